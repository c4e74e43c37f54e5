//! Values as streams: writes and reads a value of any length piece by piece, with any pool.
//!
//! [`ValueWriter`] stores pieces and an index above them. [`Parts`] finds and reads the pieces one
//! by one. [`ValueReader`] passes their bytes to the caller. The end of this file frees and checks
//! the pages of a value. [`pieces`] defines the bytes of a piece.
//!
//! If a whole value is too large for the pool to hold, the reader reads its page in parts, through
//! a small pool of its own: the scratch pool.

use std::borrow::Cow;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use vellum_pool::{
    ExclusiveGuard, PAGE_SIZE, PageId, PageRange, PageRef, Pool, PoolOptions, RawPages,
};

use super::TreeRef;
use super::check::Visitor;
use super::group::init;
use super::lookup::{LeafBytes, LeafValue};
use super::modify::{Existing, Incoming};
use crate::error::{Error, Result};
use crate::node::Payload;
use crate::page::blob::{self, BLOB_DATA, BlobRef, VALUE_MAX};
use crate::page::format::{StoreFormat, scratch_pool};
use crate::page::pieces::{
    self, PIECE_DATA, Shape, fanout, piece_data, put_index, put_piece, put_root,
};
use crate::page::runs::PageRuns;
use crate::page::{self, Checksum, PageKind};
use crate::store::header::FORMAT_VERSION_PIECES;
use crate::store::open::random_id;
use crate::store::pages::{Change, PageStore, RANGES_MAX, ValuePin, record_ranges};
use crate::value::{Blob, Value};

/// The longest pieces that a writer stores, in frames: 256 KiB.
const PIECE_FRAMES: u64 = 64;
/// The pool has room for at least this many pieces, if a piece is longer than one tree page.
const PIECES_IN_POOL: u64 = 32;
/// The pool holds whole values of up to this length, in frames, if they fit into a quarter of it.
const POOL_FRAMES: u64 = 64;
/// Length of the parts in which a reader reads a whole value through the scratch pool, in frames.
const PART_FRAMES: u32 = 64;
/// The number of parts for which the scratch pool has room: one that the caller reads, one that the
/// device reads, and one to evict.
const SCRATCH_PARTS: u64 = 3;
/// The most frames to read ahead: 4 MiB, and at most a sixteenth of the pool.
const AHEAD_FRAMES: u64 = 1024;

/// Stores a value piece by piece, with [`Write`].
///
/// The key has the value when [`finish`](ValueWriter::finish) has returned. If the writer is
/// dropped before, or if a call has failed, the writer frees its space and the key keeps its old
/// value.
///
/// The writer has a buffer of at most 256 KiB, and holds no lock between two calls. `sync` does not
/// wait for the writer, and a crash loses none of its space.
#[derive(Debug)]
pub struct ValueWriter<'a> {
    tree: TreeRef<'a>,
    key: Vec<u8>,
    piece_frames: u32,
    /// The data of the next piece.
    buffer: Vec<u8>,
    /// The number of stored pieces.
    pieces: u64,
    /// The index pages that are not full, the lowest level first.
    levels: Vec<Level>,
    /// The value's own number, which all of its pages store.
    value: u64,
    /// The number of the value in the list of unlinked pages.
    unlinked: u64,
    failed: bool,
}

/// An index page that is not full.
#[derive(Debug, Default)]
struct Level {
    /// The number of the first piece below it.
    first: u64,
    refs: Vec<u64>,
}

/// Length in frames of the pieces that a writer stores with this pool.
fn piece_frames(pages: &PageStore) -> u32 {
    let frames = (pages.pool.capacity() / PIECES_IN_POOL).min(PIECE_FRAMES) as u32;
    // A multiple of the tree page size, as every page of the file.
    (frames / pages.page_frames).max(1) * pages.page_frames
}

