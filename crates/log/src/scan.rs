//! Reading a log from a place on, record by record, and telling its end from damage.
//!
//! The end is the first block that is not the next one. It is damage instead if a later block shows
//! that it had been durable: each block says which blocks were durable when it was sealed.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::block::{Block, CLOSES, HEAD, Head, LENGTH, Lsn, PAYLOAD, STARTS, Unsound};
use crate::device::{LogDevice, is_unreadable};
use crate::error::LogError;
use crate::planted::{LogBug, is_planted};
use crate::read_ahead::ReadAhead;

/// The most blocks that are read at once.
const CHUNK: usize = 64;

/// A record, as it was appended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number.
    pub lsn: Lsn,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A record, in the memory of the scan that has read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordRef<'a> {
    /// Its number.
    pub lsn: Lsn,
    /// Its bytes.
    pub bytes: &'a [u8],
}

impl RecordRef<'_> {
    /// A copy of it.
    pub fn to_record(self) -> Record {
        Record { lsn: self.lsn, bytes: self.bytes.to_vec() }
    }
}

/// Where a log ends and why there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The first block that does not belong to the log: the next records go there.
    pub lsn: Lsn,
    /// Why it does not.
    pub why: EndReason,
    /// A record that was never acknowledged, of which only the beginning is there.
    pub unfinished: Option<Lsn>,
}

/// Why a log ends where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndReason {
    /// The log was closed there.
    Closed,
    /// What stands there is not the next block, and nothing shows that it ever was durable.
    Unsound(Unsound),
    /// There is no more room for blocks.
    Room,
    /// The caller wanted no more.
    Limit,
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EndReason::Closed => f.write_str("the log was closed there"),
            EndReason::Unsound(why) => write!(f, "the next block was not finished: {why}"),
            EndReason::Room => f.write_str("the log was written to the end of its room"),
            EndReason::Limit => f.write_str("what follows is not durable yet"),
        }
    }
}

/// Reads records in order. See [`Log::scan`](crate::Log::scan).
#[derive(Debug)]
pub struct Scan<'a> {
    device: &'a dyn LogDevice,
    room: Range<u64>,
    /// Blocks before this are known to be durable.
    known: u64,
    /// Whether `known` is also where to stop.
    stops: bool,
    chunk: Vec<Block>,
    chunk_first: u64,
    /// Blocks of the next chunk.
    chunk_next: usize,
    /// For a scan that may read ahead, until it does so.
    ahead_device: Option<Arc<dyn LogDevice>>,
    ahead: Option<ReadAhead>,
    /// The block that is read now.
    number: u64,
    head: Option<Head>,
    /// The next byte of its payload.
    cursor: usize,
    /// Records before this are passed over.
    from: Lsn,
    partial: Option<Partial>,
    /// The bytes of the last record that was in several blocks.
    joined: Vec<u8>,
    /// The scan began with a record's middle, and has not seen the end of that one.
    skips: bool,
    /// The block before this one closed the log.
    closed: bool,
    end: Option<End>,
    /// The incarnation of the block before.
    before: Option<u64>,
    /// The greatest incarnation of any block that was read, after the end, too.
    newest: u64,
    /// The storage did not give some block back.
    hidden: bool,
    /// The block at the end may be the next one in part.
    torn: bool,
}

/// Where the bytes of a record are.
enum Bytes {
    /// In the block that is read now.
    InBlock(Range<usize>),
    /// In `joined`.
    Joined,
}

/// A record that began in an earlier block.
#[derive(Debug)]
struct Partial {
    lsn: Lsn,
    /// Its length, then itself.
    bytes: Vec<u8>,
}

impl Partial {
    /// Bytes that are missing: of the length, or of the record.
    fn missing(&self) -> usize {
        match self.bytes.first_chunk::<LENGTH>() {
            None => LENGTH - self.bytes.len(),
            Some(length) => LENGTH + u32::from_le_bytes(*length) as usize - self.bytes.len(),
        }
    }

    fn is_whole(&self) -> bool {
        self.bytes.len() >= LENGTH && self.missing() == 0
    }
}

