//! Model check of the change gate and of group commits: `store/gate.rs` and `store/group_commit.rs`
//! on shuttle's scheduler.
//!
//! Every lock and every access to an atomic word is a scheduling point. Shuttle runs each scenario
//! under random schedules and under ones with few, well-placed preemptions (PCT), and fails on a
//! wrong result and on a deadlock. `VELLUM_MODEL_SCHEDULES` sets the number of schedules of each
//! kind (1,000).
#![allow(clippy::unwrap_used)]

#[path = "../src/store/gate.rs"]
#[allow(dead_code)]
mod gate;
#[path = "../src/store/group_commit.rs"]
mod group_commit;
#[path = "model/schedules.rs"]
mod schedules;
#[path = "model/sync.rs"]
mod sync;

use std::sync::Arc;

use gate::Gate;
use group_commit::GroupCommit;
use schedules::check;
use shuttle::thread;
use sync::{AtomicU64, Ordering};

/// A point at which another thread may run. `yield_now` would not do: it makes the thread the last
/// in the order of PCT's schedules, so the thread might never run on.
fn interleave() {
    AtomicU64::new(0).load(Ordering::SeqCst);
}

/// The gate, and a value that every change makes odd and then even again.
#[derive(Default)]
struct Scene {
    gate: Gate,
    value: AtomicU64,
    passed: AtomicU64,
}

impl Scene {
    fn change(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        interleave();
        self.value.fetch_add(1, Ordering::SeqCst);
    }

    /// Checks that the value does not change while the gate is frozen.
    fn look(&self) {
        let seen = self.value.load(Ordering::SeqCst);
        assert_eq!(seen % 2, 0, "a change is under way");
        interleave();
        assert_eq!(self.value.load(Ordering::SeqCst), seen, "a change went by");
    }
}

type Body = Box<dyn FnOnce(&Scene) + Send>;

fn run(bodies: Vec<Body>) -> Arc<Scene> {
    let scene = Arc::new(Scene::default());
    let threads: Vec<_> = bodies
        .into_iter()
        .map(|body| {
            let scene = scene.clone();
            thread::spawn(move || body(&scene))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    scene
}

fn try_to_change(scene: &Scene) {
    for _ in 0..2 {
        if let Some(_permit) = scene.gate.try_begin_change() {
            scene.change();
            scene.passed.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn freeze(scene: &Scene) {
    for _ in 0..2 {
        let _freeze = scene.gate.freeze();
        scene.look();
        // `try_begin_change` returns at once while the gate is frozen.
        assert!(scene.gate.try_begin_change().is_none());
        scene.look();
    }
}

/// Either `try_begin_change` finds the gate frozen, or the freeze waits for the change.
#[test]
fn try_begin_change_never_passes_a_freeze() {
    check(|| {
        let scene = run(vec![Box::new(try_to_change), Box::new(freeze), Box::new(try_to_change)]);
        let passed = scene.passed.load(Ordering::SeqCst);
        assert_eq!(scene.value.load(Ordering::SeqCst), 2 * passed);
        assert!(scene.gate.try_begin_change().is_some(), "the gate is free again");
    });
}

/// The same with changes that wait, and with a thread that wants exclusive use.
#[test]
fn try_begin_change_never_passes_exclusive_use() {
    check(|| {
        let exclusive = |scene: &Scene| {
            let _exclusive = scene.gate.exclusive();
            scene.look();
            assert!(scene.gate.try_begin_change().is_none());
            scene.change();
        };
        let scene = run(vec![
            Box::new(try_to_change),
            Box::new(exclusive),
            Box::new(change),
            Box::new(freeze),
        ]);
        let passed = scene.passed.load(Ordering::SeqCst);
        assert_eq!(scene.value.load(Ordering::SeqCst), 2 * passed + 4);
    });
}

/// Freezes the gate if the changes under way end in time.
fn freeze_briefly(scene: &Scene) {
    for waits in [0, 2] {
        if let Some(_freeze) = scene.gate.freeze_within(waits) {
            scene.look();
            assert!(scene.gate.try_begin_change().is_none());
            scene.look();
        }
    }
}

fn change(scene: &Scene) {
    let _permit = scene.gate.begin_change();
    scene.change();
}

/// `freeze_within` either freezes the gate or leaves no trace: the changes that wait for it go on.
#[test]
fn a_freeze_that_gives_up_lets_changes_go_on() {
    check(|| {
        let scene = run(vec![
            Box::new(freeze_briefly),
            Box::new(change),
            Box::new(try_to_change),
            Box::new(freeze_briefly),
        ]);
        let passed = scene.passed.load(Ordering::SeqCst);
        assert_eq!(scene.value.load(Ordering::SeqCst), 2 * passed + 2);
        assert!(scene.gate.try_begin_change().is_some(), "the gate is free again");
        drop(scene.gate.exclusive());
    });
}

/// The same with a thread that wants exclusive use, and with another freeze.
#[test]
fn a_freeze_that_gives_up_lets_exclusive_use_go_on() {
    check(|| {
        let exclusive = |scene: &Scene| {
            let _exclusive = scene.gate.exclusive();
            scene.look();
            scene.change();
        };
        let scene = run(vec![
            Box::new(freeze_briefly),
            Box::new(exclusive),
            Box::new(change),
            Box::new(freeze),
        ]);
        assert_eq!(scene.value.load(Ordering::SeqCst), 4);
        assert!(scene.gate.try_begin_change().is_some(), "the gate is free again");
    });
}

/// `freeze_within` fails while a change does not end.
#[test]
fn a_freeze_gives_up_while_a_change_goes_on() {
    check(|| {
        let scene = Arc::new(Scene::default());
        let permit = scene.gate.begin_change();
        let other = scene.clone();
        let freezer = thread::spawn(move || assert!(other.gate.freeze_within(2).is_none()));
        let waiting = scene.clone();
        let waits = thread::spawn(move || change(&waiting));
        freezer.join().unwrap();
        waits.join().unwrap();
        drop(permit);
        assert!(scene.gate.freeze_within(0).is_some());
    });
}

/// Threads change something and commit it. Each thread's change is durable when its commit returns,
/// and each commit returns. Some leaders fail, and try again.
#[test]
fn a_commit_covers_the_changes_of_all_waiting_threads() {
    check(|| {
        let commits = Arc::new(GroupCommit::default());
        let (changes, durable) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let commit =
            move |commits: &GroupCommit, changes: &AtomicU64, durable: &AtomicU64, fails| {
                let Some(_leader) = commits.lead(commits.next_cut()) else { return true };
                let cut = commits.cut();
                let covered = changes.load(Ordering::SeqCst);
                interleave();
                if fails {
                    return false;
                }
                durable.fetch_max(covered, Ordering::SeqCst);
                commits.save(cut);
                true
            };
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let (commits, changes, durable) =
                    (commits.clone(), changes.clone(), durable.clone());
                thread::spawn(move || {
                    for round in 0..2 {
                        let change = changes.fetch_add(1, Ordering::SeqCst) + 1;
                        let mut fails = number == round;
                        while !commit(&commits, &changes, &durable, fails) {
                            fails = false;
                        }
                        assert!(durable.load(Ordering::SeqCst) >= change);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