impl<'a> ValueWriter<'a> {
    pub(crate) fn new(tree: TreeRef<'a>, key: &[u8]) -> Result<ValueWriter<'a>> {
        tree.check_key(key)?;
        tree.check_dropped()?;
        tree.pages.check_writable()?;
        tree.pages.try_reclaim_unlinked();
        Ok(ValueWriter {
            tree,
            key: key.to_vec(),
            piece_frames: piece_frames(tree.pages),
            buffer: Vec::new(),
            pieces: 0,
            levels: vec![Level::default()],
            value: random_id() as u64,
            unlinked: tree.pages.unlinked.begin(),
            failed: false,
        })
    }

    /// The number of bytes that were written so far.
    pub fn len(&self) -> u64 {
        self.pieces * self.piece_data() as u64 + self.buffer.len() as u64
    }

    /// Whether nothing was written so far.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stores the value for its key. Returns true if it replaced another value.
    ///
    /// # Errors
    /// A full disk or pool, a failed read, damage. Then the key has its old value.
    pub fn finish(self) -> Result<bool> {
        self.finish_with(Existing::Replace)
    }

    /// Stores the value for its key, which must be new.
    ///
    /// # Errors
    /// [`KeyExists`](Error::KeyExists), and as [`finish`](ValueWriter::finish).
    pub fn finish_new(self) -> Result<()> {
        self.finish_with(Existing::Refuse).map(drop)
    }

    fn finish_with(mut self, existing: Existing) -> Result<bool> {
        self.check_failed()?;
        let tree = self.tree;
        let change = tree.pages.change()?;
        tree.check_dropped()?;
        let replaced = match self.store_rest(&change)? {
            None => tree.put_in(&change, &self.key, Incoming::Bytes(&self.buffer), existing)?,
            Some(blob) => {
                let payload = blob.encode();
                let pages = self.ranges();
                let with = tree.pages.log_most_taken(&change, &pages)?;
                let payload = Payload::Blob(&payload);
                tree.put_payload_of(&change, &self.key, payload, existing, with)?
            }
        };
        self.link(&change);
        Ok(replaced)
    }

    /// Stores the rest of the value: the last piece and the index. Does not store an entry for the
    /// key. `None` if the value is not in pieces, because all of it is in the buffer.
    pub(super) fn store_rest(&mut self, change: &Change<'_>) -> Result<Option<BlobRef>> {
        self.check_failed()?;
        if self.pieces == 0 {
            return Ok(None);
        }
        let blob = self.store_root(change)?;
        self.buffer = Vec::new();
        let pages = self.tree.pages;
        pages.write_unlogged(pages.unlinked.pages(self.unlinked).iter())?;
        Ok(Some(blob))
    }

    /// The bytes of a value that is not in pieces.
    pub(super) fn buffered(&self) -> &[u8] {
        &self.buffer
    }

    /// The pages of the value, as records have them. The group that adds the reference to the value
    /// says that they are in use.
    pub(super) fn ranges(&self) -> Vec<PageRef> {
        record_ranges(self.tree.pages.unlinked.pages(self.unlinked).ranges())
    }

    /// Within this change the tree has got a reference to the value. So the pages of the value are
    /// no longer unlinked at the next checkpoint.
    pub(super) fn link(&self, change: &Change<'_>) {
        let pages = self.tree.pages;
        if self.pieces > 0 {
            pages.require_version(change, FORMAT_VERSION_PIECES);
        }
        pages.unlinked.link(self.unlinked);
    }

    fn piece_data(&self) -> usize {
        piece_data(self.piece_frames)
    }

    fn check_failed(&self) -> Result<()> {
        match self.failed {
            false => Ok(()),
            true => Err(Error::Input(io::Error::other("an earlier write of the value failed"))),
        }
    }

    /// Allocates a page of the value. The page is unlinked until the value is finished.
    fn allocate(
        &self,
        change: &Change<'_>,
        frames: u32,
        kind: PageKind,
        level: u8,
    ) -> Result<ExclusiveGuard<'a>> {
        let pages = self.tree.pages;
        let mut guard = pages.pool.allocate(frames)?;
        let page = init(change, &mut guard, kind, level, self.tree.state.id);
        pages.unlinked.add_page(self.unlinked, page);
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

    /// Stores the contents of the buffer as a piece.
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

    /// Stores the index page of a level if it is full.
    fn make_room(&mut self, change: &Change<'_>, level: usize) -> Result<()> {
        match self.levels[level].refs.len() < fanout(self.tree.pages.page_frames) {
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
        let frames = self.tree.pages.page_frames;
        let mut guard = self.allocate(change, frames, PageKind::PieceIndex, level as u8 + 1)?;
        let Level { first, refs } = &self.levels[level];
        put_index(&mut guard, self.value, *first, refs);
        Ok(guard)
    }

    /// Stores the rest of the value, up to the root of its index.
    fn store_root(&mut self, change: &Change<'_>) -> Result<BlobRef> {
        let len = self.len();
        if !self.buffer.is_empty() {
            self.store_buffer(change)?;
        }
        // Storing a level may add a level above it.
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
        // The first bytes stay in the buffer, because a value that fits into one piece is not
        // stored in pieces.
        if self.buffer.len() == most || self.buffer.is_empty() && bytes.len() > most {
            let change = self.tree.pages.change()?;
            self.tree.check_dropped()?;
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

    /// Does nothing: bytes stay in the buffer until a piece is full.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for ValueWriter<'_> {
    fn drop(&mut self) {
        self.tree.pages.abandon(self.unlinked);
    }
}

/// The index of a value in pieces.
#[derive(Debug)]
pub(super) struct Index<'a> {
    pages: &'a PageStore,
    tree: u32,
    blob: BlobRef,
    pub shape: Shape,
    /// The value's number.
    pub value: u64,
    /// The pages of the pieces from the number `first` on, from the index page that was read last.
    known: Vec<u64>,
    first: u64,
}

impl<'a> Index<'a> {
    /// Opens the index of `blob` and checks its root. `key` is `None` if it is not known.
    pub(super) fn open(
        pages: &'a PageStore,
        tree: u32,
        blob: BlobRef,
        key: Option<&[u8]>,
    ) -> Result<Index<'a>> {
        let damaged = |what: String| Error::damaged(blob.page, what);
        let shape = Shape::of(blob);
        let file_pages = pages.pool.file_pages();
        if shape.pieces > file_pages || shape.frames() > file_pages {
            return Err(damaged(format!(
                "its value has {} bytes, but the file has fewer",
                blob.len
            )));
        }
        let root = pages.pool.fix_shared(blob.page)?;
        let value = pieces::check_root(&root, tree, blob, key).map_err(damaged)?;
        Ok(Index { pages, tree, blob, shape, value, known: Vec::new(), first: 0 })
    }

    pub(super) fn index_page(&self, id: u64) -> PageRef {
        PageRef { id: PageId(id), ..self.blob.page }
    }

    pub(super) fn piece_page(&self, id: u64) -> PageRef {
        PageRef { id: PageId(id), frames: self.blob.piece_frames }
    }

    /// The pages that an index page refers to.
    pub(super) fn children(&self, page: PageRef, level: u8, first: u64) -> Result<Vec<u64>> {
        let bytes = self.pages.pool.fix_shared(page)?;
        pieces::check_index(&bytes, self.tree, self.shape, self.value, (level, first))
            .map_err(|what| Error::damaged(page, what))?;
        Ok(pieces::refs(&bytes))
    }

    /// The page of a piece, if the index page that was read last refers to it.
    fn known(&self, number: u64) -> Option<PageRef> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.known.get(index).map(|id| self.piece_page(*id))
    }

    /// The page of a piece. The value has a piece of this number.
    fn piece(&mut self, number: u64) -> Result<PageRef> {
        if let Some(page) = self.known(number) {
            return Ok(page);
        }
        let (mut page, mut level, mut first) = (self.blob.page, self.shape.level, 0);
        loop {
            let children = self.children(page, level, first)?;
            if level == 1 {
                (self.known, self.first) = (children, first);
                let missing = || Error::damaged(page, format!("piece {number} is missing"));
                return self.known(number).ok_or_else(missing);
            }
            let step = self.shape.step(level);
            let index = (number - first) / step;
            page = self.index_page(children[index as usize]);
            (level, first) = (level - 1, first + index * step);
        }
    }

    /// Visits each page of the value, an index page before the pages to which it refers. `visit`
    /// gets the page, and the number of a piece. It returns whether to go on below an index page.
    /// It also gets the errors of damaged index pages.
    fn walk(&self, visit: &mut VisitPage<'_>) -> Result<()> {
        self.walk_below(self.blob.page, self.shape.level, 0, visit)
    }

    fn walk_below(
        &self,
        page: PageRef,
        level: u8,
        first: u64,
        visit: &mut VisitPage<'_>,
    ) -> Result<()> {
        if !visit(Ok((page, None)))? {
            return Ok(());
        }
        let children = match self.children(page, level, first) {
            Ok(children) => children,
            Err(error) => return visit(Err(error)).map(drop),
        };
        for (number, child) in (first..).step_by(self.shape.step(level) as usize).zip(children) {
            match level {
                1 => drop(visit(Ok((self.piece_page(child), Some(number))))?),
                _ => self.walk_below(self.index_page(child), level - 1, number, visit)?,
            }
        }
        Ok(())
    }

    /// Frees the pages below an index page, and then the index page. Recursion avoids a list of all
    /// pages.
    fn free_from(&self, page: PageRef, level: u8, first: u64) -> Result<()> {
        let mut outcome = Ok(());
        let children = self.children(page, level, first)?;
        for (number, child) in (first..).step_by(self.shape.step(level) as usize).zip(children) {
            match level {
                1 => self.pages.free_pages(self.piece_page(child).into()),
                _ => {
                    let freed = self.free_from(self.index_page(child), level - 1, number);
                    outcome = outcome.and(freed);
                }
            }
        }
        self.pages.free_pages(page.into());
        outcome
    }
}

type VisitPage<'v> = dyn FnMut(Result<(PageRef, Option<u64>)>) -> Result<bool> + 'v;

/// A whole value that the reader reads through the scratch pool.
#[derive(Debug)]
struct Whole {
    blob: BlobRef,
    /// A checksum of each part. The reader computed them while it checked the value's own checksum.
    /// By these it checks each part when it reads the part again.
    parts: Vec<u64>,
}

impl Whole {
    fn part(&self, number: u64) -> PageRef {
        let skipped = number as u32 * PART_FRAMES;
        let page = self.blob.page;
        PageRef::new(page.id.0 + u64::from(skipped), (page.frames - skipped).min(PART_FRAMES))
    }

