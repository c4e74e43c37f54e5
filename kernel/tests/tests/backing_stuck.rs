//! A backing that does not answer, like a file system that waits for its server. A process that
//! waits for it can be killed, another exmap is not affected, and nothing is lost once the answer
//! comes.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::child::Child;
use vellum_kernel_tests::counters::Memory;
use vellum_kernel_tests::slow::Slow;
use vellum_kernel_tests::threads::wait_until;
use vellum_kernel_tests::uring::{Ring, read};
use vellum_kernel_tests::{Morsel, PAGE, Plan, Surface, morsel_turn, sys, turn};
use vellum_uapi::exmap;

/// The time of an answer.
const DELAY: Duration = Duration::from_secs(3);
/// The time in which a killed process must end.
const SOON: Duration = Duration::from_secs(2);

/// How often a machine that stands still may spoil a time.
const ATTEMPTS: u32 = 5;

/// The device. It is created once, because the kernel reads from a new device.
fn device() -> &'static Slow {
    static SLOW: OnceLock<Slow> = OnceLock::new();
    SLOW.get_or_init(|| Slow::new(DELAY))
}

fn slow() -> File {
    device().open()
}

/// Kills a child that is stuck in `work`. Returns when it began: the device answers none of its
/// requests before [`DELAY`] is over.
#[track_caller]
fn kill_in(what: &str, work: impl Fn()) -> Instant {
    let mut took = Duration::ZERO;
    for _ in 0..ATTEMPTS {
        let before = device().requests();
        let begun = Instant::now();
        let child = Child::start(|| {
            work();
            0
        });
        wait_until(|| device().requests() > before);
        // It does not wait for the first request alone.
        std::thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        child.kill();
        took = start.elapsed();
        if took < SOON {
            return begun;
        }
    }
    panic!("{what}: gone after {took:?}");
}

#[test]
fn a_process_that_waits_for_its_backing_can_be_killed() {
    let Some(_turn) = turn() else { return };
    let file = slow();
    let make = |flags| Plan::new(2000, 1500).flags(flags).backing(&file).make();
    let round = || {
        for flags in [0, exmap::READS_ZEROS] {
            kill_in("a vector that reads", || {
                let surface = make(flags);
                let _ = surface.load(5);
                surface.read(0, &[(0, 700), (1000, 1), (1500, 300)]);
            });
        }
        let pread = |surface: &Surface, page, pages, opcode: u16| {
            let (at, offset) = (surface.mapping.page(page), u64::from(opcode) << 8);
            sys::pread(surface.exmap.as_fd(), at, pages * PAGE, offset)
        };
        // Two runs, because for a single run of pages of a block device the module waits as any
        // reader does.
        kill_in("two runs of pages", || {
            let _ = pread(&make(0), 7, 300, 0);
        });
        kill_in("a page that is there", || {
            let surface = make(exmap::PINNABLE);
            surface.alloc(0, &[(0, 20)]);
            let _ = pread(&surface, 0, 40, exmap::OP_REFRESH);
        });
        kill_in("a vector that writes", || {
            let surface = make(0);
            surface.alloc(0, &[(0, 600)]);
            surface.write(0, &[(0, 600)]);
        });
    };
    round();
    // After the last answers, all memory is free.
    std::thread::sleep(DELAY);
    let before = Memory::now();
    round();
    before.assert_back();
}

#[test]
fn a_process_that_fills_a_morsel_can_be_killed() {
    let Some(_turn) = morsel_turn() else { return };
    let file = slow();
    for flags in [0, vellum_uapi::morsel::PINNABLE] {
        let morsel = Morsel::new(2, 16 << 20, flags);
        let begun = kill_in("a fill", || {
            let _ = morsel.fill(&file, 0, 0, 12 << 20);
        });
        // The device may still write to the Morsel's pages, until it has answered.
        let refused = morsel.seal(vellum_uapi::morsel::SEAL_CONTENT).is_err();
        assert!(refused || begun.elapsed() >= DELAY);
        wait_until(|| morsel.seal(vellum_uapi::morsel::SEAL_CONTENT).is_ok());
        kill_in("a fill of a Morsel that is then gone", || {
            let own = Morsel::new(2, 16 << 20, flags);
            let _ = own.fill(&file, 0, 0, 12 << 20);
        });
    }
}

/// Hundreds of reads of one exmap that wait for an interface do not delay those of another.
#[test]
fn another_exmap_does_not_wait() {
    let Some(_turn) = turn() else { return };
    let mut times = std::iter::repeat_with(read_beside_stuck_ones).take(ATTEMPTS as usize);
    // All that wait for the interface take as long as the device's answer.
    assert!(times.any(|took| took < Duration::from_millis(900)));
}

/// Reads ten pages while hundreds of reads of another exmap wait. Returns the time.
fn read_beside_stuck_ones() -> Duration {
    let (file, sound) = (slow(), Backing::direct(600));
    // A worker completes a read over pages of zeros.
    let plan = |pages, file| Plan::new(pages, 500).flags(exmap::READS_ZEROS).backing(file).make();
    let (stuck, other) = (plan(2000, &file), plan(600, &sound.file));
    let mut ring = Ring::new();
    for page in 0..400 {
        ring.start(&read(&stuck.exmap, (stuck.mapping.page(page), PAGE), 0));
    }
    let took = std::thread::scope(|scope| {
        std::thread::sleep(DELAY / 2);
        // This read has the interface when their data arrives.
        scope.spawn(|| stuck.read(0, &[(1000, 1)]));
        std::thread::sleep(DELAY / 2 + Duration::from_millis(400));
        let (start, mut ring) = (Instant::now(), Ring::new());
        for page in 0..10 {
            let end = ring.run(&read(&other.exmap, (other.mapping.page(page), PAGE), 0));
            assert_eq!(end, PAGE as i32);
        }
        start.elapsed()
    });
    (0..10).for_each(|page| other.assert_stamped(page, page));
    assert!(ring.ends(400).iter().all(|(_, result)| *result == PAGE as i32));
    assert_eq!(stuck.stat().resident, 401);
    took
}
