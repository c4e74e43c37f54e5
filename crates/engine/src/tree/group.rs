//! The one place where pages of trees change: groups.
//!
//! A *group* is one atomic change of a tree: entries of one leaf, or a split with its three pages.
//! The commit of a transaction is one group, too, of any leaves of any trees. The thread locks the
//! pages, changes each of them, and ends the group while it still holds them. Until then no page of
//! the group can leave memory, and no other thread sees a part of the group. If the store has a
//! log, [`Group::end`] appends one record for the group.
//!
//! A thread that gives up has changed nothing, or else the tree is inconsistent. So the store
//! refuses changes after a group that had begun to change pages and did not end.

use std::ops::Range;

use smallvec::SmallVec;
use vellum_pool::{ExclusiveGuard, PageId, PageRef};

use super::TreeRef;
use super::lookup::{LeafBytes, LeafValue};
use crate::error::{Error, Result};
use crate::node::{
    Edit, Fences, Node, NodeMut, Part, Payload, Split, Torn, copy_part, merge_into_right,
};
use crate::page::blob::BlobRef;
use crate::page::{self, LEVEL, PAGE_HEADER, PageKind};
use crate::planted::{StoreBug, is_planted};
use crate::redo::record::{ChangedParts, RecordWriter, RemovedValue, changed_parts, push_edit};
use crate::store::pages::Change;
use crate::versions::{EntryHash, OldEntry, ValueRef};

/// Most groups change at most so many pages: a node, its new sibling and their parent. The commit
/// of a transaction may change more.
const PAGES_INLINE: usize = 3;

/// What a record of a few pages has besides edits and images, at most.
const RECORD_BYTES: usize = 128;

/// See the module's documentation.
#[derive(Debug)]
#[must_use = "a group that changed pages must end"]
pub(crate) struct Group<'c, 'a> {
    tree: TreeRef<'a>,
    /// The pages that have changed, each once.
    changed: SmallVec<[ChangedPage; PAGES_INLINE]>,
    /// The old values of the entries that have changed, if there are views that may see them.
    replaced: Option<Vec<OldEntry>>,
    /// New pages to which the tree refers after the group: nodes, and values in one page.
    taken: Vec<PageRef>,
    /// Pages to which nothing refers after the group, and that the caller frees: values in one page
    /// and what [`remove_page`](Group::remove_page) adds.
    removed: Vec<PageRef>,
    /// Values in pieces to which nothing refers after the group. The caller frees them. Their pages
    /// have records of their own (`PageStore::log_freed`).
    removed_values: Vec<RemovedValue>,
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

impl<'a> TreeRef<'a> {
    /// Begins a group within a change.
    #[inline]
    pub(crate) fn group<'c>(self, change: &'c Change<'_>) -> Group<'c, 'a> {
        let mut group = self.group_without_versions(change);
        group.replaced = self.pages.versions.are_kept().then(Vec::new);
        group
    }

    /// Begins a group that keeps no old values, because the caller has kept them.
    #[inline]
    pub(crate) fn group_without_versions<'c>(self, change: &'c Change<'_>) -> Group<'c, 'a> {
        Group {
            tree: self,
            changed: SmallVec::new(),
            replaced: None,
            taken: Vec::new(),
            removed: Vec::new(),
            removed_values: Vec::new(),
            freed: Vec::new(),
            change,
        }
    }

    /// A group of one edit, of an entry that the change has expected
    /// ([`expect_change`](crate::versions::Versions::expect_change)). If the result does not fit,
    /// returns false and changes nothing.
    ///
    /// # Errors
    /// If the log does not take the record. Then the store refuses changes.
    #[inline]
    pub(crate) fn edit(
        self,
        change: &Change<'_>,
        page: &mut ExclusiveGuard<'a>,
        expected: Option<EntryHash>,
        edit: Edit<'_>,
    ) -> Result<bool> {
        self.edit_taking(change, page, expected, edit, &[])
    }

    /// As [`edit`](Self::edit), of an entry whose value has these ranges of new pages besides those
    /// that the group finds itself.
    #[inline]
    pub(crate) fn edit_taking(
        self,
        change: &Change<'_>,
        page: &mut ExclusiveGuard<'a>,
        expected: Option<EntryHash>,
        edit: Edit<'_>,
        taken: &[PageRef],
    ) -> Result<bool> {
        let versions = &self.pages.versions;
        let keeps = expected.is_some_and(|entry| !versions.has_nothing_to_keep(entry));
        self.edit_and_keep(change, page, edit, keeps, taken)
    }

    /// As [`expect_change`](crate::versions::Versions::expect_change), of an entry of this tree.
    #[inline]
    pub(crate) fn expect_change(self, key: &[u8]) -> Option<EntryHash> {
        self.pages.versions.expect_change(self.state.id, key)
    }

    /// A group that removes several entries of a leaf.
    ///
    /// # Errors
    /// As [`edit`](Self::edit).
    pub(crate) fn remove_all(
        self,
        change: &Change<'_>,
        page: &mut ExclusiveGuard<'a>,
        indexes: &[usize],
    ) -> Result<()> {
        let keeps = self.pages.versions.are_kept();
        self.edit_and_keep(change, page, Edit::RemoveAll { indexes }, keeps, &[]).map(drop)
    }

    #[inline]
    fn edit_and_keep(
        self,
        change: &Change<'_>,
        page: &mut ExclusiveGuard<'a>,
        edit: Edit<'_>,
        keeps: bool,
        taken: &[PageRef],
    ) -> Result<bool> {
        if self.pages.redo_log.is_none() && !keeps {
            return Ok(NodeMut::new(page).edit(edit));
        }
        let mut group = self.group_without_versions(change);
        group.replaced = keeps.then(Vec::new);
        group.taken.extend_from_slice(taken);
        let fits = group.edit(page, edit);
        group.end(&mut [page])?;
        Ok(fits)
    }
}

