//! The ring of blocks into which many threads copy records at once.
//!
//! A thread *reserves* bytes of the stream of payloads by one atomic step, *copies* its record
//! there with no lock held, and counts the bytes in each block that it filled. A flush *seals*: it
//! reserves the rest of the last block that any append has, so that all blocks up to there are
//! complete as soon as their counts are, and takes these blocks. When they are durable they are
//! *released*, in order, and are filled anew.
//!
//! What holds: `tail <= sealed <= reserved <= tail + blocks of the ring`, in blocks; each byte of
//! the stream is reserved once, and only its owner writes it, until its block is complete; then
//! only the owner of the sealed blocks touches the block, until it is released. The stream of
//! payloads counts the bytes of records and of what pads a block; the heads of the blocks are not
//! in it.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::Range;

use crate::block::{BLOCK_BYTES, Block, HEAD, Head, LENGTH, PAYLOAD, PAYLOAD_U64};
use crate::sync::{AtomicU64, Mutex, Ordering, give_way, interleave, lock};

/// The ring.
#[derive(Debug)]
pub(crate) struct Ring {
    blocks: Box<[UnsafeCell<Block>]>,
    slots: Box<[Slot]>,
    /// The end of what was reserved, a position in the stream.
    reserved: AtomicU64,
    /// The end of what was sealed, a block. Held while sealing: each block is sealed once.
    sealed: Mutex<u64>,
    /// Blocks before this are durable, and their slots in the ring free.
    tail: AtomicU64,
    /// Blocks before this have room on the device.
    room: AtomicU64,
}

// SAFETY: the bytes of `blocks` are written by the owners of reservations, which are disjoint, and
// by the owner of sealed blocks after all of them have counted their bytes; see the header.
unsafe impl Sync for Ring {}

/// What is known of a block in the ring.
#[derive(Debug, Default)]
struct Slot {
    /// Bytes of the payload that are in place.
    filled: AtomicU64,
    /// Bytes that belong to a record which began in an earlier block.
    carry: AtomicU64,
}

/// Why nothing was reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The ring is full until the blocks before this one are durable.
    Ring(u64),
    /// The device has no room yet for the blocks before this one.
    Room(u64),
}

/// Blocks that were sealed and are not released: their owner alone has them.
#[derive(Debug)]
pub(crate) struct SealedBlocks {
    /// The numbers of the blocks.
    pub(crate) numbers: Range<u64>,
    /// Bytes of the last block that are records.
    used: usize,
}

impl Ring {
    /// A ring of so many blocks, whose first one is block `first` of the log.
    pub(crate) fn new(blocks: usize, first: u64, room: u64) -> Ring {
        Ring {
            blocks: (0..blocks).map(|_| UnsafeCell::new(Block::ZERO)).collect(),
            slots: (0..blocks).map(|_| Slot::default()).collect(),
            reserved: AtomicU64::new(first * PAYLOAD_U64),
            sealed: Mutex::new(first),
            tail: AtomicU64::new(first),
            room: AtomicU64::new(room),
        }
    }

    /// Blocks in the ring.
    pub(crate) fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// All blocks before this one are durable.
    pub(crate) fn durable(&self) -> u64 {
        self.tail.load(Ordering::Acquire)
    }

