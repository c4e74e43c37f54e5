//! A view: reads of the store as of one time.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::error::{Error, Result};
use crate::store::core::StoreCore;
use crate::tree::{Tree, TreeRef, ValueReader};
use crate::value::Value;
use crate::versions::{OldValue, ReadSet, Seen, Time, Validation, Versions};

/// The store as of one time. While a view lives, changes keep the old values of entries.
#[derive(Debug)]
pub(crate) struct View {
    core: Arc<StoreCore>,
    time: Time,
    /// Whether a commit has ended the view.
    has_ended: AtomicBool,
}

impl View {
    /// A view of the store as it is now.
    pub(crate) fn begin(core: &Arc<StoreCore>) -> Result<View> {
        let time = core.pages.begin_view()?;
        Ok(View { core: core.clone(), time, has_ended: AtomicBool::new(false) })
    }

    pub(crate) fn core(&self) -> &StoreCore {
        &self.core
    }

    pub(crate) fn core_handle(&self) -> Arc<StoreCore> {
        self.core.clone()
    }

    /// What a commit must find unchanged if the transaction has read this. The view ends with the
    /// validation.
    pub(crate) fn validation<'v>(&'v self, reads: &'v ReadSet) -> Validation<'v> {
        Validation { time: self.time, reads, has_ended: &self.has_ended }
    }

    pub(crate) fn time(&self) -> Time {
        self.time
    }

    pub(crate) fn versions(&self) -> &Versions {
        &self.core.pages.versions
    }

    /// The pages of a tree, which must be of this store.
    pub(crate) fn tree_ref<'t>(&self, tree: &'t Tree) -> Result<TreeRef<'t>> {
        match tree.is_of(&self.core) {
            true => Ok(tree.open_access()?.at(self.time)),
            false => Err(Error::OtherStore(tree.name().to_string())),
        }
    }

    /// The value of `key`.
    pub(crate) fn get<'t>(&self, tree: TreeRef<'t>, key: &[u8]) -> Result<Option<Value<'t>>> {
        // The page first. An error may be about a value that this view does not see.
        let found = self.read(tree, |tree| tree.get(key));
        match self.versions().at(tree.state.id, key, self.time) {
            Seen::Page => found,
            Seen::Version(None) => Ok(None),
            Seen::Version(Some(OldValue::Inline(value))) => {
                Ok(Some(Value::Inline(Cow::Owned(value.to_vec()))))
            }
            // This view keeps the pages of the value.
            Seen::Version(Some(OldValue::Blob(blob))) => tree.open_value(blob, key).map(Some),
        }
    }

    /// Reads a tree. It may be dropped meanwhile; then this view still sees it.
    pub(crate) fn read<'t, T>(
        &self,
        tree: TreeRef<'t>,
        read: impl Fn(TreeRef<'t>) -> Result<T>,
    ) -> Result<T> {
        match read(tree) {
            Err(Error::NoSuchTree(_)) => read(tree.at(self.time)),
            read => read,
        }
    }

    /// The values of many keys, in their order.
    pub(crate) fn multi_get<'t>(
        &self,
        tree: TreeRef<'t>,
        keys: &[&[u8]],
    ) -> Result<Vec<Option<Value<'t>>>> {
        let mut values = match tree.multi_get(keys) {
            // The error may be about a value that this view does not see.
            Err(_) => return keys.iter().map(|key| self.get(tree, key)).collect(),
            Ok(values) => values,
        };
        if self.versions().now() > self.time {
            for (key, value) in keys.iter().zip(&mut values) {
                if self.versions().at(tree.state.id, key, self.time) != Seen::Page {
                    *value = self.get(tree, key)?;
                }
            }
        }
        Ok(values)
    }

    /// Whether `key` has a value.
    pub(crate) fn contains(&self, tree: TreeRef<'_>, key: &[u8]) -> Result<bool> {
        let found = self.read(tree, |tree| tree.contains(key));
        match self.versions().at(tree.state.id, key, self.time) {
            Seen::Page => found,
            Seen::Version(old) => Ok(old.is_some()),
        }
    }

    /// A reader of the value of `key`.
    pub(crate) fn reader<'t>(
        &self,
        tree: TreeRef<'t>,
        key: &[u8],
    ) -> Result<Option<ValueReader<'t>>> {
        let found = self.read(tree, |tree| tree.reader(key));
        match self.versions().at(tree.state.id, key, self.time) {
            Seen::Page => found,
            Seen::Version(None) => Ok(None),
            Seen::Version(Some(OldValue::Inline(value))) => {
                Ok(Some(ValueReader::inline(tree, value.to_vec().into())))
            }
            Seen::Version(Some(OldValue::Blob(blob))) => {
                let pin = tree.pages.pin(blob.page.id);
                tree.open_reader(blob, key, pin).map(Some)
            }
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // The child of a fork has a copy of the view, and not the pages to free.
        if self.core.pages.check_process().is_err() {
            return;
        }
        self.core.pages.end_view(self.time, *self.has_ended.get_mut());
        self.core.free_dropped_trees();
    }
}
