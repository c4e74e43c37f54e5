//! Properties of exmap alone: its frames can run out, a page must be populated before a write, the
//! kernel may hold pages, and one mapping lasts for its whole life.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::available_parallelism;

use rustix::process::{Resource, Rlimit, Uid, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_keep_capabilities,
    set_thread_uid,
};

use crate::common::{Own, Refused, entries};
use vellum_testing::own_process::entered;
use vellum_testing::patience::eventually;
use vellum_vm::{
    BackendChoice, BackendKind, Entry, Errno, PAGE_SIZE, PageRange, ReserveError, Surface,
    SurfaceError, probe,
};

const EXMAP: BackendKind = BackendKind::Exmap;

/// Whether exmap works here. Prints a line if not.
fn works() -> bool {
    let works = probe::works(EXMAP);
    if let Err(reason) = &works {
        eprintln!("skipped: exmap does not work here: {reason}");
        let shown = probe::facilities();
        assert_eq!(shown.get("/dev/exmap").map(|facility| &facility.reason), Some(reason));
    }
    works.is_ok()
}

#[test]
fn frames_run_out_for_the_entries_that_need_more() {
    if !works() {
        return;
    }
    let own = Own::with_frames(10_000, 8, EXMAP);
    let mut batch = entries([(0, 3), (100, 5), (7, 1), (1, 2)]);
    assert_eq!(own.surface.populate(&mut batch), 1);
    assert_eq!(batch[2].result, Err(Errno::NOMEM));
    assert_eq!((batch[3].result, own.resident()), (Ok(()), 8));
    let mut large = [Entry::new(PageRange::new(0, 10_000))];
    assert_eq!(own.surface.populate(&mut large), 1);
    assert_eq!((large[0].result, own.resident()), (Err(Errno::NOMEM), 8));
    assert_eq!(own.release(&mut entries([(102, 1)])), 0);
    own.fill(7, 9);
    assert!(own.holds(7, 9));
    // The next page gets the frame of a released page, with its contents.
    assert_eq!(own.release(&mut large), 0);
    assert_eq!(own.resident(), 0);
}

#[test]
fn the_kernel_cannot_write_to_an_unpopulated_page() {
    if !works() {
        return;
    }
    let own = Own::new(8, EXMAP);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let read = |page: u64| {
        let address = own.surface.address(page).as_ptr().cast();
        // SAFETY: a page of the surface that no other thread uses.
        let read = unsafe { libc::pread(file.as_raw_fd(), address, PAGE_SIZE, 0) };
        usize::try_from(read).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap())
    };
    assert_eq!(read(3), Err(libc::EFAULT));
    assert!(own.holds(3, 0), "it still reads as zeros");
    assert_eq!(read(3), Err(libc::EFAULT), "a page that shows zeros can be written");
    assert_eq!(own.resident(), 0);
    own.fill(3, 1);
    assert_eq!(read(3), Ok(PAGE_SIZE));
    assert_eq!(own.copy(3)[..4], *b"\x7fELF");
}

#[test]
fn a_page_that_the_kernel_holds_is_released_after_the_hold() {
    if !works() {
        return;
    }
    let own = Own::new(1_000, EXMAP);
    (0..600).for_each(|page| own.fill(page, 5));
    let mut held = Refused::default();
    held.add(&own, 300);
    let mut batch = entries([(0, 600)]);
    assert_eq!(own.release(&mut batch), 1);
    assert_eq!((batch[0].result, own.resident()), (Err(Errno::BUSY), 600));
    assert!((0..600).all(|page| own.holds(page, 5)), "no page of the entry is released");
    assert!(own.surface.released_whole() >= 600);
    assert_eq!(own.release(&mut entries([(0, 300), (300, 1), (301, 299)])), 1);
    assert_eq!(own.resident(), 1);
    // Another thread ends the hold while release retries. A child of another test may have the
    // pipe, too, for a moment.
    std::thread::scope(|scope| {
        scope.spawn(|| drop(held));
        eventually("it is released", || own.release(&mut batch) == 0);
    });
    assert_eq!(own.resident(), 0);
}

