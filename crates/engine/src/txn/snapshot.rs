//! Snapshots: [`Snapshot`].

use crate::error::{Error, Result};
use crate::store::Store;
use crate::tree::{KeyRange, Tree, ValueReader, bounds_of, bounds_of_prefix};
use crate::txn::entries::ViewEntries;
use crate::txn::view::View;
use crate::value::Value;

/// A consistent, read-only view of the store as it was when the snapshot was taken.
///
/// A snapshot sees every change that had returned before, and none that began later; of a
/// transaction it sees all changes or none. It holds no locks: changes go on, and do not affect it.
/// Any number of snapshots can live at once, for as long as needed. Meanwhile the store keeps the
/// old values of entries that change, in memory
/// ([`StoreStat::version_bytes`](crate::StoreStat::version_bytes)).
///
/// ```
/// # use vellum::{Options, Store};
/// # let directory = tempfile::tempdir()?;
/// # let options = Options::new().pool_bytes(4 << 20);
/// # let store = Store::create(directory.path().join("store"), &options)?;
/// let stock = store.create_tree("stock")?;
/// stock.upsert(b"apples", b"7")?;
/// let snapshot = store.snapshot()?;
/// stock.upsert(b"apples", b"6")?;
/// stock.upsert(b"pears", b"3")?;
/// assert_eq!(snapshot.get(&stock, b"apples")?.as_deref(), Some(&b"7"[..]));
/// assert_eq!(snapshot.entries(&stock)?.count(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Snapshot {
    view: View,
}

impl Store {
    /// A consistent view of the store as it is now. Changes do not wait for it, but for the first
    /// of several snapshots and transactions: it waits for the changes under way, and new ones wait
    /// until it has begun.
    ///
    /// # Errors
    /// [`Closed`](crate::Error::Closed), [`CalledFromWithin`](crate::Error::CalledFromWithin).
    pub fn snapshot(&self) -> Result<Snapshot> {
        Ok(Snapshot { view: View::begin(&self.core)? })
    }
}

impl Snapshot {
    /// The names of the trees that the store had, sorted.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn trees(&self) -> Result<Vec<String>> {
        let core = self.view.core();
        core.pages.check_open()?;
        ViewEntries::new(&self.view, core.catalog(), bounds_of(&..), None, None)
            .map(|entry| {
                let (name, value) = entry?;
                Ok(core.decode_tree(&name, &value)?.name().to_string())
            })
            .collect()
    }

    /// The tree that had this name. Its handle has the newest name, and may be one that was dropped
    /// since: then only snapshots and transactions that are as old can read it.
    ///
    /// # Errors
    /// [`NoSuchTree`](Error::NoSuchTree), damage, a failed read.
    pub fn tree(&self, name: &str) -> Result<Tree> {
        let core = self.view.core();
        core.pages.check_open()?;
        let no_such_tree = || Error::NoSuchTree(name.into());
        let entry = self.view.get(core.catalog(), name.as_bytes())?.ok_or_else(no_such_tree)?;
        let number = core.decode_tree(name.as_bytes(), &entry)?.id;
        let tree = core.tree_of_number(number)?.ok_or_else(no_such_tree)?;
        Ok(Tree::new(self.view.core_handle(), tree))
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// As [`Tree::get`]; [`OtherStore`](crate::Error::OtherStore).
    pub fn get<'t>(&'t self, tree: &'t Tree, key: &[u8]) -> Result<Option<Value<'t>>> {
        self.view.get(self.view.tree_ref(tree)?, key)
    }

    /// Whether `key` has a value.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn contains(&self, tree: &Tree, key: &[u8]) -> Result<bool> {
        self.view.contains(self.view.tree_ref(tree)?, key)
    }

    /// The values of many keys, in their order.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn multi_get<'t>(
        &'t self,
        tree: &'t Tree,
        keys: &[&[u8]],
    ) -> Result<Vec<Option<Value<'t>>>> {
        let tree = self.view.tree_ref(tree)?;
        self.view.multi_get(tree, keys)
    }

    /// A reader of the value of `key`, of any length.
    ///
    /// # Errors
    /// As [`Tree::reader`].
    pub fn reader<'t>(&'t self, tree: &'t Tree, key: &[u8]) -> Result<Option<ValueReader<'t>>> {
        self.view.reader(self.view.tree_ref(tree)?, key)
    }

    /// All entries, in the order of their keys.
    ///
    /// # Errors
    /// [`Closed`](crate::Error::Closed), [`OtherStore`](crate::Error::OtherStore).
    pub fn entries<'t>(&'t self, tree: &'t Tree) -> Result<ViewEntries<'t>> {
        self.range(tree, ..)
    }

    /// The entries of a range of keys, in the order of their keys.
    ///
    /// # Errors
    /// As [`entries`](Snapshot::entries).
    pub fn range<'t>(&'t self, tree: &'t Tree, range: impl KeyRange) -> Result<ViewEntries<'t>> {
        let tree = self.view.tree_ref(tree)?;
        Ok(ViewEntries::new(&self.view, tree, bounds_of(&range), None, None))
    }

    /// The entries whose keys begin with `prefix`, in the order of their keys.
    ///
    /// # Errors
    /// As [`entries`](Snapshot::entries).
    pub fn prefix<'t>(&'t self, tree: &'t Tree, prefix: &[u8]) -> Result<ViewEntries<'t>> {
        let tree = self.view.tree_ref(tree)?;
        Ok(ViewEntries::new(&self.view, tree, bounds_of_prefix(prefix), None, None))
    }
}
