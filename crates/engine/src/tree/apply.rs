//! The one place where pages change.
//!
//! Every change of a tree's page goes through [`apply`], under the page's exclusive lock and within
//! a [`Change`] of the store. A log will write its records here, and store their sequence numbers
//! in the pages.

use vellum_pool::{ExclusiveGuard, PageRef};

use crate::error::{Error, Result};
use crate::node::{Fences, Node, NodeMut, Payload, Split, merge_into_right, split_off_left};
use crate::page::{self, LEVEL, PAGE_HEADER, PageKind};
use crate::store::pages::Change;

/// A change of one page.
#[derive(Debug)]
pub(crate) enum Action<'a> {
    /// Insert an entry before the slot at `index`.
    Insert { index: usize, key: &'a [u8], payload: Payload<'a> },
    /// Replace the payload of the entry at `index`.
    Replace { index: usize, payload: Payload<'a> },
    /// Remove the entry at `index`.
    Remove { index: usize },
    /// Remove the entries at `indexes`, which must ascend.
    RemoveAll { indexes: &'a [usize] },
    /// Copy the node of `image`. Of its page header, only kind and level are used.
    Image { image: &'a [u8] },
    /// Make the page a node for all keys: an empty leaf, or an inner node with no separators and
    /// one child.
    FormatRoot { level: u8, child: u64 },
    /// Make the page an empty leaf with these fences.
    FormatLeaf { fences: Fences<'a> },
    /// Move all slots left of the split to `left`, a new page.
    SplitOff { left: &'a mut [u8], split: &'a Split },
    /// Take all slots from the left sibling.
    MergeFrom { left: &'a [u8], separator: &'a [u8] },
}

/// Applies `action` to `page`. If the result does not fit, returns false and changes nothing.
///
/// # Errors
/// [`Error::Damaged`] if the page is inconsistent. Then nothing has changed.
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
        Action::FormatRoot { level, child } => {
            NodeMut::format(bytes, level, Default::default(), child);
        }
        Action::FormatLeaf { fences } => {
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

/// Writes the page header of a new page.
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