#[test]
fn direct_reads_and_writes_go_straight_to_frames() {
    if !works() {
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    let file = match options.open(directory.path().join("data")) {
        Ok(file) => file,
        Err(error) => return eprintln!("skipped: no direct I/O: {error}"),
    };
    let own = Own::with_frames(64, 48, EXMAP);
    for round in 1..20 {
        (0..16).for_each(|page| own.fill(page, round + page as u8));
        let from = own.surface.address(0).as_ptr();
        // SAFETY: pages of the surface that no thread writes to.
        let written = unsafe { libc::pwrite(file.as_raw_fd(), from.cast(), 16 * PAGE_SIZE, 0) };
        assert_eq!(written, 16 * PAGE_SIZE as isize);
        // Right after the write the kernel may still hold the pages.
        assert_eq!(own.release(&mut entries([(0, 16)])), 0);
        assert_eq!(own.read(&file, 0, &mut entries([(3, 1), (0, 3), (10, 6)])), 0);
        for page in (0..4).chain(10..16) {
            assert!(own.holds(page, round + page as u8), "page {page} in round {round}");
        }
        assert_eq!(own.release(&mut entries([(0, 16)])), 0);
    }
    assert_eq!(own.resident(), 0);
}

/// Threads populate and release the same pages. Each change has one winner; otherwise frames would
/// be lost or counted twice.
#[test]
fn threads_that_contend_for_pages_lose_no_frame() {
    if !works() {
        return;
    }
    const FRAMES: u64 = 64;
    let own = Own::with_frames(FRAMES, FRAMES, EXMAP);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let own = &own;
            scope.spawn(move || {
                for round in 0..200 {
                    let first = (round + thread * 5) % (FRAMES - 16);
                    let mut batch: Vec<Entry> = (first..first + 16).map(Entry::page).collect();
                    assert_eq!(own.surface.populate(&mut batch), 0, "{batch:?}");
                    batch.reverse();
                    assert_eq!(own.release(&mut batch), 0, "{batch:?}");
                }
            });
        }
    });
    let all = PageRange::new(0, FRAMES);
    assert_eq!(own.release(&mut [Entry::new(all)]), 0);
    assert_eq!(own.resident(), 0);
    assert_eq!(own.surface.populate(&mut [Entry::new(all)]), 0, "a frame is lost");
    assert_eq!(own.resident(), FRAMES);
}

/// The threads together never have more pages than there are frames. So none of them gets an error,
/// although other threads have the free frames at times.
#[test]
fn a_frame_that_is_free_is_found() {
    if !works() {
        return;
    }
    const THREADS: u64 = 4;
    const EACH: u64 = 6;
    let own = Own::with_frames(THREADS * EACH, THREADS * EACH, EXMAP);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let own = &own;
            scope.spawn(move || {
                for round in 0..3_000 {
                    let pages = thread * EACH..(thread + 1) * EACH;
                    let mut batch: Vec<Entry> = pages.map(Entry::page).collect();
                    let missed = own.surface.populate(&mut batch);
                    assert_eq!(missed, 0, "thread {thread}, round {round}: {batch:?}");
                    assert_eq!(own.release(&mut batch[1..]), 0);
                    assert_eq!(own.release(&mut batch[..1]), 0);
                }
            });
        }
    });
    assert_eq!(own.resident(), 0);
}

#[test]
fn more_threads_than_interfaces_take_turns() {
    if !works() {
        return;
    }
    let threads = 8 * available_parallelism().unwrap().get() as u64;
    let own = Own::with_frames(threads * 4, threads * 4, EXMAP);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (own, done) = (&own, &done);
            scope.spawn(move || {
                for round in 0..50 {
                    let mut batch = [Entry::new(PageRange::new(thread * 4, 4))];
                    assert_eq!(own.surface.populate(&mut batch), 0);
                    own.fill(thread * 4 + 3, round);
                    assert!(own.holds(thread * 4 + 3, round));
                    assert_eq!(own.release(&mut batch), 0);
                }
                done.store(true, Ordering::Relaxed);
            });
        }
    });
    assert!(done.into_inner());
    assert_eq!(own.resident(), 0);
}

