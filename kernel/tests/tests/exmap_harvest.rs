//! HARVEST: which pages were accessed and written. MOVE: frames that move to other pages.
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _, pipe};
use std::os::fd::AsFd as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::child::{Child, in_child};
use vellum_kernel_tests::threads::Barrier;
use vellum_kernel_tests::{PAGE, Plan, Surface, access, sys, turn_with};
use vellum_uapi::exmap::{self, Harvest, Move};

/// The accessed pages, the written pages, and the number of present pages.
type Noted = (Vec<u64>, Vec<u64>, u64);

fn harvest(surface: &Surface, page: u64, count: u64, flags: u32) -> Noted {
    let words = (count as usize).div_ceil(64);
    let (mut accessed, mut written) = (vec![0_u64; words + 1], vec![0_u64; words + 1]);
    let harvest = Harvest {
        size: size_of::<Harvest>() as u32,
        flags,
        page,
        count,
        accessed: accessed.as_mut_ptr().expose_provenance() as u64,
        written: written.as_mut_ptr().expose_provenance() as u64,
    };
    let there = pass(surface, &harvest).unwrap();
    assert_eq!((accessed[words], written[words]), (0, 0), "more than was asked for");
    let pages = |words: &[u64]| {
        let bit = |index: u64| words[index as usize / 64] >> (index % 64) & 1 == 1;
        (0..words.len() as u64 * 64).filter(|index| bit(*index)).map(|index| page + index).collect()
    };
    (pages(&accessed), pages(&written), there)
}

fn pass(surface: &Surface, harvest: &Harvest) -> Result<u64, Errno> {
    surface.exmap.pass(exmap::HARVEST, std::ptr::from_ref(harvest).expose_provenance())
}

const BOTH: u32 = exmap::CLEAR_ACCESSED | exmap::CLEAR_WRITTEN;

#[test]
fn accesses_and_writes_are_noted_and_forgotten() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    for flags in [exmap::TRACKS, exmap::TRACKS | exmap::PINNABLE] {
        // The last pages are in a table that the surface does not fill.
        let surface = Plan::new(1200, 300).flags(flags).make();
        for first in [0, 470, 1100] {
            let range = (first, 100);
            assert_eq!(surface.alloc(0, &[range]), [(0, 100)]);
            assert_eq!(harvest(&surface, first, 100, 0), (vec![], vec![], 100));
            surface.load(first + 3).unwrap();
            surface.store(first + 70, 1).unwrap();
            let noted = (vec![first + 3, first + 70], vec![first + 70], 100);
            assert_eq!(harvest(&surface, first, 100, 0), noted);
            assert_eq!(harvest(&surface, first, 100, exmap::CLEAR_WRITTEN), noted);
            let accessed = (vec![first + 3, first + 70], vec![], 100);
            assert_eq!(harvest(&surface, first, 100, exmap::CLEAR_ACCESSED), accessed);
            assert_eq!(harvest(&surface, first, 100, BOTH), (vec![], vec![], 100));
            // The harvest has flushed translations, too, so processors note new accesses again.
            surface.store(first + 70, 2).unwrap();
            surface.load(first + 3).unwrap();
            assert_eq!(harvest(&surface, first, 100, BOTH), noted);
            assert_eq!(surface.free(0, &[range]), [(0, 100)]);
            assert_eq!(harvest(&surface, first, 100, 0), (vec![], vec![], 0));
        }
    }
}

#[test]
fn writes_of_another_thread_are_noted() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let surface = Plan::new(1200, 300).flags(exmap::TRACKS).make();
    assert_eq!(surface.alloc(0, &[(5, 2), (1190, 2)]), [(0, 2), (0, 2)]);
    let step = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..60 {
                step.wait();
                surface.store(5, round).unwrap();
                surface.store(1190, round).unwrap();
                step.wait();
            }
        });
        for round in 0..60 {
            step.wait();
            step.wait();
            let (_, written, _) = harvest(&surface, 0, 1200, BOTH);
            assert_eq!(written, [5, 1190], "round {round}");
        }
    });
}

#[test]
fn writes_of_a_device_are_not_noted() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let surface = Plan::new(1200, 300).flags(exmap::TRACKS | exmap::PINNABLE).make();
    // The second page is in a table of the process.
    let pages = [5, 1190];
    assert_eq!(surface.alloc(0, &pages.map(|page| (page, 1))), [(0, 1), (0, 1)]);
    let backing = Backing::direct(1);
    for is_detached in [false, true] {
        for page in pages {
            if is_detached {
                // After a fork the kernel finds the page by a fault, otherwise without one.
                in_child(|| ());
            }
            let read = sys::pread(backing.file.as_fd(), surface.mapping.page(page), PAGE, 0);
            assert_eq!(read, Ok(PAGE as u64));
        }
        assert_eq!(harvest(&surface, 0, 1200, BOTH), (vec![], vec![], 2), "{is_detached}");
        for page in pages {
            let found = access::kernel_load(surface.mapping.page(page), PAGE).unwrap();
            assert_eq!(found, backing.stored(0), "page {page}");
            surface.store(page, 1).unwrap();
        }
        let all = pages.to_vec();
        assert_eq!(harvest(&surface, 0, 1200, BOTH), (all.clone(), all, 2));
    }
}

