//! The one place where pages change.
//!
//! Every change of a tree's page goes through [`apply`], under the page's exclusive lock and a
//! [`Change`] of the store. A log will write its record, and the page its sequence number, here.

use vellum_pool::{ExclusiveGuard, PageRef};

use crate::error::{Error, Result};
use crate::node::{Fences, Node, NodeMut, Payload, Split, merge_into_right, split_off_left};
use crate::page::{self, LEVEL, PAGE_HEADER, PageKind};
use crate::store::pages::Change;

/// A change of one page.
#[derive(Debug)]
pub(crate) enum Action<'a> {
    /// Insert an entry before the slot `index`.
    Insert { index: usize, key: &'a [u8], payload: Payload<'a> },
    /// Give the entry at `index` another payload.
    Replace { index: usize, payload: Payload<'a> },
    /// Remove the entry at `index`.
    Remove { index: usize },
    /// Remove the entries at `indexes`, which ascend.
    RemoveAll { indexes: &'a [usize] },
    /// Become the node of `image`, whose page header does not count but for kind and level.
    Image { image: &'a [u8] },
    /// Become a node of no separators with one child, of all keys.
    Raise { level: u8, child: u64 },
    /// Become a leaf of no entries between these fences.
    Empty { fences: Fences<'a> },
    /// Give everything left of the split to `left`, a new page.
    SplitOff { left: &'a mut [u8], split: &'a Split },
    /// Take everything from the left neighbour.
    MergeFrom { left: &'a [u8], separator: &'a [u8] },
}

/// Applies `action` to `page`. False, and nothing changed, if it does not fit.
///
/// # Errors
/// [`Error::Damaged`] if the page makes no sense; nothing is changed then.
pub(crate) fn apply(
    _change: &Change<'_>,
    page: &mut ExclusiveGuard<'_>,
    action: Action<'_>,
) -> Result<bool> {
    let place = page.page();
    let bytes = &mut page[..];
    match action {
        Action::Insert { index, key, payload } => {
            return Ok(NodeMut::new(bytes).insert(index, key, payload));
        }
        Action::Replace { index, payload } => {
            return Ok(NodeMut::new(bytes).replace(index, payload));
        }
        Action::Remove { index } => NodeMut::new(bytes).remove(index),
        Action::RemoveAll { indexes } => NodeMut::new(bytes).remove_all(indexes),
        Action::Image { image } => {
            bytes[PAGE_HEADER..].copy_from_slice(&image[PAGE_HEADER..]);
            let kind = if image[LEVEL] == 0 { PageKind::Leaf } else { PageKind::Inner };
            page::set_kind(bytes, kind, image[LEVEL]);
        }
        Action::Raise { level, child } => {
            NodeMut::format(bytes, level, Default::default(), child);
        }
        Action::Empty { fences } => {
            NodeMut::format(bytes, 0, fences, 0);
        }
        Action::SplitOff { left, split } => {
            split_off_left(bytes, left, split).map_err(|torn| Error::torn(place, torn))?;
        }
        Action::MergeFrom { left, separator } => {
            merge_into_right(Node::new(left), bytes, separator)
                .map_err(|torn| Error::torn(place, torn))?;
        }
    }
    Ok(true)
}

/// Writes the page header of a page that was just allocated.
pub(crate) fn init(
    _change: &Change<'_>,
    page: &mut ExclusiveGuard<'_>,
    kind: PageKind,
    level: u8,
    tree: u32,
) -> PageRef {
    let place = page.page();
    page::init(&mut page[..], place, kind, level, tree);
    place
}
