//! A virtual machine whose memory is a Morsel: it has translations of its own, and is told when
//! pages go.
#![allow(clippy::unwrap_used)]

use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::machine::Machine;
use vellum_kernel_tests::{Morsel, PAGE, access, morsel_turn};
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
