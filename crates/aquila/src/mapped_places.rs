//! The table of this process' mappings: where a fault happened, and where a page may be mapped.
//!
//! A signal handler finds a mapping here by the address of a fault, and an evictor finds all
//! mappings of a file. Both may run on any thread in the middle of anything, so the table has no
//! lock: each place counts the threads that use it, and a mapping is unmapped only when the count
//! is zero and the place is closed. So no thread changes page tables at addresses that are no
//! longer the mapping's.
//!
//! A forked child has a copy of the table, and none of the mappings. So each place has the
//! generation of the process that entered it, in the same word as the count: places of another
//! generation are as good as free.

use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use vellum_aquila_core::Page;

use crate::PAGE_SIZE;
use crate::generation::{self, Generation};

/// Mappings that a process can have at one time.
pub(crate) const MOST: usize = 4096;

/// The place is in the table.
const OPEN: u64 = 1 << 63;
/// A thread fills the place in.
const TAKEN: u64 = 1 << 62;
/// Where the generation is. Below it are the threads that use the place.
const GENERATION: u32 = 30;
const USERS: u64 = (1 << GENERATION) - 1;

static TABLE: [MappedPlace; MOST] = [const { MappedPlace::new() }; MOST];

/// Places that were ever used: the others need no look.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Where a part of a file is mapped.
#[derive(Debug)]
pub(crate) struct MappedPlace {
    /// The flags above, the generation, and the threads that use the place.
    users: AtomicU64,
    start: AtomicUsize,
    pages: AtomicU64,
    /// The number of the first page in its file.
    first: AtomicU64,
    /// The cache that it belongs to: its number, where its faults are handled, and the number of
    /// the file in it.
    cache: AtomicU64,
    owner: AtomicUsize,
    file: AtomicU32,
    /// Whether the program may store, and what it says of its accesses.
    writable: AtomicU32,
    advice: AtomicU32,
}

/// What a place is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub start: usize,
    pub pages: u64,
    pub first: u64,
    pub cache: u64,
    pub owner: usize,
    pub file: u32,
    pub writable: bool,
}

impl MappedPlace {
    const fn new() -> Self {
        Self {
            users: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            pages: AtomicU64::new(0),
            first: AtomicU64::new(0),
            cache: AtomicU64::new(0),
            owner: AtomicUsize::new(0),
            file: AtomicU32::new(0),
            writable: AtomicU32::new(0),
            advice: AtomicU32::new(0),
        }
    }

    /// What it is now. Meaningful while the thread uses it.
    pub(crate) fn mapped(&self) -> Mapped {
        Mapped {
            start: self.start.load(Ordering::Relaxed),
            pages: self.pages.load(Ordering::Relaxed),
            first: self.first.load(Ordering::Relaxed),
            cache: self.cache.load(Ordering::Relaxed),
            owner: self.owner.load(Ordering::Relaxed),
            file: self.file.load(Ordering::Relaxed),
            writable: self.writable.load(Ordering::Relaxed) != 0,
        }
    }

    /// Where it is in the table.
    pub(crate) fn number(&self) -> usize {
        (ptr::from_ref(self).addr() - TABLE.as_ptr().addr()) / size_of::<Self>()
    }

    pub(crate) fn advice(&self) -> u32 {
        self.advice.load(Ordering::Relaxed)
    }

    pub(crate) fn set_advice(&self, advice: u32) {
        self.advice.store(advice, Ordering::Relaxed);
    }

    /// Uses the place, if it is open, and this process entered it.
    fn try_use(&'static self) -> Option<Use> {
        let mut users = self.users.load(Ordering::Relaxed);
        while users & OPEN != 0 && is_of(users, generation::current()) {
            let (order, failed) = (Ordering::Acquire, Ordering::Relaxed);
            match self.users.compare_exchange_weak(users, users + 1, order, failed) {
                Ok(_) => return Some(Use(self)),
                Err(newer) => users = newer,
            }
        }
        None
    }

    /// Closes the place and waits until no thread uses it. Afterwards the addresses are the
    /// caller's alone. [`MappedPlace::forget`] ends the call.
    pub(crate) fn close(&self) {
        self.users.fetch_xor(OPEN | TAKEN, Ordering::AcqRel);
        while self.users.load(Ordering::Acquire) & USERS != 0 {
            rustix::thread::sched_yield();
        }
    }

    /// Opens a closed place again.
    pub(crate) fn reopen(&self) {
        self.users.fetch_xor(OPEN | TAKEN, Ordering::AcqRel);
    }

    /// Makes a closed place free for another mapping.
    pub(crate) fn forget(&self) {
        self.users.store(0, Ordering::Release);
    }
}

impl Mapped {
    /// The address of a page of the file, if the place has it.
    pub(crate) fn address(&self, page: u64) -> Option<usize> {
        let step = page.checked_sub(self.first).filter(|step| *step < self.pages)?;
        Some(self.start + step as usize * PAGE_SIZE)
    }

    /// The address and the bytes of the pages of a run that the place has, if it has any.
    pub(crate) fn addresses(&self, run: &[Page]) -> Option<(usize, usize)> {
        let (first, last) = (run.first()?.key.page(), run.last()?.key.page());
        let first = first.max(self.first);
        let last = last.min(self.first.saturating_add(self.pages - 1));
        let start = self.address(first).filter(|_| first <= last)?;
        Some((start, (last - first + 1) as usize * PAGE_SIZE))
    }