    /// The end of what was reserved, a position in the stream.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Acquire)
    }

    /// The end of what was sealed, a block.
    pub(crate) fn sealed(&self) -> u64 {
        *lock(&self.sealed)
    }

    /// The end of the device's room, a block.
    pub(crate) fn room(&self) -> u64 {
        self.room.load(Ordering::Acquire)
    }

    /// The device has room up to this block.
    pub(crate) fn set_room(&self, end: u64) {
        self.room.fetch_max(end, Ordering::AcqRel);
    }

    /// Appends a record in parts, which have `len` bytes in all; returns its position.
    pub(crate) fn append(&self, parts: &[&[u8]], len: u32) -> Result<u64, Obstacle> {
        let bytes = LENGTH as u64 + u64::from(len);
        let position = self.reserve(bytes)?;
        interleave();
        self.copy(position, bytes, &len.to_le_bytes(), parts);
        Ok(position)
    }

    /// Reserves bytes, which are then the caller's to copy.
    fn reserve(&self, bytes: u64) -> Result<u64, Obstacle> {
        let mut position = self.reserved.load(Ordering::Relaxed);
        loop {
            let end = position + bytes;
            let blocks = end.div_ceil(PAYLOAD_U64);
            if blocks > self.room.load(Ordering::Acquire) {
                return Err(Obstacle::Room(blocks));
            }
            // The tail only grows: what is in the ring now fits later, too.
            if blocks > self.tail.load(Ordering::Acquire) + self.len() {
                return Err(Obstacle::Ring(blocks - self.len()));
            }
            let swapped = self.reserved.compare_exchange_weak(
                position,
                end,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            match swapped {
                Ok(_) => return Ok(position),
                Err(now) => position = now,
            }
        }
    }

    /// Copies `bytes` bytes of `head` and `parts` to where the caller has reserved as many. What
    /// the parts are short of is zeros.
    fn copy(&self, position: u64, bytes: u64, head: &[u8], parts: &[&[u8]]) {
        let end = position + bytes;
        let mut at = position;
        for part in std::iter::once(&head).chain(parts) {
            let mut part = &part[..part.len().min((end - at) as usize)];
            while !part.is_empty() {
                let offset = (at % PAYLOAD_U64) as usize;
                let (now, rest) = part.split_at(part.len().min(PAYLOAD - offset));
                // SAFETY: the bytes `at..at + now.len()` of the stream lie in one block, within its
                // payload, and within the caller's reservation, which no other thread has; the
                // owner of the sealed blocks reads them only after `count` below.
                unsafe {
                    let to = self.address(at / PAYLOAD_U64).add(HEAD + offset);
                    std::ptr::copy_nonoverlapping(now.as_ptr(), to, now.len());
                }
                at += now.len() as u64;
                part = rest;
                if at.is_multiple_of(PAYLOAD_U64) || at == end {
                    self.count(position, at);
                }
            }
        }
        assert_eq!(at, end, "the record is as long as its parts");
    }

    /// Counts what a reservation from `position` on has filled of the block that ends, or is left,
    /// at `at`.
    fn count(&self, position: u64, at: u64) {
        interleave();
        let block = (at - 1) / PAYLOAD_U64;
        let begin = block * PAYLOAD_U64;
        let slot = self.slot(block);
        if position < begin {
            slot.carry.store(at - begin, Ordering::Relaxed);
        }
        slot.filled.fetch_add(at - position.max(begin), Ordering::Release);
    }

    /// Seals all that was reserved. None if there is nothing new.
    pub(crate) fn seal(&self) -> Option<SealedBlocks> {
        let mut sealed = lock(&self.sealed);
        let first = *sealed;
        let mut position = self.reserved.load(Ordering::Acquire);
        let end = loop {
            if position == first * PAYLOAD_U64 {
                return None;
            }
            let end = position.div_ceil(PAYLOAD_U64);
            let swapped = self.reserved.compare_exchange_weak(
                position,
                end * PAYLOAD_U64,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match swapped {
                Ok(_) => break end,
                Err(now) => position = now,
            }
        };
        *sealed = end;
        drop(sealed);
        let pad = (end * PAYLOAD_U64 - position) as usize;
        self.pad(end - 1, pad);
        Some(SealedBlocks { numbers: first..end, used: PAYLOAD - pad })
    }

    /// Seals one block without records. None if something was appended, or there is no room.
    pub(crate) fn seal_empty(&self) -> Option<SealedBlocks> {
        let mut sealed = lock(&self.sealed);
        let block = *sealed;
        if self.reserved() != block * PAYLOAD_U64 || self.reserve(PAYLOAD_U64).is_err() {
            return None;
        }
        *sealed = block + 1;
        drop(sealed);
        self.pad(block, PAYLOAD);
        Some(SealedBlocks { numbers: block..block + 1, used: 0 })
    }

    /// Zeroes the last bytes of a block, which the caller has reserved, and counts them.
    fn pad(&self, block: u64, bytes: usize) {
        if bytes == 0 {
            return;
        }
        // SAFETY: the caller has reserved the block's last `bytes` bytes, at most all of the
        // payload.
        unsafe {
            self.address(block).add(BLOCK_BYTES - bytes).write_bytes(0, bytes);
        }
        self.slot(block).filled.fetch_add(bytes as u64, Ordering::Release);
    }

    /// Waits until all bytes of sealed blocks are in place, and writes their heads: `flags` in the
    /// first.
    pub(crate) fn finish(&self, sealed: &SealedBlocks, log: u64, incarnation: u64, flags: u8) {
        let durable = self.durable();
        for number in sealed.numbers.clone() {
            let slot = self.slot(number);
            let mut tries = 0;
            while slot.filled.load(Ordering::Acquire) < PAYLOAD_U64 {
                give_way(tries);
                tries = tries.saturating_add(1);
            }
            let is_last = number + 1 == sealed.numbers.end;
            let used = if is_last { sealed.used } else { PAYLOAD };
            let flags = if number == sealed.numbers.start { flags } else { 0 };
            let carry = slot.carry.load(Ordering::Relaxed) as u16;
            let used = used as u16;
            let head = Head { log, number, durable, used, carry, flags, incarnation };
            // SAFETY: the block is complete, so no reservation writes to it any more, and the
            // owner of the sealed blocks alone has it until it is released.
            head.seal(unsafe { &mut *self.address(number).cast::<Block>() });
        }
    }

    /// Sealed blocks that are finished; the second part follows the first.
    pub(crate) fn parts<'a>(&'a self, sealed: &'a SealedBlocks) -> [&'a [Block]; 2] {
        let count = (sealed.numbers.end - sealed.numbers.start) as usize;
        let first = self.index(sealed.numbers.start);
        let before_wrap = count.min(self.blocks.len() - first);
        // SAFETY: complete blocks that are borrowed, so they are not released meanwhile: no
        // byte changes. `UnsafeCell<Block>` lies in memory as `Block`. There are at most as many
        // blocks as the ring.
        unsafe {
            let ring = self.blocks.as_ptr().cast::<Block>();
            [
                std::slice::from_raw_parts(ring.add(first), before_wrap),
                std::slice::from_raw_parts(ring, count - before_wrap),
            ]
        }
    }

    /// The oldest sealed blocks are durable: their slots are free.
    pub(crate) fn release(&self, sealed: SealedBlocks) {
        assert_eq!(sealed.numbers.start, self.durable(), "blocks are released in order");
        for number in sealed.numbers.clone() {
            self.slot(number).filled.store(0, Ordering::Relaxed);
            self.slot(number).carry.store(0, Ordering::Relaxed);
        }
        self.tail.store(sealed.numbers.end, Ordering::Release);
    }

    fn index(&self, block: u64) -> usize {
        (block % self.len()) as usize
    }

    fn slot(&self, block: u64) -> &Slot {
        &self.slots[self.index(block)]
    }

    fn address(&self, block: u64) -> *mut u8 {
        self.blocks[self.index(block)].get().cast()
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    fn append(ring: &Ring, len: usize) -> Result<u64, Obstacle> {
        ring.append(&[&vec![7; len]], len as u32)
    }

    #[test]
    fn a_seal_takes_all_blocks_that_were_begun_and_pads_the_last() {
        let ring = Ring::new(8, 100, 200);
        assert!(ring.seal().is_none());
        assert_eq!(append(&ring, 10), Ok(100 * PAYLOAD_U64));
        assert_eq!(append(&ring, PAYLOAD), Ok(100 * PAYLOAD_U64 + 14));
        let sealed = ring.seal().unwrap();
        assert_eq!((sealed.numbers.clone(), sealed.used), (100..102, 18));
        ring.finish(&sealed, 5, 1, 1);
        let [blocks, none] = ring.parts(&sealed);
        assert!(none.is_empty() || sealed.numbers.end > 104);
        let blocks: Vec<_> = blocks.iter().chain(none).collect();
        let heads: Vec<_> = blocks.iter().map(|block| Head::read(block).unwrap()).collect();
        let lengths: Vec<_> = heads.iter().map(|h| (h.number, h.used, h.carry, h.flags)).collect();
        assert_eq!(lengths, [(100, 4048, 0, 1), (101, 18, 18, 0)]);
        assert!(blocks[1].0[HEAD + 18..].iter().all(|byte| *byte == 0));
        assert_eq!(append(&ring, 1), Ok(102 * PAYLOAD_U64), "a new block");
    }

    #[test]
    fn a_full_ring_and_a_full_device_are_told_apart() {
        let ring = Ring::new(4, 0, 6);
        assert_eq!(append(&ring, PAYLOAD * 3), Ok(0));
        assert_eq!(append(&ring, PAYLOAD), Err(Obstacle::Ring(1)));
        assert_eq!(append(&ring, PAYLOAD * 3), Err(Obstacle::Room(7)));
        let sealed = ring.seal().unwrap();
        ring.finish(&sealed, 1, 1, 0);
        ring.release(sealed);
        assert_eq!(append(&ring, PAYLOAD), Ok(4 * PAYLOAD_U64));
        ring.set_room(9);
        assert!(append(&ring, PAYLOAD).is_ok());
    }

    #[test]
    fn the_empty_block_has_no_records() {
        let ring = Ring::new(4, 2, 6);
        let sealed = ring.seal_empty().unwrap();
        ring.finish(&sealed, 1, 1, 2);
        let head = Head::read(&ring.parts(&sealed)[0][0]).unwrap();
        assert_eq!((head.number, head.used, head.flags), (2, 0, 2));
        append(&ring, 1).unwrap();
        assert!(ring.seal_empty().is_none());
    }
}
