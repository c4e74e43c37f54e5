//! One file of a log: a head, which says which segment it is, and the segment's blocks.
//!
//! What holds: the head is durable before a block of the segment is written, and the block's place
//! is allocated and was written before, so that a block changes no metadata.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use zerocopy::IntoBytes as _;

use super::folder::{Folder, FolderFile};
use super::is_unreadable;
use super::sync_method::{SyncMethod, write_all};
use crate::block::{BLOCK_BYTES, Block, Head, Unsound, at, crc};

const MAGIC: [u8; 8] = *b"VLLOGSEG";
const VERSION: u32 = 1;

/// How a new file is zeroed: blocks at once. The simulation has short segments, and crashes between
/// these writes, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// Ahead: a flush that comes meanwhile waits for one short write.
    Ahead = if cfg!(test) { 2 } else { 16 },
    /// A record waits for the room.
    Now = if cfg!(test) { 3 } else { 256 },
    /// A log is made: its first segment can begin with so many. A store that is opened for one
    /// change does not wait for more.
    First = if cfg!(test) { 4 } else { 128 },
}

/// What a step writes, at most. It stays: new memory would fault in for each step.
static ZEROES: LazyLock<Box<[Block]>> = LazyLock::new(|| vec![Block::ZERO; 256].into());

/// What the first block of a file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentHead {
    /// The identity of the log.
    pub(super) log: u64,
    /// The number of the segment; its first block is `number * blocks`.
    pub(super) number: u64,
    /// Blocks of each segment of the log, without the head.
    pub(super) blocks: u64,
    /// The oldest segment of the log when this one was made: from there on none is missing.
    pub(super) oldest: u64,
}

impl SegmentHead {
    fn to_block(self) -> Block {
        let mut block = Block::ZERO;
        let bytes = &mut block.0;
        bytes[8..16].copy_from_slice(&MAGIC);
        bytes[16..24].copy_from_slice(&self.log.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.number.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.oldest.to_le_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        let sum = crc(&bytes[4..]);
        bytes[..4].copy_from_slice(&sum.to_le_bytes());
        block
    }

    /// The head in a block that is whole. An unknown version is an error.
    fn of_block(block: &Block) -> Result<Option<SegmentHead>, u32> {
        let bytes = &block.0;
        let is_whole = u32::from_le_bytes(at(bytes, 0)) == crc(&bytes[4..]);
        if !is_whole || bytes[8..16] != MAGIC {
            return Ok(None);
        }
        match u32::from_le_bytes(at(bytes, 4)) {
            VERSION => {}
            other => return Err(other),
        }
        let number = |start| u64::from_le_bytes(at(bytes, start));
        let head = SegmentHead {
            log: number(16),
            number: number(24),
            blocks: number(32),
            oldest: number(40),
        };
        // Places in the log and in the file are numbers of 64 bits.
        let last = head.number.checked_add(1).and_then(|next| next.checked_mul(head.blocks));
        let fits = (1..1 << 40).contains(&head.blocks) && last.is_some_and(|last| last < 1 << 50);
        Ok((fits && head.oldest <= head.number).then_some(head))
    }
}

/// One file.
#[derive(Debug)]
pub(super) struct Segment {
    file: Box<dyn FolderFile>,
    sync_method: SyncMethod,
    /// Something was written since the last sync.
    dirty: AtomicBool,
}

impl Segment {
    pub(super) fn open(
        folder: &dyn Folder,
        name: &str,
        sync_method: SyncMethod,
        create: bool,
    ) -> io::Result<Segment> {
        let file = sync_method.open(folder, name, create)?;
        Ok(Segment { file, sync_method, dirty: AtomicBool::new(false) })
    }

    /// One that is only read.
    pub(super) fn to_read(file: Box<dyn FolderFile>) -> Segment {
        Segment { file, sync_method: SyncMethod::BufferedSync, dirty: AtomicBool::new(false) }
    }

    /// Reads the head; none if there is no whole one.
    pub(super) fn head(&self) -> io::Result<Option<SegmentHead>> {
        if self.file.len()? < BLOCK_BYTES as u64 {
            return Ok(None);
        }
        let mut block = [Block::ZERO];
        match self.file.read(0, block.as_mut_bytes()) {
            Err(error) if is_unreadable(&error) => return Ok(None),
            read => read?,
        }
        SegmentHead::of_block(&block[0]).map_err(|version| {
            io::Error::other(format!("a segment of version {version}, which a later program wrote"))
        })
    }

    /// Whether the file is as long as a segment.
    pub(super) fn has_length(&self, blocks: u64) -> io::Result<bool> {
        Ok(self.file.len()? == (blocks + 1) * BLOCK_BYTES as u64)
    }

    /// How many blocks the file has after its head.
    pub(super) fn blocks(&self) -> io::Result<u64> {
        Ok((self.file.len()? / BLOCK_BYTES as u64).saturating_sub(1))
    }

