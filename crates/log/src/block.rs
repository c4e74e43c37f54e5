//! The unit of the log: blocks of 4 KiB, byte by byte, and the numbers of records.
//!
//! A block is whole or it is not: its checksum covers all of it. A reader believes a block that has
//! the log's identity and stands at the place that its own number says. The format is described in
//! `docs/log.md`.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;

use crc_fast::{CrcAlgorithm, checksum};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::planted::{LogBug, is_planted};

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;

/// Bytes of a block's head; the payload follows.
pub(crate) const HEAD: usize = 48;

/// Bytes of records, with their lengths, that a block holds.
pub(crate) const PAYLOAD: usize = BLOCK_BYTES - HEAD;

/// The same, for positions.
pub(crate) const PAYLOAD_U64: u64 = PAYLOAD as u64;

/// Bytes before each record: its length.
pub(crate) const LENGTH: usize = 4;

const MAGIC: [u8; 4] = *b"VLOG";
const VERSION: u8 = 1;

/// The block is the first one that an opening of the log wrote: a record that the block before
/// leaves unfinished was never acknowledged, and ends there.
pub(crate) const STARTS: u8 = 1;

/// The log was closed with this block, which has no records.
pub(crate) const CLOSES: u8 = 2;

/// The numbers of openings that a block can have. Those after the last one are not used, so that
/// the next one can be counted.
pub(crate) const INCARNATIONS: Range<u64> = 1..u64::MAX / 2;

/// Memory of one block, aligned as direct I/O wants it.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub struct Block(pub [u8; BLOCK_BYTES]);

impl Block {
    /// A block of zeros.
    pub const ZERO: Block = Block([0; BLOCK_BYTES]);

    /// A block that is none, and has no sector that another block could have.
    pub(crate) fn noise() -> Block {
        let mut block = Block::ZERO;
        let random = RandomState::new();
        for (at, bytes) in block.0.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&random.hash_one(at).to_le_bytes());
        }
        block.0[4..8].fill(0);
        block
    }
}

/// What a fuzzer needs to get past the checksums.
#[cfg(feature = "testing")]
impl Block {
    /// Gives the block a right checksum, whatever it has.
    pub fn reseal(&mut self) {
        let sum = crc(&self.0[4..]);
        self.0[..4].copy_from_slice(&sum.to_le_bytes());
    }

    /// The block with its head decoded and encoded again. `None` if it is not sound.
    pub fn encoded_again(&self) -> Option<Block> {
        let head = Head::read(self).ok()?;
        let mut again = *self;
        again.0[..HEAD].fill(0);
        head.seal(&mut again);
        Some(again)
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Head::read(self) {
            Ok(head) => head.fmt(f),
            Err(why) => write!(f, "Block({why})"),
        }
    }
}

/// A log sequence number: where a record begins, in bytes of the log from its very beginning, with
/// the heads of the blocks. Block `lsn / 4096`, byte `lsn % 4096`. No record has the number 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// Where a block begins.
    pub(crate) fn of_block(number: u64) -> Lsn {
        Lsn(number * BLOCK_BYTES as u64)
    }

    /// The record at a position in the stream of payloads.
    pub(crate) fn of_position(position: u64) -> Lsn {
        let block = Lsn::of_block(position / PAYLOAD_U64).0;
        Lsn(block + HEAD as u64 + position % PAYLOAD_U64)
    }

    /// The block that it lies in.
    pub(crate) fn block(self) -> u64 {
        self.0 / BLOCK_BYTES as u64
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the head of a block says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// The identity of the log.
    pub(crate) log: u64,
    /// The number of the block in the log.
    pub(crate) number: u64,
    /// When this block was sealed, all blocks with smaller numbers than this were durable.
    pub(crate) durable: u64,
    /// Bytes of the payload that are records.
    pub(crate) used: u16,
    /// Bytes of those that belong to a record which began in an earlier block.
    pub(crate) carry: u16,
    /// `STARTS`, `CLOSES`.
    pub(crate) flags: u8,
    /// The opening of the log that wrote the block: openings that write count up.
    pub(crate) incarnation: u64,
}

