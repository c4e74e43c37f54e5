//! Model check of versions: `src/versions` on shuttle's scheduler.
//!
//! Every lock and every access to an atomic word is a scheduling point. Threads run transactions,
//! snapshots and single puts on a store of a few entries, each with a lock in the place of its
//! leaf. Then the test draws the dependencies of all that have committed, as Adya does, and puts
//! what has ended before what has begun later: there must be no cycle. `VELLUM_MODEL_SCHEDULES`
//! sets the number of schedules of each kind (1,000).
#![allow(clippy::unwrap_used)]

#[path = "../src/store/gate.rs"]
#[allow(dead_code)]
mod gate;
#[path = "../src/key.rs"]
mod key;
#[path = "../src/planted.rs"]
#[allow(dead_code)]
mod planted;
#[path = "model/schedules.rs"]
mod schedules;
#[path = "model/sync.rs"]
mod sync;
#[path = "../src/versions/mod.rs"]
#[allow(dead_code, unused_imports)]
mod versions;

mod store {
    pub(crate) use crate::gate;
}

mod page {
    pub(crate) mod blob {
        /// No entry of this test has a long value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) struct BlobRef;
    }
}

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use shuttle::thread;

use gate::Gate;
use key::Key;
use schedules::{check, check_with};
use sync::{AtomicBool, Ordering, RwLock, read, write};
use versions::{Old, OldEntry, OldValue, ReadSet, Replaced, Seen, Validation, Versions};

use Read::{All, One};

const TREE: u32 = 1;

/// The number of what wrote an entry; 0 for what was there before, which is nothing.
type Writer = u64;

/// A transaction that has committed, a snapshot, or a put.
#[derive(Debug, Default)]
struct Done {
    /// What had ended before it began.
    after: Vec<Writer>,
    /// Entries, and whose values it has seen.
    reads: Vec<(usize, Writer)>,
}

struct Scene {
    gate: Gate,
    versions: Versions,
    /// Who has written each entry, oldest first. The lock stands for that of a leaf.
    leaves: [RwLock<Vec<Writer>>; 3],
    /// No scheduling points: this is the test's own.
    done: std::sync::Mutex<BTreeMap<Writer, Done>>,
}

fn key(entry: usize) -> Key {
    Key::from(&[b'a' + entry as u8][..])
}

fn old_entry(entry: usize, writers: &[Writer]) -> OldEntry {
    let old = writers.last().map(|writer| OldValue::Inline(writer.to_le_bytes()[..].into()));
    OldEntry { tree: TREE, key: key(entry), old }
}

fn writer_of(old: &Old) -> Writer {
    match old {
        Some(OldValue::Inline(bytes)) => Writer::from_le_bytes(bytes[..].try_into().unwrap()),
        Some(OldValue::Blob(_)) => unreachable!("there are no long values"),
        None => 0,
    }
}

/// What a view does.
#[derive(Clone, Copy)]
enum Read {
    One(usize),
    /// All entries, as one range.
    All,
}

impl Scene {
    fn new() -> Scene {
        Scene {
            gate: Gate::default(),
            versions: Versions::new(1 << 20),
            leaves: Default::default(),
            done: Default::default(),
        }
    }

    fn begin_view(&self) -> u64 {
        self.versions
            .try_begin_view()
            .unwrap_or_else(|| self.versions.begin_view(&self.gate.freeze()))
    }

    /// What old values take that a view needs.
    fn bytes(&self) -> u64 {
        self.versions.reclaim(&mut Vec::new());
        self.versions.bytes()
    }

    /// What has ended.
    fn done(&self) -> Vec<Writer> {
        self.done.lock().unwrap().keys().copied().collect()
    }

    /// What the view sees of an entry: the page first.
    fn read_one(&self, view: u64, entry: usize) -> Writer {
        let page = read(&self.leaves[entry]).last().copied().unwrap_or(0);
        match self.versions.at(TREE, &key(entry), view) {
            Seen::Page => page,
            Seen::Version(old) => writer_of(&old),
        }
    }

