//! Mounts: memory that programs take for mappings of files, and that is mapped as a whole. It is a
//! Morsel of the module, or a mapping of the process' own cache (`cached.rs`), its *owner*.
//!
//! A mount is mapped and unmapped as a whole only. So the table records which part of
//! each mount the program believes to have. When the program unmaps a part, the library removes it
//! from the table, and unmaps the mount with the last part. Each mount has an *anchor*
//! (`anchor.rs`), a page of the file. A mount does not support every call (other rights, parts
//! replaced or moved). Before such a call one system call makes the anchor a mapping of the file in
//! the mount's place.
//!
//! A child that is forked has no memory of a cache. The anchors take its place before the child's
//! `fork` returns.
//!
//! Invariants: entries change under the lock. A thread may read them without it to ask about its
//! own memory: an entry for that memory existed before the thread had the memory, or there is none.
//! `end` is 0 while a slot gets another mount, so no reader sees words of two mounts. A part that
//! becomes smaller is there all the time.
//! An entry is removed before its memory is unmapped: a child that is forked in between has a mount
//! that its table lacks, which does no harm; its table never has a part that is not mapped.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use vellum_interpose::Request;

use crate::system::{self, Answer};
use crate::{anchor, lock, owner};

/// The most parts; further mappings are made from the file.
const PARTS: usize = anchor::MOST;

/// A slot in the table; `end` is 0 where there is no part.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    base: AtomicUsize,
    extent: AtomicUsize,
    anchor: AtomicUsize,
    owner: AtomicUsize,
}

/// A part of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Its beginning and end, for the program.
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// The mount.
    pub(crate) base: usize,
    pub(crate) extent: usize,
    /// The address of the file's page at which the mount begins.
    pub(crate) anchor: usize,
    /// Of a mapping of a cache: what `owner.rs` knows it by. 0: it is a Morsel.
    pub(crate) owner: usize,
}

static TABLE: [Slot; PARTS] = [const { Slot::free() }; PARTS];

/// How many slots were ever taken: later ones are free.
static EVER: AtomicUsize = AtomicUsize::new(0);

/// The mount that a file is replacing, or 0. Addresses of mounts are even: [`MOVED`] is added once
/// the anchor has moved there.
static IN_TRANSIT: AtomicUsize = AtomicUsize::new(0);

/// The file has taken the mount's place, and only the table does not show it.
const MOVED: usize = 1;

impl Slot {
    const fn free() -> Self {
        Self {
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            extent: AtomicUsize::new(0),
            anchor: AtomicUsize::new(0),
            owner: AtomicUsize::new(0),
        }
    }

    fn part(&self) -> Option<Part> {
        let get = |word: &AtomicUsize| word.load(Ordering::Relaxed);
        loop {
            // The store to `end` publishes the other words.
            let end = self.end.load(Ordering::Acquire);
            let (start, base) = (get(&self.start), get(&self.base));
            let (extent, anchor, owner) = (get(&self.extent), get(&self.anchor), get(&self.owner));
            fence(Ordering::Acquire);
            if get(&self.end) == end {
                return (end != 0).then_some(Part { start, end, base, extent, anchor, owner });
            }
        }
    }

    fn set(&self, part: &Part) {
        self.end.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(part.start, Ordering::Relaxed);
        self.base.store(part.base, Ordering::Relaxed);
        self.extent.store(part.extent, Ordering::Relaxed);
        self.anchor.store(part.anchor, Ordering::Relaxed);
        self.owner.store(part.owner, Ordering::Relaxed);
        self.end.store(part.end, Ordering::Release);
    }

    /// Makes the part end earlier, or begin later: one store, so that every reader, and a child
    /// that is forked now, sees the part as it was or as it is.
    fn shrink(&self, part: &Part) {
        self.start.store(part.start, Ordering::Release);
        self.end.store(part.end, Ordering::Release);
    }

    fn clear(&self) {
        self.end.store(0, Ordering::Release);
    }
}

impl Part {
    fn mount(&self) -> Range<usize> {
        self.base..self.base + self.extent
    }

