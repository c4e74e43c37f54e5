//! Userfaultfd puts marks into page tables, and has the core look for them. The module's tables are
//! not the core's, and a Morsel's belong to others, too: none of its memory is taken.
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

/// So that the other tests can tell.
#[test]
fn ordinary_memory_is_taken() {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let (length, protection) = (16 * PAGE, sys::READ_WRITE);
    let request = Request { address: 0, length, protection, flags, fd: None, offset: 0 };
    let memory = Mapping::new(request).unwrap();
    let outcomes = outcomes(memory.start(), length);
    // The first of three concerns stores, which a small kernel reports for private memory only.
    let is_taken = |three: &[Result<(), Errno>]| three[1..].iter().all(Result::is_ok);
    assert!(outcomes.chunks(3).all(is_taken), "{outcomes:?}");
    assert!(outcomes.len() >= 6, "a kernel that knows no stores");
}

#[test]
fn a_morsel_is_not_taken() {
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
fn a_surface_is_not_taken() {
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

/// A switch of the kernel's that is off for as long as this lives.
struct Off(&'static str);

impl Off {
    /// `None`: there is none, or it cannot be switched off, which is said.
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

/// A probe keeps userfaultfd away, and an administrator may switch off all probes. The module then
/// maps nothing, or the kernel needs no probe.
#[test]
fn nothing_is_mapped_while_userfaultfd_is_not_kept_away() {
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
