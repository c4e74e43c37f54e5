//! The one place where pages of trees change: groups.
//!
//! A *group* is one atomic change of a tree: entries of one leaf, or a split with its three pages.
//! The thread locks the pages, changes each of them, and ends the group while it still holds them.
//! Until then no page of the group can leave memory, and no other thread sees a part of the group.
//! If the store has a log, [`Group::end`] appends one record for the group.
//!
//! A thread that gives up has changed nothing, or else the tree is inconsistent. So the store
//! refuses changes after a group that had begun to change pages and did not end.

use vellum_pool::{ExclusiveGuard, PageId, PageRef};

use super::Access;
use crate::error::{Error, Result};
use crate::node::{Edit, Fences, Node, NodeMut, Payload, Split, merge_into_right, split_off_left};
use crate::page::blob::BlobRef;
use crate::page::{self, LEVEL, PAGE_HEADER, PageKind};
use crate::redo::record::{RecordWriter, push_edit};
use crate::store::pages::Change;

/// The most pages that a group changes: a node, its new sibling and their parent.
const PAGES_MAX: usize = 3;

/// See the module's documentation.
#[derive(Debug)]
#[must_use = "a group that changed pages must end"]
pub(crate) struct Group<'c, 'a> {
    access: Access<'a>,
    /// The pages that have changed, each once: so many of the array.
    changed: [ChangedPage; PAGES_MAX],
    count: usize,
    /// New pages to which the tree refers after the group: nodes, and values in one page.
    taken: Vec<PageRef>,
    /// Values in one page to which nothing refers after the group. Pages of values in pieces have
    /// records of their own (`PageStore::log_ranges`).
    removed: Vec<PageRef>,
    /// Pages to which nothing refers after the group.
    freed: Vec<ExclusiveGuard<'a>>,
    change: &'c Change<'c>,
}

/// A page that a group has changed.
#[derive(Debug)]
struct ChangedPage {
    id: PageId,
    /// The edits for the log, unless the record has the page's image.
    edits: Vec<u8>,
    needs_image: bool,
}

impl ChangedPage {
    const NONE: ChangedPage = ChangedPage { id: PageId(0), edits: Vec::new(), needs_image: false };
}

impl<'a> Access<'a> {
    /// Begins a group within a change.
    #[inline]
    pub(crate) fn group<'c>(self, change: &'c Change<'_>) -> Group<'c, 'a> {
        Group {
            access: self,
            changed: [const { ChangedPage::NONE }; PAGES_MAX],
            count: 0,
            taken: Vec::new(),
            removed: Vec::new(),
            freed: Vec::new(),
            change,
        }
    }

    /// A group of one edit. If the result does not fit, returns false and changes nothing.
    ///
    /// # Errors
    /// If the log does not take the record. Then the store refuses changes.
    #[inline]
    pub(crate) fn edit(
        self,
        change: &Change<'_>,
        page: &mut ExclusiveGuard<'a>,
        edit: Edit<'_>,
    ) -> Result<bool> {
        if self.pages.redo_log.is_none() {
            return Ok(NodeMut::new(page).edit(edit));
        }
        let mut group = self.group(change);
        let fits = group.edit(page, edit);
        group.end(&mut [page])?;
        Ok(fits)
    }
}