    /// Which segment a file without a head is, by its blocks: its log and its number. The log is
    /// the one given, if there is one.
    pub(super) fn infer(&self, log: Option<u64>, blocks: u64) -> io::Result<Option<(u64, u64)>> {
        let mut found: Option<(u64, u64)> = None;
        let mut block = [Block::ZERO];
        for index in 0..blocks {
            match self.read(index, &mut block) {
                Err(error) if is_unreadable(&error) => continue,
                read => read?,
            }
            let Ok(head) = Head::read(&block[0]) else { continue };
            let fits = head.number % blocks == index && log.is_none_or(|log| log == head.log);
            let number = head.number / blocks;
            if fits && found.is_none_or(|(_, other)| other < number) {
                found = Some((head.log, number));
            }
        }
        Ok(found)
    }

    /// The heads of its blocks, if it is this segment, or why there is none.
    pub(super) fn heads(
        &self,
        log: u64,
        number: u64,
        blocks: u64,
    ) -> io::Result<Vec<Result<Head, Unsound>>> {
        let mut block = [Block::ZERO];
        let head = |index| match self.read(index, &mut block) {
            Err(error) if is_unreadable(&error) => Ok(Err(Unsound::Unreadable)),
            read => read.map(|()| Head::expect(&block[0], log, number * blocks + index)),
        };
        (0..blocks).map(head).collect()
    }

    /// Writes the head, and makes it durable.
    pub(super) fn write_head(&self, head: SegmentHead) -> io::Result<()> {
        write_all(&*self.file, 0, [&[head.to_block()], &[]], false)?;
        self.file.sync()
    }

    /// Writes blocks; the segment's first one is number 0.
    pub(super) fn write(&self, first: u64, parts: [&[Block]; 2]) -> io::Result<()> {
        self.sync_method.write(&*self.file, (first + 1) * BLOCK_BYTES as u64, parts)?;
        // After the write, so that a sync that sees it covers the write.
        self.dirty.store(!self.sync_method.is_durable(), Ordering::Release);
        Ok(())
    }

    pub(super) fn read(&self, first: u64, blocks: &mut [Block]) -> io::Result<()> {
        self.file.read((first + 1) * BLOCK_BYTES as u64, blocks.as_mut_bytes())
    }

    /// Makes durable what was written.
    pub(super) fn sync(&self) -> io::Result<()> {
        if self.dirty.swap(false, Ordering::AcqRel) { self.file.sync() } else { Ok(()) }
    }

    /// Makes durable what an earlier process wrote, and has the storage itself asked from now on:
    /// the page cache may hold what the storage failed to take.
    pub(super) fn settle(&self) -> io::Result<()> {
        self.file.sync()?;
        self.file.forget_cache()
    }
}

/// A new file that is not ready: it is allocated, and zeroed piece by piece.
#[derive(Debug)]
pub(super) struct NewSegment {
    /// A segment once there are no more steps.
    pub(super) segment: Arc<Segment>,
    /// Blocks of the file, with its head.
    blocks: u64,
    zeroed: u64,
    is_allocated: bool,
}

impl NewSegment {
    /// Creates a file for a segment of so many blocks.
    pub(super) fn create(
        folder: &dyn Folder,
        name: &str,
        sync_method: SyncMethod,
        blocks: u64,
    ) -> io::Result<NewSegment> {
        let segment = Arc::new(Segment::open(folder, name, sync_method, true)?);
        Ok(NewSegment { segment, blocks: blocks + 1, zeroed: 0, is_allocated: false })
    }

    /// The blocks of the segment that are zeroed.
    pub(super) fn ready(&self) -> u64 {
        self.zeroed.saturating_sub(1)
    }

    pub(super) fn is_whole(&self) -> bool {
        self.zeroed == self.blocks
    }

    /// Whether the file can be a log's first segment, before all of it is zeroed.
    pub(super) fn can_begin(&self) -> bool {
        self.is_whole() || self.is_allocated && self.zeroed >= Pace::First as u64
    }

    /// Does the next step. Returns whether there are more.
    pub(super) fn step(&mut self, pace: Pace) -> io::Result<bool> {
        self.zero(pace)?;
        // A flush would wait for one sync of all zeros that the page cache has.
        self.settle(pace == Pace::Ahead)?;
        Ok(!self.is_whole())
    }

    /// Zeroes the next blocks.
    pub(super) fn zero(&mut self, pace: Pace) -> io::Result<()> {
        let file = &*self.segment.file;
        if self.is_whole() {
            return Ok(());
        }
        if self.zeroed == 0 {
            match file.allocate(self.blocks * BLOCK_BYTES as u64) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                allocated => {
                    allocated?;
                    self.is_allocated = true;
                }
            }
        }
        // What was only allocated would be marked as written with the first write to it.
        let zeroes = &ZEROES[..(pace as usize).min((self.blocks - self.zeroed) as usize)];
        write_all(file, self.zeroed * BLOCK_BYTES as u64, [zeroes, &[]], false)?;
        self.zeroed += zeroes.len() as u64;
        Ok(())
    }

    /// Makes durable what was zeroed, if that is all of the file, or if the page cache has it and
    /// `now` asks for it.
    pub(super) fn settle(&self, now: bool) -> io::Result<()> {
        let is_cached = !self.segment.sync_method.is_direct();
        if self.is_whole() || now && is_cached { self.segment.file.sync() } else { Ok(()) }
    }
}