impl TreeRef<'_> {
    /// Whether the log needs the image of a page that a group is about to change.
    #[inline]
    pub(crate) fn needs_image(self, page: &[u8]) -> bool {
        self.pages.redo_log.as_ref().is_some_and(|log| log.needs_image(page))
    }
}

impl<'a> Group<'_, 'a> {
    /// The group will change so many pages.
    pub(crate) fn expect_pages(&mut self, count: usize) {
        self.changed.reserve_exact(count);
    }

    /// Edits a node. If the result does not fit, returns false and changes nothing.
    pub(crate) fn edit(&mut self, page: &mut ExclusiveGuard<'_>, edit: Edit<'_>) -> bool {
        let is_logged = self.tree.pages.redo_log.is_some();
        let needs_image = self.tree.needs_image(page);
        let removed = (self.removed.len(), self.removed_values.len());
        let replaced = self.replaced.as_ref().map_or(0, Vec::len);
        if is_logged && page[LEVEL] == 0 {
            self.remove_values(page, edit);
        }
        if self.replaced.is_some() && page[LEVEL] == 0 {
            self.replace_entries(page, edit);
        }
        let parts = if is_logged && !needs_image { changed_parts_of(page, edit) } else { None };
        let mut node = NodeMut::new(page);
        let fits = match &parts {
            Some(parts) => overwrites(edit, parts).all(|overwrite| node.edit(overwrite)),
            None => node.edit(edit),
        };
        if !fits {
            self.removed.truncate(removed.0);
            self.removed_values.truncate(removed.1);
            if let Some(entries) = &mut self.replaced {
                entries.truncate(replaced);
            }
            return false;
        }
        let changed = self.note(page, needs_image);
        if is_logged {
            if !changed.needs_image {
                push_edits(&mut changed.edits, edit, parts);
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

    /// Notes the values to which the leaf does not refer after the edit. Values move to the other
    /// part of a leaf that is split.
    fn remove_values(&mut self, page: &[u8], edit: Edit<'_>) {
        let (tree, node) = (page::tree(page), Node::new(page));
        let mut remove = |index: usize| {
            let place = node.payload_place(index).ok().filter(|place| place.blob);
            let value = place.and_then(|place| node.payload(place).ok()).and_then(BlobRef::decode);
            self.remove_value_of(tree, value);
        };
        match edit {
            Edit::Insert { .. } | Edit::Overwrite { .. } | Edit::Keep { .. } => {}
            Edit::Replace { index, .. } | Edit::Remove { index } => remove(index),
            Edit::RemoveAll { indexes } => indexes.iter().for_each(|index| remove(*index)),
        }
    }

    /// Notes the entries of a leaf that the edit changes.
    fn replace_entries(&mut self, leaf: &ExclusiveGuard<'_>, edit: Edit<'_>) {
        let (tree, leaf) = (self.tree.state.id, LeafBytes::from(leaf));
        let Some(replaced) = &mut self.replaced else { return };
        // The thread has found the entries before, so it can read them.
        let mut replace = |index: usize| {
            if let (Ok(key), Ok(value)) = (Node::new(leaf.bytes).key(index), leaf.value(index)) {
                let old = Some(ValueRef::from(value).to_old());
                replaced.push(OldEntry { tree, key: key[..].into(), old });
            }
        };
        match edit {
            Edit::Insert { key, .. } => {
                replaced.push(OldEntry { tree, key: key.into(), old: None });
            }
            Edit::Replace { index, .. }
            | Edit::Overwrite { index, .. }
            | Edit::Remove { index } => replace(index),
            Edit::RemoveAll { indexes } => indexes.iter().for_each(|index| replace(*index)),
            Edit::Keep { .. } => {}
        }
    }

    /// The group removes these entries, by other means than an edit.
    pub(crate) fn replace(&mut self, entries: Vec<OldEntry>) {
        if let Some(replaced) = &mut self.replaced {
            replaced.extend(entries);
        }
    }

    /// The group removes the last references to these values.
    pub(crate) fn remove_value(&mut self, values: impl IntoIterator<Item = BlobRef>) {
        let tree = self.tree.state.id;
        values.into_iter().for_each(|value| self.remove_value_of(tree, Some(value)));
    }

    fn remove_value_of(&mut self, tree: u32, value: Option<BlobRef>) {
        match value {
            Some(value) if value.is_whole() => self.removed.push(value.page),
            Some(_) if is_planted(StoreBug::UnnamedPages) => {}
            Some(value) => self.removed_values.push((tree, value)),
            None => {}
        }
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

    /// Splits a node. Keeps one part in its page, and moves the other part to `new`, a new page.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the node is inconsistent. Then only `new` has changed, or neither.
    pub(crate) fn split_off(
        &mut self,
        page: &mut ExclusiveGuard<'_>,
        new: &mut ExclusiveGuard<'_>,
        split: &Split,
        part: Part,
    ) -> Result<()> {
        let place = page.page();
        copy_part(new, Node::new(&page[..]), part.other(), split)
            .map_err(|torn| Error::torn(place, torn))?;
        if !self.edit(page, Edit::Keep { part, at: split.left, separator: &split.separator }) {
            return Err(Error::torn(place, Torn));
        }
        self.note(new, true);
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

    /// Has the record show the image of a page as it is. The group does not change it.
    pub(crate) fn log_image(&mut self, page: &ExclusiveGuard<'_>) {
        self.note(page, true);
    }

    #[inline]
    fn note(&mut self, page: &ExclusiveGuard<'_>, needs_image: bool) -> &mut ChangedPage {
        let id = page.page().id;
        // From the last one on: a thread that changes many pages changes one after the other.
        let found = self.changed.iter().rposition(|changed| changed.id == id);
        let at = found.unwrap_or(self.changed.len());
        if found.is_none() {
            self.changed.push(ChangedPage { id, edits: Vec::new(), needs_image: false });
        }
        let changed = &mut self.changed[at];
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

    /// The group removes the last reference to this range. The caller frees it after the end of the
    /// group.
    pub(crate) fn remove_page(&mut self, page: PageRef) {
        self.removed.push(page);
    }

    /// Ends the group. `pages` are all pages that the group has changed. The caller still holds
    /// them, and unlocks them afterwards. Returns the number of the group's record; 0 without a
    /// log.
    ///
    /// # Errors
    /// If the log does not take the record. Then the store refuses changes.
    #[inline]
    pub(crate) fn end(mut self, pages: &mut [&mut ExclusiveGuard<'a>]) -> Result<u64> {
        if let Some(replaced) = self.replaced.take_if(|replaced| !replaced.is_empty()) {
            let replaced: SmallVec<[_; 1]> = replaced.iter().map(OldEntry::replaced).collect();
            self.tree.pages.keep_versions(&replaced);
        }
        let mut lsn = 0;
        if self.tree.pages.redo_log.is_some() && !self.changed.is_empty() {
            lsn = self.append(pages)?;
        }
        self.changed.clear();
        for page in std::mem::take(&mut self.freed) {
            self.tree.free_page(self.change, page);
        }
        Ok(lsn)
    }

    /// Appends the group's record to the log, and gives its number to the changed pages.
    fn append(&self, pages: &mut [&mut ExclusiveGuard<'a>]) -> Result<u64> {
        let Some(log) = &self.tree.pages.redo_log else { return Ok(0) };
        // A group that ended in its midst has changed pages, and the log does not know how. Its
        // edits may be of the same pages as these.
        self.tree.pages.file.check_poison()?;
        let edits: usize = self.changed.iter().map(|changed| changed.edits.len()).sum();
        let images = self.changed.iter().filter(|changed| changed.needs_image).count();
        let page_bytes = pages.first().map_or(0, |page| page.len());
        // At once: the allocator grows memory under a lock that threads share.
        let mut bytes = Vec::with_capacity(RECORD_BYTES + edits + images * page_bytes);
        let freed = self.freed.iter().map(ExclusiveGuard::page);
        let freed: SmallVec<[PageRef; 4]> = freed.chain(self.removed.iter().copied()).collect();
        let taken = match is_planted(StoreBug::UnnamedPages) {
            false => &self.taken[..],
            true => &[],
        };
        let changed = pages.iter().map(|guard| guard.page());
        self.tree.pages.check_ranges(taken, &freed, &self.removed_values, changed)?;
        let mut record = RecordWriter::removing(&mut bytes, taken, &freed, &self.removed_values);
        // The caller of a large group passes the pages in the order in which it changed them.
        let change_of = |index: usize, page: PageRef| {
            let same = self.changed.get(index).filter(|changed| changed.id == page.id);
            same.or_else(|| self.changed.iter().find(|changed| changed.id == page.id))
        };
        let mut count = 0;
        for (index, guard) in pages.iter().enumerate() {
            let page = guard.page();
            if is_planted(StoreBug::HalfGroup) && count > 0 && count + 1 == self.changed.len() {
                count += 1;
                continue;
            }
            match change_of(index, page) {
                // Many edits of one page, such as new values of one key, are longer than its image.
                Some(changed) if changed.needs_image || changed.edits.len() > guard.len() => {
                    record.image(page, guard).map_err(|torn| Error::torn(page, torn))?;
                }
                Some(changed) => record.edits(page, &changed.edits),
                None => continue,
            }
            count += 1;
        }
        debug_assert_eq!(count, self.changed.len(), "the caller passes all changed pages");
        let lsn = log.append(&bytes)?;
        self.change.note_record(bytes.len());
        for (index, guard) in pages.iter_mut().enumerate() {
            if change_of(index, guard.page()).is_some() {
                page::set_lsn(guard, lsn);
            }
        }
        Ok(lsn)
    }
}

impl Drop for Group<'_, '_> {
    #[inline]
    fn drop(&mut self) {
        if !self.changed.is_empty() {
            let tree = self.tree.state.name();
            let what = format!("a change of tree {tree:?} ended in its midst");
            self.tree.pages.file.poison_for(&what);
        }
    }
}

impl<'l> From<LeafValue<'l>> for ValueRef<'l> {
    fn from(value: LeafValue<'l>) -> ValueRef<'l> {
        match value {
            LeafValue::Inline(value) => ValueRef::Bytes(value),
            LeafValue::Blob(blob) => ValueRef::Blob(blob),
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

/// The parts of a value in a leaf that an edit changes, if it replaces the value and they are few.
fn changed_parts_of(leaf: &[u8], edit: Edit<'_>) -> Option<ChangedParts> {
    let Edit::Replace { index, payload: Payload::Inline(new) } = edit else { return None };
    let place = Node::new(leaf).payload_place(index).ok().filter(|place| !place.blob)?;
    changed_parts(Node::new(leaf).payload(place).ok()?, new)
}

/// The edits that overwrite these parts of a value, in the place of an edit that replaces it.
fn overwrites<'e>(edit: Edit<'e>, parts: &[Range<usize>]) -> impl Iterator<Item = Edit<'e>> {
    parts.iter().filter_map(move |part| match edit {
        Edit::Replace { index, payload: Payload::Inline(value) } => {
            Some(Edit::Overwrite { index, offset: part.start, bytes: &value[part.clone()] })
        }
        _ => None,
    })
}

/// Adds an edit to the edits of a page, or those of the parts that it changes.
fn push_edits(bytes: &mut Vec<u8>, edit: Edit<'_>, parts: Option<ChangedParts>) {
    let Some(mut parts) = parts else { return push_edit(bytes, edit) };
    if is_planted(StoreBug::LostPart) {
        parts.pop();
    }
    overwrites(edit, &parts).for_each(|overwrite| push_edit(bytes, overwrite));
}
