//! Populating and punching pages, and I/O through a descriptor, compared with a model.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _, pipe};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use rustix::fs::OFlags;
use vellum_kernel_tests::backing::scratch;
use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::{Name, kinds, path, plan};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, access, morsel_turn, sys};
use vellum_uapi::morsel::{self, extent};

const MIB: u64 = 1 << 20;
const HUGE: u64 = 2 * MIB;

/// Kinds of Morsels, with lengths that are short enough to populate all of them, and not whole
/// pages if that is possible.
fn lengths() -> Vec<(u32, u64, u64)> {
    let length = |order| match order {
        0 => 4000,
        1 => 1_500_123,
        _ => 3 * HUGE + 5 * PAGE as u64 + 77,
    };
    kinds().into_iter().map(|(order, flags)| (order, flags, length(order))).collect()
}

#[track_caller]
fn assert_is(morsel: &Morsel, mapping: &Mapping, model: &[u8]) {
    let mut bytes = vec![1; model.len()];
    morsel.file().read_exact_at(&mut bytes, 0).unwrap();
    let differs = bytes.iter().zip(model).position(|(found, wanted)| found != wanted);
    assert_eq!(differs, None, "through the descriptor");
    let found = access::kernel_load(mapping.start(), model.len()).unwrap();
    let differs = found.iter().zip(model).position(|(found, wanted)| found != wanted);
    assert_eq!(differs, None, "where it is mapped");
}

/// A range of the model, most often short, or near the ends of pages and tables.
fn part(random: &mut Random, length: u64) -> (u64, u64) {
    let near = [0, PAGE as u64, HUGE, 2 * HUGE, length];
    let at = match random.below(3) {
        0 => random.below(length),
        _ => (random.pick(&near) + random.below(200)).saturating_sub(100).min(length - 1),
    };
    let most = random.pick(&[10, 5000, 100_000, length]);
    (at, 1 + random.below(most.min(length - at)))
}

/// All operations on bytes, in any order.
#[test]
fn bytes_are_as_in_the_model() {
    let Some(_turn) = morsel_turn() else { return };
    let mut random = Random::of_this_run();
    for (order, flags, length) in lengths() {
        let morsel = Morsel::new(order, length, flags);
        let mapping = morsel.mapped();
        let reader = morsel.map(libc::PROT_READ).unwrap();
        let mut model = vec![0_u8; length as usize];
        for step in 0..60 {
            let (at, count) = part(&mut random, length);
            let range = at as usize..(at + count) as usize;
            let mut bytes = vec![0; count as usize];
            bytes.iter_mut().for_each(|byte| *byte = random.number() as u8);
            match random.below(8) {
                0 | 1 => {
                    morsel.file().write_all_at(&bytes, at).unwrap();
                    model[range].copy_from_slice(&bytes);
                }
                2 => {
                    morsel.punch(at, count).unwrap();
                    model[range].fill(0);
                }
                3 => morsel.populate(at, count).unwrap(),
                4 => {
                    let address = mapping.start() + at as usize;
                    assert_eq!(access::kernel_store(address, &bytes), Ok(()));
                    model[range].copy_from_slice(&bytes);
                }
                5 => {
                    let found = access::kernel_load(reader.start() + at as usize, bytes.len());
                    assert!(found.unwrap() == model[range], "step {step}");
                }
                6 => {
                    let half = bytes.len() / 2;
                    let start = bytes.as_ptr().expose_provenance();
                    let parts =
                        [(start, half), (start + half, 0), (start + half, bytes.len() - half)];
                    assert_eq!(sys::pwritev(morsel.as_fd(), &parts, at), Ok(count));
                    model[range].copy_from_slice(&bytes);
                }
                _ => {
                    morsel.file().read_exact_at(&mut bytes, at).unwrap();
                    assert!(bytes == model[range], "step {step}");
                }
            }
        }
        assert_is(&morsel, &mapping, &model);
        assert_is(&morsel, &reader, &model);
        assert_morsels_are_sound();
    }
}

