//! A log's place in memory that loses, tears and reorders what was not synced: all from one seed.
//!
//! Blocks lie in a circle, so that a block's room holds an old block, as a recycled segment's does.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard};

use super::{LogDevice, Written};
use crate::block::{BLOCK_BYTES, Block};
use crate::sync::interleave;

/// Bytes that storage writes as a whole.
const SECTOR: usize = 512;

/// How a [`SimulatedDevice`] is made.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedOptions {
    /// Decides all that is random.
    pub seed: u64,
    /// Blocks that an extension adds.
    pub segment_blocks: u64,
    /// Segments that there can be at once.
    pub segments: u64,
    /// An append is durable when it returns, as with `RWF_DSYNC`.
    pub durable_appends: bool,
    /// Appends at once that are worth it.
    pub in_flight: usize,
}

impl Default for SimulatedOptions {
    fn default() -> Self {
        Self { seed: 1, segment_blocks: 8, segments: 4, durable_appends: false, in_flight: 1 }
    }
}

/// What a [`SimulatedDevice`] can be told to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimulatedFault {
    /// An append: some of its blocks arrive, some in part, and it fails.
    Append,
    /// A sync: some of what was not durable becomes so, the rest is lost, and it fails.
    Sync,
}

/// A log's place in memory.
#[derive(Debug)]
pub struct SimulatedDevice {
    options: SimulatedOptions,
    state: Mutex<State>,
    taken: AtomicBool,
}

#[derive(Clone, Debug)]
struct State {
    random: u64,
    begin: u64,
    end: u64,
    /// Blocks that there can be at once.
    slots: u64,
    /// What survives a loss of power, up to the last slot that was ever written.
    durable: Vec<Block>,
    /// What was written since, in order: slots of `durable`.
    unsynced: VecDeque<(usize, Block)>,
    fault: Option<(SimulatedFault, u64)>,
    /// Blocks that cannot be read.
    unreadable: Range<u64>,
    failed: bool,
    full: bool,
    /// The only step of the next `extend` is done.
    prepared: bool,
    syncs: u64,
}

impl SimulatedDevice {
    /// An empty log.
    pub fn new(options: SimulatedOptions) -> Self {
        let state = State {
            random: options.seed,
            begin: 0,
            end: 0,
            slots: options.segment_blocks * options.segments,
            durable: Vec::new(),
            unsynced: VecDeque::new(),
            fault: None,
            unreadable: 0..0,
            failed: false,
            full: false,
            prepared: false,
            syncs: 0,
        };
        Self { options, state: Mutex::new(state), taken: AtomicBool::new(false) }
    }

    /// What is left after a loss of power now: of what was not synced some was written, some was
    /// lost, some was torn, in any order.
    pub fn crash(&self) -> SimulatedDevice {
        let mut state = self.lock().clone();
        let count = state.unsynced.len();
        for at in (1..count).rev() {
            let other = state.below(at as u64 + 1) as usize;
            state.unsynced.swap(at, other);
        }
        // Some crashes lose all, some nothing, most some.
        let kept = state.below(11);
        while let Some((slot, block)) = state.unsynced.pop_front() {
            if state.below(10) < kept {
                state.arrive(slot, &block);
            }
        }
        self.restarted(state)
    }

    /// What is left after a loss of power now, if some block that was not synced went to the place
    /// of another one. `None` if there is no such block.
    pub fn crash_misdirected(&self) -> Option<SimulatedDevice> {
        let crashed = self.crash();
        let mut state = crashed.lock();
        let count = self.lock().unsynced.len();
        let block = self.lock().unsynced.get(state.below(count as u64) as usize)?.1;
        let slots = state.slots;
        let slot = state.below(slots) as usize;
        *state.durable_mut(slot) = block;
        drop(state);
        Some(crashed)
    }

    /// What is left when the process is killed: all that was written, synced or not.
    pub fn kill(&self) -> SimulatedDevice {
        let state = self.lock().clone();
        self.restarted(state)
    }

    fn restarted(&self, mut state: State) -> SimulatedDevice {
        let slots = state.slots;
        // What was trimmed and not reused may be there again.
        if state.below(2) == 0 {
            state.begin = state.end.saturating_sub(slots);
        }
        (state.fault, state.failed, state.full) = (None, false, false);
        let taken = AtomicBool::new(false);
        SimulatedDevice { options: self.options, state: Mutex::new(state), taken }
    }

    /// The `nth` operation of the kind from now on fails; 1 is the next.
    pub fn fail(&self, fault: SimulatedFault, nth: u64) {
        self.lock().fault = Some((fault, nth));
    }

    /// No operation is to fail any more.
    pub fn clear_fault(&self) {
        self.lock().fault = None;
    }

    /// From now on there is no more room, or there is again.
    pub fn set_full(&self, full: bool) {
        self.lock().full = full;
    }

    /// Changes the bytes of a block, as a failing disk does: what was durable is not.
    pub fn damage(&self, number: u64, change: impl FnOnce(&mut [u8; BLOCK_BYTES])) {
        let mut state = self.lock();
        let slot = state.slot(number);
        change(&mut state.durable_mut(slot).0);
    }

    /// From now on these blocks cannot be read.
    pub fn set_unreadable(&self, blocks: Range<u64>) {
        self.lock().unreadable = blocks;
    }

