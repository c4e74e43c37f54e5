//! FILL: the Morsel gets the bytes of the file, and FILL reports bytes that it cannot read.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _, pipe};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::time::Duration;

use vellum_kernel_tests::backing::{Backing, scratch};
use vellum_kernel_tests::child::{Child, in_child};
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::{kinds, plan};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{Stop, wait_until};
use vellum_kernel_tests::{Errno, Morsel, Mounted, PAGE, access, morsel_turn};
use vellum_uapi::morsel::{self, Fill, extent};

const MIB: u64 = 1 << 20;
const PAGES: u64 = 4096;

/// All bytes of a backing.
fn stored(pages: u64) -> Vec<u8> {
    (0..pages).flat_map(access::stamped).collect()
}

fn contents(morsel: &Morsel, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    morsel.file().read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn a_source_is_read_from_beginning_to_end() {
    let Some(_turn) = morsel_turn() else { return };
    let length = PAGES * PAGE as u64;
    let expected = stored(PAGES);
    for backing in Backing::all(PAGES) {
        for (order, flags) in kinds() {
            let length = length.min(extent(order));
            let morsel = Morsel::new(order, length, flags);
            let mapping = morsel.mapped();
            assert_eq!(morsel.fill(&backing.file, 0, 0, length), (length, Ok(())));
            let found = contents(&morsel, 0, length as usize);
            assert!(found == expected[..length as usize], "{}", backing.name);
            assert_eq!(morsel.stat().pages, length / PAGE as u64);
            mapping.assert_stamped(length / PAGE as u64 - 1, length / PAGE as u64 - 1);
            assert_morsels_are_sound();
        }
    }
}

/// Any part of the file to any page, over earlier contents.
#[test]
fn parts_are_read() {
    let Some(_turn) = morsel_turn() else { return };
    let mut random = Random::of_this_run();
    let expected = stored(PAGES);
    for backing in Backing::all(PAGES) {
        let block = if backing.name == "a cached file" { 1 } else { 512 };
        for flags in [0, morsel::PINNABLE, morsel::HUGE] {
            let length = 24 * MIB + 5;
            let morsel = Morsel::new(2, length, flags);
            let mut model = vec![0; length as usize];
            for _ in 0..25 {
                let size = random.pick(&[1, 5000, MIB, 9 * MIB]);
                let size = (1 + random.below(size)).next_multiple_of(block);
                let from = random.below(16 * MIB - size) / block * block;
                let page = random.below((length - size) / PAGE as u64);
                let offset = page * PAGE as u64;
                let filled = morsel.fill(&backing.file, from, offset, size);
                assert_eq!(filled, (size, Ok(())), "{} {from} {offset}", backing.name);
                let (from, to) = (from as usize, offset as usize);
                model[to..to + size as usize]
                    .copy_from_slice(&expected[from..from + size as usize]);
                if random.one_in(3) {
                    let at = random.below(length - MIB);
                    morsel.punch(at, MIB).unwrap();
                    model[at as usize..(at + MIB) as usize].fill(0);
                }
            }
            assert!(contents(&morsel, 0, length as usize) == model, "{}", backing.name);
            assert_morsels_are_sound();
        }
    }
}

#[test]
fn a_source_may_be_short() {
    let Some(_turn) = morsel_turn() else { return };
    for flags in [0, libc::O_DIRECT] {
        let path = scratch().join("morsel-fill");
        let size = 3 * MIB + 777;
        let mut file = File::create(&path).unwrap();
        file.write_all(&stored(2 * 512)[..size as usize]).unwrap();
        file.sync_all().unwrap();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&path).unwrap();
        let morsel = Morsel::new(2, 32 * MIB, 0);
        assert_eq!(morsel.fill(&file, 0, 0, 32 * MIB), (size, Ok(())));
        assert!(contents(&morsel, 0, size as usize) == stored(2 * 512)[..size as usize]);
        assert_eq!(contents(&morsel, size, 100), [0; 100], "nothing after its end");
        // The last bytes of the source, its end, and beyond.
        let last = size / 4096 * 4096;
        assert_eq!(morsel.fill(&file, last, 4096, 8192), (size - last, Ok(())));
        for from in [size.next_multiple_of(4096), 1 << 40, i64::MAX as u64 - 32 * MIB] {
            assert_eq!(morsel.fill(&file, from, 0, 4096), (0, Err(Errno::NODATA)), "{from}");
        }
        if flags == 0 {
            assert_eq!(morsel.fill(&file, size, 0, 1), (0, Err(Errno::NODATA)));
            assert_eq!(morsel.fill(&file, size - 1, 0, 2), (1, Ok(())));
        }
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        assert_eq!(morsel.fill(&file, 0, 0, 4096), (0, Err(Errno::NODATA)));
        // A hole of the source is zeros.
        File::options().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
        assert_eq!(morsel.fill(&file, 0, 0, 4 * MIB), (2 * MIB, Ok(())));
        assert!(contents(&morsel, 0, 2 << 20) == vec![0; 2 << 20]);
        std::fs::remove_file(&path).unwrap();
        assert_morsels_are_sound();
    }
}