    /// The remainders of the part on either side of a range; either may be empty.
    fn without(&self, range: &Range<usize>) -> [Part; 2] {
        let left = Part { end: self.end.min(range.start), ..*self };
        let right = Part { start: self.start.max(range.end), ..*self };
        [left, right]
    }

    fn is_empty(&self) -> bool {
        self.start >= self.end
    }
}

fn parts() -> impl Iterator<Item = (&'static Slot, Part)> {
    let taken = &TABLE[..EVER.load(Ordering::Acquire)];
    taken.iter().filter_map(|slot| Some((slot, slot.part()?)))
}

fn of_mount(base: usize) -> impl Iterator<Item = (&'static Slot, Part)> {
    parts().filter(move |(_, part)| part.base == base)
}

/// A part of the first mount that a range touches.
fn first(range: &Range<usize>) -> Option<Part> {
    let touches = |part: &Part| part.base < range.end && range.start < part.mount().end;
    parts().map(|(_, part)| part).filter(touches).min_by_key(|part| part.base)
}

/// Whether a range touches a mount, also outside the part that the program believes to have.
pub(crate) fn touch(range: &Range<usize>) -> bool {
    first(range).is_some()
}

/// The part that has all of a range.
fn containing(range: &Range<usize>) -> Option<Part> {
    let has = |part: &Part| part.start <= range.start && range.end <= part.end;
    parts().map(|(_, part)| part).find(has)
}

/// Whether all of a range is in one part.
pub(crate) fn have(range: &Range<usize>) -> bool {
    containing(range).is_some()
}

/// Whether all of a range is in one part whose pages stay in memory: of a Morsel.
pub(crate) fn have_for_good(range: &Range<usize>) -> bool {
    containing(range).is_some_and(|part| part.owner == 0)
}

/// Calls a function with the owner of the part that has all of a range, if it has one. The owner
/// stays meanwhile.
pub(crate) fn with_owner(range: &Range<usize>, work: impl FnOnce(usize)) {
    locked(|| {
        if let Some(part) = containing(range).filter(|part| part.owner != 0) {
            work(part.owner);
        }
    });
}

/// Adds a new mount to the table, with the part of it that the program is to have, its owner, and
/// the request that the file itself could answer in the mount's place. Returns false if that cannot
/// be: the table is full, or the kernel refuses.
pub(crate) fn add(
    part: Range<usize>,
    mount: &Range<usize>,
    owner: usize,
    request: &Request,
) -> bool {
    let (Range { start, end }, base, extent) = (part, mount.start, mount.end - mount.start);
    locked(|| {
        let Some(anchor) = anchor::map(request) else { return false };
        let is_put = put(&Part { start, end, base, extent, anchor, owner });
        if !is_put {
            // SAFETY: no table has it.
            unsafe { anchor::unmap(anchor) };
        }
        is_put
    })
}

/// Calls a function while this thread has the table.
fn locked<T>(work: impl FnOnce() -> T) -> T {
    lock::locked(forget_transit, work)
}

/// In a child that was just forked: puts files in the place of what the child does not have.
pub(crate) fn give_up_in_child() {
    let owned = || parts().map(|(_, part)| part).find(|part| part.owner != 0);
    lock::locked_in_child(forget_transit, || {
        while let Some(mount) = owned() {
            // SAFETY: mount and anchor are of the table, and nothing is in transit.
            unsafe { give_file(&mount) };
            // SAFETY: the file has just taken its place.
            unsafe { forget_parts(&mount) };
        }
    });
}

/// In a child: puts a file in the place of a mount that the child does not have, or ends the child.
///
/// # Safety
/// The mount must be one of the table, and the anchor its own.
unsafe fn give_file(mount: &Part) {
    // What another handler of the fork has mapped there is not the library's to replace.
    // SAFETY: nothing is replaced.
    let is_free = unsafe { system::reserve(&mount.mount()) };
    // SAFETY: the caller's promise, and the child knows no other memory there.
    if !is_free || !unsafe { system::stretch(mount.anchor, &mount.mount()) } {
        system::end("vellum: a forked child cannot have a file that its parent has mapped");
    }
    anchor::reserve_again(mount.anchor);
}

