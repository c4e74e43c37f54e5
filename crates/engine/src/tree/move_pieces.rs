//! Moves pages of a value in pieces towards the front of the file (`move_pages.rs`).
//!
//! A value in pieces may be longer than all free space. So this moves some pieces at a time. It
//! copies them, and the index pages from them up to the root, because no page of a value changes.
//! The old and the new value share all other pages. Then the leaf refers to the new root, and the
//! pages that were copied are free. All of that is one group.
//!
//! Because the two values share pages, the old one must have no reader: a reader keeps the pages of
//! its own value only. A reader pins the value while it holds the lock of the leaf, so this thread
//! knows all of them while it holds that lock exclusively. A value with readers stays where it is.

use vellum_pool::{ExclusiveGuard, PageRef};

use super::TreeRef;
use super::group::init;
use super::lookup::{LeafBytes, LeafValue};
use super::move_pages::{Limit, Moves};
use super::streams::Index;
use crate::error::{Error, Result};
use crate::page::blob::BlobRef;
use crate::page::pieces::{self, put_index, put_root};
use crate::page::{PAGE_HEADER, PageKind};
use crate::store::pages::Change;

/// The pieces that are copied at a time. Checkpoints wait meanwhile.
const PIECES_AT_ONCE: usize = 32;

/// A value that is being copied in part.
struct Copy<'c, 'a> {
    tree: TreeRef<'a>,
    change: &'c Change<'c>,
    index: Index<'a>,
    blob: BlobRef,
    key: &'c [u8],
    limit: Limit,
    /// The pieces that may still be copied.
    left: usize,
    /// The new pages. They are freed unless a leaf refers to them.
    new: Vec<PageRef>,
    /// The pages that were copied.
    old: Vec<PageRef>,
    buffer: Vec<u8>,
}

impl Drop for Copy<'_, '_> {
    fn drop(&mut self) {
        // No record says that these pages are in use.
        self.new.drain(..).for_each(|page| self.tree.pages.free_logged(page));
    }
}

impl<'a> Copy<'_, 'a> {
    /// Copies what has to move below an index page, and the page itself if it has to move or to
    /// change. Returns the number of its copy; `None` if it stays as it is.
    fn copy(&mut self, page: PageRef, level: u8, first: u64) -> Result<Option<u64>> {
        let children = self.index.children(page, level, first)?;
        let step = self.index.shape.step(level) as usize;
        let mut refs = children.clone();
        for (number, child) in (first..).step_by(step).zip(&mut refs) {
            if self.left == 0 {
                break;
            }
            let copied = match level {
                1 => self.copy_piece(self.index.piece_page(*child), number)?,
                _ => self.copy(self.index.index_page(*child), level - 1, number)?,
            };
            *child = copied.unwrap_or(*child);
        }
        let pool = &self.tree.pages.pool;
        let place = match self.limit.bound(page) {
            Some(bound) => pool.allocate_below(page.frames, bound)?,
            None => None,
        };
        let mut new = match place {
            Some(new) => new,
            None if refs == children => return Ok(None),
            None => pool.allocate(page.frames)?,
        };
        self.init(&mut new, PageKind::PieceIndex, level);
        put_index(&mut new, self.index.value, first, &refs);
        if page == self.blob.page {
            put_root(&mut new, self.key, self.blob.len, self.blob.piece_frames);
        }
        self.old.push(page);
        Ok(Some(new.page().id.0))
    }

    fn copy_piece(&mut self, page: PageRef, number: u64) -> Result<Option<u64>> {
        let Some(bound) = self.limit.bound(page) else { return Ok(None) };
        let (tree, pool) = (self.tree, &self.tree.pages.pool);
        if !pool.with_space(|space| space.has_room_below(page.frames.into(), bound)) {
            return Ok(None);
        }
        // Through a buffer: a thread that waits for a frame should hold no pages.
        let bytes = pool.fix_shared(page)?;
        pieces::check_piece(&bytes, tree.state.id, self.index.value, number)
            .map_err(|what| Error::damaged(page, what))?;
        self.buffer.clear();
        self.buffer.extend_from_slice(&bytes[PAGE_HEADER..]);
        drop(bytes);
        let Some(mut new) = pool.allocate_below(page.frames, bound)? else { return Ok(None) };
        self.init(&mut new, PageKind::Piece, 0);
        new[PAGE_HEADER..].copy_from_slice(&self.buffer);
        self.old.push(page);
        self.left -= 1;
        Ok(Some(new.page().id.0))
    }

    fn init(&mut self, page: &mut ExclusiveGuard<'a>, kind: PageKind, level: u8) {
        self.new.push(init(self.change, page, kind, level, self.tree.state.id));
    }
}

impl TreeRef<'_> {
    /// Moves what has to move of the value of `key`, which is in pieces, as far as there is room.
    pub(super) fn move_pieces(
        self,
        key: &[u8],
        mut value: BlobRef,
        moves: &mut Moves<'_>,
    ) -> Result<()> {
        if u64::from(value.piece_frames) > self.pages.pool.capacity() / 4 {
            // A larger pool has stored it.
            return Ok(());
        }
        while let Some((new, moved)) = self.move_some_pieces(key, value, moves.limit)? {
            value = new;
            moves.moved += moved;
            moves.see(0)?;
        }
        Ok(())
    }

    /// Moves some pieces. Returns the new reference to the value, and how many frames have moved.
    /// `None` if there is nothing to move, no room, a reader, or another value by now.
    fn move_some_pieces(
        self,
        key: &[u8],
        value: BlobRef,
        limit: Limit,
    ) -> Result<Option<(BlobRef, u64)>> {
        let change = self.pages.change_to_free(0)?;
        self.check_dropped()?;
        let leaf = self.leaf_for_reading(key)?;
        match LeafBytes::from(&leaf).find(key)? {
            Some((_, LeafValue::Blob(found))) if found == value => {}
            _ => return Ok(None),
        }
        // While it is pinned, no other value gets its place: the same reference is the same value.
        let pin = self.pages.pin(value.page.id);
        drop(leaf);
        let index = Index::open(self.pages, self.state.id, value, Some(key))?;
        let level = index.shape.level;
        let mut copy = Copy {
            tree: self,
            change: &change,
            index,
            blob: value,
            key,
            limit,
            left: PIECES_AT_ONCE,
            new: Vec::new(),
            old: Vec::new(),
            buffer: Vec::new(),
        };
        let Some(root) = copy.copy(value.page, level, 0)? else { return Ok(None) };
        self.pages.write_unlogged(copy.new.iter().copied())?;
        change.next_group()?;
        let mut leaf = self.exclusive_leaf(key)?;
        let found = LeafBytes::from(&leaf).find(key)?;
        let Some((at, LeafValue::Blob(found))) = found else { return Ok(None) };
        if found != value {
            return Ok(None);
        }
        drop(pin);
        if self.pages.unlinked.has_readers(value.page.id) {
            return Ok(None);
        }
        let page = PageRef::new(root, value.page.frames);
        let new = BlobRef { page, ..value };
        self.replace_reference(&change, &mut leaf, at, new, |group| {
            copy.new.iter().for_each(|page| group.take(*page));
            copy.old.iter().for_each(|page| group.remove_page(*page));
        })?;
        drop(leaf);
        copy.new.clear();
        let moved = copy.old.iter().map(|page| u64::from(page.frames)).sum();
        copy.old.drain(..).for_each(|page| self.pages.free_logged(page));
        Ok(Some((new, moved)))
    }
}
