//! Userfaultfd puts marks into page tables, and the kernel looks for them. The module has its own
//! tables, and processes share a Morsel's. So userfaultfd must refuse this memory.
#![allow(clippy::unwrap_used)]

use std::fs;

use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::morsel::{kinds, stamped};
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::userfault::{Userfault, feature, mode};
use vellum_kernel_tests::{Errno, Exmap, Mapping, PAGE, Plan, morsel_turn, turn};

/// The features that descriptors request, as far as the kernel knows them.
const FEATURES: [u64; 3] =
    [feature::WP_ASYNC | feature::WP_UNPOPULATED, feature::PAGEFAULT_FLAG_WP, 0];

/// Registering memory in all modes, with all features.
fn outcomes(start: usize, length: usize) -> Vec<Result<(), Errno>> {
    let mut outcomes = Vec::new();
    for userfault in FEATURES.into_iter().filter_map(Userfault::new) {
        for mode in [mode::WP, mode::MISSING, mode::MINOR] {
            outcomes.push(userfault.register(start, length, mode));
        }
    }
    outcomes
}

#[track_caller]
fn assert_refused(mapping: &Mapping) {
    // All of it, and a part.
    for length in [mapping.length(), PAGE] {
        let outcomes = outcomes(mapping.start(), length);
        let refused = outcomes.iter().all(|outcome| *outcome == Err(Errno::INVAL));
        assert!(refused, "{length:#x} bytes: {outcomes:?}");
    }
}

/// Shows that the other tests test something.
#[test]
fn userfaultfd_accepts_ordinary_memory() {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let (length, protection) = (16 * PAGE, sys::READ_WRITE);
    let request = Request { address: 0, length, protection, flags, fd: None, offset: 0 };
    let memory = Mapping::new(request).unwrap();
    let outcomes = outcomes(memory.start(), length);
    // The first outcome of three concerns stores, which a small kernel only reports for private
    // memory.
    let is_taken = |three: &[Result<(), Errno>]| three[1..].iter().all(Result::is_ok);
    assert!(outcomes.chunks(3).all(is_taken), "{outcomes:?}");
    assert!(outcomes.len() >= 6, "a kernel that knows no stores");
}

#[test]
fn userfaultfd_refuses_a_morsel() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        for protection in [sys::READ_WRITE, libc::PROT_READ] {
            let morsel = stamped(kind);
            let mapping = morsel.map(protection).unwrap();
            // Before it is accessed, and afterwards.
            assert_refused(&mapping);
            mapping.assert_stamped(0, 7);
            assert_refused(&mapping);
            mapping.assert_stamped(0, 7);
            morsel.mapped().stamp(0, 8);
            mapping.assert_stamped(0, 8);
            assert_morsels_are_sound();
        }
    }
}

#[test]
fn userfaultfd_refuses_a_surface() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 8).make();
    assert_refused(&surface.mapping);
    surface.alloc(0, &[(1, 1)]);
    surface.stamp(1, 7);
    assert_refused(&surface.mapping);
    surface.assert_stamped(1, 7);
    surface.free(0, &[(1, 1)]);
    surface.assert_works();
}

/// A switch of the kernel that is off while this lives.
struct Off(&'static str);

impl Off {
    /// `None`, and a printed line, if the kernel does not have the switch, or cannot turn it off.
    fn new(path: &'static str) -> Option<Self> {
        let switched = fs::write(path, "0");
        println!("{path}: {switched:?}");
        switched.is_ok().then(|| Self(path))
    }
}

impl Drop for Off {
    fn drop(&mut self) {
        fs::write(self.0, "1").unwrap();
    }
}

/// On some kernels the module refuses userfaultfd by a probe, and an administrator may switch off
/// all probes. Then the module maps nothing, unless the kernel needs no probe.
#[test]
fn nothing_is_mapped_while_userfaultfd_cannot_be_refused() {
    let Some(_turn) = morsel_turn() else { return };
    for path in ["/sys/kernel/debug/kprobes/enabled", "/proc/sys/kernel/ftrace_enabled"] {
        let Some(off) = Off::new(path) else { continue };
        let (morsel, exmap) = (stamped((1, 0)), Exmap::with(8, 1, 0));
        for mapping in [morsel.map(sys::READ_WRITE), exmap.map(1000)] {
            match mapping {
                Ok(mapping) => assert_refused(&mapping),
                Err(error) => assert_eq!(error, Errno::OPNOTSUPP, "{path}"),
            }
        }
        drop(off);
        for mapping in [morsel.map(sys::READ_WRITE), exmap.map(1000)] {
            assert_refused(&mapping.unwrap());
        }
        morsel.mapped().assert_stamped(0, 7);
    }
    assert_morsels_are_sound();
}