impl Head {
    /// Writes the head, and the checksum of the whole block.
    pub(crate) fn seal(&self, block: &mut Block) {
        let bytes = &mut block.0;
        bytes[4..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.log.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.durable.to_le_bytes());
        bytes[32..34].copy_from_slice(&self.used.to_le_bytes());
        bytes[34..36].copy_from_slice(&self.carry.to_le_bytes());
        bytes[36] = VERSION;
        bytes[37] = self.flags;
        bytes[38..40].fill(0);
        bytes[40..48].copy_from_slice(&self.incarnation.to_le_bytes());
        let sum = crc(&bytes[4..]);
        bytes[..4].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads the head of a block that is whole.
    ///
    /// # Errors
    /// Why it is none.
    pub(crate) fn read(block: &Block) -> Result<Head, Unsound> {
        let bytes = &block.0;
        if bytes[4..8] != MAGIC {
            let is_zero = bytes.iter().all(|byte| *byte == 0);
            return Err(if is_zero { Unsound::Empty } else { Unsound::NoBlock });
        }
        let is_whole = u32::from_le_bytes(at(bytes, 0)) == crc(&bytes[4..]);
        if !is_whole && !is_planted(LogBug::SkippedChecksum) {
            return Err(Unsound::Checksum);
        }
        if bytes[36] != VERSION {
            return Err(Unsound::Version(bytes[36]));
        }
        let head = Head {
            log: u64::from_le_bytes(at(bytes, 8)),
            number: u64::from_le_bytes(at(bytes, 16)),
            durable: u64::from_le_bytes(at(bytes, 24)),
            used: u16::from_le_bytes(at(bytes, 32)),
            carry: u16::from_le_bytes(at(bytes, 34)),
            flags: bytes[37],
            incarnation: u64::from_le_bytes(at(bytes, 40)),
        };
        let fits = usize::from(head.used) <= PAYLOAD && head.carry <= head.used;
        let counts = INCARNATIONS.contains(&head.incarnation);
        if fits && counts { Ok(head) } else { Err(Unsound::Fields) }
    }

    /// Reads the head of the block of this number in this log.
    ///
    /// # Errors
    /// Why it is none.
    pub(crate) fn expect(block: &Block, log: u64, number: u64) -> Result<Head, Unsound> {
        let head = Head::read(block)?;
        if head.log != log {
            return Err(Unsound::OtherLog(head.log));
        }
        if head.number != number {
            return Err(Unsound::Number(head.number));
        }
        Ok(head)
    }

    /// Whether the block can follow one of that incarnation: the same opening wrote it, or it is
    /// the first one of a later opening. Another one is left from a flush that did not finish.
    pub(crate) fn follows(&self, before: Option<u64>) -> bool {
        if is_planted(LogBug::BelievedRest) {
            return true;
        }
        before.is_none_or(|before| match self.flags & STARTS {
            0 => self.incarnation == before,
            _ => self.incarnation > before,
        })
    }
}

/// CRC-32C.
pub(crate) fn crc(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Bytes of a number.
pub(crate) fn at<const N: usize>(bytes: &[u8], start: usize) -> [u8; N] {
    let mut number = [0; N];
    number.copy_from_slice(&bytes[start..start + N]);
    number
}

/// Why what stands in a block's place is not that block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsound {
    /// Zeros: nothing was written yet.
    #[error("it is empty")]
    Empty,
    /// Something that never was a block of a log.
    #[error("it is no block of a log")]
    NoBlock,
    /// The bytes do not belong together: a part of the block was written, or it was changed.
    #[error("its checksum is wrong")]
    Checksum,
    /// A later program wrote it.
    #[error("it has version {0} of the format, which this program does not know")]
    Version(u8),
    /// A whole block of another log.
    #[error("it belongs to another log ({0:#018x})")]
    OtherLog(u64),
    /// The storage does not give it back.
    #[error("the storage cannot read it")]
    Unreadable,
    /// A whole block of another place: what the segment held before it was recycled.
    #[error("it is block {0}")]
    Number(u64),
    /// A whole block whose lengths exceed it, or whose other numbers cannot be.
    #[error("the numbers in its head cannot be")]
    Fields,
    /// A whole block of an earlier opening of the log, whose flush did not finish: the log went on
    /// before it.
    #[error("opening {0} of the log wrote it, and the log went on without it")]
    Incarnation(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD_OF_TEST: Head = Head {
        log: 0x0123_4567_89ab_cdef,
        number: 77,
        durable: 70,
        used: 3000,
        carry: 17,
        flags: STARTS,
        incarnation: 5,
    };

    #[test]
    fn the_checksum_is_crc_32c() {
        assert_eq!(crc(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_head_reads_back_and_every_flipped_bit_is_seen() {
        let mut block = Block([0x5a; BLOCK_BYTES]);
        HEAD_OF_TEST.seal(&mut block);
        assert_eq!(Head::expect(&block, HEAD_OF_TEST.log, 77), Ok(HEAD_OF_TEST));
        for bit in 0..BLOCK_BYTES * 8 {
            block.0[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::read(&block).is_err(), "bit {bit}");
            block.0[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn other_places_logs_and_lengths_are_refused() {
        let mut block = Block::ZERO;
        assert_eq!(Head::read(&block), Err(Unsound::Empty));
        block.0[4000] = 1;
        assert_eq!(Head::read(&block), Err(Unsound::NoBlock));
        HEAD_OF_TEST.seal(&mut block);
        assert_eq!(Head::expect(&block, HEAD_OF_TEST.log, 78), Err(Unsound::Number(77)));
        assert_eq!(Head::expect(&block, 1, 77), Err(Unsound::OtherLog(HEAD_OF_TEST.log)));
        for (used, carry) in [(4049, 0), (10, 11)] {
            Head { used, carry, ..HEAD_OF_TEST }.seal(&mut block);
            assert_eq!(Head::read(&block), Err(Unsound::Fields));
        }
    }

    #[test]
    fn numbers_of_records_are_places_in_blocks() {
        assert_eq!(Lsn::of_position(0), Lsn(48));
        assert_eq!(Lsn::of_position(4047), Lsn(4095));
        assert_eq!(Lsn::of_position(4048), Lsn(4096 + 48));
        assert_eq!(Lsn::of_position(4048 * 3 + 1).block(), 3);
    }
}