/// In a child whose parent was replacing a mount: the child keeps the mount or the file, whichever
/// it has. Of a mount of a cache, it gets the file.
fn forget_transit() {
    let in_transit = IN_TRANSIT.swap(0, Ordering::Relaxed);
    let base = in_transit & !MOVED;
    let owned = of_mount(base).map(|(_, part)| part).find(|part| part.owner != 0);
    // The parent may have been between the call that moves the anchor and the note of that. Then
    // nothing is at the anchor's address, or another mapping that took it at once. The latter has
    // the child end, because the file is where the mount was.
    let is_moved = |mount: &Part| anchor::reserve_again(mount.anchor);
    if let Some(mount) = owned.filter(|mount| in_transit & MOVED == 0 && !is_moved(mount)) {
        // SAFETY: the mount is of the table, and the anchor has not moved.
        unsafe { give_file(&mount) };
    }
    of_mount(base).for_each(|(slot, _)| slot.clear());
}

fn put(part: &Part) -> bool {
    let Some(index) = TABLE.iter().position(|slot| slot.part().is_none()) else { return false };
    TABLE[index].set(part);
    EVER.fetch_max(index + 1, Ordering::Release);
    true
}

/// `munmap` of whole pages. A mount stays while any part of it is left, so the program can read
/// addresses that it has unmapped until it unmaps the last part.
///
/// # Safety
/// As that: the range must be the caller's, and no pointer into it may be left.
pub(crate) unsafe fn unmap(range: &Range<usize>) -> Answer {
    locked(|| {
        let mut rest = range.clone();
        while !rest.is_empty() {
            let next = first(&rest);
            let gap = rest.start..next.map_or(rest.end, |part| part.base.max(rest.start));
            // SAFETY: the caller's promise; no mount is in it.
            let mut answer = if gap.is_empty() { 0 } else { unsafe { system::unmap(&gap) } };
            rest.start = gap.end;
            if let (0, Some(mount)) = (answer, next) {
                let off = rest.start..mount.mount().end.min(rest.end);
                // SAFETY: the caller's promise.
                answer = unsafe { take_off(&mount, &off) };
                rest.start = off.end;
            }
            if answer != 0 {
                return answer;
            }
        }
        0
    })
}

/// Removes a range from the parts of a mount, and unmaps the mount with the last of them.
///
/// # Safety
/// As [`unmap`].
unsafe fn take_off(mount: &Part, range: &Range<usize>) -> Answer {
    for (slot, part) in of_mount(mount.base) {
        let [left, right] = part.without(range);
        match (left.is_empty(), right.is_empty()) {
            (true, true) => slot.clear(),
            (false, true) => slot.shrink(&left),
            (true, false) => slot.shrink(&right),
            (false, false) if put(&right) => slot.shrink(&left),
            // The table is full: a file's mapping needs no slot in it. SAFETY: the caller's
            // promise.
            (false, false) => unsafe {
                return if replace(mount) { system::unmap(range) } else { system::no_memory() };
            },
        }
    }
    if of_mount(mount.base).next().is_some() {
        return 0;
    }
    if mount.owner != 0 {
        // SAFETY: it is not retired, and the lock is held.
        unsafe { owner::detach(mount.owner) };
    }
    // SAFETY: it is the mount's.
    unsafe { anchor::unmap(mount.anchor) };
    // SAFETY: the program has unmapped all of its mount.
    let answer = unsafe { system::unmap(&mount.mount()) };
    if mount.owner != 0 {
        // SAFETY: the last part of its mount is gone.
        unsafe { owner::retire(mount.owner) };
    }
    answer
}

/// Replaces all mounts that a range touches by mappings of their files, to which the program's call
/// can then do anything. Returns false if that is not possible: then the mount stays, and the call
/// must not be made.
pub(crate) fn give_up(range: &Range<usize>) -> bool {
    locked(|| {
        while let Some(mount) = first(range) {
            // SAFETY: mount and anchor are of the table, and the file has the bytes of the mount.
            if !unsafe { replace(&mount) } {
                return false;
            }
        }
        true
    })
}