    fn count(&self) -> u64 {
        self.blob.page.frames.div_ceil(PART_FRAMES).into()
    }
}

#[derive(Debug)]
enum Kind<'a> {
    Pieces(Index<'a>),
    Whole(Whole),
}

/// The parts of a value. A reader reads them one by one.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    tree: TreeRef<'a>,
    kind: Kind<'a>,
    /// The scratch pool, if the parts are too large for the store's pool. Such parts are in the
    /// file.
    scratch: Option<Pool>,
    /// The next part, if the caller reads the parts in order.
    next: u64,
    /// The reads of the parts before this one were started.
    started: u64,
}

/// Where a byte is: a part, and the offset in it.
pub(crate) struct PartOffset {
    pub part: u64,
    pub offset: usize,
}

impl<'a> Parts<'a> {
    /// The parts of a value in pieces.
    pub(crate) fn of_pieces(
        tree: TreeRef<'a>,
        blob: BlobRef,
        key: Option<&[u8]>,
    ) -> Result<Parts<'a>> {
        let index = Index::open(tree.pages, tree.state.id, blob, key)?;
        let (pages, frames) = (tree.pages, u64::from(blob.piece_frames));
        // A store with this pool writes smaller pieces. So these pieces were written with another
        // pool, and are not in memory.
        let scratch = match frames > pages.pool.capacity() / 4 {
            true => Some(scratch_pool(
                &pages.device,
                StoreFormat::to_read(),
                (frames * SCRATCH_PARTS).max(PoolOptions::MIN_FRAMES),
            )?),
            false => None,
        };
        Ok(Parts { tree, kind: Kind::Pieces(index), scratch, next: 0, started: 0 })
    }

    /// The parts of a whole value that is not in the pool. Reads and checks all of it.
    pub(crate) fn of_whole(tree: TreeRef<'a>, blob: BlobRef, key: &[u8]) -> Result<Parts<'a>> {
        let frames = u64::from(PART_FRAMES) * SCRATCH_PARTS;
        let scratch = scratch_pool(&tree.pages.device, Arc::new(RawPages), frames)?;
        let whole = Whole { blob, parts: Vec::new() };
        let (kind, scratch) = (Kind::Whole(whole), Some(scratch));
        let mut parts = Parts { tree, kind, scratch, next: 0, started: 0 };
        parts.check_whole(blob, key)?;
        Ok(parts)
    }

    fn check_whole(&mut self, blob: BlobRef, key: &[u8]) -> Result<()> {
        let page = blob.page;
        let mut sums = Vec::new();
        let (mut head, mut tail, mut sum) = (Vec::new(), Vec::new(), None::<Checksum>);
        for number in 0..u64::from(page.frames.div_ceil(PART_FRAMES)) {
            self.with_part(number, |bytes| {
                sums.push(checksum(CrcAlgorithm::Crc64Nvme, bytes));
                match &mut sum {
                    Some(sum) => sum.add(bytes),
                    None => {
                        head = bytes[..PAGE_SIZE].to_vec();
                        sum = Some(Checksum::of(bytes));
                    }
                }
                tail = bytes[bytes.len() - PAGE_SIZE..].to_vec();
            })?;
        }
        let computed = sum.map_or(0, |sum| sum.value());
        let header = page::verify_parts(page, &head, computed)?;
        let checked = match header.kind {
            PageKind::Blob => blob::check_head(&head, self.tree.state.id, blob.len)
                .and_then(|()| blob::check_tail(&tail, page.bytes() as u64, key, blob.len)),
            _ => Err("it is not the page of a value".into()),
        };
        checked.map_err(|what| Error::damaged(page, what))?;
        if let Kind::Whole(whole) = &mut self.kind {
            whole.parts = sums;
        }
        (self.next, self.started) = (0, 0);
        Ok(())
    }

    /// Where the byte at `position` of the value is.
    pub(crate) fn part_offset(&self, position: u64) -> PartOffset {
        let (before, each, offset) = match &self.kind {
            Kind::Pieces(index) => (0, piece_data(index.blob.piece_frames) as u64, PIECE_DATA),
            Kind::Whole(_) => (BLOB_DATA as u64, u64::from(PART_FRAMES) * PAGE_SIZE as u64, 0),
        };
        let at = before + position;
        PartOffset { part: at / each, offset: (at % each) as usize + offset }
    }

    fn count(&self) -> u64 {
        match &self.kind {
            Kind::Pieces(index) => index.shape.pieces,
            Kind::Whole(whole) => whole.count(),
        }
    }

    fn page(&mut self, part: u64) -> Result<PageRef> {
        match &mut self.kind {
            Kind::Pieces(index) => index.piece(part),
            Kind::Whole(whole) => Ok(whole.part(part)),
        }
    }

    /// Checks a part and calls `read` with it. Reads ahead if the caller reads the parts in order.
    pub(crate) fn with_part<T>(&mut self, part: u64, read: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let page = self.page(part)?;
        if part == self.next && part > 0 {
            self.read_ahead(part, page);
        } else {
            self.started = 0;
        }
        self.next = part + 1;
        let pool = self.scratch.as_ref().unwrap_or(&self.tree.pages.pool);
        let bytes = pool.fix_shared(page)?;
        let checked = match &self.kind {
            Kind::Pieces(index) => {
                pieces::check_piece(&bytes, self.tree.state.id, index.value, part)
            }
            Kind::Whole(Whole { parts, .. }) => match parts.get(part as usize) {
                Some(sum) if *sum != checksum(CrcAlgorithm::Crc64Nvme, &bytes) => {
                    Err("the device returns other bytes than before".into())
                }
                // There are no checksums yet while `check_whole` runs.
                _ => Ok(()),
            },
        };
        checked.map_err(|what| Error::damaged(page, what))?;
        Ok(read(&bytes))
    }

    /// Starts the reads of the next parts whose pages are known, when less than half of the parts
    /// that may be read ahead are left.
    fn read_ahead(&mut self, part: u64, page: PageRef) {
        let pool = self.scratch.as_ref().unwrap_or(&self.tree.pages.pool);
        let most = match self.scratch {
            Some(_) => 1,
            None => (pool.capacity() / 16).min(AHEAD_FRAMES) / u64::from(page.frames),
        };
        let started = self.started.max(part + 1);
        if most == 0 || started > part + 1 + most / 2 {
            return;
        }
        let end = (part + 1 + most).min(self.count());
        let pages: Vec<_> = match &self.kind {
            Kind::Pieces(index) => (started..end).map_while(|part| index.known(part)).collect(),
            Kind::Whole(whole) => (started..end).map(|part| whole.part(part)).collect(),
        };
        if !pages.is_empty() {
            pool.evict_and_prefetch(&pages);
        }
        self.started = started + pages.len() as u64;
    }
}

