//! Free frames, in lists of two levels (paper, section 3.2).
//!
//! Each processor has a list, and each NUMA node has one. A processor takes frames from its own
//! list; a list that has become long gives a *bundle* to the node's list, and one that is empty
//! takes a bundle from it: a bundle is one element of the node's list, so it moves by one exchange.
//! Only when all nodes have nothing a processor takes from the lists of others.
//!
//! A list is a stack. Its head is one word: the first frame, and a tag that every change
//! increments.

use crate::frame::Frame;
use crate::sync::{AtomicU64, Ordering};

/// Frames that move at once between a processor and a node, in a large cache.
const BUNDLE_FRAMES: u32 = 4096;

const LOW: u64 = u32::MAX as u64;
const TAG: u64 = 1 << 32;

/// Which of the two links of a frame a list uses.
#[derive(Clone, Copy)]
enum Level {
    /// Frame to frame: the lower half of the word.
    Frame,
    /// First frame of a bundle to first frame of a bundle: the upper half.
    Bundle,
}

/// The lists.
#[derive(Debug)]
pub(crate) struct FreeLists<'a> {
    /// The head and the length of each processor's list.
    processors: &'a [AtomicU64],
    /// The head of each node's list, and after them that of the list of retired frames.
    nodes: &'a [AtomicU64],
    /// The links of each frame.
    links: &'a [AtomicU64],
    /// The frames of a bundle.
    bundle_frames: u32,
}

impl<'a> FreeLists<'a> {
    /// Words for so many processors.
    pub(crate) const fn processor_words(processors: usize) -> usize {
        2 * processors
    }

    /// Words for so many nodes.
    pub(crate) const fn node_words(nodes: usize) -> usize {
        nodes + 1
    }

    /// All words are zero: the lists are empty.
    pub(crate) fn new(
        processors: &'a [AtomicU64],
        nodes: &'a [AtomicU64],
        links: &'a [AtomicU64],
    ) -> Self {
        let frames = links.len() as u32;
        // All processors together keep at most half of the frames to themselves.
        let share = frames / (4 * (processors.len() as u32 / 2));
        Self { processors, nodes, links, bundle_frames: share.clamp(1, BUNDLE_FRAMES) }
    }

    /// Takes a free frame, if there is one.
    pub(crate) fn take(&self, processor: usize, node: usize) -> Option<Frame> {
        let count = self.processors.len() / 2;
        let own = processor % count;
        if let Some(frame) = self.take_of(own) {
            return Some(frame);
        }
        let nodes = self.nodes.len() - 1;
        for step in 0..nodes {
            let head = &self.nodes[(node + step) % nodes];
            if let Some(first) = self.pop(head, Level::Bundle) {
                self.take_over(own, first);
                return Some(first);
            }
        }
        (1..count).find_map(|step| self.take_of((own + step) % count))
    }

    /// Gives a frame back.
    pub(crate) fn put(&self, frame: Frame, processor: usize, node: usize) {
        let own = processor % (self.processors.len() / 2);
        self.push(&self.processors[2 * own], Level::Frame, frame, frame);
        // The length is below zero for a moment if another thread takes the frame before it counts.
        let length = self.processors[2 * own + 1].fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if length >= 2 * u64::from(self.bundle_frames) && length <= LOW {
            self.give_bundle(own, node);
        }
    }

    /// Takes a frame out of use.
    pub(crate) fn retire(&self, frame: Frame) {
        self.push(self.retired(), Level::Frame, frame, frame);
    }

    /// A frame that was out of use.
    pub(crate) fn take_retired(&self) -> Option<Frame> {
        self.pop(self.retired(), Level::Frame)
    }

    fn retired(&self) -> &AtomicU64 {
        &self.nodes[self.nodes.len() - 1]
    }

    fn take_of(&self, processor: usize) -> Option<Frame> {
        let frame = self.pop(&self.processors[2 * processor], Level::Frame)?;
        self.processors[2 * processor + 1].fetch_sub(1, Ordering::Relaxed);
        Some(frame)
    }

