//! LRU, approximated from faults, as the paper has it (section 3.2).
//!
//! A list in the order of the last faults would be changed by every fault, under a lock. Instead
//! each frame has the *generation* of its page's last fault. A generation ends when an eighth of
//! the frames had a fault in it. A hand goes round over the frames and takes the pages of the
//! oldest generation, so that the order is exact between generations and arbitrary inside one.

use super::{Evictor, Policy};
use crate::frame::{Frame, Key};
use crate::sync::{AtomicU64, Ordering};

/// Generations that the frames of a full cache have.
const GENERATIONS: u32 = 8;

/// Words before those of the frames.
const OWN_WORDS: usize = 5;

/// LRU by generations of faults.
#[derive(Debug)]
pub struct Lru<'a> {
    /// The generation that faults are in now.
    current: &'a AtomicU64,
    /// Faults in it.
    faults: &'a AtomicU64,
    /// Pages of this generation and of earlier ones are proposed.
    oldest: &'a AtomicU64,
    /// The oldest generation that the hand has met in this round, plus one; zero for none.
    met: &'a AtomicU64,
    hand: &'a AtomicU64,
    /// The generation of each frame.
    generations: &'a [AtomicU64],
}

impl<'a> Lru<'a> {
    /// Words that the policy needs.
    pub const fn words(frames: u32) -> usize {
        OWN_WORDS + frames as usize
    }

    /// The policy for so many frames. All words are zero.
    ///
    /// # Panics
    /// If there are fewer than [`words`](Self::words) words, or no frame.
    pub fn new(words: &'a [AtomicU64], frames: u32) -> Self {
        assert!(frames > 0, "a cache has at least one frame");
        Self {
            current: &words[0],
            faults: &words[1],
            oldest: &words[2],
            met: &words[3],
            hand: &words[4],
            generations: &words[OWN_WORDS..Self::words(frames)],
        }
    }

    fn fault(&self, frame: Frame) {
        let current = self.current.load(Ordering::Relaxed);
        self.generations[frame as usize].store(current, Ordering::Relaxed);
        let faults = self.faults.fetch_add(1, Ordering::Relaxed) + 1;
        let limit = (self.generations.len() as u64 / u64::from(GENERATIONS)).max(1);
        if faults >= limit {
            let (order, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            // One thread begins the next generation.
            if self.current.compare_exchange(current, current + 1, order, failed).is_ok() {
                self.faults.store(0, Ordering::Relaxed);
            }
        }
    }

    /// The hand begins a round: the pages of the oldest generation that it met in the last round
    /// may leave in this one.
    fn begin_round(&self) {
        let current = self.current.load(Ordering::Relaxed);
        let next = match self.met.swap(0, Ordering::Relaxed) {
            0 => self.oldest.load(Ordering::Relaxed) + 1,
            met => met - 1,
        };
        self.oldest.store(next.min(current), Ordering::Relaxed);
    }

    fn meet(&self, generation: u64) {
        let met = self.met.load(Ordering::Relaxed);
        if met == 0 || generation + 1 < met {
            self.met.store(generation + 1, Ordering::Relaxed);
        }
    }
}

impl Policy for Lru<'_> {
    fn admit(&self, frame: Frame, _: Key) {
        self.fault(frame);
    }

    fn touch(&self, frame: Frame) {
        self.fault(frame);
    }

    fn remove(&self, _: Frame, _: Key) {}

    fn propose(&self, evictor: &mut dyn Evictor) {
        let frames = self.generations.len() as u64;
        for _ in 0..frames * u64::from(GENERATIONS + 2) {
            if !evictor.wants_more() {
                return;
            }
            let position = self.hand.fetch_add(1, Ordering::Relaxed) % frames;
            if position == 0 {
                self.begin_round();
            }
            let generation = self.generations[position as usize].load(Ordering::Relaxed);
            let oldest = self.oldest.load(Ordering::Relaxed);
            let frame = position as Frame;
            if generation > oldest {
                self.meet(generation);
            } else if evictor.was_referenced(frame) {
                // The environment has seen an access that caused no fault.
                self.fault(frame);
            } else {
                evictor.take(frame);
            }
        }
    }
}
