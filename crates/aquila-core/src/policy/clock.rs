//! CLOCK: a hand goes round over the frames and gives each page that was accessed a second chance.

use super::{Evictor, Policy};
use crate::frame::{Frame, Key};
use crate::sync::{AtomicU64, Ordering};

/// CLOCK on the bits of access that faults set, and the environment's own where it has any.
#[derive(Debug)]
pub struct Clock<'a> {
    hand: &'a AtomicU64,
    frames: u32,
}

impl<'a> Clock<'a> {
    /// Words that the policy needs.
    pub const WORDS: usize = 1;

    /// A clock over so many frames.
    ///
    /// # Panics
    /// If there are fewer than [`WORDS`](Self::WORDS) words, or no frame.
    pub fn new(words: &'a [AtomicU64], frames: u32) -> Self {
        assert!(frames > 0, "a cache has at least one frame");
        Self { hand: &words[0], frames }
    }
}

impl Policy for Clock<'_> {
    fn admit(&self, _: Frame, _: Key) {}

    #[inline]
    fn touch(&self, _: Frame) {}

    fn remove(&self, _: Frame, _: Key) {}

    fn propose(&self, evictor: &mut dyn Evictor) {
        // The first round takes the second chances away, the next finds the pages without one; the
        // third is for pages that were accessed in between.
        for _ in 0..3 * u64::from(self.frames) {
            if !evictor.wants_more() {
                return;
            }
            let position = self.hand.fetch_add(1, Ordering::Relaxed) % u64::from(self.frames);
            let frame = position as Frame;
            if !evictor.was_referenced(frame) {
                evictor.take(frame);
            }
        }
    }
}
