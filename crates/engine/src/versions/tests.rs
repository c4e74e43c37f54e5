//! The tables of versions. `tests/versions_model.rs` compiles their files with other primitives, so
//! these tests stand apart.

use std::ops::Bound;

use crate::store::gate::Gate;
use crate::sync::AtomicBool;
use crate::versions::change_times::ChangeTimes;
use crate::versions::entry::EntryHasher;
use crate::versions::noted_entries::NotedEntries;
use crate::versions::{
    Conflicting, OldValue, ReadSet, Replaced, Seen, Validation, ValueRef, Versions,
};

#[test]
fn a_place_has_the_newest_time_of_its_entries() {
    let (times, hasher) = (ChangeTimes::new(1 << 16), EntryHasher::new());
    let entry = |key: &[u8]| hasher.hash(1, key);
    assert!(!times.may_be_after(0, entry(b"key")));
    let keys: Vec<_> = (0..20_000_u32).map(u32::to_be_bytes).collect();
    for (key, time) in keys.iter().zip(1..) {
        times.note(time, entry(key));
        // An older time changes nothing.
        times.note(time / 2, entry(key));
        assert!(times.may_be_after(time - 1, entry(key)));
        assert!(!times.may_be_after(time, entry(key)));
    }
    // No change is forgotten.
    assert!(keys.iter().zip(1..).all(|(key, time)| times.may_be_after(time - 1, entry(key))));
    assert!(!times.may_be_after(20_000, entry(b"key")));
}

#[test]
fn an_entry_is_noted_for_its_tree_and_its_views() {
    let (noted, hasher) = (NotedEntries::new(1 << 16), EntryHasher::new());
    let has = |tree, key: &[u8], views| noted.has(hasher.hash(tree, key), views);
    let note = |key: &[u8]| noted.note(hasher.hash(1, key), 7);
    assert!(!has(1, b"key", 7));
    note(b"key");
    assert!(has(1, b"key", 7));
    assert!(!has(2, b"key", 7) && !has(1, b"kez", 7) && !has(1, b"key", 8));
    for number in 0..100_000_u32 {
        note(&number.to_be_bytes());
        assert!(has(1, &number.to_be_bytes(), 7));
    }
    let left = (0..100_000_u32).filter(|number| has(1, &number.to_be_bytes(), 7));
    assert!((4000..=8192).contains(&left.count()));
}

/// `Versions::bytes` does not count a chain without old values, so a failed commit removes its own.
#[test]
fn a_commit_that_fails_leaves_no_chain() {
    let (gate, versions) = (Gate::default(), Versions::new(1 << 20));
    let held = versions.begin_view(&gate.freeze());
    let view = versions.try_begin_view().unwrap();
    let replaced = |key| Replaced { tree: 1, key, old: None };
    versions.keep(&[replaced(b"read")], |_| {}, &mut vec![]);
    assert_eq!(versions.counts(), (1, 1));
    let (mut reads, has_ended) = (ReadSet::new(1000), AtomicBool::new(false));
    reads.note_key(1, b"read");
    let validation = Validation { time: view, reads: &reads, has_ended: &has_ended };
    let keys: Vec<_> = (0..1000_u32).map(u32::to_be_bytes).collect();
    let changes = keys.iter().map(|key| replaced(key));
    let changes: Vec<_> = changes.chain([replaced(b"read")]).collect();
    let kept = versions.keep_unless_conflicting(validation, &changes, |_| {}, &mut vec![]);
    assert_eq!(kept, Err(Conflicting));
    assert_eq!(versions.counts(), (1, 1));
    versions.end_view(view, false, &mut vec![]);
    versions.end_view(held, false, &mut vec![]);
    versions.reclaim(&mut vec![]);
    assert_eq!((versions.counts(), versions.bytes()), ((0, 0), 0));
}

/// Lists of chains become more and fewer one by one: no chain is lost, and none stays.
#[test]
fn a_view_finds_each_of_many_old_values() {
    const ENTRIES: u32 = 20_000;
    let (gate, versions) = (Gate::default(), Versions::new(1 << 30));
    let old_value = |entry: u32| [entry.to_le_bytes(); 3].concat();
    let keep = |entry: u32| {
        let (key, value) = (entry.to_be_bytes(), old_value(entry));
        let old = Some(ValueRef::Bytes(&value));
        versions.keep(&[Replaced { tree: entry % 3, key: &key, old }], |_| {}, &mut vec![]);
    };
    let mut views = vec![versions.begin_view(&gate.freeze())];
    for entry in 0..ENTRIES {
        keep(entry);
        if entry % 1000 == 0 {
            views.extend(versions.try_begin_view());
        }
    }
    assert_eq!(versions.counts(), (ENTRIES.into(), ENTRIES.into()));
    // The oldest views end, and with each some chains go.
    for (ended, view) in views.iter().enumerate() {
        for entry in 0..ENTRIES {
            let is_later = entry as usize > ended.saturating_sub(1) * 1000 || ended == 0;
            let expected = match is_later {
                true => Seen::Version(Some(OldValue::Inline(old_value(entry).into()))),
                false => Seen::Page,
            };
            assert_eq!(versions.at(entry % 3, &entry.to_be_bytes(), *view), expected, "{entry}");
        }
        let everything = (Bound::Unbounded, Bound::Unbounded);
        let seen = versions.range_at(1, everything, *view).versions;
        let later = ended.saturating_sub(1) * 1000 + usize::from(ended > 0);
        assert_eq!(seen.len(), (later..ENTRIES as usize).filter(|entry| entry % 3 == 1).count());
        assert!(seen.is_sorted_by_key(|(key, _)| key.clone()));
        versions.end_view(*view, false, &mut vec![]);
    }
    versions.reclaim(&mut vec![]);
    assert_eq!((versions.counts(), versions.bytes()), ((0, 0), 0));
}