/// The log has become durable up to `from`: the block before it is there, and so is its own unless
/// the number is that of the block's first byte for records, where a log may have ended. Otherwise
/// an opening would go on after a hole. Returns the incarnation of the block before.
pub(crate) fn check_reaches(device: &dyn LogDevice, from: Lsn) -> Result<Option<u64>, LogError> {
    let (room, block) = (device.scan(), from.block());
    let mut before = None;
    let first = block.saturating_sub(1).max(room.start);
    let is_first = from.0 <= Lsn::of_block(block).0 + HEAD as u64;
    let end = if is_first { block } else { block + 1 };
    for number in first..end.min(room.end) {
        let mut read = [Block::ZERO];
        let doing = || format!("reading the log at {}", Lsn::of_block(number));
        device.read(number, &mut read).map_err(LogError::io(doing()))?;
        match Head::expect(&read[0], device.identity(), number) {
            Ok(head) if number < block => before = Some(head.incarnation),
            Ok(head) if head.follows(before) => {}
            _ => return Err(LogError::NotAppended { lsn: from, end: Lsn::of_block(number) }),
        }
    }
    Ok(before)
}

impl<'a> Scan<'a> {
    /// Reads from the record `from` on, or from the oldest one that begins in the log. Blocks
    /// before `durable` are known to be there; if there is such a number, the scan ends at it.
    /// `before` is the incarnation of the block before, if that is known.
    pub(crate) fn new(
        device: &'a dyn LogDevice,
        from: Option<Lsn>,
        durable: Option<u64>,
        before: Option<u64>,
    ) -> Result<Scan<'a>, LogError> {
        let room = device.scan();
        let start = from.map_or(room.start, Lsn::block);
        if start < room.start || start > room.end {
            let (lsn, begin) = (Lsn::of_block(start), Lsn::of_block(room.start));
            let end = Lsn::of_block(room.end);
            return Err(match start < room.start {
                true => LogError::Trimmed { lsn, begin },
                false => LogError::NotAppended { lsn, end },
            });
        }
        Ok(Scan {
            device,
            room,
            known: durable.unwrap_or(start),
            stops: durable.is_some(),
            chunk: Vec::new(),
            chunk_first: start,
            chunk_next: CHUNK,
            ahead_device: None,
            ahead: None,
            number: start,
            head: None,
            cursor: 0,
            from: from.unwrap_or(Lsn(0)),
            partial: None,
            joined: Vec::new(),
            skips: true,
            closed: false,
            end: None,
            before,
            newest: before.unwrap_or(0),
            hidden: false,
            torn: false,
        })
    }

    /// Has a thread read ahead if the scan needs more than one chunk. `device` is the scan's.
    pub(crate) fn read_ahead(&mut self, device: Arc<dyn LogDevice>) {
        self.ahead_device = Some(device);
    }

    /// Has the scan begin with one block, and read twice as much each time: its caller may want one
    /// record alone.
    pub(crate) fn begin_small(mut self) -> Scan<'a> {
        self.chunk_next = 1;
        self
    }

    /// Where the log ends, once all records were read.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// The greatest incarnation of all blocks that were read.
    pub(crate) fn newest(&self) -> u64 {
        self.newest
    }

    /// The incarnation of the block that was read last.
    pub(crate) fn incarnation(&self) -> u64 {
        self.before.unwrap_or(0)
    }

    /// Whether some block could not be read.
    pub(crate) fn has_hidden(&self) -> bool {
        self.hidden
    }

    /// Whether what stands at the end may be a part of the next block: a write that was torn again
    /// could complete it.
    pub(crate) fn ends_torn(&self) -> bool {
        self.torn
    }

    /// The next record; none at the end.
    ///
    /// # Errors
    /// `Damaged`, or what the storage said. Nothing is read after that.
    pub fn next_record(&mut self) -> Result<Option<Record>, LogError> {
        Ok(self.next_ref()?.map(RecordRef::to_record))
    }

    /// The next record, without a copy of it; none at the end.
    ///
    /// # Errors
    /// As [`next_record`](Scan::next_record).
    pub fn next_ref(&mut self) -> Result<Option<RecordRef<'_>>, LogError> {
        let Some((lsn, bytes)) = self.find_next()? else { return Ok(None) };
        let bytes = match bytes {
            Bytes::InBlock(range) => &self.block_read().0[range],
            Bytes::Joined => &self.joined,
        };
        Ok(Some(RecordRef { lsn, bytes }))
    }

    /// The block that is read now.
    fn block_read(&self) -> &Block {
        &self.chunk[(self.number - self.chunk_first) as usize]
    }

    /// The number and the place of the next record.
    fn find_next(&mut self) -> Result<Option<(Lsn, Bytes)>, LogError> {
        loop {
            if self.end.is_some() {
                return Ok(self.believed_tail());
            }
            let Some(head) = self.head else {
                self.enter()?;
                continue;
            };
            let left = usize::from(head.used).saturating_sub(self.cursor);
            if left == 0 {
                self.leave(head)?;
                continue;
            }
            let lsn = Lsn(Lsn::of_block(self.number).0 + (HEAD + self.cursor) as u64);
            if let Some(range) = self.whole_record(head) {
                self.cursor = range.end - HEAD;
                if lsn < self.from {
                    continue;
                }
                return Ok(Some((lsn, Bytes::InBlock(range))));
            }
            let joined = &mut self.joined;
            let partial = self.partial.get_or_insert_with(|| {
                joined.clear();
                Partial { lsn, bytes: std::mem::take(joined) }
            });
            let taken = partial.missing().min(left);
            let from = HEAD + self.cursor;
            let block = &self.chunk[(self.number - self.chunk_first) as usize];
            partial.bytes.extend_from_slice(&block.0[from..from + taken]);
            self.cursor += taken;
            if let Some(whole) = self.partial.take_if(|partial| partial.is_whole()) {
                let carries = usize::from(head.carry);
                if whole.lsn.block() < self.number && self.cursor != carries {
                    return Err(self.inconsistent("a record ends elsewhere than its block says"));
                }
                if whole.lsn < self.from {
                    continue;
                }
                self.joined = whole.bytes;
                self.joined.drain(..LENGTH);
                return Ok(Some((whole.lsn, Bytes::Joined)));
            }
        }
    }

    /// The place of the record that begins at the cursor, if it ends in the same block.
    fn whole_record(&self, head: Head) -> Option<Range<usize>> {
        if self.partial.is_some() {
            return None;
        }
        let from = HEAD + self.cursor;
        let rest = self.block_read().0.get(from..HEAD + usize::from(head.used))?;
        let (length, rest) = rest.split_first_chunk::<LENGTH>()?;
        let length = u32::from_le_bytes(*length) as usize;
        (length <= rest.len()).then(|| from + LENGTH..from + LENGTH + length)
    }

    /// The beginning of the last record as a whole one, if that bug is planted.
    fn believed_tail(&mut self) -> Option<(Lsn, Bytes)> {
        if !is_planted(LogBug::BelievedTail) {
            return None;
        }
        let Partial { lsn, mut bytes } = self.partial.take()?;
        let length = u32::from_le_bytes(*bytes.first_chunk::<LENGTH>()?) as usize;
        bytes.resize(LENGTH + length, 0);
        self.joined = bytes.split_off(LENGTH);
        Some((lsn, Bytes::Joined))
    }

    /// Begins with the next block, or ends.
    fn enter(&mut self) -> Result<(), LogError> {
        if self.stops && self.number >= self.known {
            self.finish(EndReason::Limit);
            return Ok(());
        }
        if self.number == self.room.end {
            self.finish(EndReason::Room);
            return Ok(());
        }
        let head = match self.block(self.number)? {
            Ok(head) => head,
            Err(why) => return self.conclude(why),
        };
        if !head.follows(self.before) {
            return self.conclude(Unsound::Incarnation(head.incarnation));
        }
        self.before = Some(head.incarnation);
        if head.flags & STARTS != 0 {
            // What the block before left unfinished was never acknowledged.
            self.partial = None;
        }
        let carry = usize::from(head.carry);
        if self.skips {
            (self.cursor, self.skips) = (carry, carry == PAYLOAD);
        } else if !self.continues(carry) {
            return Err(self.inconsistent("a block does not go on where the one before it ends"));
        } else {
            self.cursor = 0;
        }
        self.head = Some(head);
        Ok(())
    }

    /// Whether a block that begins with so many bytes of an earlier record is the next one.
    fn continues(&self, carry: usize) -> bool {
        match &self.partial {
            None => carry == 0,
            Some(partial) if partial.bytes.len() < LENGTH => carry >= partial.missing(),
            Some(partial) => carry == partial.missing().min(PAYLOAD),
        }
    }

    /// A block is read to its end.
    fn leave(&mut self, head: Head) -> Result<(), LogError> {
        if self.partial.is_some() && usize::from(head.used) < PAYLOAD {
            return Err(self.inconsistent("a record is longer than what follows it"));
        }
        self.closed = head.flags & CLOSES != 0;
        (self.head, self.number) = (None, self.number + 1);
        Ok(())
    }

    /// Reads a block, through the chunk.
    fn block(&mut self, number: u64) -> Result<Result<Head, Unsound>, LogError> {
        let chunk = self.chunk_first..self.chunk_first + self.chunk.len() as u64;
        if !chunk.contains(&number) && !self.take_chunk_ahead(number) {
            let count = (self.room.end - number).min(self.chunk_next as u64) as usize;
            self.chunk_next = CHUNK.min(2 * self.chunk_next);
            self.chunk.resize(count, Block::ZERO);
            self.chunk_first = number;
            let mut read = self.device.read(number, &mut self.chunk);
            if read.is_err() {
                // A later block of the chunk may be to blame.
                self.chunk.truncate(1);
                read = self.device.read(number, &mut self.chunk);
            }
            if let Err(error) = read {
                self.chunk.clear();
                self.check_trimmed(number)?;
                if is_unreadable(&error) {
                    tracing::warn!(block = number, %error, "the log has an unreadable block");
                    self.hidden = true;
                    return Ok(Err(Unsound::Unreadable));
                }
                let doing = format!("reading the log at {}", Lsn::of_block(number));
                return Err(LogError::io(doing)(error));
            }
        }
        let block = &self.chunk[(number - self.chunk_first) as usize];
        let head = Head::expect(block, self.device.identity(), number);
        self.newest = self.newest.max(head.map_or(0, |head| head.incarnation));
        Ok(head)
    }

    /// Takes the next chunk if the thread that reads ahead has it.
    fn take_chunk_ahead(&mut self, number: u64) -> bool {
        let is_next = number == self.chunk_first + self.chunk.len() as u64;
        if !is_next || self.chunk.is_empty() {
            return false;
        }
        if let Some(device) = self.ahead_device.take() {
            self.ahead = ReadAhead::start(device, number, self.room.end);
        }
        match &self.ahead {
            Some(ahead) if ahead.take(number, &mut self.chunk) => self.chunk_first = number,
            _ => self.ahead = None,
        }
        self.ahead.is_some()
    }

    /// A running log may have been trimmed since the scan began, and the room reused.
    fn check_trimmed(&self, number: u64) -> Result<(), LogError> {
        let begin = self.device.scan().start;
        if number >= begin {
            return Ok(());
        }
        Err(LogError::Trimmed { lsn: Lsn::of_block(number), begin: Lsn::of_block(begin) })
    }

    /// There is no sound block here: that is the end, or damage.
    fn conclude(&mut self, why: Unsound) -> Result<(), LogError> {
        let number = self.number;
        // What follows is not read to redo it. A new log is empty, and its opening takes no memory.
        self.ahead_device = None;
        self.check_trimmed(number)?;
        if let Unsound::Version(_) = why {
            return Err(LogError::damaged(number, why, "its checksum is right".into()));
        }
        if number < self.known {
            let witness = "it was durable when this process wrote on".into();
            return Err(LogError::damaged(number, why, witness));
        }
        if number == self.room.start && number > 0 {
            // Trims leave the last durable block.
            let witness = "the log was trimmed up to there when it was durable".into();
            return Err(LogError::damaged(number, why, witness));
        }
        let mut answers = why != Unsound::Unreadable;
        for later in number + 1..self.room.end {
            let read = self.block(later)?;
            answers |= read != Err(Unsound::Unreadable);
            let Ok(head) = read else { continue };
            if head.durable > number {
                let lsn = Lsn::of_block(later);
                let witness = format!("the block at {lsn} was written when it was durable");
                return Err(LogError::damaged(number, why, witness));
            }
        }
        let is_last = number > 0 && number + 1 == self.room.end;
        answers = answers || is_last && self.block(number - 1)?.is_ok();
        if !answers {
            // Not one bad block: the storage does not answer, and the log may go on there.
            let source = std::io::Error::other("nor can any block after it");
            let doing = format!("reading the log at {}", Lsn::of_block(number));
            return Err(LogError::io(doing)(source));
        }
        self.torn = matches!(why, Unsound::Checksum | Unsound::Unreadable);
        self.finish(if self.closed { EndReason::Closed } else { EndReason::Unsound(why) });
        Ok(())
    }

    fn finish(&mut self, why: EndReason) {
        let unfinished = self.partial.as_ref().map(|partial| partial.lsn);
        if !is_planted(LogBug::BelievedTail) {
            self.partial = None;
        }
        self.end = Some(End { lsn: Lsn::of_block(self.number), why, unfinished });
    }

    /// Sound blocks do not fit together: their writer was wrong, or they were exchanged.
    fn inconsistent(&self, what: &str) -> LogError {
        LogError::Damaged {
            lsn: Lsn(Lsn::of_block(self.number).0 + (HEAD + self.cursor) as u64),
            what: what.into(),
            witness: "the block's checksum is right".into(),
        }
    }
}

impl Iterator for Scan<'_> {
    type Item = Result<Record, LogError>;

    /// After an error there is nothing more.
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.next_record().transpose();
        if let Some(Err(_)) = next {
            self.finish(EndReason::Limit);
        }
        next
    }
}
