//! The one place where pages of trees change: groups.
//!
//! A *group* is one atomic change of a tree: an entry of one leaf, or a split with its three pages.
//! The thread locks the pages, applies an [`Action`] to each of them, and ends the group while it
//! still holds them. Until then no page of the group can leave memory, and no other thread sees a
//! part of the group. A log will write one record for each group, in [`Group::end`].
//!
//! A thread that gives up has applied nothing, or else the tree is inconsistent. So the store
//! refuses changes after a group that had begun to change pages and did not end.

use vellum_pool::{ExclusiveGuard, PageId, PageRef};

use super::Access;
use crate::error::{Error, Result};
use crate::node::{Fences, Node, NodeMut, Payload, Split, merge_into_right, split_off_left};
use crate::page::{self, LEVEL, PAGE_HEADER, PageKind};
use crate::store::pages::Change;

/// The most pages that a group changes: a node, its new sibling and their parent.
const PAGES_MAX: usize = 3;

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
    /// Take all slots from the left sibling.
    MergeFrom { left: &'a [u8], separator: &'a [u8] },
}

/// See the module's documentation.
#[derive(Debug)]
#[must_use = "a group that changed pages must end"]
pub(crate) struct Group<'c, 'a> {
    access: Access<'a>,
    /// The pages that have changed, each once: so many of the array.
    changed: [PageId; PAGES_MAX],
    count: usize,
    /// Pages to which nothing refers after the group.
    freed: Vec<ExclusiveGuard<'a>>,
    change: &'c Change<'c>,
}

impl<'a> Access<'a> {
    /// Begins a group within a change.
    #[inline]
    pub(crate) fn group<'c>(self, change: &'c Change<'_>) -> Group<'c, 'a> {
        Group { access: self, changed: [PageId(0); PAGES_MAX], count: 0, freed: Vec::new(), change }
    }

    /// A group of one action: applies it to `page`. If the result does not fit, returns false and
    /// changes nothing.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the page is inconsistent. Then nothing has changed.
    #[inline]
    pub(crate) fn apply(
        self,
        _change: &Change<'_>,
        page: &mut ExclusiveGuard<'a>,
        action: Action<'_>,
    ) -> Result<bool> {
        // It ends at once: an action is applied, or has changed nothing.
        apply(page, action)
    }
}

impl<'a> Group<'_, 'a> {
    /// Applies `action` to `page`. If the result does not fit, returns false and changes nothing.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the page is inconsistent. Then this action has changed nothing.
    pub(crate) fn apply(
        &mut self,
        page: &mut ExclusiveGuard<'_>,
        action: Action<'_>,
    ) -> Result<bool> {
        let applied = apply(page, action)?;
        if applied {
            self.note(page.page().id);
        }
        Ok(applied)
    }

    /// Moves all slots left of the split to `left`, a new page.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub(crate) fn split_off(
        &mut self,
        page: &mut ExclusiveGuard<'_>,
        left: &mut ExclusiveGuard<'_>,
        split: &Split,
    ) -> Result<()> {
        let place = page.page();
        split_off_left(&mut page[..], &mut left[..], split)
            .map_err(|torn| Error::torn(place, torn))?;
        self.note(place.id);
        self.note(left.page().id);
        Ok(())
    }

    #[inline]
    fn note(&mut self, page: PageId) {
        if !self.changed[..self.count].contains(&page) {
            self.changed[self.count] = page;
            self.count += 1;
        }
    }

    /// The group removes the last reference to this page. The page is freed when the group ends. If
    /// the group does not end, the page stays.
    pub(crate) fn free(&mut self, page: ExclusiveGuard<'a>) {
        self.freed.push(page);
    }

    /// Ends the group. `pages` are all pages that the group has changed. The caller still holds
    /// them, and unlocks them afterwards.
    #[inline]
    pub(crate) fn end(mut self, pages: &[&ExclusiveGuard<'a>]) {
        let is_held = |page: &PageId| pages.iter().any(|guard| guard.page().id == *page);
        debug_assert!(self.changed[..self.count].iter().all(is_held), "{self:?} without {pages:?}");
        self.count = 0;
        for page in std::mem::take(&mut self.freed) {
            self.access.free_page(self.change, page);
        }
    }
}

impl Drop for Group<'_, '_> {
    #[inline]
    fn drop(&mut self) {
        if self.count > 0 {
            let tree = self.access.tree.name();
            let what = format!("a change of tree {tree:?} ended in its midst");
            self.access.pages.file.poison_for(&what);
        }
    }
}
fn apply(page: &mut ExclusiveGuard<'_>, action: Action<'_>) -> Result<bool> {
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
