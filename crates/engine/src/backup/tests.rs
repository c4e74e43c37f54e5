//! Backups beside loads and transactions, and increments that name their own base.

use std::ops::ControlFlow;
use std::sync::Arc;

use tempfile::tempdir;
use vellum_log::{SimulatedDevice, SimulatedOptions};
use vellum_pool::device::MemoryDevice;

use crate::{BackupOptions, BackupProgress, Error, Options, RestoreOptions, Store, Tree};

fn goes_on(_: BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// While a backup copies values, bulk loads end: one, or another one in each round. Once the backup
/// has its end, a transaction changes an entry of the last load and another one, and a checkpoint
/// writes both pages.
#[test]
fn a_backup_has_all_of_a_transaction_or_nothing() {
    for loads in [1, usize::MAX] {
        let segments =
            SimulatedOptions { segments: 1000, segment_blocks: 16, ..Default::default() };
        let options = Options {
            log: Some(Arc::new(SimulatedDevice::new(segments))),
            log_bytes: 1 << 20,
            evictors: 0,
            cut_in_background: false,
            ..Options::new().pool_bytes(32 << 20)
        };
        let folder = tempdir().unwrap();
        let store = Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap();
        let redo_log = store.core.pages.redo_log.as_ref().unwrap();
        let other = store.create_tree("other").unwrap();
        other.upsert(b"key", b"old").unwrap();
        let last = 9_999_u32.to_be_bytes();
        let mut loaded = Vec::new();
        let (mut calls, mut copied, mut begun) = (0_u32, 0, None);
        let mut is_changed = false;
        let path = folder.path().join("backup");
        let backup = store.backup(&path, &BackupOptions::new(), &mut |progress| {
            let bytes = progress.bytes_done - copied;
            (calls, copied) = (calls + 1, progress.bytes_done);
            if is_changed {
                // The backup is checked.
            } else if redo_log.has_backup_ended() {
                is_changed = true;
                let tree: &Tree = loaded.last().unwrap();
                let changed = store.transact(|transaction| {
                    transaction.put(tree, &last, b"new")?;
                    transaction.put(&other, b"key", b"new")
                });
                changed.unwrap();
                store.core.pages.cut_log_if(redo_log, |_| true).unwrap();
            } else if calls == 1 {
                other.upsert(b"long", &[1; 100_000]).unwrap();
            } else if begun.is_some() || bytes == 25 << 12 {
                // The long value was copied. A load takes more than eight calls.
                let first = *begun.get_or_insert(calls);
                if (calls - first).is_multiple_of(8) && loaded.len() < loads {
                    let tree = store.create_tree(&calls.to_string()).unwrap();
                    let old = |key: u32| (key.to_be_bytes(), [b'o'; 200]);
                    tree.bulk_load((0..10_000).map(old)).unwrap();
                    loaded.push(tree);
                }
            }
            ControlFlow::Continue(())
        });
        backup.unwrap();
        assert!(is_changed && loaded.len() >= loads.min(3), "{} loads", loaded.len());
        let copy = Store::open(&path, &Options::new().log(false).pool_bytes(4 << 20)).unwrap();
        assert!(copy.check(&mut |_| ()).unwrap().is_sound());
        let first = |name: &str, key: &[u8]| {
            let tree = copy.tree(name).unwrap();
            tree.get(key).unwrap().map(|value| value[0])
        };
        let (one, two) = (first(&loaded.last().unwrap().name(), &last), first("other", b"key"));
        assert_eq!((one, two), (Some(b'o'), Some(b'o')), "{loads}");
    }
}

#[test]
fn an_increment_does_not_replace_its_base() {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let store = Store::create(at("store"), &Options::new().pool_bytes(4 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    store.backup(at("full"), &BackupOptions::new(), &mut goes_on).unwrap();
    tree.insert(b"a", b"1").unwrap();
    let increment = |base: &str, path: &str, replace: bool| {
        let options = BackupOptions::new().since(at(base)).replace(replace);
        store.backup(at(path), &options, &mut goes_on)
    };
    increment("full", "one", false).unwrap();
    tree.insert(b"b", b"2").unwrap();
    std::fs::hard_link(at("one"), at("same")).unwrap();
    for (base, path) in [("one", "one"), ("full", "full"), ("one", "same")] {
        let error = increment(base, path, true).unwrap_err();
        assert!(matches!(error, Error::BadOption(_)), "{error}");
        assert!(error.to_string().contains("would replace the backup"), "{error}");
    }
    let options = RestoreOptions::new();
    crate::restore(at("restored"), at("full"), &[at("one")], &options, &mut goes_on).unwrap();
    let restored = Store::open(at("restored"), &Options::new().pool_bytes(4 << 20)).unwrap();
    assert!(restored.tree("tree").unwrap().contains(b"a").unwrap());
}
