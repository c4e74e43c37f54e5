//! A virtual machine with a Morsel as its memory has its own translations. The module notifies it
//! when pages are punched.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_kernel_tests::child::in_child;
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::machine::{Machine, Starter};
use vellum_kernel_tests::morsel::{kinds, plan, stamped};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{
    Barrier, Deadline, Place, Preemptible, Stop, processors, stay_on,
};
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, access, morsel_turn, persistent, sys};
use vellum_uapi::morsel::{HUGE, PINNABLE, SEAL_CONTENT};

const MIB: u64 = 1 << 20;

#[test]
fn a_virtual_machine_loses_punched_pages() {
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
        // Another owner very likely has the page now.
        let other = Morsel::new(2, 16 * MIB, 0);
        let others = other.mapped();
        let pages = 16 * MIB / PAGE as u64;
        (0..pages).for_each(|page| others.stamp(page, 3));
        assert_eq!(machine.load(0).unwrap(), 0, "flags {flags:#x}: it reads another owner's page");
        machine.store(0, 0x1234).unwrap();
        (0..pages).for_each(|page| others.assert_stamped(page, 3));
        assert_eq!((word(), machine.load(0).unwrap()), (vec![0x34, 0x12], 0x1234));

        morsel.revoke().unwrap();
        assert!(machine.load(0).is_err(), "it has no memory");
        assert_morsels_are_sound();
    }
}

/// Fails unless the machine reads the page's contents. Some kernels give it no leaves of 2 MiB.
#[track_caller]
fn assert_loaded(machine: &mut Machine, page: usize, word: u16, flags: u64) {
    match machine.load(page) {
        Ok(found) => assert_eq!(found, word, "page {page}"),
        Err(error) => assert_eq!(flags, HUGE, "page {page}: {error}"),
    }
}

/// For a machine's rights the host only checks leaves, and it gives the right to write even for a
/// read.
#[test]
fn a_virtual_machine_cannot_write_to_a_mapping_for_reading() {
    let Some(_turn) = morsel_turn() else { return };
    for (kind, seals) in kinds().into_iter().flat_map(|kind| [(kind, 0), (kind, SEAL_CONTENT)]) {
        let morsel = stamped(kind);
        morsel.populate(0, PAGE as u64).unwrap();
        morsel.seal(seals).unwrap();
        let mapping = morsel.map(libc::PROT_READ).unwrap();
        mapping.assert_stamped(0, 7);
        let pages = mapping.length() / PAGE;
        // Page 1 is a hole that no process has accessed.
        for (page, word) in [(0, 7), (1, 0)].into_iter().filter(|(page, _)| *page < pages) {
            for loads_first in [false, true] {
                let Some(mut machine) = Machine::new(&mapping) else { return };
                if loads_first {
                    assert_loaded(&mut machine, page, word, kind.1);
                }
                let stored = machine.store(page, 0x1234);
                assert!(stored.is_err(), "{kind:x?}, seals {seals}, page {page} is written");
                assert_loaded(&mut machine, page, word, kind.1);
                assert!(machine.store(page, 0x1234).is_err(), "{kind:x?}, seals {seals}");
            }
        }
        morsel.assert_stamped(0, 7);
        mapping.assert_stamped(0, 7);
        assert_morsels_are_sound();
    }
}

/// Only orders with their own tables. For Morsels of one page, the kernel's tables show the page to
/// machines even if no process may access it.
#[test]
fn a_virtual_machine_loses_rights_by_mprotect() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds().into_iter().filter(|(_, flags)| *flags != HUGE) {
        let morsel = stamped((order, flags));
        let (mapping, other) = (morsel.mapped(), morsel.mapped());
        let (start, length) = (mapping.start(), mapping.length());
        let protect = |protection| sys::mprotect(start, length, protection).unwrap();
        let word = || access::kernel_load(other.start(), 2).unwrap();
        let Some(mut machine) = Machine::new(&mapping) else { return };
        machine.store(0, 0x1234).unwrap();

        protect(libc::PROT_READ);
        assert!(machine.store(0, 0x4321).is_err(), "order {order}, flags {flags:#x}: written");
        assert_eq!((word(), machine.load(0).unwrap()), (vec![0x34, 0x12], 0x1234));

        protect(libc::PROT_NONE);
        assert!(machine.load(0).is_err(), "order {order}, flags {flags:#x}: read");
        assert!(machine.store(0, 0x4321).is_err(), "order {order}, flags {flags:#x}: written");
        assert_eq!(word(), [0x34, 0x12]);

        protect(sys::READ_WRITE);
        machine.store(0, 0x4321).unwrap();
        assert_eq!((word(), machine.load(0).unwrap()), (vec![0x21, 0x43], 0x4321));
        assert_morsels_are_sound();
    }
}

/// Populates and punches pages until a flag stops it.
fn come_and_go(morsel: &Morsel, stop: &Stop) {
    while !stop.is_said() {
        assert_eq!(rustix::io::pwrite(morsel, &[1; PAGE], 0), Ok(PAGE));
        morsel.punch(0, PAGE as u64).unwrap();
    }
}