/// FILL may fill all of the last page, because direct I/O reads blocks, but no more.
#[test]
fn a_morsel_may_be_short() {
    let Some(_turn) = morsel_turn() else { return };
    for backing in Backing::all(8) {
        let morsel = Morsel::new(1, 4096 + 10, 0);
        assert_eq!(morsel.fill(&backing.file, 0, 0, 8192), (8192, Ok(())));
        assert!(contents(&morsel, 0, 4106) == stored(2)[..4106]);
        for (offset, length) in [(0, 8193), (4096, 4097), (8192, 1), (1 << 40, 1), (0, u64::MAX)] {
            let filled = morsel.fill(&backing.file, 0, offset, length);
            assert_eq!(filled, (0, Err(Errno::INVAL)), "{offset} {length}");
        }
        for (offset, length) in [(1, 1), (512, 512), (4095, 1), (0, 0), (u64::MAX - 4095, 4096)] {
            let filled = morsel.fill(&backing.file, 0, offset, length);
            assert_eq!(filled, (0, Err(Errno::INVAL)), "{offset} {length}");
        }
        for from in [u64::MAX, 1 << 63, i64::MAX as u64] {
            assert_eq!(morsel.fill(&backing.file, from, 0, 4096), (0, Err(Errno::INVAL)));
        }
        if backing.name != "a cached file" {
            let (filled, error) = morsel.fill(&backing.file, 1, 0, 512);
            assert_eq!((filled, error), (0, Err(Errno::INVAL)), "{}", backing.name);
        }
        assert!(contents(&morsel, 0, 4106) == stored(2)[..4106]);
    }
}

#[test]
fn invalid_sources_are_refused() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::new(2, MIB, 0);
    morsel.stamp(0, 7);
    let as_file = |fd: OwnedFd| File::from(fd);
    let (reader, writer) = pipe().unwrap();
    let path = scratch().join("morsel-write-only");
    let fill = |file: &File| morsel.fill(file, 0, 0, 4096);
    assert_eq!(fill(&as_file(reader.into())), (0, Err(Errno::INVAL)), "a pipe");
    assert!(fill(&as_file(writer.into())).1.is_err(), "a pipe's other end");
    assert_eq!(fill(&File::open(scratch()).unwrap()), (0, Err(Errno::INVAL)), "a folder");
    assert_eq!(fill(&File::open("/dev/zero").unwrap()), (0, Err(Errno::INVAL)), "a device");
    assert_eq!(fill(&File::create(&path).unwrap()), (0, Err(Errno::BADF)), "not for reading");
    for made_up in ["/proc/cpuinfo", "/sys/kernel/mm/transparent_hugepage/enabled"] {
        assert_eq!(fill(&File::open(made_up).unwrap()), (0, Err(Errno::INVAL)), "{made_up}");
    }
    let only_path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
    assert_eq!(fill(&only_path), (0, Err(Errno::BADF)), "a path");
    for source in [-1, i32::MIN, i32::MAX, 900] {
        let size = size_of::<Fill>() as u32;
        let mut fill = Fill { size, source, from: 0, offset: 0, length: 4096, filled: 9 };
        let outcome = morsel.pass(morsel::FILL, (&raw mut fill).expose_provenance());
        assert_eq!((outcome, fill.filled), (Err(Errno::BADF), 0));
    }
    let shapeless = Morsel::nameless();
    let backing = Backing::cached(1);
    assert_eq!(shapeless.fill(&backing.file, 0, 0, 4096), (0, Err(Errno::INVAL)));
    morsel.assert_stamped(0, 7);
    std::fs::remove_file(path).unwrap();
}

