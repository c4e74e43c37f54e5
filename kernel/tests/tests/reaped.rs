//! The kernel may free the memory of a killed process before its threads have ended
//! (`process_mrelease`, and when memory is short). Pages that other processes share with it stay.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::io::{Read as _, Write as _, pipe};
use std::time::Duration;

use vellum_kernel_tests::child::Child;
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::kinds;
use vellum_kernel_tests::threads::Deadline;
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, Plan, access, morsel_turn, sys};
use vellum_uapi::exmap;

/// The present pages of a Morsel.
const PAGES: u64 = 64;

fn descriptor_of(process: i32) -> u64 {
    // SAFETY: the call returns a new descriptor.
    sys::checked(unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) }).unwrap()
}

/// Frees the memory of a killed process. ESRCH if the process has none any more.
fn release(descriptor: u64) -> Result<(), Errno> {
    let deadline = Deadline::after_ms(10_000);
    loop {
        // SAFETY: the process is a killed child.
        let done = unsafe { libc::syscall(libc::SYS_process_mrelease, descriptor, 0) };
        let done = sys::checked(done).map(drop);
        if done != Err(Errno::AGAIN) || deadline.is_over() {
            return done;
        }
    }
}

/// Reads and writes pages forever.
fn be_busy(mappings: &[(&Mapping, bool)]) -> ! {
    loop {
        for page in 0..PAGES.min(mappings[0].0.length() as u64 / PAGE as u64) {
            for (mapping, writes) in mappings {
                let at = mapping.page(page);
                let value = access::load(at).unwrap();
                if *writes {
                    access::store(at, value).unwrap();
                }
            }
        }
    }
}

fn busy_child(morsel: &Morsel, flags: u64) -> Child {
    let (mut told, mut tell) = pipe().unwrap();
    let child = Child::start(|| {
        let (read, write) = (morsel.map(libc::PROT_READ).unwrap(), morsel.mapped());
        let surface = Plan::new(1000, PAGES).flags(flags).make();
        surface.alloc(0, &[(0, PAGES)]);
        let own = Mapping::anonymous(None, 16 << 20).unwrap();
        (0..4096).for_each(|page| access::store(own.page(page), 1).unwrap());
        tell.write_all(&[1]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| be_busy(&[(&read, false), (&write, true)]));
            scope.spawn(|| be_busy(&[(&write, true), (&surface.mapping, false)]));
            be_busy(&[(&surface.mapping, true), (&own, true)])
        })
    });
    told.read_exact(&mut [0]).unwrap();
    child
}

#[test]
fn a_killed_process_is_reaped() {
    let Some(_turn) = morsel_turn() else { return };
    let memory = Memory::now();
    let mut reaped = 0;
    for kind in kinds() {
        for flags in [0, exmap::PINNABLE] {
            let morsel = Morsel::of(kind);
            let pages = PAGES.min(morsel.stat().length / PAGE as u64);
            (0..pages).for_each(|page| morsel.stamp(page, page + 7));
            let child = busy_child(&morsel, flags);
            let descriptor = descriptor_of(child.process());
            std::thread::sleep(Duration::from_millis(20));
            child.signal(libc::SIGKILL);
            let released = release(descriptor);
            assert!(matches!(released, Ok(()) | Err(Errno::SRCH)), "{kind:?}: {released:?}");
            reaped += u32::from(released.is_ok());
            child.wait();
            // SAFETY: the descriptor is this function's.
            unsafe { libc::close(descriptor as i32) };
            (0..pages).for_each(|page| morsel.assert_stamped(page, page + 7));
            morsel.mapped().assert_stamped(0, 7);
            assert_morsels_are_sound();
        }
    }
    println!("{reaped} processes were reaped");
    assert!(reaped > 0, "all processes had ended before");
    memory.assert_back();
}