#[test]
fn without_tracking_present_pages_count_as_written() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let surface = Plan::new(1200, 300).make();
    assert_eq!(surface.alloc(0, &[(5, 2), (1190, 1)]), [(0, 2), (0, 1)]);
    for flags in [0, BOTH, 0] {
        let all = vec![5, 6, 1190];
        assert_eq!(harvest(&surface, 0, 1200, flags), (all.clone(), all, 3));
    }
}

#[test]
fn a_harvest_outside_of_the_surface_is_refused() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let surface = Plan::new(1200, 300).flags(exmap::TRACKS).make();
    surface.alloc(0, &[(5, 2)]);
    let size = size_of::<Harvest>() as u32;
    let right = Harvest { size, flags: 0, page: 0, count: 1200, accessed: 0, written: 0 };
    assert_eq!(pass(&surface, &right), Ok(2));
    for (page, count) in [(0, 1201), (1200, 1), (1, 1200), (u64::MAX, 2), (2, u64::MAX)] {
        let wrong = Harvest { page, count, ..right };
        assert_eq!(pass(&surface, &wrong), Err(Errno::INVAL), "{count} from {page}");
    }
    assert_eq!(pass(&surface, &Harvest { flags: 4, ..right }), Err(Errno::INVAL));
    assert_eq!(pass(&surface, &Harvest { size: 8, ..right }), Err(Errno::INVAL));
    for at in [8, 0xffff_8000_0000_0000, u64::MAX - 7] {
        assert_eq!(pass(&surface, &Harvest { accessed: at, ..right }), Err(Errno::FAULT));
        assert_eq!(pass(&surface, &Harvest { written: at, ..right }), Err(Errno::FAULT));
    }
    // The result may go to the surface itself, to a present or an absent page.
    let at = surface.mapping.page(5) as u64;
    assert_eq!(pass(&surface, &Harvest { written: at, ..right }), Ok(2));
    let at = surface.mapping.page(9) as u64;
    assert_eq!(pass(&surface, &Harvest { written: at, ..right }), Err(Errno::FAULT));
    surface.assert_works();
}

fn shift(surface: &Surface, from: u64, to: u64, count: u64) -> Result<u64, Errno> {
    let size = size_of::<Move>() as u32;
    let request = Move { size, interface: 0, from, to, count };
    surface.exmap.pass(exmap::MOVE, (&raw const request).expose_provenance())
}

#[test]
fn frames_move_with_their_contents() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    for flags in [0, exmap::PINNABLE, exmap::READS_ZEROS, exmap::TRACKS] {
        let surface = Plan::new(1200, 64).flags(flags).make();
        assert_eq!(surface.alloc(0, &[(0, 4), (6, 2), (1101, 1)]), [(0, 4), (0, 2), (0, 1)]);
        let pages = [0, 1, 2, 3, 6, 7, 1101];
        pages.iter().for_each(|page| surface.stamp(*page, *page));
        // One page has no frame, and the target of another has one.
        assert_eq!(shift(&surface, 0, 1100, 8), Ok(5));
        for (from, to) in [(0, 1100), (2, 1102), (3, 1103), (6, 1106), (7, 1107)] {
            surface.assert_stamped(to, from);
            assert_eq!(surface.store(from, 1), Err(surface.fault(from)));
        }
        surface.assert_stamped(1, 1);
        surface.assert_stamped(1101, 1101);
        assert_eq!(surface.stat().resident, 7);
        for (from, to, count) in [
            (0, 4, 5),
            (5, 1, 5),
            (0, 0, 1),
            (0, 600, 601),
            (600, 1199, 2),
            (1200, 0, 1),
            (u64::MAX, 0, 2),
            (0, u64::MAX - 3, 8),
            (0, 2, u64::MAX),
        ] {
            let refused = shift(&surface, from, to, count);
            assert_eq!(refused, Err(Errno::INVAL), "{count} from {from} to {to}");
        }
        surface.assert_works();
        assert_eq!(surface.assert_counted().len(), 7);
    }
}

