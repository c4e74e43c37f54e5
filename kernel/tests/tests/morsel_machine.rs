//! A virtual machine whose memory is a Morsel: it has translations of its own, and is told when
//! pages go.
#![allow(clippy::unwrap_used)]

use vellum_kernel_tests::child::in_child;
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::machine::Machine;
use vellum_kernel_tests::threads::Stop;
use vellum_kernel_tests::{Mapping, Morsel, PAGE, access, morsel_turn};
use vellum_uapi::morsel::{HUGE, PINNABLE};

const MIB: u64 = 1 << 20;

#[test]
fn a_virtual_machine_loses_what_is_punched() {
    let Some(_turn) = morsel_turn() else { return };
    for flags in [0, PINNABLE, HUGE] {
        let morsel = Morsel::new(2, 2 * MIB, flags);
        morsel.populate(0, 2 * MIB).unwrap();
        let mapping = morsel.mapped();
        let Some(mut machine) = Machine::new(&mapping) else { return };
        let word = || access::kernel_load(mapping.start(), 2).unwrap();
        if flags == HUGE && machine.store(0, 0x1234).is_err() {
            eprintln!("left out: this kernel gives virtual machines no such leaves of 2 MiB");
            continue;
        }
        machine.store(0, 0x1234).unwrap();
        assert_eq!((word(), machine.load(0).unwrap()), (vec![0x34, 0x12], 0x1234));

        morsel.punch(0, 2 * MIB).unwrap();
        // The page belongs to somebody else now, in all likelihood.
        let other = Morsel::new(2, 16 * MIB, 0);
        let others = other.mapped();
        let pages = 16 * MIB / PAGE as u64;
        (0..pages).for_each(|page| others.stamp(page, 3));
        assert_eq!(machine.load(0).unwrap(), 0, "flags {flags:#x}: what others have is read");
        machine.store(0, 0x1234).unwrap();
        (0..pages).for_each(|page| others.assert_stamped(page, 3));
        assert_eq!((word(), machine.load(0).unwrap()), (vec![0x34, 0x12], 0x1234));

        morsel.revoke().unwrap();
        assert!(machine.load(0).is_err(), "it has no memory any more");
        assert_morsels_are_sound();
    }
}

/// Brings pages and takes them off, until it is told to stop.
fn come_and_go(morsel: &Morsel, stop: &Stop) {
    while !stop.is_said() {
        assert_eq!(rustix::io::pwrite(morsel, &[1; PAGE], 0), Ok(PAGE));
        morsel.punch(0, PAGE as u64).unwrap();
    }
}

/// What a process has the kernel tell its machines, and its mappings, begins and ends for the same
/// ones: those that come in between hear neither.
#[test]
fn machines_and_mappings_come_while_others_punch() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::new(3, 2 * MIB, 0);
    let stop = Stop::default();
    std::thread::scope(|scope| {
        let _at_end = stop.at_end();
        scope.spawn(|| come_and_go(&morsel, &stop));
        for _ in 0..40 {
            in_child(|| {
                let first = Mapping::anonymous(None, PAGE).unwrap();
                // The process has a machine before it has the Morsel, and more of both after that.
                let Some(_machine) = Machine::new(&first) else { return };
                for _ in 0..3 {
                    let mapping = morsel.mapped();
                    let Some(mut machine) = Machine::new(&mapping) else { return };
                    machine.store(1, 0x1234).unwrap();
                    assert_eq!(machine.load(1).unwrap(), 0x1234);
                }
            });
        }
    });
    assert_morsels_are_sound();
}
