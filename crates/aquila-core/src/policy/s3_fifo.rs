//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP '23), for frames
//! that have fixed places.
//!
//! New pages are on *probation* in a tenth of the frames. A page that is used again during that
//! time becomes a *main* page; the others leave. So a scan drives out other pages of the scan only.
//! A page that left during its probation is remembered for a while, by a hash of its key: if it
//! comes back, it becomes a main page at once.
//!
//! The paper has queues. Here two hands go round over the frames, one for each kind of page. A hand
//! that comes by has seen all frames since it last was there, which is the order of a queue as soon
//! as the cache is full; and hands need neither links nor locks.

use super::{Evictor, Policy};
use crate::frame::{Frame, Key};
use crate::sync::{AtomicU64, Ordering};

/// The number of accesses that is remembered, at most.
const MOST_USES: u64 = 3;
const USES: u64 = 0b11;
/// What a frame has: nothing, a page on probation, a main page.
const KIND: u64 = 0b11 << 2;
const PROBATION: u64 = 0b01 << 2;
const MAIN: u64 = 0b10 << 2;

/// Words before those of the frames.
const OWN_WORDS: usize = 5;

/// S3-FIFO with hands.
#[derive(Debug)]
pub struct S3Fifo<'a> {
    /// The hand over pages on probation.
    probation_hand: &'a AtomicU64,
    main_hand: &'a AtomicU64,
    /// Pages on probation.
    on_probation: &'a AtomicU64,
    main: &'a AtomicU64,
    /// Pages that have left during their probation, ever.
    left: &'a AtomicU64,
    /// The kind and the uses of each frame.
    frames: &'a [AtomicU64],
    /// The pages that have left, by the hash of their keys: a part of the hash, and the value of
    /// `left` at that time.
    ghosts: &'a [AtomicU64],
}

impl<'a> S3Fifo<'a> {
    /// Words that the policy needs.
    pub const fn words(frames: u32) -> usize {
        OWN_WORDS + frames as usize + (frames as usize).next_power_of_two()
    }

    /// The policy for so many frames. All words are zero.
    ///
    /// # Panics
    /// If there are fewer than [`words`](Self::words) words, or no frame.
    pub fn new(words: &'a [AtomicU64], frames: u32) -> Self {
        assert!(frames > 0, "a cache has at least one frame");
        let (own, rest) = words[..Self::words(frames)].split_at(OWN_WORDS);
        let (frames, ghosts) = rest.split_at(frames as usize);
        Self {
            probation_hand: &own[0],
            main_hand: &own[1],
            on_probation: &own[2],
            main: &own[3],
            left: &own[4],
            frames,
            ghosts,
        }
    }

    /// Where the ghost of a page is, and how it is recognised. Never zero.
    fn ghost(&self, key: Key) -> (&AtomicU64, u64) {
        const MULTIPLIER: u64 = 0xd6e8_feb8_6659_fd93;
        let mut hash = key.word().wrapping_mul(MULTIPLIER);
        hash = (hash ^ (hash >> 32)).wrapping_mul(MULTIPLIER);
        let place = hash as usize & (self.ghosts.len() - 1);
        (&self.ghosts[place], (hash >> 32) | 1)
    }

    /// Whether the page left not long ago.
    fn is_remembered(&self, key: Key) -> bool {
        let (ghost, part) = self.ghost(key);
        let found = ghost.load(Ordering::Relaxed);
        let since = (self.left.load(Ordering::Relaxed) as u32).wrapping_sub(found as u32);
        found >> 32 == part && since as usize <= self.frames.len()
    }

    fn remember(&self, key: Key) {
        let left = self.left.fetch_add(1, Ordering::Relaxed) + 1;
        let (ghost, part) = self.ghost(key);
        ghost.store((part << 32) | u64::from(left as u32), Ordering::Relaxed);
    }

    /// Sets the kind of a frame, and counts. Returns the kind before.
    fn set(&self, frame: Frame, kind: u64) -> u64 {
        let old = self.frames[frame as usize].swap(kind, Ordering::Relaxed) & KIND;
        match old {
            PROBATION => _ = self.on_probation.fetch_sub(1, Ordering::Relaxed),
            MAIN => _ = self.main.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
        match kind {
            PROBATION => _ = self.on_probation.fetch_add(1, Ordering::Relaxed),
            MAIN => _ = self.main.fetch_add(1, Ordering::Relaxed),
            _ => {}
        }
        old
    }

    /// The hand over pages on probation looks at the next frame.
    fn step_probation(&self, evictor: &mut dyn Evictor) {
        let frame = self.next(self.probation_hand);
        let word = self.frames[frame as usize].load(Ordering::Relaxed);
        if word & KIND != PROBATION {
            return;
        }
        if word & USES > 0 || evictor.was_referenced(frame) {
            self.set(frame, MAIN);
        } else {
            evictor.take(frame);
        }
    }

    /// The hand over main pages looks at the next frame.
    fn step_main(&self, evictor: &mut dyn Evictor) {
        let frame = self.next(self.main_hand);
        let word = self.frames[frame as usize].load(Ordering::Relaxed);
        if word & KIND != MAIN || evictor.was_referenced(frame) {
            return;
        }
        if word & USES > 0 {
            let (order, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            // If a fault has changed the word, the page has had an access, and stays.
            let _ = self.frames[frame as usize].compare_exchange(word, word - 1, order, failed);
        } else {
            evictor.take(frame);
        }
    }

    fn next(&self, hand: &AtomicU64) -> Frame {
        (hand.fetch_add(1, Ordering::Relaxed) % self.frames.len() as u64) as Frame
    }
}

impl Policy for S3Fifo<'_> {
    fn admit(&self, frame: Frame, key: Key) {
        self.set(frame, if self.is_remembered(key) { MAIN } else { PROBATION });
    }

    fn touch(&self, frame: Frame) {
        let word = self.frames[frame as usize].load(Ordering::Relaxed);
        if word & KIND != 0 && word & USES < MOST_USES {
            let (order, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            let _ = self.frames[frame as usize].compare_exchange(word, word + 1, order, failed);
        }
    }

    fn remove(&self, frame: Frame, key: Key) {
        if self.set(frame, 0) == PROBATION {
            self.remember(key);
        }
    }

    fn propose(&self, evictor: &mut dyn Evictor) {
        let frames = self.frames.len() as u64;
        // A main page loses its uses one round at a time; and probation takes one round.
        for step in 0..frames * (MOST_USES + 4) {
            if !evictor.wants_more() {
                return;
            }
            let on_probation = self.on_probation.load(Ordering::Relaxed);
            let has_main = self.main.load(Ordering::Relaxed) > 0;
            // If one kind is all pinned, the other has its turn.
            let is_stuck = step / frames % 2 == 1;
            if (on_probation > frames / 10 || !has_main) != is_stuck {
                self.step_probation(evictor);
            } else {
                self.step_main(evictor);
            }
        }
    }
}
