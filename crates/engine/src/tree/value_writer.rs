//! Storing a value bit by bit: [`ValueWriter`].

use std::io::{self, Write};

use vellum_pool::ExclusiveGuard;

use super::Access;
use super::apply::init;
use super::modify::{Existing, Incoming};
use crate::error::{Error, Result};
use crate::node::Payload;
use crate::page::PageKind;
use crate::page::blob::BlobRef;
use crate::page::pieces::{VALUE_MAX, fanout, piece_data, put_index, put_piece, put_root};
use crate::store::core::{Change, StoreCore};
use crate::store::header::FORMAT_VERSION_PIECES;
use crate::store::open::random_id;

/// The longest pieces that are written, in frames: 256 KiB.
const PIECE_FRAMES: u64 = 64;
/// Pieces for which the pool has room at least, if they have more than one page each.
const PIECES_IN_POOL: u64 = 32;

/// A value that is being stored bit by bit, with [`Write`].
///
/// The key has it when [`finish`](ValueWriter::finish) has returned. Dropped before, the writer
/// gives its space back and the key keeps what it had; so it does when a call has failed.
///
/// The writer takes a buffer of at most 256 KiB, holds no lock while the caller's code runs, and
/// takes nothing from others but space: `sync` does not wait for it, and a crash loses none of its
/// space. Its calls wait, as all changes do, while a snapshot lives: the thread that has one must
/// not write.
#[derive(Debug)]
pub struct ValueWriter<'a> {
    access: Access<'a>,
    key: Vec<u8>,
    piece_frames: u32,
    /// What comes into the next piece.
    buffer: Vec<u8>,
    /// Pieces that are stored.
    pieces: u64,
    /// Index pages that are not full, the lowest level first.
    levels: Vec<Level>,
    /// The value's own number, in all its pages.
    value: u64,
    /// The number under which its pages are set aside.
    aside: u64,
    failed: bool,
}

/// An index page that is not full.
#[derive(Debug, Default)]
struct Level {
    /// The number of the first piece below it.
    first: u64,
    refs: Vec<u64>,
}

/// Length of the pieces that are written with this pool.
fn piece_frames(core: &StoreCore) -> u32 {
    let frames = (core.pool.capacity() / PIECES_IN_POOL).min(PIECE_FRAMES) as u32;
    // Whole tree pages, as every page of the file.
    (frames / core.page_frames).max(1) * core.page_frames
}

impl<'a> ValueWriter<'a> {
    pub(crate) fn new(access: Access<'a>, key: &[u8]) -> Result<ValueWriter<'a>> {
        access.check_key(key)?;
        access.check_dropped()?;
        access.core.check_writable()?;
        access.core.try_free_ended();
        Ok(ValueWriter {
            access,
            key: key.to_vec(),
            piece_frames: piece_frames(access.core),
            buffer: Vec::new(),
            pieces: 0,
            levels: vec![Level::default()],
            value: random_id() as u64,
            aside: access.core.aside.begin(),
            failed: false,
        })
    }

    /// Bytes that were written so far.
    pub fn len(&self) -> u64 {
        self.pieces * self.piece_data() as u64 + self.buffer.len() as u64
    }

    /// Nothing was written so far.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gives the value to its key; true if it replaced another one.
    ///
    /// # Errors
    /// A full disk or pool, a failed read, damage. Then the key has what it had.
    pub fn finish(mut self) -> Result<bool> {
        self.check_failed()?;
        let core = self.access.core;
        let change = core.change()?;
        self.access.check_dropped()?;
        let replaced = if self.pieces == 0 {
            let value = Incoming::Bytes(&self.buffer);
            self.access.put_in(&change, &self.key, value, Existing::Replace)?
        } else {
            let blob = self.store_root(&change)?;
            core.need_version(&change, FORMAT_VERSION_PIECES);
            let payload = blob.encode();
            let payload = Payload::Blob(&payload);
            self.access.put_payload(&change, &self.key, payload, Existing::Replace)?
        };
        // Before a checkpoint can come between.
        core.aside.keep(self.aside);
        Ok(replaced)
    }

    fn piece_data(&self) -> usize {
        piece_data(self.piece_frames)
    }

    fn check_failed(&self) -> Result<()> {
        match self.failed {
            false => Ok(()),
            true => Err(Error::Input(io::Error::other("an earlier write of it failed"))),
        }
    }

    /// A new page of the value, which is set aside until the value is finished.
    fn allocate(
        &self,
        change: &Change<'_>,
        frames: u32,
        kind: PageKind,
        level: u8,
    ) -> Result<ExclusiveGuard<'a>> {
        let core = self.access.core;
        let mut guard = core.pool.allocate(frames)?;
        let page = init(change, &mut guard, kind, level, self.access.tree.id);
        core.aside.push(self.aside, page);
        Ok(guard)
    }