    fn read(&self, view: u64, reads: &[Read], set: &mut ReadSet) -> Vec<(usize, Writer)> {
        let mut seen = Vec::new();
        for one in reads {
            match *one {
                One(entry) => {
                    seen.push((entry, self.read_one(view, entry)));
                    set.note_key(TREE, &key(entry));
                }
                All => {
                    let everything = (Bound::Unbounded, Bound::Unbounded);
                    // A leaf and its range at a time, as an iterator does.
                    for entry in 0..self.leaves.len() {
                        let page = read(&self.leaves[entry]).last().copied().unwrap_or(0);
                        let key = key(entry);
                        let bounds = (Bound::Included(&key[..]), Bound::Included(&key[..]));
                        let found = self.versions.range_at(TREE, bounds, view);
                        let page = if found.is_hidden { 0 } else { page };
                        let old = found.versions.first().map(|(_, old)| writer_of(old));
                        seen.push((entry, old.unwrap_or(page)));
                    }
                    set.note_range(TREE, everything);
                }
            }
        }
        seen
    }

    /// A snapshot that reads, twice.
    fn snapshot(&self, id: Writer, reads: &[Read]) {
        let after = self.done();
        let view = self.begin_view();
        let seen = self.read(view, reads, &mut ReadSet::new(1000));
        assert_eq!(seen, self.read(view, reads, &mut ReadSet::new(1000)), "a view has changed");
        self.versions.end_view(view, false, &mut Vec::new());
        self.done.lock().unwrap().insert(id, Done { after, reads: seen });
    }

    /// A transaction, which commits unless it conflicts with another one.
    fn transaction(&self, id: Writer, reads: &[Read], writes: &[usize]) {
        let after = self.done();
        let (view, mut set) = (self.begin_view(), ReadSet::new(1000));
        let seen = self.read(view, reads, &mut set);
        let has_ended = AtomicBool::new(false);
        let permit = self.gate.begin_change();
        let mut leaves: Vec<_> =
            writes.iter().map(|entry| (*entry, write(&self.leaves[*entry]))).collect();
        let validation = Validation { time: view, reads: &set, has_ended: &has_ended };
        let committed = self.versions.validate_alone(validation).and_then(|is_alone| {
            if is_alone {
                return Ok(());
            }
            let entries = leaves.iter().map(|(entry, writers)| old_entry(*entry, writers));
            let entries: Vec<_> = entries.collect();
            let replaced: Vec<_> = entries.iter().map(OldEntry::replaced).collect();
            self.versions.keep_unless_conflicting(validation, &replaced, |_| {}, &mut Vec::new())
        });
        if committed.is_ok() {
            leaves.iter_mut().for_each(|(_, writers)| writers.push(id));
        }
        drop(leaves);
        self.versions.reclaim_some(writes.len(), &mut Vec::new());
        drop(permit);
        self.versions.end_view(view, has_ended.load(Ordering::Relaxed), &mut Vec::new());
        if committed.is_ok() {
            self.done.lock().unwrap().insert(id, Done { after, reads: seen });
        }
    }

    /// A change on its own.
    fn put(&self, id: Writer, entry: usize) {
        let after = self.done();
        let permit = self.gate.begin_change();
        let mut writers = write(&self.leaves[entry]);
        let keeps = self
            .versions
            .expect_change(TREE, &key(entry))
            .is_some_and(|entry| !self.versions.has_nothing_to_keep(entry));
        if keeps {
            let replaced = old_entry(entry, &writers);
            self.versions.keep(&[replaced.replaced()], |_| {}, &mut Vec::new());
        }
        writers.push(id);
        drop((writers, permit));
        self.done.lock().unwrap().insert(id, Done { after, reads: Vec::new() });
    }

    /// A bulk load, which fills the tree with one entry.
    fn load(&self, id: Writer, entry: usize) {
        let _permit = self.gate.begin_change();
        let mut writers = write(&self.leaves[entry]);
        if self.versions.are_kept() {
            self.versions.keep_load(TREE);
        }
        writers.push(id);
    }

