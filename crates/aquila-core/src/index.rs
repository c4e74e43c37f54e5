//! The index: which frame has a page. A lock-free hash table (paper, section 3.2).
//!
//! A bucket is a list of frames in the order of their keys. The links lie in the frames'
//! descriptors, so an insertion needs no memory. A link is one word: the next frame, a mark that
//! says that the frame which has the link is being removed, and a tag that every change of the link
//! increments. A thread that stopped in the middle of a list and goes on much later sees by the tag
//! that its link is not the one that it had loaded, even if the same frame follows again.
//!
//! All threads go on in every case: a thread that finds a marked frame unlinks it itself.

use crate::frame::{Frame, Key};
use crate::sync::{AtomicU64, Ordering};

const MARK: u64 = 1 << 31;
const NEXT: u64 = MARK - 1;
const TAG: u64 = 1 << 32;

/// A link, as it was when it was loaded.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Link(u64);

impl Link {
    fn next(self) -> Option<Frame> {
        (self.0 & NEXT).checked_sub(1).map(|frame| frame as Frame)
    }

    fn is_marked(self) -> bool {
        self.0 & MARK != 0
    }

    /// The value that follows this one and leads to where `other` leads.
    fn leading_as(self, other: Self) -> Self {
        Self((self.0 & !(TAG - 1)).wrapping_add(TAG) | (other.0 & NEXT))
    }

    fn leading_to(self, frame: Frame) -> Self {
        self.leading_as(Self(u64::from(frame) + 1))
    }

    fn marked(self) -> Self {
        Self(self.leading_as(self).0 | MARK)
    }
}

/// A position in a list: the link that leads there, and its value.
struct Position<'a> {
    link: &'a AtomicU64,
    value: Link,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Index<'a> {
    buckets: &'a [AtomicU64],
    /// The link of each frame.
    links: &'a [AtomicU64],
    /// The key of each frame.
    keys: &'a [AtomicU64],
}

impl<'a> Index<'a> {
    /// Buckets for so many frames.
    pub(crate) const fn buckets(frames: u32) -> usize {
        (frames as usize).next_power_of_two()
    }

    /// All words are zero: the table is empty.
    pub(crate) fn new(
        buckets: &'a [AtomicU64],
        links: &'a [AtomicU64],
        keys: &'a [AtomicU64],
    ) -> Self {
        assert!(buckets.len().is_power_of_two(), "buckets are a power of two");
        assert!(links.len() as u64 <= NEXT, "a link has 31 bits for a frame");
        Self { buckets, links, keys }
    }

    /// The frame that has a page, or is being filled with it.
    #[inline]
    pub(crate) fn find(&self, key: Key) -> Option<Frame> {
        self.first(key).or_else(|| self.search(key).ok())
    }

    /// The frame that has a page, if it is the first of its list. Most are. This is the first step
    /// of [`search`](Self::search), in a third of the instructions.
    #[inline]
    fn first(&self, key: Key) -> Option<Frame> {
        let bucket = &self.buckets[self.bucket(key)];
        let value = Link(bucket.load(Ordering::Acquire));
        let frame = value.next()?;
        let link = Link(self.links[frame as usize].load(Ordering::Acquire));
        let found = self.keys[frame as usize].load(Ordering::Acquire);
        let is_it =
            found == key.word() && !link.is_marked() && bucket.load(Ordering::Acquire) == value.0;
        is_it.then_some(frame)
    }

    /// Adds a frame, whose key is set. `Err`: the frame that has the page already.
    pub(crate) fn insert(&self, key: Key, frame: Frame) -> Result<(), Frame> {
        let link = &self.links[frame as usize];
        loop {
            let position = match self.search(key) {
                Ok(found) => return Err(found),
                Err(position) => position,
            };
            // No other thread changes the link of a frame that is in no list: exchanges by threads
            // that still know the link from an earlier list fail, because the tag is another one.
            let old = Link(link.load(Ordering::Acquire));
            link.store(old.leading_as(position.value).0, Ordering::Release);
            if exchange(position.link, position.value, position.value.leading_to(frame)) {
                return Ok(());
            }
        }
    }

    /// Removes a frame from the list of its key. The caller owns the frame.
    pub(crate) fn remove(&self, key: Key, frame: Frame) {
        let link = &self.links[frame as usize];
        loop {
            let value = Link(link.load(Ordering::Acquire));
            debug_assert!(!value.is_marked(), "a frame is removed once");
            if exchange(link, value, value.marked()) {
                break;
            }
        }
        // The search unlinks what is marked on its way, and the frame is on its way. So no list has
        // the frame when this returns, and the frame may be used again.
        let _ = self.search(key);
    }

    /// The frame with a key; or the position where such a frame belongs.
    fn search(&self, key: Key) -> Result<Frame, Position<'_>> {
        'again: loop {
            let link = &self.buckets[self.bucket(key)];
            let mut position = Position { link, value: Link(link.load(Ordering::Acquire)) };
            loop {
                let Some(frame) = position.value.next() else {
                    return Err(position);
                };
                let link = &self.links[frame as usize];
                let value = Link(link.load(Ordering::Acquire));
                let found = self.keys[frame as usize].load(Ordering::Acquire);
                // If the link before is as it was, then the frame was in this list all the time,
                // and what was just read of it belongs together.
                if position.link.load(Ordering::Acquire) != position.value.0 {
                    continue 'again;
                }
                if value.is_marked() {
                    let without = position.value.leading_as(value);
                    if !exchange(position.link, position.value, without) {
                        continue 'again;
                    }
                    position.value = without;
                } else if found == key.word() {
                    return Ok(frame);
                } else if found > key.word() {
                    return Err(position);
                } else {
                    position = Position { link, value };
                }
            }
        }
    }

    /// The bucket of a key. Neighbouring pages have different ones.
    #[inline]
    fn bucket(&self, key: Key) -> usize {
        const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
        let bits = self.buckets.len().trailing_zeros();
        let hash = key.word().wrapping_mul(MULTIPLIER);
        hash.checked_shr(u64::BITS - bits).unwrap_or(0) as usize
    }
}