    fn store_piece(&mut self, change: &Change<'_>, data: &[u8]) -> Result<()> {
        self.make_room(change, 0)?;
        let mut guard = self.allocate(change, self.piece_frames, PageKind::Piece, 0)?;
        put_piece(&mut guard, self.value, self.pieces, data);
        self.push(0, self.pieces, guard.page().id.0);
        self.pieces += 1;
        Ok(())
    }

    /// Stores what is in the buffer as a piece.
    fn store_buffer(&mut self, change: &Change<'_>) -> Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.store_piece(change, &buffer)?;
        buffer.clear();
        self.buffer = buffer;
        Ok(())
    }

    fn push(&mut self, level: usize, first: u64, id: u64) {
        let level = &mut self.levels[level];
        if level.refs.is_empty() {
            level.first = first;
        }
        level.refs.push(id);
    }

    /// Stores the index page of a level if that is full.
    fn make_room(&mut self, change: &Change<'_>, level: usize) -> Result<()> {
        match self.levels[level].refs.len() < fanout(self.access.core.page_frames) {
            true => Ok(()),
            false => self.store_level(change, level),
        }
    }

    fn store_level(&mut self, change: &Change<'_>, level: usize) -> Result<()> {
        if self.levels.len() == level + 1 {
            self.levels.push(Level::default());
        }
        self.make_room(change, level + 1)?;
        let guard = self.index_page(change, level)?;
        let Level { first, .. } = std::mem::take(&mut self.levels[level]);
        self.push(level + 1, first, guard.page().id.0);
        Ok(())
    }

    fn index_page(&self, change: &Change<'_>, level: usize) -> Result<ExclusiveGuard<'a>> {
        let frames = self.access.core.page_frames;
        let mut guard = self.allocate(change, frames, PageKind::PieceIndex, level as u8 + 1)?;
        let Level { first, refs } = &self.levels[level];
        put_index(&mut guard, self.value, *first, refs);
        Ok(guard)
    }

    /// Stores what is left, up to the root.
    fn store_root(&mut self, change: &Change<'_>) -> Result<BlobRef> {
        let len = self.len();
        if !self.buffer.is_empty() {
            self.store_buffer(change)?;
        }
        // Storing a level may add one on top.
        let mut level = 0;
        while level + 1 < self.levels.len() {
            self.store_level(change, level)?;
            level += 1;
        }
        let mut guard = self.index_page(change, level)?;
        put_root(&mut guard, &self.key, len, self.piece_frames);
        Ok(BlobRef { page: guard.page(), len, piece_frames: self.piece_frames })
    }

    fn write_some(&mut self, bytes: &[u8]) -> Result<usize> {
        self.check_failed()?;
        let most = self.piece_data();
        let room = VALUE_MAX - self.len();
        let bytes = &bytes[..usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len())];
        if bytes.is_empty() {
            return Err(Error::TooLongForAny { max: VALUE_MAX });
        }
        // Bytes wait in the buffer for others, so that a value that fits one piece becomes none.
        if self.buffer.len() == most || self.buffer.is_empty() && bytes.len() > most {
            let change = self.access.core.change()?;
            self.access.check_dropped()?;
            if self.buffer.is_empty() {
                self.store_piece(&change, &bytes[..most])?;
                return Ok(most);
            }
            self.store_buffer(&change)?;
        }
        let count = bytes.len().min(most - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..count]);
        Ok(count)
    }
}

impl Write for ValueWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let written = self.write_some(bytes);
        self.failed |= written.is_err();
        Ok(written?)
    }

    /// Does nothing: bytes wait for those that come with them into a piece.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for ValueWriter<'_> {
    fn drop(&mut self) {
        self.access.core.abandon(self.aside);
    }
}