/// Reads the value of a key piece by piece, with [`Read`] and [`Seek`].
///
/// The reader reads the value that the key had when [`Tree::reader`](crate::Tree::reader) was
/// called, whatever other threads do. It has a buffer of at most 1 MiB. It also has a scratch pool
/// of at most 4 MiB if the value was written in pieces with a much larger pool, or if it is a whole
/// value that the pool does not hold. Such a whole value takes another 8 bytes for each 256 KiB of
/// its length.
///
/// The reader checks every byte before it returns it. It checks a value that was
/// [written](crate::Tree::writer) as a stream piece by piece. It checks a value that was stored in
/// one call as a whole when it is created, and again part by part when it reads it. The reader
/// returns an error of the store as an [`io::Error`] with an [`Error`] inside.
#[derive(Debug)]
pub struct ValueReader<'a> {
    tree: TreeRef<'a>,
    len: u64,
    position: u64,
    source: Source<'a>,
    // After `source`, so that the source drops its guards before the pages are freed.
    _pin: Option<ValuePin<'a>>,
}

#[derive(Debug)]
enum Source<'a> {
    Inline(Cow<'a, [u8]>),
    Guarded(Blob<'a>),
    Parts(Box<Buffered<'a>>),
}

/// The parts of a value, and a copy of one part.
#[derive(Debug)]
struct Buffered<'a> {
    parts: Parts<'a>,
    buffer: Vec<u8>,
    /// The part that is in the buffer.
    number: Option<u64>,
}

impl Buffered<'_> {
    /// Copies bytes from `from` on: as many as the part has and `target` has room for.
    fn copy(&mut self, from: PartOffset, target: &mut [u8]) -> Result<usize> {
        if self.number == Some(from.part) {
            return Ok(copy(&self.buffer[from.offset..], target));
        }
        let (parts, buffer) = (&mut self.parts, &mut self.buffer);
        let mut is_buffered = false;
        let copied = parts.with_part(from.part, |bytes| {
            let wanted = &bytes[from.offset..];
            if target.len() < wanted.len() {
                buffer.clear();
                buffer.extend_from_slice(bytes);
                is_buffered = true;
            }
            copy(wanted, target)
        })?;
        if is_buffered {
            self.number = Some(from.part);
        }
        Ok(copied)
    }
}