fn exchange(link: &AtomicU64, old: Link, new: Link) -> bool {
    link.compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn words(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    fn key(page: u64) -> Key {
        Key::new(5, page).unwrap()
    }

    /// The words of an index with so many buckets and frames.
    struct Words(Vec<AtomicU64>, Vec<AtomicU64>, Vec<AtomicU64>);

    impl Words {
        fn new(buckets: usize, frames: usize) -> Self {
            Self(words(buckets), words(frames), words(frames))
        }

        fn index(&self) -> Index<'_> {
            Index::new(&self.0, &self.1, &self.2)
        }

        fn insert(&self, page: u64, frame: Frame) -> Result<(), Frame> {
            self.2[frame as usize].store(key(page).word(), Ordering::Release);
            self.index().insert(key(page), frame)
        }
    }

    #[cfg(not(feature = "model"))]
    mod alone {
        use super::*;
        use proptest::prelude::*;

        proptest! {
            #[test]
            fn an_index_is_a_map(
                buckets in 0..4_u32,
                steps in prop::collection::vec((any::<bool>(), 0..12_u64), 0..200),
            ) {
                let words = Words::new(1 << buckets, 16);
                let mut map = BTreeMap::new();
                let mut free: Vec<Frame> = (0..16).collect();
                for (inserts, page) in steps {
                    if inserts {
                        let frame = free.pop().unwrap();
                        let result = words.insert(page, frame);
                        match map.get(&page) {
                            Some(other) => prop_assert_eq!(result, Err(*other)),
                            None => {
                                prop_assert_eq!(result, Ok(()));
                                map.insert(page, frame);
                            }
                        }
                        if result.is_err() {
                            free.insert(0, frame);
                        }
                    } else if let Some(frame) = map.remove(&page) {
                        words.index().remove(key(page), frame);
                        free.insert(0, frame);
                    }
                    for page in 0..12 {
                        prop_assert_eq!(words.index().find(key(page)), map.get(&page).copied());
                    }
                }
            }
        }
    }

    #[cfg(feature = "model")]
    mod model {
        use super::*;
        use shuttle::thread;

        fn check(scenario: impl Fn() + Send + Sync + Clone + 'static) {
            shuttle::check_random(scenario.clone(), 2_000);
            shuttle::check_pct(scenario, 2_000, 3);
        }

        #[test]
        fn one_of_two_insertions_of_a_page_wins() {
            check(|| {
                let words = Words::new(1, 4);
                words.insert(1, 3).unwrap();
                let results = thread::scope(|scope| {
                    let threads = [0, 1].map(|frame| {
                        let words = &words;
                        scope.spawn(move || words.insert(2, frame))
                    });
                    threads.map(|thread| thread.join().unwrap())
                });
                match results {
                    [Ok(()), Err(0)] | [Err(1), Ok(())] => {}
                    other => panic!("{other:?}"),
                }
                assert_eq!(words.index().find(key(1)), Some(3));
            });
        }

        #[test]
        fn frames_move_between_lists_under_searches() {
            check(|| {
                // One bucket: all pages are in one list, around one page that is always there.
                let words = Words::new(1, 4);
                words.insert(5, 0).unwrap();
                thread::scope(|scope| {
                    for (frame, pages) in [(1, [4, 6]), (2, [6, 4])] {
                        let words = &words;
                        scope.spawn(move || {
                            for page in pages {
                                if words.insert(page, frame).is_ok() {
                                    assert_eq!(words.index().find(key(page)), Some(frame));
                                    words.index().remove(key(page), frame);
                                }
                            }
                        });
                    }
                    let words = &words;
                    scope.spawn(move || {
                        for _ in 0..3 {
                            assert_eq!(words.index().find(key(5)), Some(0));
                        }
                    });
                });
                let found: BTreeMap<u64, Frame> = (0..8)
                    .filter_map(|page| Some((page, words.index().find(key(page))?)))
                    .collect();
                assert_eq!(found, BTreeMap::from([(5, 0)]));
            });
        }

        #[test]
        fn frames_move_between_buckets_under_searches() {
            check(|| {
                let words = Words::new(2, 4);
                // Two pages of each bucket.
                let of_bucket =
                    |bucket: usize| (0..).filter(move |page| words_bucket(*page) == bucket).take(2);
                let pages: Vec<u64> = of_bucket(0).chain(of_bucket(1)).collect();
                words.insert(pages[1], 0).unwrap();
                words.insert(pages[3], 1).unwrap();
                thread::scope(|scope| {
                    let (words, pages) = (&words, &pages);
                    scope.spawn(move || {
                        for page in [pages[0], pages[2], pages[0]] {
                            words.insert(page, 2).unwrap();
                            words.index().remove(key(page), 2);
                        }
                    });
                    for (page, frame) in [(pages[1], 0), (pages[3], 1)] {
                        scope.spawn(move || {
                            assert_eq!(words.index().find(key(page)), Some(frame));
                            assert_eq!(words.index().find(key(page)), Some(frame));
                        });
                    }
                });
            });
        }

        fn words_bucket(page: u64) -> usize {
            let words = Words::new(2, 1);
            words.index().bucket(key(page))
        }
    }
}
