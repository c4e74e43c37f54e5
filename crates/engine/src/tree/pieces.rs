//! Where the parts of a value are, and reading them one by one.
//!
//! A value in pieces is found by its index. A whole value that is larger than what the pool should
//! hold is read past the pool, in parts of its page.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use vellum_pool::{PAGE_SIZE, PageId, PageRef, Pool, RawPages};

use super::Access;
use super::check::Visitor;
use super::page_runs::PageRuns;
use crate::error::{Error, Result};
use crate::page::blob::{self, BLOB_DATA, BlobRef};
use crate::page::format::StoreFormat;
use crate::page::pieces::{self, PIECE_DATA, Shape, piece_data};
use crate::page::{self, Checksum, PageKind};
use crate::store::core::StoreCore;
use crate::store::open::scratch_pool;

/// Length of the parts in which a whole value is read past the pool, in frames.
const PART_FRAMES: u32 = 64;

/// Parts for which a pool beside the store's own has room: one that is read from, one that is on
/// its way, and one that has to leave.
const SCRATCH_PARTS: u64 = 3;

/// The most frames that are read ahead: 4 MiB, or a sixteenth of the pool.
const AHEAD_FRAMES: u64 = 1024;

/// The index of a value in pieces.
#[derive(Debug)]
struct Index<'a> {
    core: &'a StoreCore,
    tree: u32,
    blob: BlobRef,
    shape: Shape,
    /// The value's number.
    value: u64,
    /// Pieces from the number `first` on.
    known: Vec<u64>,
    first: u64,
}

impl<'a> Index<'a> {
    /// `key` is none if it is not known.
    fn open(
        core: &'a StoreCore,
        tree: u32,
        blob: BlobRef,
        key: Option<&[u8]>,
    ) -> Result<Index<'a>> {
        let damaged = |what: String| Error::damaged(blob.page, what);
        let shape = Shape::of(blob);
        let file_pages = core.pool.file_pages();
        if shape.pieces > file_pages || shape.frames() > file_pages {
            return Err(damaged(format!("its value has {} bytes, the file fewer", blob.len)));
        }
        let root = core.pool.fix_shared(blob.page)?;
        let value = pieces::check_root(&root, tree, blob, key).map_err(damaged)?;
        Ok(Index { core, tree, blob, shape, value, known: Vec::new(), first: 0 })
    }

    fn index_page(&self, id: u64) -> PageRef {
        PageRef { id: PageId(id), ..self.blob.page }
    }

    fn piece_page(&self, id: u64) -> PageRef {
        PageRef { id: PageId(id), frames: self.blob.piece_frames }
    }

    /// The pages that an index page refers to.
    fn children(&self, page: PageRef, level: u8, first: u64) -> Result<Vec<u64>> {
        let bytes = self.core.pool.fix_shared(page)?;
        pieces::check_index(&bytes, self.tree, self.shape, self.value, (level, first))
            .map_err(|what| Error::damaged(page, what))?;
        Ok(pieces::refs(&bytes))
    }

    /// The place of a piece, if the last one that was looked up stands beside it.
    fn known(&self, number: u64) -> Option<PageRef> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.known.get(index).map(|id| self.piece_page(*id))
    }

    /// The place of a piece; the value has one of this number.
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

    /// Visits each page, an index page before those that it refers to. `visit` gets a piece's
    /// number, says whether to go on below an index page, and is told of index pages that are
    /// damaged.
    fn walk(&self, visit: &mut Visit<'_>) -> Result<()> {
        self.walk_below(self.blob.page, self.shape.level, 0, visit)
    }

    fn walk_below(
        &self,
        page: PageRef,
        level: u8,
        first: u64,
        visit: &mut Visit<'_>,
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
}

type Visit<'v> = dyn FnMut(Result<(PageRef, Option<u64>)>) -> Result<bool> + 'v;

/// A whole value that is read past the pool.
#[derive(Debug)]
struct Whole {
    blob: BlobRef,
    /// A checksum of each part, from when the value's own was checked: so each part is known to be
    /// what was checked then.
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

/// The parts of a value, which are read one by one.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    access: Access<'a>,
    kind: Kind<'a>,
    /// Reads past the store's pool: the parts are too large for that, and so are in the file.
    scratch: Option<Pool>,
    /// The part that comes next if parts are read in their order.
    next: u64,
    /// The reads of the parts before this one were started.
    started: u64,
}

/// A part, and where in it a byte is.
pub(crate) struct Place {
    pub part: u64,
    pub offset: usize,
}