/// Splicing into it and out of it, and copying by the kernel.
#[test]
fn bytes_go_through_pipes_and_files() {
    let Some(_turn) = morsel_turn() else { return };
    let mut random = Random::of_this_run();
    let name = scratch().join("morsel-pages");
    for (order, flags, length) in lengths() {
        let morsel = Morsel::new(order, length, flags);
        let mapping = morsel.mapped();
        let mut model = vec![0_u8; length as usize];
        let (mut out, mut into) = pipe().unwrap();
        for _ in 0..40 {
            let (at, count) = part(&mut random, length);
            let count = count.min(60_000) as usize;
            let mut bytes = vec![random.number() as u8; count];
            into.write_all(&bytes).unwrap();
            let mut done = 0;
            while done < count {
                let at = Some(at + done as u64);
                done +=
                    sys::splice((out.as_fd(), None), (morsel.as_fd(), at), count - done).unwrap();
            }
            model[at as usize..at as usize + count].copy_from_slice(&bytes);

            let (at, count) = part(&mut random, length);
            let count = count.min(30_000) as usize;
            let mut done = 0;
            while done < count {
                let at = at + done as u64;
                let moved =
                    sys::splice((morsel.as_fd(), Some(at)), (into.as_fd(), None), count - done)
                        .unwrap();
                bytes.resize(moved, 0);
                out.read_exact(&mut bytes).unwrap();
                let at = at as usize;
                assert!(bytes == model[at..at + moved], "from it through a pipe");
                done += moved;
            }
        }
        // To a file and back, as programs that copy files do.
        let mut file = File::options().read(true).write(true).create_new(true).open(&name).unwrap();
        let sent = rustix::fs::sendfile(&file, &morsel, Some(&mut 0), length as usize);
        assert_eq!(sent, Ok(length as usize));
        let mut found = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut found).unwrap();
        assert!(found == model, "sendfile");
        let copy = Morsel::new(order, length, flags);
        file.rewind().unwrap();
        let copied = std::io::copy(&mut file, &mut copy.file()).unwrap();
        assert_eq!(copied, length);
        assert_is(&copy, &copy.mapped(), &model);
        assert_is(&morsel, &mapping, &model);
        drop(file);
        std::fs::remove_file(&name).unwrap();
    }
}

#[test]
fn a_descriptor_has_a_position() {
    let Some(_turn) = morsel_turn() else { return };
    let _name = Name("position");
    let morsel = Morsel::named("position");
    assert_eq!(morsel.file().write_at(&[1], 0).unwrap_err().raw_os_error(), Some(libc::EFBIG));
    assert_eq!(morsel.file().read_at(&mut [1], 0).unwrap(), 0, "no shape yet");
    morsel.create(&plan(2, 10_000, 0)).unwrap();
    let mut file = morsel.file();
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), 10_000);
    assert_eq!(file.read(&mut [0; 10]).unwrap(), 0);
    assert_eq!(file.write(&[1; 10]).unwrap_err().raw_os_error(), Some(libc::EFBIG));
    assert_eq!(file.seek(SeekFrom::End(-5)).unwrap(), 9995);
    assert_eq!(file.write(&[7; 10]).unwrap(), 5, "up to its end");
    assert_eq!(file.stream_position().unwrap(), 10_000);
    assert!(file.seek(SeekFrom::End(-10_001)).is_err());
    assert_eq!(file.seek(SeekFrom::Start(9990)).unwrap(), 9990);
    let mut bytes = [9; 20];
    assert_eq!(file.read(&mut bytes).unwrap(), 10);
    assert_eq!(bytes[..10], [0, 0, 0, 0, 0, 7, 7, 7, 7, 7]);
    assert_eq!(file.read_at(&mut bytes, 1 << 62).unwrap(), 0);
    assert!(file.write_at(&bytes, i64::MAX as u64).is_err());
    let mut append = File::options().append(true).open(path("position")).unwrap();
    assert_eq!(append.write(&[1]).unwrap_err().raw_os_error(), Some(libc::EFBIG));
    assert_eq!(rustix::fs::fcntl_getfl(&append).unwrap() & OFlags::APPEND, OFlags::APPEND);
    assert_eq!(file.metadata().unwrap().len(), 10_000);
    // A Morsel has a shape, so opening with O_TRUNC is refused.
    assert!(File::create(path("position")).is_err());
    file.sync_all().unwrap();
    assert_eq!(file.read_at(&mut bytes, 9990).unwrap(), 10);
}

/// Reading populates no page. Statistics tell how many pages are present.
#[test]
fn holes_are_zeros_and_stay_holes() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags, length) in lengths() {
        let morsel = Morsel::new(order, length, flags);
        let mut bytes = vec![1; length as usize];
        morsel.file().read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!((morsel.stat().pages, morsel.file().metadata().unwrap().blocks()), (0, 0));
        morsel.punch(0, length).unwrap();
        assert_eq!(morsel.stat().pages, 0);
        // Populating a part of a page populates the page.
        let last = length - 1;
        morsel.populate(last, 1).unwrap();
        let pages = morsel.stat().pages;
        assert_eq!(pages, 1);
        assert_eq!(morsel.file().metadata().unwrap().blocks(), 8);
        morsel.populate(0, length).unwrap();
        let pages = length.div_ceil(PAGE as u64);
        assert_eq!(morsel.stat().pages, pages);
        assert_eq!(morsel.stat().huge, if flags == morsel::HUGE { 3 } else { 0 });
        assert_eq!(morsel.file().metadata().unwrap().blocks(), pages * 8);
        morsel.populate(0, length).unwrap();
        assert_eq!(morsel.stat().pages, pages);
        morsel.punch(0, length).unwrap();
        assert_eq!((morsel.stat().pages, morsel.stat().huge), (0, 0));
        assert_morsels_are_sound();
    }
}

