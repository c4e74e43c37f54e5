//! A view of a store that stands still: [`Snapshot`].

use crate::error::Result;
use crate::store::Store;
use crate::store::gate::Hold;
use crate::tree::Tree;

/// While this lives the store does not change: whatever is read fits together.
///
/// For now changes simply wait, those of other threads until the snapshot is dropped; the thread
/// that has it must not change the store itself, for that would wait for ever. Reading is not
/// affected, and several snapshots may live at once.
#[derive(Debug)]
pub struct Snapshot<'a> {
    store: &'a Store,
    _still: Hold<'a>,
}

impl Store {
    /// A view of the store that stands still. Changes wait while it lives.
    ///
    /// # Errors
    /// [`Closed`](crate::Error::Closed), [`CalledFromWithin`](crate::Error::CalledFromWithin).
    pub fn snapshot(&self) -> Result<Snapshot<'_>> {
        self.core.check_open()?;
        Ok(Snapshot { store: self, _still: self.core.hold()? })
    }
}

impl Snapshot<'_> {
    /// The tree of this name, as it is.
    ///
    /// # Errors
    /// [`NoSuchTree`](crate::Error::NoSuchTree), damage, a failed read.
    pub fn tree(&self, name: &str) -> Result<Tree> {
        self.store.tree(name)
    }

    /// The names of all trees, sorted.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn trees(&self) -> Result<Vec<String>> {
        self.store.trees()
    }
}