/// Copies as many bytes as fit. Returns their number.
fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let count = from.len().min(to.len());
    to[..count].copy_from_slice(&from[..count]);
    count
}

impl<'a> ValueReader<'a> {
    /// A reader of a value from a leaf.
    pub(crate) fn inline(tree: TreeRef<'a>, value: Cow<'a, [u8]>) -> ValueReader<'a> {
        let (len, source) = (value.len() as u64, Source::Inline(value));
        ValueReader { tree, len, position: 0, source, _pin: None }
    }

    /// Length of the value in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the value has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends the rest of the value to `value`.
    pub(crate) fn read_rest(&mut self, value: &mut Vec<u8>) -> Result<()> {
        let rest = self.len.saturating_sub(self.position);
        let no_memory = || Error::Input(io::ErrorKind::OutOfMemory.into());
        let rest = usize::try_from(rest).map_err(|_| no_memory())?;
        value.try_reserve_exact(rest).map_err(|_| no_memory())?;
        let mut filled = value.len();
        value.resize(filled + rest, 0);
        while filled < value.len() {
            match self.read_some(&mut value[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        value.truncate(filled);
        Ok(())
    }

    /// The value as a slice, if it is contiguous in memory.
    pub(crate) fn as_slice(&self) -> Option<&[u8]> {
        match &self.source {
            Source::Inline(value) => Some(value),
            Source::Guarded(blob) => Some(blob),
            Source::Parts(_) => None,
        }
    }

    fn read_some(&mut self, target: &mut [u8]) -> Result<usize> {
        let left = self.len.saturating_sub(self.position);
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(target.len());
        if wanted == 0 {
            return Ok(0);
        }
        self.tree.pages.check_open()?;
        let target = &mut target[..wanted];
        let copied = match &mut self.source {
            Source::Inline(value) => copy(&value[self.position as usize..], target),
            Source::Guarded(blob) => copy(&blob[self.position as usize..], target),
            Source::Parts(parts) => parts.copy(parts.parts.part_offset(self.position), target)?,
        };
        // If the store was closed meanwhile, another process may have written what the scratch pool
        // has read.
        self.tree.pages.check_open()?;
        self.position += copied as u64;
        Ok(copied)
    }
}

impl Read for ValueReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.read_some(buffer)?)
    }
}