#[test]
fn other_ways_to_allocate_are_refused() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::new(1, MIB, 0);
    morsel.stamp(0, 7);
    for mode in [2, 8, 16, 17, 32, 64, 128] {
        // SAFETY: the call takes numbers.
        let done = unsafe { libc::fallocate(morsel.file().as_raw_fd(), mode, 0, 8192) };
        assert_eq!(done, -1, "mode {mode}");
    }
    for (offset, length) in [(MIB, 1), (0, MIB + 1), (MIB - 1, 2), (i64::MAX as u64, 1)] {
        assert!(morsel.populate(offset, length).is_err(), "{offset} {length}");
    }
    assert!(morsel.populate(0, 0).is_err());
    morsel.assert_stamped(0, 7);
    assert_eq!(morsel.stat().pages, 1);
}

/// Before Linux 6.5, a fault could take an entry of 2 MiB for damage if the place had one before.
/// There it is populated page by page.
#[test]
fn before_6_5_a_place_gets_an_entry_of_2_mib_once() {
    let Some(_turn) = morsel_turn() else { return };
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
    let returns = (numbers.next(), numbers.next()) >= (Some(6), Some(5));
    let morsel = Morsel::new(2, 4 * HUGE, morsel::HUGE);
    let reader = morsel.map(libc::PROT_READ).unwrap();
    for round in 0..3 {
        for block in 0..2 {
            morsel.stamp(block * 512 + 7, round);
            reader.assert_stamped(block * 512 + 7, round);
        }
        let stat = morsel.stat();
        let expected = if round == 0 || returns { (2, 1024) } else { (0, 2) };
        assert_eq!((stat.huge, stat.pages), expected, "round {round}");
        morsel.punch(0, 2 * HUGE).unwrap();
        assert_morsels_are_sound();
    }
    // Another place has had no entry of 2 MiB yet.
    morsel.populate(2 * HUGE, HUGE).unwrap();
    assert_eq!(morsel.stat().huge, 1);
}

/// 2 MiB have one leaf, which is punched as one, and is split into 512 pages if a part is punched.
#[test]
fn pieces_of_two_mib_are_populated_and_punched() {
    let Some(_turn) = morsel_turn() else { return };
    for order in [2, 3] {
        let morsel = Morsel::new(order, 8 * HUGE, morsel::HUGE);
        let mapping = morsel.mapped();
        morsel.populate(0, 8 * HUGE).unwrap();
        let stat = morsel.stat();
        assert_eq!((stat.pages, stat.huge), (4096, 8));
        let reader = morsel.map(libc::PROT_READ).unwrap();
        (0..4096).for_each(|page| mapping.stamp(page, page));
        let page = PAGE as u64;
        // Whole pieces, the first page of one, a page inside one, and a range over two.
        morsel.punch(0, HUGE).unwrap();
        assert_eq!((morsel.stat().pages, morsel.stat().huge), (3584, 7));
        morsel.punch(HUGE, page).unwrap();
        assert_eq!((morsel.stat().pages, morsel.stat().huge), (3583, 6));
        morsel.punch(2 * HUGE + 77 * page, page).unwrap();
        assert_eq!((morsel.stat().pages, morsel.stat().huge), (3582, 5));
        morsel.punch(4 * HUGE - page, 2 * page).unwrap();
        assert_eq!((morsel.stat().pages, morsel.stat().huge), (3580, 3));
        // Bytes within a page split nothing.
        morsel.punch(5 * HUGE + 5, 100).unwrap();
        assert_eq!((morsel.stat().pages, morsel.stat().huge), (3580, 3));
        let gone = |page| page < 513 || [1101, 2047, 2048].contains(&page);
        for page in (0..4096).filter(|page| *page != 2560) {
            if gone(page) {
                assert_eq!(access::kernel_load(reader.page(page), 8), Ok(vec![0; 8]));
            } else {
                reader.assert_stamped(page, page);
            }
        }
        let mut expected = access::stamped(2560);
        expected[5..105].fill(0);
        assert!(access::kernel_load(mapping.page(2560), PAGE) == Ok(expected));
        assert_morsels_are_sound();
        // In an empty piece the pages may come as one leaf or as 512. All of them are present.
        morsel.punch(0, 8 * HUGE).unwrap();
        assert_eq!((morsel.stat().pages, morsel.stat().huge), (0, 0));
        morsel.populate(0, 8 * HUGE).unwrap();
        assert_eq!(morsel.stat().pages, 4096);
        assert!(access::kernel_load(mapping.start(), 8192) == Ok(vec![0; 8192]));
        assert_morsels_are_sound();
    }
}

