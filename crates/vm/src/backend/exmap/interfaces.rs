//! The interfaces of an exmap: which thread uses which, and how entries travel in their vectors.
//!
//! An interface is for one thread at a time, and a surface is for any number of threads. There are
//! twice as many interfaces as threads can run at once. Each thread gets a favourite in turn, so
//! that it allocates the frames that it freed. If another thread is using the favourite, the thread
//! takes the next free interface, and waits for its favourite if none is free. So the usual cost is
//! one compare-and-exchange on a word that no other thread writes.

use std::num::NonZero;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::available_parallelism;

use rustix::io::Errno;
use vellum_uapi::exmap::{self, ENTRY_PAGES, MAX_INTERFACES, VECTOR_ENTRIES, offset_interface};

use super::device::{Device, carry_out};
use super::memory::Mapped;
use crate::PAGE_SIZE;
use crate::range::{Entry, PageRange};
use crate::sys::Rights;

/// Entries of a vector.
const ENTRIES: usize = VECTOR_ENTRIES as usize;

/// How many interfaces an exmap of this process has.
pub(super) fn count() -> u32 {
    let threads = available_parallelism().map_or(2, NonZero::get);
    u32::try_from(threads).unwrap_or(MAX_INTERFACES).saturating_mul(2).clamp(4, MAX_INTERFACES)
}

/// All interfaces of an exmap.
#[derive(Debug)]
pub(super) struct Interfaces {
    all: Box<[Interface]>,
}

/// One of them, on cache lines of its own.
#[repr(align(128))]
#[derive(Debug)]
struct Interface(Mutex<Vector>);

impl Interfaces {
    /// Maps the vectors of a device that has `count` interfaces.
    pub(super) fn new(device: &Device, count: u32) -> Result<Self, Errno> {
        let interface = |index| Ok(Interface(Mutex::new(Vector::map(device, index)?)));
        Ok(Self { all: (0..count).map(interface).collect::<Result<_, Errno>>()? })
    }

    /// An interface for this thread alone, until the guard goes.
    pub(super) fn take(&self) -> MutexGuard<'_, Vector> {
        let favourite = favourite() % self.all.len();
        let (before, from) = self.all.split_at(favourite);
        for interface in from.iter().chain(before) {
            match interface.0.try_lock() {
                Ok(vector) => return vector,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        self.all[favourite].0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// This thread's number: the first is 0, the next 1, and so on.
fn favourite() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that is about to end has no number any more.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}

/// What populating a page means if the page is present already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// All is well: there it is.
    Fine,
    /// The entry fails with `EXIST`: another thread has populated the page.
    Fails,
}

/// The vector of an interface, which one thread uses.
#[derive(Debug)]
pub(super) struct Vector {
    interface: u32,
    page: Mapped,
    /// Which entry of the batch each entry of the vector is a part of.
    owners: Box<[usize; ENTRIES]>,
    /// A descriptor for this interface, made when it is first used; none if that failed.
    private: Option<OwnedFd>,
    is_used: bool,
}

impl Vector {
    fn map(device: &Device, interface: u32) -> Result<Self, Errno> {
        let page = Mapped::new(
            device.as_fd(),
            PAGE_SIZE,
            offset_interface(interface.into()),
            Rights::ReadAndWrite,
        )?;
        let owners = Box::new([0; ENTRIES]);
        Ok(Self { interface, page, owners, private: None, is_used: false })
    }

    /// The entries, which the kernel reads and writes during a command.
    fn slots(&self) -> &[AtomicU64; ENTRIES] {
        // SAFETY: a page that is mapped as long as `self` lives, aligned; all bits are valid, and
        // every other writer writes it by whole words.
        unsafe { self.page.base().cast::<[AtomicU64; ENTRIES]>().as_ref() }
    }

    /// Has the module carry out a command on all entries whose result is `Ok`; true if all still
    /// are.
    ///
    /// # Safety
    /// Those entries lie within the surface, and no code relies on memory that the command takes.
    pub(super) unsafe fn run(
        &mut self,
        device: &Device,
        command: u32,
        found: Found,
        entries: &mut [Entry],
    ) -> bool {
        if !self.is_used {
            self.is_used = true;
            self.private = device.private().ok();
        }
        let mut next = Position::default();
        let mut all_done = true;
        loop {
            let filled = self.fill(entries, &mut next);
            if filled == 0 {
                return all_done;
            }
            let descriptor = self.private.as_ref().map_or(device.as_fd(), OwnedFd::as_fd);
            // SAFETY: the vector has parts of entries; the rest is the caller's promise.
            match unsafe { carry_out(descriptor, command, self.interface, filled) } {
                Ok(0) if found == Found::Fine => continue,
                Ok(0) if self.all_were_brought(entries, filled) => continue,
                Ok(_) => self.take_results(entries, filled, found),
                Err(errno) => {
                    let owners = &self.owners[..filled];
                    owners.iter().for_each(|owner| entries[*owner].result = Err(errno));
                }
            }
            all_done = false;
        }
    }

