//! Tests of the gate with threads of the system; the model check is in `tests/gate_model.rs`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::store::gate::Gate;

/// The brief wait after which a change is overdue.
const OVERDUE: Duration = Duration::from_millis(1);

/// Two hold the gate in turn, and neither lets go before the other one has it, or has waited
/// for two rounds in vain: without turns no change would ever pass.
#[test]
fn changes_pass_though_there_is_always_a_holder() {
    let gate = Gate::default();
    let (holds, passed) = (AtomicU64::new(0), AtomicBool::new(false));
    let rounds = 2000;
    for alone in [false, true] {
        holds.store(0, Ordering::Relaxed);
        passed.store(false, Ordering::Relaxed);
        let first = gate.hold();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while holds.load(Ordering::Relaxed) < rounds {
                        let hold = gate.hold();
                        let mine = holds.fetch_add(1, Ordering::Relaxed) + 1;
                        std::thread::sleep(OVERDUE / 3);
                        let patience = std::time::Instant::now() + 3 * OVERDUE;
                        while holds.load(Ordering::Relaxed) == mine
                            && std::time::Instant::now() < patience
                        {
                            std::thread::yield_now();
                        }
                        drop(hold);
                        if passed.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                });
            }
            scope.spawn(|| {
                if alone {
                    drop(gate.alone());
                } else {
                    drop(gate.pass());
                }
                passed.store(true, Ordering::Relaxed);
                assert!(holds.load(Ordering::Relaxed) < rounds, "it passed only at the end");
            });
            while holds.load(Ordering::Relaxed) < 4 {
                std::thread::yield_now();
            }
            drop(first);
        });
    }
}

#[test]
fn nothing_changes_while_the_gate_is_held() {
    let gate = Gate::default();
    let (value, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _passage = gate.pass();
                    value.fetch_add(1, Ordering::Relaxed);
                    std::hint::spin_loop();
                    value.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _alone = gate.alone();
                    value.fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                    value.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..200 {
            let _one = gate.hold();
            let _two = gate.hold();
            let seen = value.load(Ordering::Relaxed);
            assert_eq!(seen % 2, 0);
            std::thread::yield_now();
            assert_eq!(value.load(Ordering::Relaxed), seen);
        }
        stop.store(true, Ordering::Relaxed);
    });
}