impl<'a> Group<'_, 'a> {
    /// Edits a node. If the result does not fit, returns false and changes nothing.
    pub(crate) fn edit(&mut self, page: &mut ExclusiveGuard<'_>, edit: Edit<'_>) -> bool {
        let is_logged = self.access.pages.redo_log.is_some();
        let (needs_image, removed) = (self.needs_image(page), self.removed.len());
        if is_logged {
            self.remove_values(Node::new(page), edit);
        }
        if !NodeMut::new(page).edit(edit) {
            self.removed.truncate(removed);
            return false;
        }
        let changed = self.note(page, needs_image);
        if is_logged {
            if !changed.needs_image {
                push_edit(&mut changed.edits, edit);
            }
            self.take_value(edit);
        }
        true
    }

    /// Notes the value to which the edit adds the first reference.
    fn take_value(&mut self, edit: Edit<'_>) {
        if let Edit::Insert { payload: Payload::Blob(reference), .. }
        | Edit::Replace { payload: Payload::Blob(reference), .. } = edit
        {
            let value = BlobRef::decode(reference).filter(|value| value.is_whole());
            self.taken.extend(value.map(|value| value.page));
        }
    }

    /// Notes the values to which the node does not refer after the edit.
    fn remove_values(&mut self, node: Node<&[u8]>, edit: Edit<'_>) {
        let mut remove = |index: usize| {
            let place = node.payload_place(index).ok().filter(|place| place.blob);
            let value = place.and_then(|place| node.payload(place).ok()).and_then(BlobRef::decode);
            self.remove_value(value);
        };
        match edit {
            Edit::Insert { .. } => {}
            Edit::Replace { index, .. } | Edit::Remove { index } => remove(index),
            Edit::RemoveAll { indexes } => indexes.iter().for_each(|index| remove(*index)),
        }
    }

    /// The group removes the last references to these values.
    pub(crate) fn remove_value(&mut self, values: impl IntoIterator<Item = BlobRef>) {
        let whole = values.into_iter().filter(|value| value.is_whole());
        self.removed.extend(whole.map(|value| value.page));
    }

    /// Copies the node of `image` to `page`. Of its page header, only the level is used.
    pub(crate) fn copy(&mut self, page: &mut ExclusiveGuard<'_>, image: &[u8]) {
        page[PAGE_HEADER..].copy_from_slice(&image[PAGE_HEADER..]);
        let kind = if image[LEVEL] == 0 { PageKind::Leaf } else { PageKind::Inner };
        page::set_kind(page, kind, image[LEVEL]);
        self.note(page, true);
    }

    /// Makes the page a node for all keys: an empty leaf, or an inner node with no separators and
    /// one child.
    pub(crate) fn format_root(&mut self, page: &mut ExclusiveGuard<'_>, level: u8, child: u64) {
        NodeMut::format(page, level, Fences::default(), child);
        self.note(page, true);
    }

    /// Makes the page an empty leaf with these fences.
    pub(crate) fn format_leaf(&mut self, page: &mut ExclusiveGuard<'_>, fences: Fences<'_>) {
        NodeMut::format(page, 0, fences, 0);
        self.note(page, true);
    }

    /// Moves all slots left of the split to `left`, a new page.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the node is inconsistent. Then only `left` has changed, or neither.
    pub(crate) fn split_off(
        &mut self,
        page: &mut ExclusiveGuard<'_>,
        left: &mut ExclusiveGuard<'_>,
        split: &Split,
    ) -> Result<()> {
        split_off_left(page, left, split).map_err(|torn| Error::torn(page.page(), torn))?;
        self.note(page, true);
        self.note(left, true);
        Ok(())
    }

    /// Moves all entries of `left` to the front of `right`, its sibling.
    ///
    /// # Errors
    /// [`Error::Damaged`] if one of the nodes is inconsistent. Then nothing has changed.
    pub(crate) fn merge(
        &mut self,
        left: &[u8],
        right: &mut ExclusiveGuard<'_>,
        separator: &[u8],
    ) -> Result<()> {
        let place = right.page();
        merge_into_right(Node::new(left), right, separator)
            .map_err(|torn| Error::torn(place, torn))?;
        self.note(right, true);
        Ok(())
    }

    /// Whether the log needs the image of a page that the group is about to change.
    #[inline]
    fn needs_image(&self, page: &[u8]) -> bool {
        self.access.pages.redo_log.as_ref().is_some_and(|log| log.needs_image(page))
    }

    #[inline]
    fn note(&mut self, page: &ExclusiveGuard<'_>, needs_image: bool) -> &mut ChangedPage {
        let id = page.page().id;
        let found = self.changed[..self.count].iter().position(|changed| changed.id == id);
        let at = found.unwrap_or(self.count);
        let changed = &mut self.changed[at];
        if found.is_none() {
            changed.id = id;
            self.count += 1;
        }
        changed.needs_image |= needs_image;
        changed
    }

    /// The group adds the first reference to this range of new pages.
    pub(crate) fn take(&mut self, pages: PageRef) {
        self.taken.push(pages);
    }

    /// The group removes the last reference to this page. The page is freed when the group ends. If
    /// the group does not end, the page stays.
    pub(crate) fn free(&mut self, page: ExclusiveGuard<'a>) {
        self.freed.push(page);
    }

    /// Ends the group. `pages` are all pages that the group has changed. The caller still holds
    /// them, and unlocks them afterwards.
    ///
    /// # Errors
    /// If the log does not take the record. Then the store refuses changes.
    #[inline]
    pub(crate) fn end(mut self, pages: &mut [&mut ExclusiveGuard<'a>]) -> Result<()> {
        debug_assert!(
            self.changed[..self.count]
                .iter()
                .all(|changed| { pages.iter().any(|guard| guard.page().id == changed.id) })
        );
        if self.access.pages.redo_log.is_some() && self.count > 0 {
            self.append(pages)?;
        }
        self.count = 0;
        for page in std::mem::take(&mut self.freed) {
            self.access.free_page(self.change, page);
        }
        Ok(())
    }

    /// Appends the group's record to the log, and gives its number to the changed pages.
    fn append(&self, pages: &mut [&mut ExclusiveGuard<'a>]) -> Result<()> {
        let Some(log) = &self.access.pages.redo_log else { return Ok(()) };
        let mut bytes = Vec::new();
        let freed = self.freed.iter().map(ExclusiveGuard::page);
        let freed: Vec<PageRef> = freed.chain(self.removed.iter().copied()).collect();
        let mut record = RecordWriter::new(&mut bytes, &self.taken, &freed);
        let changed = &self.changed[..self.count];
        let change_of = |page: PageRef| changed.iter().find(|changed| changed.id == page.id);
        for guard in &*pages {
            let page = guard.page();
            match change_of(page) {
                Some(changed) if changed.needs_image => {
                    record.image(page, guard).map_err(|torn| Error::torn(page, torn))?;
                }
                Some(changed) => record.edits(page, &changed.edits),
                None => {}
            }
        }
        let lsn = log.append(&bytes)?;
        for guard in pages {
            if change_of(guard.page()).is_some() {
                page::set_lsn(guard, lsn);
            }
        }
        Ok(())
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
