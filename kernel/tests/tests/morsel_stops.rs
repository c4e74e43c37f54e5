//! Processes that a terminal or a debugger stops while they map a Morsel.
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _, pipe};
use std::time::Duration;

use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::{Mapping, Morsel, PAGE, access, morsel_turn, sys};

/// Ordinary memory in which neighbouring pages have different rights, so that the kernel has many
/// mappings.
fn patchwork(pages: u64) -> Mapping {
    let memory = Mapping::anonymous(None, pages as usize * PAGE).unwrap();
    for page in (0..pages).step_by(2) {
        sys::mprotect(memory.page(page), PAGE, libc::PROT_READ).unwrap();
    }
    memory
}

/// The first mapping of a Morsel in a process may be interrupted. Its time grows with the number of
/// other mappings. One thread maps while another gets a signal that stops all threads. The first
/// must not delay that signal.
#[test]
fn a_process_may_be_stopped_while_it_maps() {
    let Some(_turn) = morsel_turn() else { return };
    let mut random = Random::of_this_run();
    let morsel = Morsel::whole(2);
    for round in 0..30 {
        let (mut told, mut tell) = pipe().unwrap();
        let child = Child::start(|| {
            let _others = patchwork(3000);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    tell.write_all(b"!").unwrap();
                    let mapping = morsel.mapped();
                    access::store(mapping.start(), round).unwrap();
                });
            });
            0
        });
        told.read_exact(&mut [0]).unwrap();
        std::thread::sleep(Duration::from_micros(random.below(1000)));
        let end = child.stop().unwrap_or_else(|| {
            child.signal(libc::SIGCONT);
            child.wait()
        });
        assert_eq!(end, End::Status(0), "round {round}");
        assert_eq!(access::load(morsel.mapped().start()), Ok(round));
    }
    assert_morsels_are_sound();
}