    /// Syncs so far.
    pub fn syncs(&self) -> u64 {
        self.lock().syncs
    }

    /// A number below `limit`, from the seed.
    pub fn random_below(&self, limit: u64) -> u64 {
        self.lock().below(limit)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    /// SplitMix64.
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % limit.max(1)
    }

    fn slot(&self, number: u64) -> usize {
        (number % self.slots) as usize
    }

    fn durable(&self, slot: usize) -> Block {
        self.durable.get(slot).copied().unwrap_or(Block::ZERO)
    }

    fn durable_mut(&mut self, slot: usize) -> &mut Block {
        if self.durable.len() <= slot {
            self.durable.resize(slot + 1, Block::ZERO);
        }
        &mut self.durable[slot]
    }

    /// A block reaches the storage, whole or in part.
    fn arrive(&mut self, slot: usize, block: &Block) {
        let torn = self.below(3) == 0;
        for sector in 0..BLOCK_BYTES / SECTOR {
            if !torn || self.below(2) == 0 {
                let bytes = sector * SECTOR..(sector + 1) * SECTOR;
                self.durable_mut(slot).0[bytes.clone()].copy_from_slice(&block.0[bytes]);
            }
        }
    }

    /// Some of these blocks arrive, and some in part.
    fn arrive_some(&mut self, blocks: Vec<(usize, Block)>) {
        for (slot, block) in blocks {
            if self.below(2) == 0 {
                self.arrive(slot, &block);
            }
        }
    }

    /// Whether this operation is the one to fail.
    fn fails(&mut self, kind: SimulatedFault) -> bool {
        if let Some((fault, nth)) = &mut self.fault
            && *fault == kind
        {
            *nth -= 1;
            if *nth == 0 {
                self.fault = None;
                return true;
            }
        }
        false
    }

    fn check(&self, first: u64, count: usize) -> io::Result<()> {
        let is_inside = first >= self.begin && first + count as u64 <= self.end;
        let message = || format!("blocks {first}+{count} of {}..{}", self.begin, self.end);
        if is_inside { Ok(()) } else { Err(io::Error::other(message())) }
    }
}

impl LogDevice for SimulatedDevice {
    fn identity(&self) -> u64 {
        0x51d0
    }

    fn scan(&self) -> Range<u64> {
        let state = self.lock();
        state.begin..state.end
    }

    fn prepare(&self) -> io::Result<bool> {
        interleave();
        Ok(!std::mem::replace(&mut self.lock().prepared, true))
    }

    fn extend(&self) -> io::Result<u64> {
        interleave();
        let mut state = self.lock();
        state.prepared = false;
        let end = state.end + self.options.segment_blocks;
        if state.full || end - state.begin > state.slots {
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.end = end;
        Ok(end)
    }

    fn append(&self, first: u64, parts: [&[Block]; 2]) -> io::Result<Written> {
        let mut state = self.lock();
        state.check(first, parts[0].len() + parts[1].len())?;
        let blocks: Vec<_> = (first..)
            .zip(parts[0].iter().chain(parts[1]))
            .map(|(number, block)| (state.slot(number), *block))
            .collect();
        if state.failed {
            return Err(io::Error::other("an earlier operation has failed"));
        }
        if state.fails(SimulatedFault::Append) {
            state.failed = true;
            state.arrive_some(blocks);
            return Err(io::Error::other("a planned fault of an append"));
        }
        state.unsynced.extend(blocks.iter().copied());
        drop(state);
        interleave();
        if !self.options.durable_appends {
            return Ok(Written::Cached);
        }
        let mut state = self.lock();
        for (slot, block) in blocks {
            *state.durable_mut(slot) = block;
            state.unsynced.retain(|(other, _)| *other != slot);
        }
        Ok(Written::Durable)
    }

    fn sync(&self) -> io::Result<()> {
        interleave();
        let mut state = self.lock();
        state.syncs += 1;
        if state.failed || state.fails(SimulatedFault::Sync) {
            state.failed = true;
            let unsynced = state.unsynced.drain(..).collect();
            state.arrive_some(unsynced);
            return Err(io::Error::other("a planned fault of a sync"));
        }
        while let Some((slot, block)) = state.unsynced.pop_front() {
            *state.durable_mut(slot) = block;
        }
        Ok(())
    }

    fn read(&self, first: u64, blocks: &mut [Block]) -> io::Result<()> {
        let state = self.lock();
        state.check(first, blocks.len())?;
        let bad = &state.unreadable;
        if first < bad.end && bad.start < first + blocks.len() as u64 {
            return Err(rustix::io::Errno::IO.into());
        }
        for (number, block) in (first..).zip(blocks) {
            let slot = state.slot(number);
            let newest = state.unsynced.iter().rev().find(|(other, _)| *other == slot);
            *block = newest.map_or_else(|| state.durable(slot), |(_, block)| *block);
        }
        Ok(())
    }

    fn trim(&self, before: u64) -> io::Result<()> {
        let mut state = self.lock();
        let segment = self.options.segment_blocks;
        state.begin = state.begin.max(before.min(state.end) / segment * segment);
        Ok(())
    }

    fn taken(&self) -> &AtomicBool {
        &self.taken
    }

    fn in_flight(&self) -> usize {
        self.options.in_flight
    }
}