impl Seek for ValueReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(by) => self.len.checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        let before = || {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "the caller tried to seek to a position before the beginning",
            )
        };
        self.position = position.ok_or_else(before)?;
        Ok(self.position)
    }
}

impl<'a> TreeRef<'a> {
    /// A reader of the value of `key`.
    pub(crate) fn reader(self, key: &[u8]) -> Result<Option<ValueReader<'a>>> {
        let leaf = self.leaf_for_reading(key)?;
        match LeafBytes::from(&leaf).find(key)? {
            None => Ok(None),
            Some((_, LeafValue::Inline(value))) => {
                Ok(Some(ValueReader::inline(self, value.to_vec().into())))
            }
            Some((_, LeafValue::Blob(blob))) => {
                let pin = self.pages.pin(blob.page.id);
                drop(leaf);
                self.open_reader(blob, key, pin).map(Some)
            }
        }
    }

    /// A reader of the value of a reference. `pin` keeps the value's pages.
    pub(crate) fn open_reader(
        self,
        blob: BlobRef,
        key: &[u8],
        pin: ValuePin<'a>,
    ) -> Result<ValueReader<'a>> {
        let buffered =
            |parts| Source::Parts(Box::new(Buffered { parts, buffer: Vec::new(), number: None }));
        let source = if !blob.is_whole() {
            buffered(Parts::of_pieces(self, blob, Some(key))?)
        } else if self.is_read_through_pool(blob) {
            Source::Guarded(self.open_blob(blob, key)?)
        } else {
            buffered(Parts::of_whole(self, blob, key)?)
        };
        Ok(ValueReader { tree: self, len: blob.len, position: 0, source, _pin: Some(pin) })
    }

    /// Whether a reader reads a whole value through the store's pool, and not through the scratch
    /// pool. A value that is not resident is in the file, because a stored blob does not change.
    fn is_read_through_pool(self, blob: BlobRef) -> bool {
        let pool = &self.pages.pool;
        let most = (pool.capacity() / 16).max(POOL_FRAMES).min(pool.capacity() / 4);
        u64::from(blob.page.frames) <= most || pool.is_resident(blob.page)
    }

    /// Checks a whole value. The caller makes sure that the store does not change.
    pub(crate) fn check_whole(self, blob: BlobRef, key: &[u8]) -> Result<()> {
        match self.is_read_through_pool(blob) {
            true => self.open_blob(blob, key).map(drop),
            false => Parts::of_whole(self, blob, key).map(drop),
        }
    }

    /// A copy of the value of a reader that is at the beginning.
    pub(crate) fn copy_of(self, mut reader: ValueReader<'a>) -> Result<Value<'a>> {
        let (len, max) = (reader.len, self.pages.max_blob());
        if len > max {
            return Err(Error::NeedsReader { len, max });
        }
        let mut value = Vec::new();
        reader.read_rest(&mut value)?;
        Ok(Value::Inline(Cow::Owned(value)))
    }
}

