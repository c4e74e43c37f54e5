//! Replacement policies: which pages leave when a frame is needed.
//!
//! A policy hears what the faults show of the program's accesses, and proposes frames. The cache
//! decides: it refuses frames whose pages are pinned or just being used. Threads call a policy at
//! the same time, and in the middle of their faults, which on Linux is a signal handler: a policy
//! has no locks, does not allocate and does not panic. A wrong proposal costs time and nothing
//! else.
//!
//! | policy | evicts | words |
//! |---|---|---|
//! | [`Clock`] | the next page that was not accessed since the hand last came by | 1 |
//! | [`Lru`] | a page of the oldest eighth, by the last fault (the paper's policy, roughly) | one a frame |
//! | [`S3Fifo`] | a page that came in and was not used again, before all others | two to three a frame |

mod clock;
mod lru;
mod s3_fifo;

pub use clock::Clock;
pub use lru::Lru;
pub use s3_fifo::S3Fifo;

use crate::frame::{Frame, Key};

/// Chooses the pages that leave.
pub trait Policy: Sync {
    /// A page was read into a frame.
    fn admit(&self, frame: Frame, key: Key);

    /// A fault found the page of a frame resident.
    fn touch(&self, frame: Frame);

    /// The page of a frame has left.
    fn remove(&self, frame: Frame, key: Key);

    /// Proposes frames, in the order in which they should leave, as long as the evictor wants more.
    /// Returns after a bounded number of steps, even if the evictor refuses all.
    fn propose(&self, evictor: &mut dyn Evictor);
}

/// The side of the cache that asks a policy.
pub trait Evictor {
    /// Whether it needs more frames.
    fn wants_more(&self) -> bool;

    /// Whether the page was accessed since the last call, as far as the environment can tell.
    fn was_referenced(&mut self, frame: Frame) -> bool;

    /// Takes a frame, unless its page cannot leave now. Returns whether it did.
    fn take(&mut self, frame: Frame) -> bool;
}

impl<P: Policy + ?Sized> Policy for &P {
    fn admit(&self, frame: Frame, key: Key) {
        (**self).admit(frame, key);
    }

    fn touch(&self, frame: Frame) {
        (**self).touch(frame);
    }

    fn remove(&self, frame: Frame, key: Key) {
        (**self).remove(frame, key);
    }

    fn propose(&self, evictor: &mut dyn Evictor) {
        (**self).propose(evictor);
    }
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;
    use crate::sync::AtomicU64;

    fn words(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    /// A cache of `frames` pages without contents: accesses are faults that find the page or not.
    struct Simulation<P> {
        policy: P,
        pages: Vec<Option<Key>>,
        misses: usize,
    }

    struct One<'a> {
        pages: &'a [Option<Key>],
        taken: Option<Frame>,
    }

    impl Evictor for One<'_> {
        fn wants_more(&self) -> bool {
            self.taken.is_none()
        }

        fn was_referenced(&mut self, _: Frame) -> bool {
            false
        }