    /// Moves a bundle from a processor's list to a node's.
    fn give_bundle(&self, processor: usize, node: usize) {
        let Some(first) = self.take_of(processor) else {
            return;
        };
        let mut last = first;
        for taken in 1..self.bundle_frames {
            let Some(frame) = self.take_of(processor) else {
                // Other processors have taken the rest.
                self.push(&self.processors[2 * processor], Level::Frame, first, last);
                self.processors[2 * processor + 1].fetch_add(taken.into(), Ordering::Relaxed);
                return;
            };
            self.set_link(last, Level::Frame, u64::from(frame) + 1);
            last = frame;
        }
        self.set_link(last, Level::Frame, 0);
        let nodes = self.nodes.len() - 1;
        self.push(&self.nodes[node % nodes], Level::Bundle, first, first);
    }

    /// Puts all frames of a bundle but the first into a processor's list.
    fn take_over(&self, processor: usize, first: Frame) {
        let Some(second) = self.link(first, Level::Frame) else {
            return;
        };
        let mut last = second;
        while let Some(next) = self.link(last, Level::Frame) {
            last = next;
        }
        self.push(&self.processors[2 * processor], Level::Frame, second, last);
        let rest = u64::from(self.bundle_frames - 1);
        self.processors[2 * processor + 1].fetch_add(rest, Ordering::Relaxed);
    }

    /// Pushes a chain of frames, which the caller owns.
    fn push(&self, head: &AtomicU64, level: Level, first: Frame, last: Frame) {
        let mut value = head.load(Ordering::Acquire);
        loop {
            self.set_link(last, level, value & LOW);
            let new = (value & !LOW).wrapping_add(TAG) | (u64::from(first) + 1);
            match head.compare_exchange(value, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(newer) => value = newer,
            }
        }
    }

    fn pop(&self, head: &AtomicU64, level: Level) -> Option<Frame> {
        let mut value = head.load(Ordering::Acquire);
        loop {
            let first = (value & LOW).checked_sub(1)? as Frame;
            // If another thread has taken the frame meanwhile, its link may be anything, and the
            // exchange fails by the tag.
            let next = self.link(first, level).map_or(0, |frame| u64::from(frame) + 1);
            let new = (value & !LOW).wrapping_add(TAG) | next;
            match head.compare_exchange(value, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(first),
                Err(newer) => value = newer,
            }
        }
    }

    fn link(&self, frame: Frame, level: Level) -> Option<Frame> {
        let word = self.links[frame as usize].load(Ordering::Acquire);
        let half = match level {
            Level::Frame => word & LOW,
            Level::Bundle => word >> 32,
        };
        half.checked_sub(1).map(|frame| frame as Frame)
    }

