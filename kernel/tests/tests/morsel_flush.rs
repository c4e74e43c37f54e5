//! TLBs are flushed before a page is used again: once for each process that maps the Morsel,
//! however many mappings it has.
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _, pipe};
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::child::Child;
use vellum_kernel_tests::counters::{Interrupts, assert_morsels_are_sound};
use vellum_kernel_tests::threads::{Place, Stop, processors, stay_on, wait_until};
use vellum_kernel_tests::{Mapping, Morsel, PAGE, morsel_turn};
use vellum_uapi::morsel::extent;

const MAPPINGS: usize = 1000;

/// The allowance for flushes of other memory, and for other function calls.
const FEW: u64 = 100;

/// How often `work` has interrupted another processor on which a thread of this process runs.
fn interruptions(work: impl FnOnce()) -> u64 {
    let (stop, rounds) = (Stop::default(), AtomicU64::new(0));
    let _place = Place::on(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stay_on(1);
            while !stop.is_said() {
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _at_end = stop.at_end();
        wait_until(|| rounds.load(Ordering::Relaxed) > 10);
        let before = Interrupts::now();
        work();
        // Shootdowns are among the calls.
        before.since().calls[1]
    })
}

fn many(morsel: &Morsel) -> Vec<Mapping> {
    (0..MAPPINGS).map(|_| morsel.mapped()).collect()
}

#[test]
fn a_process_is_flushed_once_for_all_of_its_mappings() {
    let Some(_turn) = morsel_turn() else { return };
    if processors() < 2 {
        eprintln!("skipped: one processor");
        return;
    }
    let morsel = Morsel::new(1, extent(1), 0);
    let mappings = many(&morsel);
    // Another process has as many mappings. The module must not search them for those of this
    // process.
    let (mut told, mut tell) = pipe().unwrap();
    let other = Child::start(|| {
        let _mappings = many(&morsel);
        tell.write_all(&[1]).unwrap();
        loop {
            std::thread::park();
        }
    });
    told.read_exact(&mut [0]).unwrap();

    morsel.stamp(0, 7);
    mappings.iter().for_each(|mapping| mapping.assert_stamped(0, 7));
    let punch = interruptions(|| morsel.punch(0, PAGE as u64).unwrap());
    for mapping in &mappings {
        assert_eq!(access::load(mapping.start()), Ok(0));
    }
    morsel.stamp(0, 8);
    assert_morsels_are_sound();

    let revoke = interruptions(|| morsel.revoke().unwrap());
    for mapping in &mappings {
        let address = mapping.start();
        assert_eq!(access::load(address), Err(Fault { signal: libc::SIGBUS, address }));
    }
    other.kill();
    assert!(punch < FEW && revoke < FEW, "{punch} for a punch, {revoke} for REVOKE");
}