/// Frees the pages of a value that has no readers and to which no leaf refers any more.
///
/// # Errors
/// A failed read of the index, or damage there. Then no page was freed.
pub(crate) fn free_pages_of(pages: &PageStore, tree: u32, blob: BlobRef) -> Result<()> {
    if blob.is_whole() {
        pages.free_logged(blob.page);
        return Ok(());
    }
    let index = Index::open(pages, tree, blob, None)?;
    let (mut all, mut fits) = (PageRuns::default(), true);
    index.walk(&mut |found| {
        let (page, _) = found?;
        if fits {
            all.push(page);
            fits = all.ranges().len() <= RANGES_MAX;
        }
        Ok(true)
    })?;
    if fits {
        pages.free_pages(all);
        return Ok(());
    }
    // Recovery frees the whole value, unless a record says that the root is free. So that record
    // comes before those of the other pages. A crash between them loses pages.
    pages.log_freed(&[blob.page])?;
    // Every page of the index was read and is sound. If one cannot be read again, the rest of the
    // value stays allocated and unused.
    if let Err(error) = index.free_from(blob.page, index.shape.level, 0) {
        tracing::warn!("pages of a value stay unused: {error}");
    }
    Ok(())
}

/// The pages of a value.
///
/// # Errors
/// A failed read, or damage.
pub(crate) fn pages_of(store: &PageStore, tree: u32, blob: BlobRef) -> Result<PageRuns> {
    if blob.is_whole() {
        return Ok(blob.page.into());
    }
    let mut pages = PageRuns::default();
    Index::open(store, tree, blob, None)?.walk(&mut |found| {
        pages.push(found?.0);
        Ok(true)
    })?;
    Ok(pages)
}

