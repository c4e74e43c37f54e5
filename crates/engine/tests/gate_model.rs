//! Model check of the change gate and of group commits: `store/gate.rs` and `store/group_commit.rs`
//! on shuttle's scheduler.
//!
//! Every lock and every access to an atomic word is a scheduling point. Shuttle runs each scenario
//! under random schedules and under ones with few, well-placed preemptions (PCT), and fails on a
//! wrong result as well as on a deadlock. `VELLUM_MODEL_SCHEDULES` sets how many are tried (1,000
//! of each).
#![allow(clippy::unwrap_used)]

#[path = "../src/store/gate.rs"]
#[allow(dead_code)]
mod gate;
#[path = "../src/store/group_commit.rs"]
mod group_commit;

/// The primitives by which both are compiled here.
mod sync {
    pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering};
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }

    pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        condvar.wait(guard).unwrap()
    }

    /// The model has no clock: a brief wait lets any other thread run.
    pub(crate) fn wait_briefly<'a, T>(
        _condvar: &Condvar,
        mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
    ) -> MutexGuard<'a, T> {
        drop(guard);
        shuttle::thread::yield_now();
        lock(mutex)
    }
}

use std::sync::Arc;

use gate::Gate;
use group_commit::GroupCommit;
use shuttle::thread;
use sync::{AtomicU64, Ordering};

fn check(scenario: impl Fn() + Send + Sync + 'static) {
    let schedules = std::env::var("VELLUM_MODEL_SCHEDULES").ok().and_then(|n| n.parse().ok());
    let schedules = schedules.unwrap_or(1_000);
    let scenario = Arc::new(scenario);
    let (random, pct) = (scenario.clone(), scenario);
    shuttle::check_random(move || random(), schedules);
    shuttle::check_pct(move || pct(), schedules, 3);
}

/// A point at which another thread may run. `yield_now` is none: it makes the thread the last in
/// the order of PCT's schedules, which then never let it run on.
fn interleave() {
    AtomicU64::new(0).load(Ordering::SeqCst);
}

/// What changes touch: each makes it odd, and even again.
#[derive(Default)]
struct Ground {
    gate: Gate,
    value: AtomicU64,
    passed: AtomicU64,
}

impl Ground {
    fn change(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        interleave();
        self.value.fetch_add(1, Ordering::SeqCst);
    }

    /// Nothing changes while the gate is held.
    fn look(&self) {
        let seen = self.value.load(Ordering::SeqCst);
        assert_eq!(seen % 2, 0, "a change is under way");
        interleave();
        assert_eq!(self.value.load(Ordering::SeqCst), seen, "a change went by");
    }
}

type Body = Box<dyn FnOnce(&Ground) + Send>;

fn run(bodies: Vec<Body>) -> Arc<Ground> {
    let ground = Arc::new(Ground::default());
    let threads: Vec<_> = bodies
        .into_iter()
        .map(|body| {
            let ground = ground.clone();
            thread::spawn(move || body(&ground))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    ground
}

fn try_to_change(ground: &Ground) {
    for _ in 0..2 {
        if let Some(_passage) = ground.gate.try_pass() {
            ground.change();
            ground.passed.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn hold(ground: &Ground) {
    for _ in 0..2 {
        let _hold = ground.gate.hold();
        ground.look();
        // `try_pass` returns at once while the gate is held.
        assert!(ground.gate.try_pass().is_none());
        ground.look();
    }
}

/// A change that tries finds the gate held, or is waited for.
#[test]
fn a_change_that_tries_passes_no_holder() {
    check(|| {
        let ground = run(vec![Box::new(try_to_change), Box::new(hold), Box::new(try_to_change)]);
        let passed = ground.passed.load(Ordering::SeqCst);
        assert_eq!(ground.value.load(Ordering::SeqCst), 2 * passed);
        assert!(ground.gate.try_pass().is_some(), "the gate is free again");
    });
}

/// The same beside changes that wait, and one that wants to be alone.
#[test]
fn a_change_that_tries_passes_nobody_who_is_alone() {
    check(|| {
        let alone = |ground: &Ground| {
            let _alone = ground.gate.alone();
            ground.look();
            assert!(ground.gate.try_pass().is_none());
            ground.change();
        };
        let ground =
            run(vec![Box::new(try_to_change), Box::new(alone), Box::new(change), Box::new(hold)]);
        let passed = ground.passed.load(Ordering::SeqCst);
        assert_eq!(ground.value.load(Ordering::SeqCst), 2 * passed + 4);
    });
}

/// Holds the gate if the changes under way end in time.
fn hold_briefly(ground: &Ground) {
    for waits in [0, 2] {
        if let Some(_hold) = ground.gate.hold_within(waits) {
            ground.look();
            assert!(ground.gate.try_pass().is_none());
            ground.look();
        }
    }
}

fn change(ground: &Ground) {
    let _passage = ground.gate.pass();
    ground.change();
}

/// The holder that waits for a while only holds the gate as any other does, or leaves no trace:
/// changes that wait for it go on.
#[test]
fn a_holder_that_gives_up_lets_changes_go_on() {
    check(|| {
        let ground = run(vec![
            Box::new(hold_briefly),
            Box::new(change),
            Box::new(try_to_change),
            Box::new(hold_briefly),
        ]);
        let passed = ground.passed.load(Ordering::SeqCst);
        assert_eq!(ground.value.load(Ordering::SeqCst), 2 * passed + 2);
        assert!(ground.gate.try_pass().is_some(), "the gate is free again");
        drop(ground.gate.alone());
    });
}

/// The same beside a thread that wants to be alone, and another holder.
#[test]
fn a_holder_that_gives_up_lets_one_be_alone() {
    check(|| {
        let alone = |ground: &Ground| {
            let _alone = ground.gate.alone();
            ground.look();
            ground.change();
        };
        let ground =
            run(vec![Box::new(hold_briefly), Box::new(alone), Box::new(change), Box::new(hold)]);
        assert_eq!(ground.value.load(Ordering::SeqCst), 4);
        assert!(ground.gate.try_pass().is_some(), "the gate is free again");
    });
}

/// A change that does not end keeps the gate from a holder that waits for a while only.
#[test]
fn a_holder_gives_up_while_a_change_goes_on() {
    check(|| {
        let ground = Arc::new(Ground::default());
        let passage = ground.gate.pass();
        let other = ground.clone();
        let holder = thread::spawn(move || assert!(other.gate.hold_within(2).is_none()));
        let waiting = ground.clone();
        let waits = thread::spawn(move || change(&waiting));
        holder.join().unwrap();
        waits.join().unwrap();
        drop(passage);
        assert!(ground.gate.hold_within(0).is_some());
    });
}

/// Threads that change something and have it saved: what a thread has changed is durable when it
/// goes on, and every thread goes on. Some leaders fail; their threads try again.
#[test]
fn commits_cover_the_changes_of_all_who_wait() {
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
