//! The tables of versions. `tests/versions_model.rs` compiles their files with other primitives, so
//! these tests stand apart.

use crate::key::Key;
use crate::store::gate::Gate;
use crate::sync::AtomicBool;
use crate::versions::changed::ChangeTimes;
use crate::versions::entry::EntryHasher;
use crate::versions::noted::NotedEntries;
use crate::versions::{Conflicting, ReadSet, Replaced, Validation, Versions};

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
    let replaced = |key: &[u8]| Replaced { tree: 1, key: Key::from(key), old: None };
    versions.keep(vec![replaced(b"read")], |_| {}, &mut vec![]);
    assert_eq!(versions.counts(), (1, 1));
    let (mut reads, has_ended) = (ReadSet::new(1000), AtomicBool::new(false));
    reads.note_key(1, b"read");
    let validation = Validation { time: view, reads: &reads, has_ended: &has_ended };
    let changes = (0..1000_u32).map(|key| replaced(&key.to_be_bytes()));
    let changes = changes.chain([replaced(b"read")]).collect();
    let kept = versions.keep_unless_conflicting(validation, changes, |_| {}, &mut vec![]);
    assert_eq!(kept, Err(Conflicting));
    assert_eq!(versions.counts(), (1, 1));
    versions.end_view(view, false, &mut vec![]);
    versions.end_view(held, false, &mut vec![]);
    versions.reclaim(&mut vec![]);
    assert_eq!((versions.counts(), versions.bytes()), ((0, 0), 0));
}