    /// Asserts that there is an order in which all that has committed may have run.
    fn assert_is_serializable(&self) {
        let done = self.done.lock().unwrap();
        let versions: Vec<Vec<Writer>> =
            self.leaves.iter().map(|leaf| read(leaf).clone()).collect();
        let mut following: BTreeMap<Writer, BTreeSet<Writer>> = BTreeMap::new();
        let mut depends = |first: Writer, then: Writer| {
            if first != 0 && first != then {
                following.entry(first).or_default().insert(then);
            }
        };
        for writers in &versions {
            writers.windows(2).for_each(|two| depends(two[0], two[1]));
        }
        for (id, Done { after, reads }) in done.iter() {
            after.iter().for_each(|first| depends(*first, *id));
            for (entry, seen) in reads {
                depends(*seen, *id);
                let writers = &versions[*entry];
                let next = writers.iter().position(|writer| writer == seen).map_or(0, |at| at + 1);
                writers.get(next).iter().for_each(|next| depends(*id, **next));
            }
        }
        // Takes away what nothing comes before, until nothing is left.
        let mut left: BTreeSet<Writer> = done.keys().copied().collect();
        while !left.is_empty() {
            let is_first = |id: &Writer| {
                let comes_before =
                    |other: &Writer| following.get(other).is_some_and(|all| all.contains(id));
                !left.iter().any(comes_before)
            };
            let first = left.iter().copied().find(is_first);
            let Some(first) = first else {
                panic!("a cycle among {left:?}: reads {done:?}, versions {versions:?}")
            };
            left.remove(&first);
        }
    }
}

type Body = fn(&Scene);

fn run(bodies: &[Body]) {
    let scene = Arc::new(Scene::new());
    run_on(&scene, bodies);
    assert_eq!(scene.bytes(), 0, "old values are left, and no view");
}

/// Runs beside a view that began before everything else.
fn run_beside_a_view(bodies: &[Body]) {
    let scene = Arc::new(Scene::new());
    let view = scene.begin_view();
    run_on(&scene, bodies);
    (0..scene.leaves.len()).for_each(|entry| assert_eq!(scene.read_one(view, entry), 0));
    scene.versions.end_view(view, false, &mut Vec::new());
    assert_eq!(scene.bytes(), 0);
}