/// Filling from a Morsel, another one or the same, is refused, or has the right result.
#[test]
fn a_morsel_as_the_source() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds().into_iter().filter(|(order, _)| *order > 0) {
        let (from, to) = (Morsel::new(order, 2 * MIB, flags), Morsel::new(order, 2 * MIB, flags));
        (0..512).for_each(|page| from.stamp(page, page));
        let filled = to.fill(from.file(), 0, 0, 2 * MIB);
        println!("from another one: {filled:?}");
        if filled.1.is_ok() {
            assert_eq!(filled.0, 2 * MIB);
            (0..512).for_each(|page| to.assert_stamped(page, page));
        }
        let filled = from.fill(from.file(), 0, 4096, MIB);
        println!("from itself: {filled:?}");
        from.assert_stamped(0, 0);
        from.assert_stamped(511, 511);
        assert_eq!(from.fill(from.file(), 0, 0, MIB).1.is_ok(), filled.1.is_ok());
        assert_morsels_are_sound();
    }
}

/// The bytes before an error are present, and FILL reports them.
#[test]
fn bytes_read_before_an_error_are_reported() {
    let Some(_turn) = morsel_turn() else { return };
    for backing in Backing::all(PAGES) {
        let morsel = Morsel::new(2, 16 * MIB, 0);
        morsel.populate(0, 3 * MIB).unwrap();
        morsel.seal(morsel::SEAL_POPULATION).unwrap();
        let (filled, error) = morsel.fill(&backing.file, 0, 0, 16 * MIB);
        assert_eq!(error, Err(Errno::PERM));
        let there = (0..3 * 256).take_while(|page| {
            contents(&morsel, page * PAGE as u64, PAGE) == access::stamped(*page)
        });
        let there = there.count() as u64 * PAGE as u64;
        assert_eq!(filled, there, "{}: these bytes are present", backing.name);

        let mounted = Mounted::new("size=8m").unwrap();
        let morsel = mounted.nameless();
        morsel.create(&plan(2, 16 * MIB, 0)).unwrap();
        let (filled, error) = morsel.fill(&backing.file, 0, 0, 16 * MIB);
        assert_eq!(error, Err(Errno::NOSPC));
        let there = (0..PAGES).take_while(|page| {
            contents(&morsel, page * PAGE as u64, PAGE) == access::stamped(*page)
        });
        assert_eq!(filled, there.count() as u64 * PAGE as u64, "{}: there is", backing.name);
        assert!(filled >= 6 * MIB, "{filled}");
    }
}

extern "C" fn nothing(_signal: i32) {}

/// Sends this process SIGALRM at this interval, in microseconds, from now on.
fn signal_every(pause: libc::suseconds_t) {
    let every = libc::timeval { tv_sec: 0, tv_usec: pause };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: `timer` is valid for the call.
    let outcome =
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    assert_eq!(outcome, 0);
}

/// Repeated signals end FILL early, and never lose bytes that it has read.
#[test]
fn a_signal_loses_no_bytes() {
    let Some(_turn) = morsel_turn() else { return };
    for backing in Backing::all(PAGES) {
        let morsel = Morsel::new(2, PAGES * PAGE as u64, 0);
        in_child(|| {
            // SAFETY: the handler does nothing, so it may run at any time.
            unsafe { libc::signal(libc::SIGALRM, nothing as *const () as libc::sighandler_t) };
            // A slow machine reads nothing in 3 ms, so signals come less often after each call that
            // read nothing.
            let mut pause = 3000;
            signal_every(pause);
            let (mut done, mut calls, mut empty) = (0, 0, 0);
            while done < PAGES * PAGE as u64 {
                let left = PAGES * PAGE as u64 - done;
                let (filled, outcome) = morsel.fill(&backing.file, done, done, left);
                let interrupted = outcome == Err(Errno::INTR);
                assert!(outcome.is_ok() || interrupted, "{outcome:?}");
                assert!(!interrupted || filled == 0, "bytes were read, and the result is an error");
                if filled == 0 {
                    empty += 1;
                    pause = (pause + pause / 8).min(900_000);
                    signal_every(pause);
                }
                calls += 1;
                assert!(calls < 2000, "{done} bytes in {calls} calls, {empty} without any");
                done += filled / PAGE as u64 * PAGE as u64;
            }
            println!("{}: {calls} calls, {empty} without anything read", backing.name);
        });
        assert!(contents(&morsel, 0, (PAGES as usize) * PAGE) == stored(PAGES));
    }
}

