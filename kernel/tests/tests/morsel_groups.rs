//! Memory control groups: the group of the process that populates a page is charged for it.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::counters::{Memory, PATIENCE, assert_morsels_are_sound};
use vellum_kernel_tests::group::Group;
use vellum_kernel_tests::{Errno, Morsel, PAGE, access, morsel_turn};
use vellum_uapi::morsel;

const MIB: u64 = 1 << 20;

/// Populated by POPULATE, by an access, and by a write.
#[test]
fn the_process_that_populates_is_charged() {
    let Some(_turn) = morsel_turn() else { return };
    let Some(group) = Group::new("charged") else { return };
    for flags in [0, morsel::PINNABLE, morsel::HUGE] {
        for what in 0..3 {
            let morsel = Morsel::new(2, 64 * MIB, flags);
            let before = group.charged();
            let child = group.start(|| {
                match what {
                    0 => morsel.populate(0, 64 * MIB).unwrap(),
                    1 => {
                        let mapping = morsel.mapped();
                        for page in 0..64 * MIB / PAGE as u64 {
                            access::store(mapping.page(page), 1).unwrap();
                        }
                    }
                    _ => {
                        for part in 0..64 {
                            let bytes = vec![1; MIB as usize];
                            rustix::io::pwrite(&morsel, &bytes, part * MIB).unwrap();
                        }
                    }
                }
                0
            });
            assert_eq!(child.wait(), End::Status(0));
            // The charge stays as long as the Morsel has the page. Accesses by other processes do
            // not change it.
            assert!(group.charged() >= before + 60 * MIB, "{} {before}", group.charged());
            let mapping = morsel.mapped();
            for page in 0..64 * MIB / PAGE as u64 {
                access::load(mapping.page(page)).unwrap();
            }
            morsel.punch(0, 64 * MIB).unwrap();
            let start = Instant::now();
            while group.charged() > before + 8 * MIB {
                assert!(start.elapsed() < PATIENCE, "{} is left", group.charged());
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// A process above its limit gets an error, or is killed. Other processes are not, and earlier
/// pages stay.
#[test]
fn a_process_above_its_limit_does_no_harm() {
    let Some(_turn) = morsel_turn() else { return };
    let before = Memory::now();
    for flags in [0, morsel::PINNABLE, morsel::HUGE] {
        for what in 0..4 {
            let Some(group) = Group::new("little") else { return };
            group.set("memory.max", "24M");
            group.forbid_swap();
            let morsel = Morsel::new(2, 128 * MIB, flags);
            morsel.stamp(0, 7);
            let bystander = Child::start(|| {
                let mapping = morsel.mapped();
                for _ in 0..100 {
                    mapping.assert_stamped(0, 7);
                    std::thread::sleep(Duration::from_millis(1));
                }
                0
            });
            let child = group.start(|| {
                let mapping = morsel.mapped();
                let refused = |error: Errno| i32::from(error == Errno::NOMEM) * 3;
                match what {
                    0 => return morsel.populate(0, 128 * MIB).map_or_else(refused, |()| 0),
                    1 => {
                        for page in 1..128 * MIB / PAGE as u64 {
                            access::store(mapping.page(page), 1).unwrap();
                        }
                    }
                    2 => {
                        for page in 1..128 * MIB / PAGE as u64 {
                            if access::kernel_store(mapping.page(page), &[1]).is_err() {
                                return 3;
                            }
                        }
                    }
                    _ => {
                        for page in 1..128 * MIB / PAGE as u64 {
                            let written = rustix::io::pwrite(&morsel, &[1], page * PAGE as u64);
                            if let Err(error) = written {
                                return refused(error);
                            }
                        }
                    }
                }
                0
            });
            let end = child.wait();
            let expected = [End::Signal(libc::SIGKILL), End::Status(3)];
            assert!(expected.contains(&end), "{end:?}, flags {flags:#x}, way {what}");
            assert_eq!(bystander.wait(), End::Status(0));
            morsel.assert_stamped(0, 7);
            assert!(morsel.stat().pages < 32 * MIB / PAGE as u64, "{:?}", morsel.stat());
            assert_morsels_are_sound();
            // With a sufficient limit it works.
            group.set("memory.max", "max");
            let child = group.start(|| {
                morsel.populate(0, 32 * MIB).unwrap();
                0
            });
            assert_eq!(child.wait(), End::Status(0));
        }
    }
    before.assert_back();
}