/// Replaces the mounts of the files whose leases are to end. Returns false if that is not possible
/// for one of them.
pub(crate) fn give_up_broken() -> bool {
    locked(|| {
        let mut are_all = true;
        for slot in &TABLE[..EVER.load(Ordering::Acquire)] {
            // A replacement may have cleared other slots.
            let Some(mount) = slot.part().filter(|part| part.owner != 0) else { continue };
            // SAFETY: the table has the owner; mount and anchor are of the table.
            are_all &= unsafe { !owner::is_broken(mount.owner) || replace(&mount) };
        }
        are_all
    })
}

/// Replaces a mount by a mapping of its file.
///
/// # Safety
/// The mount must be one of the table.
unsafe fn replace(mount: &Part) -> bool {
    // SAFETY: it is not retired, and the lock is held.
    if mount.owner != 0 && !unsafe { owner::detach(mount.owner) } {
        return false;
    }
    IN_TRANSIT.store(mount.base, Ordering::Relaxed);
    // SAFETY: the program sees the file at the address at which it asked for it.
    if !unsafe { system::stretch(mount.anchor, &mount.mount()) } {
        IN_TRANSIT.store(0, Ordering::Relaxed);
        if mount.owner != 0 {
            // SAFETY: as above.
            unsafe { owner::reattach(mount.owner) };
        }
        return false;
    }
    // From now on another mapping may be at the anchor's address.
    IN_TRANSIT.store(mount.base | MOVED, Ordering::Relaxed);
    anchor::reserve_again(mount.anchor);
    // SAFETY: the file has just taken its place.
    unsafe { forget_parts(mount) };
    IN_TRANSIT.store(0, Ordering::Relaxed);
    if mount.owner != 0 {
        // SAFETY: its parts are gone.
        unsafe { owner::retire(mount.owner) };
    }
    true
}