    /// The page of the file at an address, if the place has it.
    fn page(&self, address: usize) -> Option<u64> {
        let step = address.checked_sub(self.start)? as u64 / PAGE_SIZE as u64;
        (step < self.pages).then_some(self.first + step)
    }
}

/// A place that stays as it is while this lives.
#[derive(Debug)]
pub(crate) struct Use(&'static MappedPlace);

impl Use {
    pub(crate) fn place(&self) -> &'static MappedPlace {
        self.0
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

/// The runs of consecutive pages.
pub(crate) fn runs(pages: &[Page]) -> impl Iterator<Item = &[Page]> {
    pages.chunk_by(|one, next| one.key.after(1) == Some(next.key))
}

/// The place with a number.
pub(crate) fn numbered(number: usize) -> &'static MappedPlace {
    &TABLE[number]
}

/// Whether a place's word has a generation.
fn is_of(users: u64, generation: Generation) -> bool {
    (users & !(OPEN | TAKEN)) >> GENERATION == u64::from(generation)
}

/// Enters a mapping in the table. `None` if the table is full.
pub(crate) fn enter(mapped: &Mapped) -> Option<&'static MappedPlace> {
    let generation = generation::current();
    let tagged = u64::from(generation) << GENERATION;
    let is_taken = |place: &&MappedPlace| {
        let users = place.users.load(Ordering::Relaxed);
        let is_free = users == 0 || !is_of(users, generation);
        let (order, failed) = (Ordering::Acquire, Ordering::Relaxed);
        is_free && place.users.compare_exchange(users, TAKEN | tagged, order, failed).is_ok()
    };
    let (number, place) = TABLE.iter().enumerate().find(|(_, place)| is_taken(place))?;
    place.start.store(mapped.start, Ordering::Relaxed);
    place.pages.store(mapped.pages, Ordering::Relaxed);
    place.first.store(mapped.first, Ordering::Relaxed);
    place.cache.store(mapped.cache, Ordering::Relaxed);
    place.owner.store(mapped.owner, Ordering::Relaxed);
    place.file.store(mapped.file, Ordering::Relaxed);
    place.writable.store(mapped.writable.into(), Ordering::Relaxed);
    place.advice.store(0, Ordering::Relaxed);
    USED.fetch_max(number + 1, Ordering::AcqRel);
    place.users.store(OPEN | tagged, Ordering::Release);
    Some(place)
}

/// The place at an address, and the page of the file that is mapped there.
pub(crate) fn at(address: usize) -> Option<(Use, u64)> {
    TABLE[..USED.load(Ordering::Acquire)].iter().find_map(|place| {
        // Most places are not the one, and need no exchange.
        place.mapped().page(address)?;
        let used = place.try_use()?;
        let page = place.mapped().page(address)?;
        Some((used, page))
    })
}

/// The places where a file of a cache is mapped.
pub(crate) fn of_file(cache: u64, file: u32) -> impl Iterator<Item = Use> {
    TABLE[..USED.load(Ordering::Acquire)].iter().filter_map(move |place| {
        let is_of_file = || {
            let mapped = place.mapped();
            mapped.cache == cache && mapped.file == file
        };
        is_of_file().then(|| place.try_use()).flatten().filter(|_| is_of_file())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(start: usize, cache: u64) -> Mapped {
        Mapped { start, pages: 2, first: 5, cache, owner: 0, file: 3, writable: true }
    }

    #[test]
    fn a_place_is_found_by_its_addresses_while_it_is_open() {
        // Addresses and a cache that no other test has.
        let (start, cache) = (0x1000, u64::MAX);
        generation::begin().unwrap();
        let place = enter(&mapped(start, cache)).unwrap();
        for (address, page) in [(0xfff, None), (0x1000, Some(5)), (0x2fff, Some(6)), (0x3000, None)]
        {
            assert_eq!(at(address).map(|(_, page)| page), page, "{address:#x}");
        }
        assert!(ptr::eq(numbered(place.number()), place));
        assert_eq!(place.mapped().address(6), Some(0x2000));
        assert_eq!((place.mapped().address(4), place.mapped().address(7)), (None, None));
        assert_eq!(of_file(cache, 3).count(), 1);
        assert_eq!(of_file(cache, 4).count(), 0);
        place.close();
        assert!(at(0x1000).is_none());
        assert_eq!(of_file(cache, 3).count(), 0);
        place.forget();
    }

    #[test]
    fn closing_waits_for_the_threads_that_use_a_place() {
        let start = 0x10_0000;
        generation::begin().unwrap();
        let place = enter(&mapped(start, u64::MAX - 1)).unwrap();
        let (used, _) = at(start).unwrap();
        let is_closed = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                place.close();
                is_closed.store(1, Ordering::Release);
                place.forget();
            });
            vellum_testing::patience::eventually("closed for others", || at(start).is_none());
            assert_eq!(is_closed.load(Ordering::Acquire), 0, "closed while it is used");
            drop(used);
        });
        assert_eq!(is_closed.load(Ordering::Acquire), 1);
    }
}
