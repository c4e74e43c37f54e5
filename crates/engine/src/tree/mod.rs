//! B+trees on the buffer manager: [`Tree`].
//!
//! Nodes have fence keys and no pointers to their siblings. Readers take no locks (optimistic lock
//! coupling); changes lock the leaf, and for splits and merges its parent and neighbour as well.
//! The root's page never changes, so a tree is found by one number for all of its life.

mod alter;
mod apply;
mod bulk_load;
mod check;
mod cursor;
mod descend;
mod drain;
mod drop_tree;
mod entries;
mod handle;
mod held_leaf;
mod modify;
mod multi_get;
mod owned_streams;
pub(crate) mod page_runs;
mod range;
mod read;
mod read_ahead;
mod salvage;
mod state;
pub(crate) mod streams;
mod structure;
#[cfg(test)]
mod tests;
mod update;

use std::sync::atomic::Ordering;

pub(crate) use apply::{Action, apply, init};
pub use bulk_load::BulkLoader;
pub use check::TreeStat;
pub(crate) use check::Visitor;
pub use cursor::Cursor;
pub use drain::ExtractIf;
pub use entries::Entries;
pub use handle::Tree;
pub(crate) use modify::{Existing, Incoming};
pub use owned_streams::{OwnedValueReader, OwnedValueWriter};
pub use range::KeyRange;
pub use salvage::{Visit, VisitReaders};
pub(crate) use state::{CATALOG, TreeState};
pub use streams::{ValueReader, ValueWriter};

use crate::error::{Error, Result};
use crate::store::core::StoreCore;

/// A tree and its store: what every operation works on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access<'a> {
    pub core: &'a StoreCore,
    pub tree: &'a TreeState,
}

impl Access<'_> {
    #[inline(always)]
    pub(crate) fn check_dropped(self) -> Result<()> {
        match self.tree.dropped.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::NoSuchTree(self.tree.name().to_string())),
        }
    }
}