/// The start and the end of a notification reach the same machines and mappings of a process. Those
/// created in between get neither.
#[test]
fn machines_and_mappings_are_created_while_threads_punch() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::new(3, 2 * MIB, 0);
    let stop = Stop::default();
    std::thread::scope(|scope| {
        let _at_end = stop.at_end();
        scope.spawn(|| come_and_go(&morsel, &stop));
        for _ in 0..40 {
            in_child(|| {
                let first = Mapping::anonymous(None, PAGE).unwrap();
                // The process creates a machine before it maps the Morsel, and more of both
                // afterwards.
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

/// KVM has a reference to the page that describes a nested machine, whether the Morsel is pinnable
/// or not. It writes to the page even after the mapping through which it found it is gone.
#[test]
fn a_morsel_with_a_page_that_kvm_holds_cannot_be_sealed() {
    let Some(_turn) = morsel_turn() else { return };
    if processors() < 2 {
        eprintln!("skipped: one processor");
        return;
    }
    for (order, flags) in [(1, 0), (1, PINNABLE), (2, HUGE)] {
        if !seal_and_look(order, || Morsel::new(order, 2 * MIB, flags)) {
            return;
        }
    }
    if persistent::is_there() {
        persistent::format();
        seal_and_look(1, || {
            let morsel = Morsel::nameless_in(Path::new(persistent::FOLDER)).unwrap();
            morsel.create(&plan(1, 2 * MIB, 0)).unwrap();
            morsel
        });
        persistent::unmount().unwrap();
    }
}

/// Keeps a thread of lower priority from its processor, except while this one is to be idle.
fn be_in_the_way(stop: &Stop, is_idle: &AtomicBool) {
    while !stop.is_said() {
        match is_idle.load(Ordering::Relaxed) {
            true => std::thread::sleep(Duration::from_micros(100)),
            false => std::hint::spin_loop(),
        }
    }
}

/// Seals Morsels while a machine tries to start a nested one, and checks that they do not change
/// afterwards. False if there are no nested machines.
fn seal_and_look(order: u32, make: impl Fn() -> Morsel) -> bool {
    let address = make().map(sys::READ_WRITE).unwrap().start();
    let map = |morsel: &Morsel| {
        let request = morsel.request(sys::READ_WRITE);
        let flags = request.flags | libc::MAP_FIXED;
        Mapping::new(sys::Request { address, flags, ..request }).unwrap()
    };
    let first = make();
    let is_huge = first.stat().flags & HUGE != 0;
    let mapping = map(&first);
    let Some(mut starter) = Starter::new(&mapping, 0) else { return false };
    let (stop, deadline) = (Stop::default(), Deadline::after_ms(10_000));
    let mut random = Random::new(1);
    let (mut rounds, mut described, mut busy) = (0, 0, 0);
    // Only a thread that is preempted while KVM has a reference still has it when the mapping is
    // gone, because the kernel waits for a while before that.
    let _preemptible = Preemptible::new();
    let _place = Place::on(0);
    // Threads map their stacks, which must not come to lie where the Morsels are to be.
    let has_started = Barrier::new(3);
    let is_idle = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _at_end = stop.at_end();
        scope.spawn(|| {
            stay_on(1);
            // The other thread there has the processor most of the time.
            rustix::process::nice(19).unwrap();
            has_started.wait();
            while !stop.is_said() {
                starter.run();
            }
        });
        scope.spawn(|| {
            stay_on(1);
            has_started.wait();
            be_in_the_way(&stop, &is_idle);
        });
        has_started.wait();
        drop((mapping, first));
        // On a busy machine KVM may come late.
        while !deadline.is_over() || (described == 0 && !is_huge && rounds < 200) {
            rounds += 1;
            let morsel = make();
            let mapping = map(&morsel);
            access::kernel_store(mapping.start(), &[0; PAGE]).unwrap();
            let answer = mapping.start() + Starter::ANSWER;
            let is_answered = || access::kernel_load(answer, 8).unwrap() == [0xff; 8];
            let patience = Deadline::after_ms(300);
            while !is_answered() && !patience.is_over() {}
            described += u64::from(is_answered());
            (0..random.below(2_000)).for_each(|_| std::hint::spin_loop());
            drop(mapping);
            // An answer that is still on its way shows after this, and the seal comes at once.
            rustix::io::pwrite(&morsel, &[0; 8], Starter::ANSWER as u64).unwrap();
            match morsel.seal(SEAL_CONTENT) {
                Err(error) => {
                    assert_eq!(error, Errno::BUSY);
                    busy += 1;
                }
                Ok(()) => {
                    let sealed = page_of(&morsel);
                    // KVM's thread goes on, and has time for what is left.
                    is_idle.store(true, Ordering::Relaxed);
                    let patience = Deadline::after_ms(10);
                    while !patience.is_over() {
                        assert!(page_of(&morsel) == sealed, "order {order}, round {rounds}");
                    }
                    is_idle.store(false, Ordering::Relaxed);
                }
            }
        }
    });
    println!("order {order}: {rounds} rounds, KVM was there in {described}, {busy} were busy");
    if described == 0 {
        assert!(is_huge, "order {order}: the machine starts nothing");
        println!("left out: this kernel gives virtual machines no such leaves of 2 MiB");
    }
    true
}

fn page_of(morsel: &Morsel) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    assert_eq!(rustix::io::pread(morsel, &mut page[..], 0), Ok(PAGE));
    page
}
