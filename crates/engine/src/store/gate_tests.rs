//! Tests of the gate with real threads. The model check is in `tests/gate_model.rs`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use vellum_testing::patience::{SetWhenDropped, eventually};

use crate::store::gate::Gate;

/// A change that has waited this long is overdue.
const OVERDUE: Duration = Duration::from_millis(1);

/// Two threads freeze the gate in turn. Neither lets go before the other has frozen it, or has
/// waited in vain for some time. If freezing threads did not let overdue changes go first, no
/// change would ever pass.
#[test]
fn changes_pass_although_the_gate_is_always_frozen() {
    let gate = Gate::default();
    let (freezes, passed) = (AtomicU64::new(0), AtomicBool::new(false));
    let rounds = 2000;
    for alone in [false, true] {
        freezes.store(0, Ordering::Relaxed);
        passed.store(false, Ordering::Relaxed);
        let first = gate.freeze();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Also if this thread fails: then the others end at once.
                let passed = SetWhenDropped(&passed);
                if alone {
                    drop(gate.exclusive());
                } else {
                    drop(gate.begin_change());
                }
                drop(passed);
                assert!(freezes.load(Ordering::Relaxed) < rounds, "it passed only at the end");
            });
            // However late it begins, the freezes that count come afterwards.
            eventually("the change is overdue", || gate.overdue() == 1);
            for _ in 0..2 {
                scope.spawn(|| {
                    while freezes.load(Ordering::Relaxed) < rounds {
                        let freeze = gate.freeze();
                        let mine = freezes.fetch_add(1, Ordering::Relaxed) + 1;
                        std::thread::sleep(OVERDUE / 3);
                        let patience = std::time::Instant::now() + 3 * OVERDUE;
                        while freezes.load(Ordering::Relaxed) == mine
                            && std::time::Instant::now() < patience
                        {
                            std::thread::yield_now();
                        }
                        drop(freeze);
                        if passed.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                });
            }
            eventually("freezes come", || freezes.load(Ordering::Relaxed) >= 4);
            drop(first);
        });
    }
}

#[test]
fn nothing_changes_while_the_gate_is_frozen() {
    let gate = Gate::default();
    let (value, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _permit = gate.begin_change();
                    value.fetch_add(1, Ordering::Relaxed);
                    std::hint::spin_loop();
                    value.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _exclusive = gate.exclusive();
                    value.fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                    value.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..200 {
            let _one = gate.freeze();
            let _two = gate.freeze();
            let seen = value.load(Ordering::Relaxed);
            assert_eq!(seen % 2, 0);
            std::thread::yield_now();
            assert_eq!(value.load(Ordering::Relaxed), seen);
        }
    });
}