#[test]
fn a_process_may_be_killed_while_it_reads() {
    let Some(_turn) = morsel_turn() else { return };
    let mut random = Random::of_this_run();
    let backings = Backing::all(PAGES);
    let before = Memory::now();
    for flags in [0, morsel::PINNABLE, morsel::HUGE] {
        for backing in &backings {
            for _ in 0..4 {
                let morsel = Morsel::new(2, 16 * MIB, flags);
                let (mut ready, mut readies) = pipe().unwrap();
                let child = Child::start(|| {
                    readies.write_all(b"!").unwrap();
                    loop {
                        morsel.fill(&backing.file, 0, 0, 16 * MIB).1.unwrap();
                        morsel.punch(0, 16 * MIB).unwrap();
                    }
                });
                ready.read_exact(&mut [0]).unwrap();
                std::thread::sleep(Duration::from_millis(random.below(40)));
                child.kill();
                assert_morsels_are_sound();
                // A device may still have I/O to finish.
                wait_until(|| match morsel.seal(morsel::SEAL_CONTENT) {
                    Err(Errno::BUSY) => false,
                    outcome => {
                        assert_eq!(outcome, Ok(()), "nothing writes");
                        true
                    }
                });
            }
        }
    }
    before.assert_back();
}

/// Threads fill parts of a Morsel, while others punch pages elsewhere, and read all of it.
#[test]
fn threads_fill_at_the_same_time() {
    let Some(_turn) = morsel_turn() else { return };
    let expected = stored(PAGES);
    for backing in Backing::all(PAGES) {
        for flags in [0, morsel::HUGE] {
            let morsel = Morsel::new(2, 64 * MIB, flags);
            let stop = Stop::default();
            std::thread::scope(|scope| {
                let (morsel, stop, backing) = (&morsel, &stop, &backing);
                scope.spawn(move || {
                    while !stop.is_said() {
                        morsel.punch(32 * MIB, 8 * MIB).unwrap();
                        let _ = contents(morsel, 0, 1 << 20);
                    }
                });
                let fill = |part: u64| {
                    for round in 0..4 {
                        // The last round fills the thread's own part, the others any part.
                        let to = if round == 3 { part * 4 } else { 24 + (part + round) % 4 * 4 };
                        let from = part * 4 * MIB;
                        let filled = morsel.fill(&backing.file, from, to * MIB, 4 * MIB);
                        assert_eq!(filled, (4 * MIB, Ok(())));
                    }
                };
                let _at_end = stop.at_end();
                std::thread::scope(|inner| {
                    (0..4).for_each(|part| drop(inner.spawn(move || fill(part))));
                });
            });
            assert!(contents(&morsel, 0, expected.len()) == expected, "{}", backing.name);
            assert_morsels_are_sound();
        }
    }
}

/// The source is written and truncated while FILL reads it.
#[test]
fn a_source_may_change_during_a_fill() {
    let Some(_turn) = morsel_turn() else { return };
    for flags in [0, libc::O_DIRECT] {
        let path = scratch().join("morsel-changing");
        let writer = File::create(&path).unwrap();
        let source = OpenOptions::new().read(true).custom_flags(flags).open(&path).unwrap();
        let morsel = Morsel::new(2, 8 * MIB, 0);
        let stop = Stop::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let bytes = vec![0x5a; 4 << 20];
                while !stop.is_said() {
                    writer.write_all_at(&bytes, 0).unwrap();
                    writer.set_len(4096).unwrap();
                }
            });
            let _at_end = stop.at_end();
            for _ in 0..30 {
                let (filled, outcome) = morsel.fill(&source, 0, 0, 8 * MIB);
                assert!(matches!(outcome, Ok(()) | Err(Errno::NODATA)), "{outcome:?}");
                assert!(filled <= 4 * MIB);
                let found = contents(&morsel, 0, filled as usize);
                assert!(found.iter().all(|byte| [0, 0x5a].contains(byte)));
            }
        });
        std::fs::remove_file(&path).unwrap();
        assert_morsels_are_sound();
    }
}