fn run_on(scene: &Arc<Scene>, bodies: &[Body]) {
    let threads: Vec<_> = bodies
        .iter()
        .map(|body| {
            let (scene, body) = (scene.clone(), *body);
            thread::spawn(move || body(&scene))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    scene.assert_is_serializable();
}

#[test]
fn write_skew_is_found() {
    check(|| {
        run(&[
            |scene| scene.transaction(1, &[One(0)], &[1]),
            |scene| scene.transaction(2, &[One(1)], &[0]),
            |scene| scene.snapshot(3, &[One(0), One(1)]),
        ]);
    });
}

/// Three transactions in a ring, of which a snapshot sees some.
#[test]
fn a_ring_of_transactions_is_found() {
    check(|| {
        run(&[
            |scene| scene.transaction(1, &[One(0)], &[1]),
            |scene| scene.transaction(2, &[One(1)], &[2]),
            |scene| scene.transaction(3, &[One(2)], &[0]),
            |scene| scene.snapshot(4, &[One(2), One(0), One(1)]),
        ]);
    });
}

/// The anomaly of a transaction that only reads: it sees the second of two transactions, and not
/// the first, of which the second has read the old value.
#[test]
fn a_snapshot_sees_transactions_in_their_order() {
    check(|| {
        run(&[
            |scene| scene.transaction(1, &[One(0), One(1)], &[0]),
            |scene| scene.transaction(2, &[One(1)], &[1]),
            |scene| {
                scene.snapshot(3, &[One(0), One(1)]);
                scene.snapshot(4, &[One(1), One(0)]);
            },
        ]);
    });
}

/// A put takes a time while two transactions take theirs, so that a view may begin between them.
#[test]
fn a_view_between_two_transactions_sees_the_first() {
    check_with(4, || {
        run_beside_a_view(&[
            |scene| scene.put(1, 2),
            |scene| scene.transaction(2, &[], &[1]),
            |scene| scene.transaction(3, &[One(1)], &[0]),
            |scene| scene.snapshot(4, &[One(1), One(0)]),
        ]);
    });
}

#[test]
fn puts_and_transactions_are_in_one_order() {
    check(|| {
        run(&[
            |scene| {
                scene.put(1, 0);
                scene.put(2, 0);
                scene.put(3, 1);
            },
            |scene| scene.transaction(4, &[One(1)], &[0, 2]),
            |scene| {
                scene.snapshot(5, &[One(1), One(0)]);
                scene.snapshot(6, &[One(0), One(2)]);
            },
        ]);
    });
}

/// A put of an entry that was changed since the newest view began keeps nothing.
#[test]
fn a_view_that_begins_between_two_puts_stays_as_it_is() {
    check_with(4, || {
        run_beside_a_view(&[
            |scene| {
                scene.put(1, 0);
                scene.put(2, 1);
                scene.put(3, 0);
            },
            |scene| scene.snapshot(4, &[One(0), One(1)]),
        ]);
    });
}

/// A thread drops all that no view sees, while views begin and changes take their times.
#[test]
fn what_is_dropped_is_what_no_view_sees() {
    check_with(4, || {
        run_beside_a_view(&[
            |scene| {
                scene.put(1, 0);
                scene.transaction(2, &[One(1)], &[0, 1]);
                scene.put(3, 0);
            },
            |scene| {
                for _ in 0..2 {
                    // Only then is there something to drop.
                    let view = scene.begin_view();
                    scene.versions.end_view(view, false, &mut Vec::new());
                    scene.versions.drop_unseen(&mut Vec::new());
                }
            },
            |scene| {
                scene.snapshot(4, &[One(0), One(1)]);
                scene.snapshot(5, &[One(1), One(0)]);
            },
        ]);
    });
}

/// Transactions that read an entry and change it: none is lost.
#[test]
fn no_update_is_lost() {
    check(|| {
        run(&[
            |scene| {
                scene.transaction(1, &[One(0)], &[0]);
                scene.transaction(2, &[One(0)], &[0]);
            },
            |scene| scene.transaction(3, &[One(0)], &[0, 1]),
            |scene| {
                scene.put(4, 0);
                scene.snapshot(5, &[One(0), One(1)]);
            },
        ]);
    });
}

#[test]
fn a_range_has_no_phantoms() {
    check(|| {
        run(&[
            |scene| scene.transaction(1, &[All], &[0]),
            |scene| scene.transaction(2, &[All], &[1]),
            |scene| {
                scene.put(3, 2);
                scene.snapshot(4, &[All]);
            },
        ]);
    });
}

/// A transaction that fails takes back what it has kept.
#[test]
fn what_fails_leaves_nothing() {
    check(|| {
        run(&[
            |scene| {
                scene.transaction(1, &[One(0), One(1), One(2)], &[0, 1, 2]);
                scene.transaction(2, &[One(2)], &[0]);
            },
            |scene| scene.transaction(3, &[One(0), One(1), One(2)], &[1, 2]),
            |scene| scene.snapshot(4, &[One(0), One(1), One(2)]),
            |scene| scene.put(5, 1),
        ]);
    });
}

#[test]
fn a_put_amid_a_transaction_is_not_lost() {
    check_with(4, || {
        run_beside_a_view(&[
            |scene| {
                scene.put(1, 0);
                scene.put(2, 0);
            },
            |scene| scene.transaction(3, &[One(0)], &[0]),
        ]);
    });
}

/// While a view reads, other changes of the tree come. The view sees the first of these.
fn check_load(before: &'static [Writer], changes: Body, expected: Writer) {
    check(move || {
        let scene = Arc::new(Scene::new());
        let first = scene.begin_view();
        before.iter().for_each(|id| scene.put(*id, 0));
        let view = scene.begin_view();
        // A change of another tree, so that the view looks for old values.
        let other = Replaced { tree: TREE + 1, key: &key(0), old: None };
        scene.versions.keep(&[other], |_| {}, &mut vec![]);
        let changing = scene.clone();
        let thread = thread::spawn(move || changes(&changing));
        assert_eq!(scene.read_one(view, 0), expected);
        let seen = scene.read(view, &[All], &mut ReadSet::new(1000));
        assert_eq!(seen, [(0, expected), (1, 0), (2, 0)]);
        thread.join().unwrap();
        [first, view].iter().for_each(|view| scene.versions.end_view(*view, false, &mut vec![]));
        assert_eq!(scene.bytes(), 0);
    });
}

#[test]
fn a_view_sees_what_was_there_before_a_load() {
    let clear_and_load: Body = |scene| {
        scene.put(2, 0);
        scene.load(3, 0);
    };
    check_load(&[1], clear_and_load, 1);
}

#[test]
fn a_view_sees_nothing_of_a_load_that_goes_again() {
    let load_and_clear: Body = |scene| {
        scene.load(1, 0);
        scene.put(2, 0);
        scene.load(3, 0);
    };
    check_load(&[], load_and_clear, 0);
}