/// What was written before a MOVE and is not yet in a harvest is in the next one, for the new page.
#[test]
fn notes_move_with_their_frames() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    for flags in [exmap::TRACKS, exmap::TRACKS | exmap::PINNABLE] {
        let surface = Plan::new(1200, 64).flags(flags).make();
        assert_eq!(surface.alloc(0, &[(0, 8)]), [(0, 8)]);
        surface.load(2).unwrap();
        surface.store(3, 1).unwrap();
        surface.store(7, 1).unwrap();
        // The pages from 1024 on are in a table of the process.
        for (from, to) in [(0, 600), (600, 1100), (1100, 1150), (1150, 8)] {
            assert_eq!(shift(&surface, from, to, 8), Ok(8));
            let noted = (vec![to + 2, to + 3, to + 7], vec![to + 3, to + 7], 8);
            assert_eq!(harvest(&surface, 0, 1200, 0), noted, "from {from} to {to}");
        }
        assert_eq!(harvest(&surface, 0, 1200, exmap::CLEAR_WRITTEN).1, [11, 15]);
        surface.store(9, 1).unwrap();
        assert_eq!(shift(&surface, 8, 1100, 8), Ok(8));
        let noted = (vec![1101, 1102, 1103, 1107], vec![1101], 8);
        assert_eq!(harvest(&surface, 0, 1200, BOTH), noted);
        // Detached, the process does not have the pages' table.
        surface.store(1105, 1).unwrap();
        in_child(|| ());
        assert_eq!(shift(&surface, 1100, 40, 8), Ok(8));
        assert_eq!(harvest(&surface, 0, 1200, BOTH), (vec![45], vec![45], 8));
        // A page that comes has no notes of the one that has left.
        assert_eq!(surface.alloc(0, &[(1100, 8)]), [(0, 8)]);
        assert_eq!(harvest(&surface, 0, 1200, BOTH), (vec![], vec![], 16));
    }
}

/// Frames move back and forth while threads store to both places.
#[test]
fn frames_move_while_they_are_used() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    for flags in [0, exmap::PINNABLE, exmap::READS_ZEROS, exmap::TRACKS] {
        let surface = Plan::new(1200, 40).interfaces(2).flags(flags).make();
        assert_eq!(surface.alloc(0, &[(500, 20)]), [(0, 20)]);
        let stop = vellum_kernel_tests::threads::Stop::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.is_said() {
                    for page in (500..520).chain(1100..1120) {
                        let _ = access::kernel_store(surface.mapping.page(page) + 8, &[1; 8]);
                    }
                }
            });
            let _at_end = stop.at_end();
            for round in 0..200 {
                (500..520).for_each(|page| assert!(surface.store(page, round as u8).is_ok()));
                let there = shift(&surface, 500, 1100, 20);
                assert_eq!(there, Ok(20), "round {round}, flags {flags:#x}");
                let found = (1100..1120).map(|page| surface.load(page));
                assert!(found.into_iter().all(|byte| byte == Ok(round as u8)), "round {round}");
                let back = shift(&surface, 1100, 500, 20);
                assert_eq!(back, Ok(20), "round {round}, flags {flags:#x}");
            }
        });
        assert_eq!(surface.assert_counted(), (500..520).collect::<Vec<u64>>());
    }
}

/// The pages of a surface of 4 TiB, for which a command takes long.
const MANY: u64 = 1 << 30;

#[test]
fn a_killed_process_does_not_harvest_all_pages() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let killed = |moves: bool| {
        let (mut begun, begin) = pipe().unwrap();
        let child = Child::start(|| {
            let surface = Plan::new(MANY, 16).make();
            (&begin).write_all(&[1]).unwrap();
            let size = size_of::<Harvest>() as u32;
            let all = Harvest { size, flags: 0, page: 0, count: MANY, accessed: 0, written: 0 };
            let _ =
                if moves { shift(&surface, 0, MANY / 2, MANY / 2) } else { pass(&surface, &all) };
            0
        });
        begun.read_exact(&mut [0]).unwrap();
        sleep(Duration::from_millis(200));
        let time = Instant::now();
        child.kill();
        time.elapsed()
    };
    for moves in [false, true] {
        // A host that is busy may keep the guest from its processors, but not each time.
        let mut times = (0..5).map(|_| killed(moves));
        assert!(times.any(|time| time < Duration::from_secs(5)), "moves {moves}");
    }
}

#[test]
fn other_threads_get_the_interface_while_many_pages_move() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let surface = Plan::new(MANY, 16).make();
    std::thread::scope(|scope| {
        let moves = scope.spawn(|| shift(&surface, 0, MANY / 2, MANY / 2));
        sleep(Duration::from_millis(200));
        for _ in 0..10 {
            assert_eq!(surface.alloc(0, &[(MANY - 1, 1)]), [(0, 1)]);
            assert_eq!(surface.free(0, &[(MANY - 1, 1)]), [(0, 1)]);
        }
        assert!(!moves.is_finished(), "the pages were moved before other threads got it");
        // The other threads stop when the surface is dropped.
        let (start, length) = (surface.mapping.start(), surface.mapping.length());
        sys::munmap(start, length).unwrap();
        assert_eq!(moves.join().unwrap(), Err(Errno::NODEV));
    });
    surface.mapping.leave();
}