impl<'a> TreeRef<'a> {
    /// Visits and checks all pages of a value in pieces.
    pub(crate) fn check_pieces(
        self,
        blob: BlobRef,
        key: &[u8],
        visitor: &mut dyn Visitor,
    ) -> Result<()> {
        let open = || {
            let index = Index::open(self.pages, self.state.id, blob, Some(key))?;
            Ok((index, Parts::of_pieces(self, blob, Some(key))?))
        };
        let (index, mut parts) = match open() {
            Ok(opened) => opened,
            Err(error) => {
                visitor.page(blob.page)?;
                return visitor.damage(error);
            }
        };
        index.walk(&mut |found| {
            let (page, number) = match found {
                Ok(found) => found,
                Err(error) => return visitor.damage(error).map(|()| false),
            };
            let first_visit = visitor.page(page)?;
            if let Some(number) = number.filter(|_| first_visit)
                && let Err(error) = parts.with_part(number, |_| ())
            {
                visitor.damage(error)?;
            }
            Ok(first_visit)
        })
    }
}

impl PageStore {
    /// The writer of a value, or a bulk load, has ended without finishing.
    pub(crate) fn abandon(&self, number: u64) {
        self.unlinked.abandon(number);
        self.try_reclaim_unlinked();
    }

    /// As [`reclaim_unlinked`](Self::reclaim_unlinked), within a change of its own. Does nothing
    /// while the gate is frozen, because the caller may be the thread that has frozen it.
    pub(crate) fn try_reclaim_unlinked(&self) {
        if let Some(_permit) = self.gate.try_begin_change() {
            self.reclaim_unlinked();
        }
    }

    /// Frees the unlinked pages whose reader or writer has ended. The caller has begun a change or
    /// has frozen the gate.
    pub(crate) fn reclaim_unlinked(&self) {
        let (ended, unreadable) = self.unlinked.take_reclaimable();
        ended.into_iter().for_each(|pages| self.free_pages(pages));
        for frames in self.unlinked.take_lost() {
            self.free_lost(frames);
        }
        unreadable.into_iter().for_each(|(tree, blob)| self.free_value(tree, blob));
    }

    /// Frees the pages of a removed value, or leaves them to its last reader. If the pages cannot
    /// be found now, a later call tries again.
    pub(crate) fn free_value(&self, tree: u32, blob: BlobRef) {
        let freed = match self.unlinked.has_readers(blob.page.id) {
            false => free_pages_of(self, tree, blob),
            true => pages_of(self, tree, blob).map(|pages| {
                // A recovery has no readers, and must not lose the pages. The group has logged the
                // page of a whole value.
                if !blob.is_whole()
                    && let Err(error) = self.log_freed(&record_ranges(pages.ranges()))
                {
                    tracing::debug!("a crash before the next checkpoint loses pages: {error}");
                }
                if let Some(pages) = self.unlinked.unlink(blob.page.id, pages) {
                    self.free_pages(pages);
                }
            }),
        };
        match freed {
            Ok(()) => {}
            Err(error) => {
                tracing::warn!("the pages of a value cannot be freed yet: {error}");
                self.unlinked.add_unreadable([(tree, blob)]);
            }
        }
    }

    /// Frees pages to which nothing refers any more, and logs that. A reader that holds a page
    /// keeps it until it lets go. If the log has no room, the pages are freed after the next
    /// checkpoint. The free map of that has them already.
    pub(crate) fn free_pages(&self, pages: PageRuns) {
        if let Err(error) = self.log_freed(&record_ranges(pages.ranges())) {
            tracing::debug!("pages of a value are freed later: {error}");
            self.unlinked.add_reclaimable(pages);
            return;
        }
        pages.iter().for_each(|page| self.free_logged(page));
    }

    /// Frees ranges of frames that no tree refers to, whatever pages lie in them, and logs that.
    /// Returns the number of frames. As [`free_pages`](Self::free_pages), frees them later if it
    /// must.
    pub(crate) fn free_lost(&self, frames: PageRuns) -> u64 {
        if let Err(error) = self.log_freed(&record_ranges(frames.ranges())) {
            tracing::debug!("lost pages are freed later: {error}");
            let count = frames.ranges().map(|(_, count)| count).sum();
            self.unlinked.add_lost(frames);
            return count;
        }
        let free = |(start, count)| self.pool.free_range(PageRange::new(start, count));
        frames.ranges().map(free).sum()
    }

    /// Frees a page to which nothing refers any more. A group has logged that, or has never logged
    /// that the page is in use.
    pub(crate) fn free_logged(&self, page: PageRef) {
        if let Err(error) = self.pool.free_page(page) {
            tracing::warn!("{page} could not be freed and stays unused: {error}");
        }
    }
}