/// Removes the parts of a mount, whose place its file has taken, and unmaps what lies around them.
///
/// # Safety
/// The program believes that nothing is mapped around the parts.
unsafe fn forget_parts(mount: &Part) {
    let mut rest = mount.mount();
    while let Some((slot, part)) = of_mount(mount.base).min_by_key(|(_, part)| part.start) {
        let gap = rest.start..part.start;
        // SAFETY: the caller's promise.
        let _ = (!gap.is_empty()).then(|| unsafe { system::unmap(&gap) });
        rest.start = part.end;
        slot.clear();
    }
    // SAFETY: as above, after the last.
    let _ = (!rest.is_empty()).then(|| unsafe { system::unmap(&rest) });
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::sync::Once;

    use vellum_testing::own_process;

    use super::*;
    use crate::system::PAGE;

    const EXTENT: usize = 16 * PAGE;

    fn request(file: &File, flags: i32) -> Request {
        let (rights, file) = (libc::PROT_READ, file.as_raw_fd());
        Request { length: EXTENT, rights, flags, file, offset: 0 }
    }

    /// A stand-in for a mount, with pages of 'm', and a file with pages of 'f' that can replace it;
    /// the program has all but the first page and the last three of both.
    fn mount() -> Part {
        static RESERVE: Once = Once::new();
        RESERVE.call_once(anchor::reserve_places);
        let of = |letter: u8| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&[letter; EXTENT]).unwrap();
            file
        };
        // SAFETY: replaces nothing.
        let base = unsafe { system::map(0, &request(&of(b'm'), libc::MAP_SHARED)) }.unwrap();
        let part = base + PAGE..base + 13 * PAGE;
        let file = of(b'f');
        let instead = request(&file, libc::MAP_PRIVATE);
        assert!(add(part, &(base..base + EXTENT), 0, &instead));
        of_mount(base).next().unwrap().1
    }

    /// The pages at a mount's addresses: `m`, `f`, or `-` if none is mapped. No other thread maps
    /// memory meanwhile.
    fn pages(mount: &Part) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_mapped = |page: usize| {
            maps.lines().any(|line| {
                let (range, _) = line.split_once(' ').unwrap();
                let (start, end) = range.split_once('-').unwrap();
                let number = |text| usize::from_str_radix(text, 16).unwrap();
                number(start) <= page && page < number(end)
            })
        };
        let pages = mount.mount().step_by(PAGE);
        let letter = |page| match is_mapped(page) {
            // SAFETY: the page is mapped, and no thread unmaps it meanwhile.
            true => unsafe { std::ptr::with_exposed_provenance::<u8>(page).read() }.into(),
            false => '-',
        };
        pages.map(letter).collect()
    }

    fn off(mount: &Part, pages: Range<usize>) {
        let at = |page| mount.base + page * PAGE;
        // SAFETY: only the test knows of it.
        assert_eq!(unsafe { unmap(&(at(pages.start)..at(pages.end))) }, 0);
    }

    /// The first page of each part, and the one after the part.
    fn parts_of(mount: &Part) -> Vec<(usize, usize)> {
        let page = |address| (address - mount.base) / PAGE;
        let parts = of_mount(mount.base).map(|(_, part)| (page(part.start), page(part.end)));
        let mut parts: Vec<_> = parts.collect();
        parts.sort_unstable();
        parts
    }

    #[test]
    fn a_mount_goes_with_its_last_part() {
        if !own_process::entered("mounts::tests::a_mount_goes_with_its_last_part") {
            return;
        }
        let mount = mount();
        let at = |page: usize| mount.base + page * PAGE;
        assert!(touch(&(at(0)..at(1))) && !have(&(at(0)..at(2))) && have(&(at(1)..at(13))));
        off(&mount, 1..3);
        off(&mount, 5..6);
        off(&mount, 12..16);
        assert_eq!(parts_of(&mount), [(3, 5), (6, 12)]);
        assert!(have(&(at(3)..at(5))) && !have(&(at(3)..at(7))));
        // Unmapping absent pages works, too.
        off(&mount, 5..6);
        off(&mount, 0..7);
        assert_eq!(parts_of(&mount), [(7, 12)]);
        assert_eq!(pages(&mount), "m".repeat(16));
        off(&mount, 7..12);
        assert_eq!((pages(&mount), parts_of(&mount).len()), ("-".repeat(16), 0));
        assert!(!touch(&mount.mount()));
        assert_eq!(self::mount().anchor, mount.anchor);
    }

    #[test]
    fn what_lies_around_mounts_goes_with_them() {
        if !own_process::entered("mounts::tests::what_lies_around_mounts_goes_with_them") {
            return;
        }
        let (first, second) = (mount(), mount());
        let (low, high) = (first.base.min(second.base), first.base.max(second.base));
        if high - low != EXTENT {
            // Another mapping lies between them, which must stay.
            off(&first, 0..16);
            off(&second, 0..16);
            return;
        }
        off(&Part { base: low, ..first }, 0..32);
        assert_eq!(pages(&first) + &pages(&second), "-".repeat(32));
    }

    #[test]
    fn a_file_takes_the_place_of_a_mount_where_the_program_has_it() {
        if !own_process::entered(
            "mounts::tests::a_file_takes_the_place_of_a_mount_where_the_program_has_it",
        ) {
            return;
        }
        let mount = mount();
        off(&mount, 5..7);
        let outside = mount.base + 15 * PAGE;
        give_up(&(outside..outside + 1));
        assert_eq!(pages(&mount), "-ffff--ffffff---");
        assert!(!touch(&mount.mount()) && parts_of(&mount).is_empty());
        off(&mount, 0..16);
        assert_eq!(pages(&mount), "-".repeat(16));
    }

    #[test]
    fn a_part_that_becomes_smaller_is_always_there() {
        const END: usize = 1 << 40;
        let slot = Slot::free();
        let part = Part { start: PAGE, end: END, base: PAGE, extent: END, anchor: 0, owner: 0 };
        slot.set(&part);
        let is_done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for pages in 2..100_000 {
                    slot.shrink(&Part { start: pages * PAGE, ..part });
                }
                is_done.store(1, Ordering::Release);
            });
            while is_done.load(Ordering::Acquire) == 0 {
                let seen = slot.part().expect("it was gone for a moment");
                assert!(seen.end == END && seen.base == PAGE, "{seen:?}");
            }
        });
    }

    #[test]
    fn a_child_forgets_what_its_parent_has_begun() {
        if !own_process::entered("mounts::tests::a_child_forgets_what_its_parent_has_begun") {
            return;
        }
        let (mount, other) = (mount(), mount());
        IN_TRANSIT.store(mount.base, Ordering::Relaxed);
        forget_transit();
        assert_eq!((parts_of(&mount).len(), parts_of(&other).len()), (0, 1));
        assert_eq!(pages(&mount), "m".repeat(16));
    }

    /// A mount of a cache, as a child has it.
    fn absent_mount() -> Part {
        let mount = mount();
        let (slot, part) = of_mount(mount.base).next().unwrap();
        let part = Part { owner: 8, ..part };
        slot.set(&part);
        // SAFETY: only the table knows of it.
        assert_eq!(unsafe { system::unmap(&mount.mount()) }, 0);
        part
    }

    #[test]
    fn a_child_gets_the_file_wherever_its_parent_was_in_a_replacement() {
        if !own_process::entered(
            "mounts::tests::a_child_gets_the_file_wherever_its_parent_was_in_a_replacement",
        ) {
            return;
        }
        let replaced = || {
            let mount = absent_mount();
            // SAFETY: mount and anchor are of the table.
            assert!(unsafe { system::stretch(mount.anchor, &mount.mount()) });
            mount
        };
        let all = |letter: &str| letter.repeat(16);
        let not_begun = absent_mount();
        IN_TRANSIT.store(not_begun.base, Ordering::Relaxed);
        forget_transit();
        assert_eq!((pages(&not_begun), parts_of(&not_begun).len()), (all("f"), 0));
        let not_noted = replaced();
        IN_TRANSIT.store(not_noted.base, Ordering::Relaxed);
        forget_transit();
        assert_eq!((pages(&not_noted), parts_of(&not_noted).len()), (all("f"), 0));
        // Another's memory is where the anchor was.
        let noted = replaced();
        let anchor = noted.anchor..noted.anchor + PAGE;
        // SAFETY: nothing is replaced.
        assert!(unsafe { system::reserve(&anchor) });
        IN_TRANSIT.store(noted.base | MOVED, Ordering::Relaxed);
        forget_transit();
        assert_eq!((pages(&noted), parts_of(&noted).len()), (all("f"), 0));
        // SAFETY: it is this test's.
        assert!(unsafe { system::unmap(&anchor) == 0 && system::reserve(&anchor) });
        // Nothing was in transit.
        let mount = absent_mount();
        // SAFETY: mount and anchor are of the table.
        unsafe {
            give_file(&mount);
            forget_parts(&mount);
        }
        assert_eq!(pages(&mount), "-ffffffffffff---");
    }

    #[test]
    fn a_child_ends_rather_than_move_memory_that_may_be_another_s() {
        if !own_process::entered(
            "mounts::tests::a_child_ends_rather_than_move_memory_that_may_be_another_s",
        ) {
            return;
        }
        let mount = absent_mount();
        // SAFETY: mount and anchor are of the table, and nothing else is there.
        unsafe {
            assert!(system::stretch(mount.anchor, &mount.mount()));
            assert!(system::reserve(&(mount.anchor..mount.anchor + PAGE)));
        }
        IN_TRANSIT.store(mount.base, Ordering::Relaxed);
        // SAFETY: the child calls what is under test, and ends.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                forget_transit();
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            status
        };
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT, "{status}");
    }

    #[test]
    fn a_file_that_cannot_take_the_place_leaves_it() {
        if !own_process::entered("mounts::tests::a_file_that_cannot_take_the_place_leaves_it") {
            return;
        }
        let mount = mount();
        // SAFETY: only the table knows of it.
        assert_eq!(unsafe { system::unmap(&(mount.anchor..mount.anchor + PAGE)) }, 0);
        give_up(&mount.mount());
        assert_eq!(parts_of(&mount), [(1, 13)]);
        off(&mount, 1..13);
    }
}