        fn take(&mut self, frame: Frame) -> bool {
            let is_free_to_go = self.taken.is_none() && self.pages[frame as usize].is_some();
            if is_free_to_go {
                self.taken = Some(frame);
            }
            is_free_to_go
        }
    }

    impl<P: Policy> Simulation<P> {
        fn new(policy: P, frames: usize) -> Self {
            Self { policy, pages: vec![None; frames], misses: 0 }
        }

        fn access(&mut self, page: u64) {
            let key = Key::new(0, page).unwrap();
            if let Some(frame) = self.pages.iter().position(|found| *found == Some(key)) {
                self.policy.touch(frame as Frame);
                return;
            }
            self.misses += 1;
            let frame = match self.pages.iter().position(Option::is_none) {
                Some(frame) => frame as Frame,
                None => {
                    let mut one = One { pages: &self.pages, taken: None };
                    self.policy.propose(&mut one);
                    let frame = one.taken.expect("a page can leave, so the policy finds one");
                    self.policy.remove(frame, self.pages[frame as usize].unwrap());
                    frame
                }
            };
            self.pages[frame as usize] = Some(key);
            self.policy.admit(frame, key);
        }
    }

    /// A hot set of half the cache, and a scan of cold pages between its rounds. Returns the misses
    /// of the hot set in the second half of the rounds.
    fn misses_of_the_hot_set(policy: impl Policy, frames: u64) -> usize {
        let mut simulation = Simulation::new(policy, frames as usize);
        let mut cold = 1_000_000;
        let mut misses = 0;
        for round in 0..40 {
            for _ in 0..2 {
                let before = simulation.misses;
                for page in 0..frames / 2 {
                    simulation.access(page);
                }
                if round >= 20 {
                    misses += simulation.misses - before;
                }
            }
            for _ in 0..frames {
                simulation.access(cold);
                cold += 1;
            }
        }
        misses
    }

    #[test]
    fn a_scan_does_not_drive_the_hot_set_out_of_s3_fifo() {
        let frames = if cfg!(miri) { 20 } else { 64 };
        let s3 = words(S3Fifo::words(frames));
        let lru = words(Lru::words(frames));
        let kept = misses_of_the_hot_set(S3Fifo::new(&s3, frames), frames.into());
        let driven_out = misses_of_the_hot_set(Lru::new(&lru, frames), frames.into());
        assert!(kept * 10 < driven_out, "S3-FIFO {kept} misses, LRU {driven_out}");
    }

    #[test]
    fn lru_keeps_what_faults_touch() {
        let frames = 64;
        let memory = words(Lru::words(frames));
        let mut simulation = Simulation::new(Lru::new(&memory, frames), frames as usize);
        let mut misses = 0;
        for round in 0..if cfg!(miri) { 30 } else { 200 } {
            let before = simulation.misses;
            (0..8).for_each(|page| simulation.access(page));
            if round > 0 {
                misses += simulation.misses - before;
            }
            (0..16).for_each(|step| simulation.access(1000 + round * 16 + step));
        }
        assert_eq!(misses, 0, "eight pages that are used in each round stay");
    }

    #[test]
    fn the_clock_gives_a_second_chance() {
        struct Marked(Vec<bool>, Vec<Frame>);
        impl Evictor for Marked {
            fn wants_more(&self) -> bool {
                self.1.len() < 3
            }
            fn was_referenced(&mut self, frame: Frame) -> bool {
                std::mem::take(&mut self.0[frame as usize])
            }
            fn take(&mut self, frame: Frame) -> bool {
                self.1.push(frame);
                true
            }
        }
        let memory = words(Clock::WORDS);
        let clock = Clock::new(&memory, 4);
        let mut evictor = Marked(vec![false, true, false, true], Vec::new());
        clock.propose(&mut evictor);
        assert_eq!(evictor.1, [0, 2, 0], "marked frames are passed over once");
        let mut all = Marked(vec![true; 4], Vec::new());
        clock.propose(&mut all);
        assert_eq!(all.1, [1, 2, 3]);
    }

    #[test]
    fn a_policy_gives_up_when_every_frame_is_refused() {
        struct Refuses;
        impl Evictor for Refuses {
            fn wants_more(&self) -> bool {
                true
            }
            fn was_referenced(&mut self, _: Frame) -> bool {
                true
            }
            fn take(&mut self, _: Frame) -> bool {
                false
            }
        }
        let memory = (words(Clock::WORDS), words(Lru::words(8)), words(S3Fifo::words(8)));
        let clock = Clock::new(&memory.0, 8);
        let lru = Lru::new(&memory.1, 8);
        let s3 = S3Fifo::new(&memory.2, 8);
        for policy in [&clock as &dyn Policy, &lru, &s3] {
            (0..8).for_each(|frame| policy.admit(frame, Key::new(0, frame.into()).unwrap()));
            policy.propose(&mut Refuses);
        }
    }
}