/// Values that only the views of short transactions see go soon, also beside a snapshot that is
/// held, and also if the chains are in the register of another thread than the changes.
#[test]
fn short_views_leave_few_old_values() {
    const ENTRIES: u32 = 10_000;
    for by_another_thread in [false, true] {
        let (gate, versions) = (Gate::default(), Versions::new(1 << 30));
        let keep = |entry: u32| {
            let old = Some(ValueRef::Bytes(&[7; 100]));
            let replaced = Replaced { tree: 1, key: &entry.to_be_bytes(), old };
            versions.keep(&[replaced], |_| {}, &mut vec![]);
        };
        let held = versions.begin_view(&gate.freeze());
        (0..ENTRIES).for_each(keep);
        let bytes = versions.bytes();
        let keep_beside_a_view = |entry| {
            let view = versions.try_begin_view().unwrap();
            keep(entry);
            versions.end_view(view, false, &mut vec![]);
        };
        match by_another_thread {
            false => (0..ENTRIES).for_each(keep_beside_a_view),
            true => std::thread::scope(|scope| {
                scope.spawn(|| (0..ENTRIES).for_each(keep_beside_a_view));
            }),
        }
        let more = versions.bytes() - bytes;
        assert!(more <= bytes / 10, "{more} bytes besides the {bytes} that the snapshot needs");
        assert!(versions.fresh() <= 1000, "{}", versions.fresh());
        for entry in 0..ENTRIES {
            let seen = versions.at(1, &entry.to_be_bytes(), held);
            assert_eq!(seen, Seen::Version(Some(OldValue::Inline([7; 100].into()))));
        }
        versions.end_view(held, false, &mut vec![]);
        versions.reclaim(&mut vec![]);
        assert_eq!((versions.fresh(), versions.counts()), (0, (0, 0)));
    }
}

/// Each thread counts for itself. What one has kept and not told yet, another one may drop.
#[test]
fn the_memory_of_old_values_is_never_less_than_none() {
    let (gate, versions) = (Gate::default(), Versions::new(1 << 20));
    let held = versions.begin_view(&gate.freeze());
    let change = || {
        let replaced = Replaced { tree: 1, key: b"key", old: Some(ValueRef::Bytes(&[7; 100])) };
        versions.keep(&[replaced], |_| {}, &mut vec![]);
        assert!(versions.bytes() < 10_000 && versions.check_room(0).is_ok());
    };
    change();
    for _ in 0..6 {
        let view = versions.try_begin_view().unwrap();
        change();
        versions.end_view(view, false, &mut vec![]);
        // Drops what only that view needed.
        std::thread::scope(|scope| drop(scope.spawn(change)));
    }
    versions.end_view(held, false, &mut vec![]);
    versions.reclaim(&mut vec![]);
    assert_eq!((versions.counts(), versions.bytes()), ((0, 0), 0));
}

/// With many views nothing is looked at again, and nothing is noted for that without a bound.
#[test]
fn very_many_changes_beside_many_views_take_no_memory() {
    let (gate, versions) = (Gate::default(), Versions::new(1 << 20));
    let held = versions.begin_view(&gate.freeze());
    let keep = || {
        let replaced = Replaced { tree: 1, key: b"key", old: None };
        versions.keep(&[replaced], |_| {}, &mut vec![]);
    };
    let mut views = vec![held];
    for _ in 0..20 {
        keep();
        views.extend(versions.try_begin_view());
    }
    for _ in 0..5000 {
        let view = versions.try_begin_view().unwrap();
        keep();
        versions.end_view(view, false, &mut vec![]);
    }
    assert!(versions.fresh() <= 1000, "{} values", versions.fresh());
    views.iter().for_each(|view| versions.end_view(*view, false, &mut vec![]));
}

#[test]
fn commits_that_conflict_leave_few_old_values() {
    let (gate, versions) = (Gate::default(), Versions::new(1 << 30));
    let held = versions.begin_view(&gate.freeze());
    fn replaced(key: &[u8]) -> Replaced<'_> {
        Replaced { tree: 1, key, old: Some(ValueRef::Bytes(&[7; 100])) }
    }
    for round in 0..2000_u32 {
        let view = versions.try_begin_view().unwrap();
        let conflicts = round % 4 != 0;
        if conflicts {
            versions.keep(&[replaced(b"read")], |_| {}, &mut vec![]);
        }
        let (mut reads, has_ended) = (ReadSet::new(1000), AtomicBool::new(false));
        reads.note_key(1, b"read");
        let validation = Validation { time: view, reads: &reads, has_ended: &has_ended };
        let keys: Vec<_> = (0..10).map(|key| (round * 10 + key).to_be_bytes()).collect();
        let changes: Vec<_> = keys.iter().map(|key| replaced(key)).collect();
        let kept = versions.keep_unless_conflicting(validation, &changes, |_| {}, &mut vec![]);
        assert_eq!(kept.is_err(), conflicts);
        versions.reclaim_some(changes.len(), &mut vec![]);
        versions.end_view(view, !conflicts, &mut vec![]);
    }
    assert!(versions.fresh() <= 1000, "{}", versions.fresh());
    versions.end_view(held, false, &mut vec![]);
}