/// The source of the write is the Morsel itself.
#[test]
fn a_morsel_is_written_to_itself() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds().into_iter().filter(|(order, _)| *order > 0) {
        let morsel = Morsel::new(order, 2 * MIB, flags);
        let mapping = morsel.mapped();
        (0..8).for_each(|page| morsel.stamp(page, page));
        // From a present page, and from a page that is populated during the read.
        let written = sys::pwrite(morsel.as_fd(), mapping.page(1), 3 * PAGE, 100 * PAGE as u64);
        assert_eq!(written, Ok(3 * PAGE as u64));
        (0..3).for_each(|page| mapping.assert_stamped(100 + page, 1 + page));
        let written = sys::pwrite(morsel.as_fd(), mapping.page(200), PAGE, 0);
        assert_eq!(written, Ok(PAGE as u64));
        assert!(access::kernel_load(mapping.start(), PAGE) == Ok(vec![0; PAGE]));
        let read = sys::pread(morsel.as_fd(), mapping.page(300), PAGE, 5 * PAGE as u64);
        assert_eq!(read, Ok(PAGE as u64));
        mapping.assert_stamped(300, 5);
        // A page onto itself.
        assert_eq!(sys::pwrite(morsel.as_fd(), mapping.page(6), PAGE, 6 * PAGE as u64), Ok(4096));
        mapping.assert_stamped(6, 6);
        // Unreadable memory ends the write.
        let bad = [(mapping.page(7), PAGE), (8, PAGE)];
        assert_eq!(sys::pwritev(morsel.as_fd(), &bad, 400 * PAGE as u64), Ok(PAGE as u64));
        mapping.assert_stamped(400, 7);
        assert_eq!(sys::pwrite(morsel.as_fd(), 8, PAGE, 0), Err(Errno::FAULT));
        assert_morsels_are_sound();
    }
}

#[test]
fn punched_memory_is_free_at_once() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds().into_iter().filter(|(order, _)| *order > 1) {
        let morsel = Morsel::new(order, 200 * MIB, flags);
        let mapping = morsel.mapped();
        let reader = morsel.map(libc::PROT_READ).unwrap();
        let mut before = None;
        for round in 0..5 {
            morsel.populate(0, 200 * MIB).unwrap();
            for page in (0..200 * MIB / PAGE as u64).step_by(100) {
                assert_eq!(access::load(mapping.page(page)), Ok(0));
                assert_eq!(access::load(reader.page(page)), Ok(0));
                assert_eq!(access::store(mapping.page(page), 1), Ok(()));
            }
            morsel.punch(0, 200 * MIB).unwrap();
            // Tables stay. The first rounds allocate them; the second round, too, if an entry of 2
            // MiB comes only once.
            if round > 0 {
                before.get_or_insert_with(Memory::now).assert_back();
            }
        }
    }
}

/// A process reads pages while others punch and populate them. It finds zeros or the stores to
/// these pages, but no bytes of other users of the memory.
#[test]
fn bytes_of_other_users_are_never_seen() {
    let Some(_turn) = morsel_turn() else { return };
    const MINE: u8 = 0x11;
    const OTHERS: u8 = 0xee;
    for (order, flags) in kinds() {
        let length = extent(order).min(2 * HUGE);
        let pages = length / PAGE as u64;
        let morsel = Morsel::new(order, length, flags);
        let other = Morsel::new(2, 8 * HUGE, 0);
        let watch = |rights| {
            Child::start(|| {
                let mapping = morsel.map(rights).unwrap();
                let mut random = Random::new(rights as u64);
                let mut seen = 0;
                // Reads until it is killed, unless it sees other bytes.
                while seen != OTHERS {
                    seen = access::load(mapping.page(random.below(pages)) + 9).unwrap();
                    assert!([0, MINE].contains(&seen), "{seen:#x}");
                }
                1
            })
        };
        let watchers = [watch(libc::PROT_READ), watch(sys::READ_WRITE)];
        let deadline = vellum_kernel_tests::threads::Deadline::after_ms(400);
        let (mine, others) = (vec![MINE; length as usize], vec![OTHERS; 8 * HUGE as usize]);
        for _ in deadline.rounds() {
            morsel.file().write_all_at(&mine, 0).unwrap();
            morsel.punch(0, length).unwrap();
            other.file().write_all_at(&others, 0).unwrap();
            other.punch(0, 8 * HUGE).unwrap();
        }
        for watcher in watchers {
            watcher.signal(libc::SIGKILL);
            assert_eq!(watcher.wait(), End::Signal(libc::SIGKILL));
        }
        assert_morsels_are_sound();
    }
}
