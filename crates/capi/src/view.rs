//! What snapshots and transactions have in common: reads of the store as of one time.

use std::io::Read;
use std::ops::Bound;

use vellum::{Error, Snapshot, Transaction, Tree, Value, ValueReader, ViewEntries};

use crate::call::Outcome;
use crate::store::{no_key, of_stream};

pub(crate) trait View {
    fn value<'t>(&'t self, tree: &'t Tree, key: &[u8]) -> Result<Option<Value<'t>>, Error>;

    fn values<'t>(
        &'t self,
        tree: &'t Tree,
        keys: &[&[u8]],
    ) -> Result<Vec<Option<Value<'t>>>, Error>;

    fn reader<'t>(&'t self, tree: &'t Tree, key: &[u8]) -> Result<Option<ValueReader<'t>>, Error>;

    fn entries<'t>(
        &'t self,
        tree: &'t Tree,
        range: (Bound<&[u8]>, Bound<&[u8]>),
    ) -> Result<ViewEntries<'t>, Error>;

    /// Whether the store is open, and has the tree.
    fn check(&self, tree: &Tree) -> Result<(), Error>;
}

macro_rules! view {
    ($($type:ty),+) => {
        $(impl View for $type {
            fn value<'t>(&'t self, tree: &'t Tree, key: &[u8]) -> Result<Option<Value<'t>>, Error> {
                self.get(tree, key)
            }

            fn values<'t>(
                &'t self,
                tree: &'t Tree,
                keys: &[&[u8]],
            ) -> Result<Vec<Option<Value<'t>>>, Error> {
                self.multi_get(tree, keys)
            }

            fn reader<'t>(
                &'t self,
                tree: &'t Tree,
                key: &[u8],
            ) -> Result<Option<ValueReader<'t>>, Error> {
                self.reader(tree, key)
            }

            fn entries<'t>(
                &'t self,
                tree: &'t Tree,
                range: (Bound<&[u8]>, Bound<&[u8]>),
            ) -> Result<ViewEntries<'t>, Error> {
                self.range(tree, range)
            }

            fn check(&self, tree: &Tree) -> Result<(), Error> {
                self.multi_get(tree, &[]).map(drop)
            }
        })+
    };
}

view!(Snapshot, Transaction);

/// Copies the beginning of a value. Returns the whole length of the value, which may be longer than
/// the pool.
pub(crate) fn copy_value(
    view: &impl View,
    tree: &Tree,
    key: &[u8],
    target: &mut [u8],
) -> Outcome<usize> {
    match view.value(tree, key) {
        Err(Error::NeedsReader { .. }) => {}
        value => {
            let value = value?.ok_or_else(no_key)?;
            let count = value.len().min(target.len());
            target[..count].copy_from_slice(&value[..count]);
            return Ok(value.len());
        }
    }
    let mut reader = view.reader(tree, key)?.ok_or_else(no_key)?;
    let length = usize::try_from(reader.len()).unwrap_or(usize::MAX);
    let count = length.min(target.len());
    reader.read_exact(&mut target[..count]).map_err(of_stream)?;
    Ok(length)
}