impl<'a> Parts<'a> {
    /// The parts of a value in pieces.
    pub(crate) fn of_pieces(
        access: Access<'a>,
        blob: BlobRef,
        key: Option<&[u8]>,
    ) -> Result<Parts<'a>> {
        let index = Index::open(access.core, access.tree.id, blob, key)?;
        let (core, frames) = (access.core, u64::from(blob.piece_frames));
        // Pieces that a pool writes are smaller than that, so those of others are not in memory.
        let scratch = match frames > core.pool.capacity() / 4 {
            true => Some(scratch_pool(
                &core.device,
                Arc::new(StoreFormat::default()),
                (frames * SCRATCH_PARTS).max(vellum_pool::PoolOptions::MIN_FRAMES),
            )?),
            false => None,
        };
        Ok(Parts { access, kind: Kind::Pieces(index), scratch, next: 0, started: 0 })
    }

    /// The parts of a whole value that is not in the pool's memory, once all of it was checked.
    pub(crate) fn of_whole(access: Access<'a>, blob: BlobRef, key: &[u8]) -> Result<Parts<'a>> {
        let frames = u64::from(PART_FRAMES) * SCRATCH_PARTS;
        let scratch = scratch_pool(&access.core.device, Arc::new(RawPages), frames)?;
        let whole = Whole { blob, parts: Vec::new() };
        let (kind, scratch) = (Kind::Whole(whole), Some(scratch));
        let mut parts = Parts { access, kind, scratch, next: 0, started: 0 };
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
            PageKind::Blob => blob::check_head(&head, self.access.tree.id, blob.len)
                .and_then(|()| blob::check_tail(&tail, page.bytes() as u64, key, blob.len)),
            _ => Err("it is no value".into()),
        };
        checked.map_err(|what| Error::damaged(page, what))?;
        if let Kind::Whole(whole) = &mut self.kind {
            whole.parts = sums;
        }
        (self.next, self.started) = (0, 0);
        Ok(())
    }

    /// Where the byte `position` of the value is.
    pub(crate) fn place(&self, position: u64) -> Place {
        let (before, each, offset) = match &self.kind {
            Kind::Pieces(index) => (0, piece_data(index.blob.piece_frames) as u64, PIECE_DATA),
            Kind::Whole(_) => (BLOB_DATA as u64, u64::from(PART_FRAMES) * PAGE_SIZE as u64, 0),
        };
        let at = before + position;
        Place { part: at / each, offset: (at % each) as usize + offset }
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

    /// Hands a part to `read`, once it was checked. Parts that are read in their order are read
    /// ahead.
    pub(crate) fn with_part<T>(&mut self, part: u64, read: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let page = self.page(part)?;
        if part == self.next && part > 0 {
            self.read_ahead(part, page);
        } else {
            self.started = 0;
        }
        self.next = part + 1;
        let pool = self.scratch.as_ref().unwrap_or(&self.access.core.pool);
        let bytes = pool.fix_shared(page)?;
        let checked = match &self.kind {
            Kind::Pieces(index) => {
                pieces::check_piece(&bytes, self.access.tree.id, index.value, part)
            }
            Kind::Whole(Whole { parts, .. }) => match parts.get(part as usize) {
                Some(sum) if *sum != checksum(CrcAlgorithm::Crc64Nvme, &bytes) => {
                    Err("the device gives other bytes than before".into())
                }
                // Without checksums the value is being checked now.
                _ => Ok(()),
            },
        };
        checked.map_err(|what| Error::damaged(page, what))?;
        Ok(read(&bytes))
    }

    /// Starts the reads of the parts behind `part`, as far as their places are known, once half of
    /// those that may be on their way have come.
    fn read_ahead(&mut self, part: u64, page: PageRef) {
        let pool = self.scratch.as_ref().unwrap_or(&self.access.core.pool);
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
            pool.bring_in(&pages);
        }
        self.started = started + pages.len() as u64;
    }
}

/// The pages of a value.
///
/// # Errors
/// A failed read, or damage.
pub(crate) fn pages_of(core: &StoreCore, tree: u32, blob: BlobRef) -> Result<PageRuns> {
    let mut pages = PageRuns::default();
    if blob.is_whole() {
        pages.push(blob.page);
        return Ok(pages);
    }
    Index::open(core, tree, blob, None)?.walk(&mut |found| {
        pages.push(found?.0);
        Ok(true)
    })?;
    Ok(pages)
}

impl<'a> Access<'a> {
    /// Visits and checks all pages of a value in pieces.
    pub(crate) fn check_pieces(
        self,
        blob: BlobRef,
        key: &[u8],
        visitor: &mut dyn Visitor,
    ) -> Result<()> {
        let open = || {
            let index = Index::open(self.core, self.tree.id, blob, Some(key))?;
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
            let fresh = visitor.page(page)?;
            if let Some(number) = number.filter(|_| fresh)
                && let Err(error) = parts.with_part(number, |_| ())
            {
                visitor.damage(error)?;
            }
            Ok(fresh)
        })
    }
}