    /// Fills the vector with the next entries; returns how many of them are in use.
    fn fill(&mut self, entries: &[Entry], next: &mut Position) -> usize {
        let mut filled = 0;
        while filled < ENTRIES {
            let Some((owner, part)) = next.part(entries) else { break };
            let entry = exmap::Entry::new(part.start, part.count);
            self.slots()[filled].store(entry.bits(), Ordering::Relaxed);
            self.owners[filled] = owner;
            filled += 1;
        }
        filled
    }

    /// The result of each entry of the vector: an error or 0, and pages; and the entry that it
    /// belongs to.
    fn results(&self, filled: usize) -> impl Iterator<Item = (exmap::Entry, usize)> + '_ {
        let slots = self.slots()[..filled].iter().zip(&self.owners[..]);
        slots.map(|(slot, owner)| (exmap::Entry::from_bits(slot.load(Ordering::Relaxed)), *owner))
    }

    /// No entry's page was present before; each entry of the batch has one page.
    fn all_were_brought(&self, entries: &[Entry], filled: usize) -> bool {
        debug_assert!(entries.iter().all(|entry| entry.range.count == 1));
        self.results(filled).all(|(result, _)| result.pages() == 1)
    }

    /// Gives the batch the errors that the kernel left in the vector.
    fn take_results(&self, entries: &mut [Entry], filled: usize, found: Found) {
        for (result, owner) in self.results(filled) {
            let error = result.result();
            if error != 0 {
                entries[owner].result = Err(Errno::from_raw_os_error(error.wrapping_neg()));
            } else if found == Found::Fails && result.pages() == 0 {
                entries[owner].result = Err(Errno::EXIST);
            }
        }
    }
}

/// How far a batch has come into vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    /// Index of the entry.
    entry: usize,
    /// Pages of that entry that are in a vector already.
    done: u64,
}

impl Position {
    /// The next part of an entry that has not failed, as long as an entry of a vector can be, and
    /// the entry that it is a part of.
    fn part(&mut self, entries: &[Entry]) -> Option<(usize, PageRange)> {
        while let Some(entry) = entries.get(self.entry) {
            let left = entry.range.count - self.done;
            if entry.result.is_ok() && left > 0 {
                let part = PageRange::new(entry.range.start + self.done, left.min(ENTRY_PAGES));
                let owner = self.entry;
                self.done += part.count;
                return Some((owner, part));
            }
            *self = Self { entry: self.entry + 1, done: 0 };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_cut_where_an_entry_of_a_vector_ends() {
        let mut batch = [(5, 1), (9, 0), (100, 2 * ENTRY_PAGES + 1), (7, 3), (8, 1)]
            .map(|(start, count)| Entry::new(PageRange::new(start, count)));
        batch[3].result = Err(Errno::INVAL);
        let mut next = Position::default();
        let parts: Vec<_> = std::iter::from_fn(|| next.part(&batch)).collect();
        let expected = [
            (0, PageRange::new(5, 1)),
            (2, PageRange::new(100, ENTRY_PAGES)),
            (2, PageRange::new(100 + ENTRY_PAGES, ENTRY_PAGES)),
            (2, PageRange::new(100 + 2 * ENTRY_PAGES, 1)),
            (4, PageRange::new(8, 1)),
        ];
        assert_eq!(parts, expected);
    }

    #[test]
    fn an_entry_that_fails_is_left_where_it_is() {
        let mut batch = [Entry::new(PageRange::new(0, 3 * ENTRY_PAGES)), Entry::page(1)];
        let mut next = Position::default();
        assert_eq!(next.part(&batch), Some((0, PageRange::new(0, ENTRY_PAGES))));
        batch[0].result = Err(Errno::NOMEM);
        assert_eq!(next.part(&batch), Some((1, PageRange::new(1, 1))));
        assert_eq!(next.part(&batch), None);
    }

    #[test]
    fn threads_have_favourites_of_their_own() {
        let mine = favourite();
        assert_eq!(favourite(), mine);
        let other = std::thread::spawn(favourite).join().unwrap();
        assert_ne!(other, mine);
        assert!((4..=MAX_INTERFACES).contains(&count()));
    }
}
