//! Ghosts: pages that left not long ago, remembered in four bytes each.
//!
//! The table remembers a page that left before a thread accessed it again; if the page comes back
//! soon, it was evicted too early. A ghost is a fingerprint of 16 bits and the time at which the
//! page left, in buckets of eight, the newest first. Time counts frames that left. The table does
//! not remove old ghosts: their time tells their age, and new ones push them out. It takes one in
//! about 8,000 other pages for a ghost, which costs no more than a wrong guess.

const WAYS: usize = 8;
/// Ghosts in a bucket on average, so that few are pushed out by their neighbours early.
const FILL: u64 = 6;
/// Time is kept in at least this many steps of the memory's span, fewer than twice as many, and
/// wraps after 2^16 steps.
const STEPS: u64 = 1 << 12;

/// The ghosts of one shard.
pub(super) struct Ghosts {
    /// Fingerprint in the upper half, time in the lower one; zero is none.
    buckets: Vec<[u32; WAYS]>,
    /// Steps until a ghost is forgotten.
    span: u16,
    /// Frames to a step.
    step: u64,
    /// Steps that passed, modulo 2^16.
    now: u16,
    /// Frames that left since the last step.
    frames: u64,
}

impl Ghosts {
    /// Remembers the last `span` frames.
    pub(super) fn new(span: u64) -> Ghosts {
        let buckets = usize::try_from(span.div_ceil(FILL)).unwrap_or(usize::MAX).max(1);
        let step = (span / STEPS).max(1);
        let span = (span / step) as u16;
        Ghosts { buckets: vec![[0; WAYS]; buckets], span, step, now: 0, frames: 0 }
    }

    fn fingerprint(hash: u64) -> u32 {
        ((hash & 0xffff) as u32).max(1)
    }

    fn bucket(&mut self, hash: u64) -> &mut [u32; WAYS] {
        let below_shard = hash << 8;
        let at = (u128::from(below_shard) * self.buckets.len() as u128) >> 64;
        &mut self.buckets[at as usize]
    }

    /// Remembers a page of this hash and of `frames` frames that left.
    pub(super) fn add(&mut self, hash: u64, frames: u32) {
        self.frames += u64::from(frames);
        if self.frames >= self.step {
            self.now = self.now.wrapping_add((self.frames / self.step) as u16);
            self.frames %= self.step;
        }
        let ghost = Self::fingerprint(hash) << 16 | u32::from(self.now);
        let bucket = self.bucket(hash);
        bucket.copy_within(..WAYS - 1, 1);
        bucket[0] = ghost;
    }

    /// Whether a page of this hash left not long ago. Forgets its ghost.
    pub(super) fn take(&mut self, hash: u64) -> bool {
        let (now, span) = (self.now, self.span);
        let fingerprint = Self::fingerprint(hash);
        let bucket = self.bucket(hash);
        let Some(ghost) = bucket.iter_mut().find(|ghost| **ghost >> 16 == fingerprint) else {
            return false;
        };
        let age = now.wrapping_sub(*ghost as u16);
        *ghost = 0;
        age <= span
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::hash;
    use super::*;
    use crate::page::PageRef;

    fn scattered(id: u64) -> u64 {
        hash(PageRef::new(id, 1))
    }

    #[test]
    fn the_last_ones_are_remembered_and_older_ones_are_not() {
        let mut ghosts = Ghosts::new(1_000);
        (0..10_000).for_each(|id| ghosts.add(scattered(id), 1));
        let recent = (9_001..10_000).filter(|id| ghosts.take(scattered(*id))).count();
        assert!(recent > 900, "a few are pushed out early: {recent}");
        let gone = (0..8_990).filter(|id| ghosts.take(scattered(*id))).count();
        assert!(gone < 10, "one in 8,000 by mistake: {gone}");
    }

    #[test]
    fn a_ghost_is_seen_once() {
        let mut ghosts = Ghosts::new(100);
        ghosts.add(scattered(7), 1);
        assert!(ghosts.take(scattered(7)));
        assert!(!ghosts.take(scattered(7)));
    }

    #[test]
    fn large_pages_let_more_time_pass() {
        let mut ghosts = Ghosts::new(100);
        ghosts.add(scattered(1), 1);
        ghosts.add(scattered(2), 90);
        assert!(ghosts.take(scattered(1)));
        ghosts.add(scattered(1), 1);
        ghosts.add(scattered(3), 110);
        assert!(!ghosts.take(scattered(1)));
    }

    /// Ghosts of long ago do not come back when the time wraps.
    #[test]
    fn time_wraps() {
        let mut ghosts = Ghosts::new(64);
        let mut mistakes = 0;
        for id in 0..200_000 {
            ghosts.add(scattered(id), 1);
            mistakes += usize::from(id >= 500 && ghosts.take(scattered(id - 500)));
        }
        assert!(mistakes < 100, "{mistakes} of 200,000");
    }

    #[test]
    fn none_is_remembered_in_the_smallest_memory() {
        let mut ghosts = Ghosts::new(0);
        assert!(!ghosts.take(scattered(1)));
        ghosts.add(scattered(1), 1);
        ghosts.add(scattered(2), 7);
        assert!(!ghosts.take(scattered(1)));
    }
}