#[test]
fn it_grows_within_its_mapping_and_names_the_end() {
    if !works() {
        return;
    }
    let own = Own::new(1, EXMAP);
    own.fill(0, 1);
    let room = (64 << 30) / PAGE_SIZE as u64;
    own.surface.grow(room).unwrap();
    own.fill(room - 1, 2);
    let error = own.surface.grow(room + 1).unwrap_err();
    let SurfaceError::Reserve(ReserveError::RoomUsedUp { bytes, mapped, .. }) = error else {
        panic!("{error:?}");
    };
    assert_eq!((bytes, mapped), ((64 << 30) + PAGE_SIZE, 64 << 30));
    assert_eq!(own.surface.pages(), room);
    assert!(own.holds(0, 1) && own.holds(room - 1, 2) && own.holds(room - 2, 0));
    // Sixteen times the size, which the module does not map.
    let large = Own::with_frames(room, 1, EXMAP);
    large.surface.grow(8 * room).unwrap();
    let too_long = Surface::reserve_with_frames(1 << 33, 1, BackendChoice::Only(EXMAP));
    assert!(matches!(too_long, Err(SurfaceError::Reserve(ReserveError::TooLarge { .. }))));
}

#[test]
fn a_tight_address_space_leaves_less_room() {
    if !works() || !entered("exmap::a_tight_address_space_leaves_less_room") {
        return;
    }
    let limit = Rlimit { current: Some(8 << 30), maximum: None };
    setrlimit(Resource::As, limit).unwrap();
    let own = Own::new(1 << 18, EXMAP);
    own.fill((1 << 18) - 1, 3);
    own.surface.grow(1 << 19).unwrap();
    own.fill((1 << 19) - 1, 4);
    assert!(own.holds((1 << 18) - 1, 3));
    let error = Surface::reserve(9 << 18, BackendChoice::Only(EXMAP)).unwrap_err();
    let SurfaceError::Reserve(ReserveError::AddressSpaceLimit { limit, .. }) = error else {
        panic!("{error:?}");
    };
    assert_eq!(limit, 8 << 30);
}

/// Makes this thread run as a user that has locked no memory, may open the device, and has no right
/// to exceed the limit of locked memory.
fn become_another_user() -> bool {
    const OTHER_USER: u32 = 54_321;
    let all = capabilities(None).unwrap();
    let keeps = set_keep_capabilities(true);
    if keeps.is_err() || set_thread_uid(Uid::from_raw(OTHER_USER)).is_err() {
        return false;
    }
    let effective = CapabilitySet::DAC_OVERRIDE;
    set_capabilities(None, CapabilitySets { effective, ..all }).is_ok()
}

#[test]
fn frames_beyond_the_limit_of_locked_memory_are_refused_and_auto_does_without() {
    const TEST: &str =
        "exmap::frames_beyond_the_limit_of_locked_memory_are_refused_and_auto_does_without";
    if !works() || !entered(TEST) {
        return;
    }
    assert!(works(), "found out with all rights");
    // Interfaces and page tables are locked as well as frames.
    const INTERFACE_PAGES: u64 = 6;
    let processors = available_parallelism().unwrap().get() as u64;
    let interfaces = (2 * processors).max(4) * INTERFACE_PAGES;
    let pages = interfaces + 64;
    let limit = Rlimit { current: Some(pages * PAGE_SIZE as u64), maximum: None };
    setrlimit(Resource::Memlock, limit).unwrap();
    if !become_another_user() {
        return eprintln!("skipped: only root can become a user who may lock little");
    }
    let reserve = |frames, backend| Surface::reserve_with_frames(1_000, frames, backend);
    let in_words = format!("{} KiB in all (RLIMIT_MEMLOCK)", (pages * PAGE_SIZE as u64) >> 10);
    for (frames, what) in [(65, "65 frames (260 KiB) and"), (64, "the page tables of its surface")]
    {
        let error = reserve(frames, BackendChoice::Only(EXMAP)).unwrap_err();
        let SurfaceError::BackendUnavailable { backend: EXMAP, reason } = &error else {
            panic!("{error:?}");
        };
        assert!(reason.contains(what) && reason.contains(&in_words), "{reason}");
        let without = reserve(frames, BackendChoice::Auto).unwrap();
        assert_eq!(without.backend(), probe::choice_without_exmap().backend);
    }
    drop(reserve(40, BackendChoice::Only(EXMAP)).unwrap());
    let first = reserve(40, BackendChoice::Auto).unwrap();
    assert_eq!(first.backend(), EXMAP);
    let second = reserve(40, BackendChoice::Auto).unwrap();
    assert_ne!(second.backend(), EXMAP, "two have more than the limit together");
    drop(first);
    assert_eq!(reserve(56, BackendChoice::Auto).unwrap().backend(), EXMAP);
}