    /// The caller owns the frame, so no other thread changes its links.
    fn set_link(&self, frame: Frame, level: Level, link: u64) {
        let word = self.links[frame as usize].load(Ordering::Acquire);
        let word = match level {
            Level::Frame => (word & !LOW) | link,
            Level::Bundle => (word & LOW) | (link << 32),
        };
        self.links[frame as usize].store(word, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    struct Words(Vec<AtomicU64>, Vec<AtomicU64>, Vec<AtomicU64>);

    impl Words {
        fn new(processors: usize, nodes: usize, frames: usize) -> Self {
            let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
            Self(
                words(FreeLists::processor_words(processors)),
                words(FreeLists::node_words(nodes)),
                words(frames),
            )
        }

        fn lists(&self) -> FreeLists<'_> {
            FreeLists::new(&self.0, &self.1, &self.2)
        }
    }

    #[cfg(not(feature = "model"))]
    mod alone {
        use super::*;
        use proptest::prelude::*;

        proptest! {
            /// Steps are: which processor, and whether it takes, puts, retires or takes a retired
            /// frame.
            #[test]
            fn a_frame_is_in_one_list_at_a_time(
                processors in 1..4_usize,
                nodes in 1..3_usize,
                frames in 1..40_usize,
                steps in prop::collection::vec((0..4_usize, 0..4_u8), 0..300),
            ) {
                let words = Words::new(processors, nodes, frames);
                let lists = words.lists();
                let mut taken: Vec<Frame> = (0..frames as u32).collect();
                let mut retired = 0;
                for (processor, step) in steps {
                    let found = match step {
                        0 => lists.take(processor, processor % nodes),
                        1 => lists.take_retired().inspect(|_| retired -= 1),
                        _ => {
                            if let Some(frame) = taken.pop() {
                                if step == 2 {
                                    lists.put(frame, processor, processor % nodes);
                                } else {
                                    lists.retire(frame);
                                    retired += 1;
                                }
                            }
                            continue;
                        }
                    };
                    match found {
                        Some(frame) => {
                            prop_assert!(!taken.contains(&frame), "a frame is given out twice");
                            taken.insert(0, frame);
                        }
                        // Every processor finds what any list has.
                        None if step == 0 => prop_assert_eq!(taken.len() + retired, frames),
                        None => prop_assert_eq!(retired, 0),
                    }
                }
            }
        }

        #[test]
        fn long_lists_give_bundles_to_their_node() {
            let words = Words::new(2, 1, 1 << 10);
            let lists = words.lists();
            assert_eq!(lists.bundle_frames, 128);
            (0..1 << 10).for_each(|frame| lists.put(frame, 0, 0));
            assert!(words.0[1].load(Ordering::Relaxed) < 2 * 128, "the processor keeps few");
            let of_another: BTreeSet<Frame> =
                (0..1 << 10).map_while(|_| lists.take(1, 0)).collect();
            assert_eq!(of_another.len(), 1 << 10);
        }
    }

    #[cfg(feature = "model")]
    #[test]
    fn threads_never_have_the_same_frame() {
        let scenario = || {
            let words = Words::new(2, 1, 5);
            (0..5).for_each(|frame| words.lists().put(frame, 0, 0));
            let taken: Vec<AtomicU64> = (0..5).map(|_| AtomicU64::new(0)).collect();
            shuttle::thread::scope(|scope| {
                for thread in 0..3 {
                    let (words, taken) = (&words, &taken);
                    scope.spawn(move || {
                        for _ in 0..2 {
                            let frames = [0, 1].map(|_| words.lists().take(thread, 0));
                            for frame in frames.into_iter().flatten() {
                                let old = taken[frame as usize].fetch_add(1, Ordering::AcqRel);
                                assert_eq!(old, 0, "two threads have a frame");
                            }
                            for frame in frames.into_iter().flatten() {
                                taken[frame as usize].fetch_sub(1, Ordering::AcqRel);
                                words.lists().put(frame, thread, 0);
                            }
                        }
                    });
                }
            });
            let rest: BTreeSet<Frame> = (0..6).map_while(|_| words.lists().take(0, 0)).collect();
            assert_eq!(rest.len(), 5, "a frame was lost");
        };
        shuttle::check_random(scenario, 2_000);
        shuttle::check_pct(scenario, 2_000, 3);
    }

    #[cfg(feature = "model")]
    #[test]
    fn a_head_that_is_the_same_frame_again_is_another_head() {
        let scenario = || {
            let words = Words::new(1, 1, 3);
            (0..3).for_each(|frame| words.lists().retire(frame));
            let taken: Vec<AtomicU64> = (0..3).map(|_| AtomicU64::new(0)).collect();
            let take = || {
                let frame = words.lists().take_retired();
                frame.inspect(|frame| {
                    let old = taken[*frame as usize].fetch_add(1, Ordering::AcqRel);
                    assert_eq!(old, 0, "two threads have a frame");
                })
            };
            let give = |frame: Frame| {
                taken[frame as usize].fetch_sub(1, Ordering::AcqRel);
                words.lists().retire(frame);
            };
            shuttle::thread::scope(|scope| {
                // One thread has loaded the head and the next frame, and stops.
                scope.spawn(|| [take(), take()]);
                // The other one gives the head back, but not the next frame.
                scope.spawn(|| {
                    let [one, next] = [take(), take()];
                    one.into_iter().for_each(give);
                    let _ = (take(), next);
                });
            });
        };
        shuttle::check_random(scenario, 5_000);
        shuttle::check_pct(scenario, 5_000, 3);
    }
}
