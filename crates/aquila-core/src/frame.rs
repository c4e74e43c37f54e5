//! Frames: which page is in each, and what may be done with it.
//!
//! A frame has one word of state and one word for its key. The key changes only while one thread
//! owns the frame (it is free, or being filled), so a thread that has pinned a frame and then reads
//! the key it wanted has the page, whatever happened before. So the word needs no version: a frame
//! that was used for another page meanwhile has another key.
//!
//! | from | to | by |
//! |---|---|---|
//! | free | filling | the thread that took the frame from the free list |
//! | filling | resident | the same thread, once the page was read |
//! | filling | free | the same thread, if the read failed or another thread has the page |
//! | resident | evicting | an evictor, if the frame is neither pinned nor locked |
//! | evicting | resident | the evictor, if the page could not be written |
//! | evicting | free | the evictor, once the page is unmapped and written |
//!
//! A resident frame is *locked* while a thread changes whether the page is dirty: a thread that
//! handles a write fault, and a thread that writes the page back. So no store comes between the end
//! of write access and the write, and none is lost.

use crate::sync::{AtomicU64, Ordering};

/// The number of a frame.
pub type Frame = u32;

/// Bits of a key for the number of the page in its file.
const PAGE_BITS: u32 = 40;

/// A page of a file, by name: the number of the file in this cache, and the number of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u64);

impl Key {
    /// Files that a cache can have.
    pub const FILES: u32 = (1 << (64 - PAGE_BITS)) - 2;
    /// Pages that a file can have.
    pub const PAGES: u64 = 1 << PAGE_BITS;

    /// `None` if the numbers are too large.
    pub const fn new(file: u32, page: u64) -> Option<Self> {
        if file >= Self::FILES || page >= Self::PAGES {
            return None;
        }
        Some(Self((file as u64 + 1) << PAGE_BITS | page))
    }

    /// The number of the file.
    pub const fn file(self) -> u32 {
        (self.0 >> PAGE_BITS) as u32 - 1
    }

    /// The number of the page in the file.
    pub const fn page(self) -> u64 {
        self.0 & (Self::PAGES - 1)
    }

    /// The page so many pages later in the same file.
    pub const fn after(self, pages: u64) -> Option<Self> {
        match self.page().checked_add(pages) {
            Some(page) => Self::new(self.file(), page),
            None => None,
        }
    }

    /// The same as a word, which is never zero.
    #[inline]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// The key that a word of [`Key::word`] means.
    pub(crate) const fn of_word(word: u64) -> Option<Self> {
        if word == 0 { None } else { Some(Self(word)) }
    }
}

/// What a frame is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has no page.
    Free,
    /// A thread reads a page into it.
    Filling,
    /// It has a page.
    Resident,
    /// An evictor takes the page away.
    Evicting,
}

const STATE: u64 = 0b11;
const FREE: u64 = 0;
const FILLING: u64 = 1;
const RESIDENT: u64 = 2;
const EVICTING: u64 = 3;
const LOCKED: u64 = 1 << 2;
const DIRTY: u64 = 1 << 3;
const REFERENCED: u64 = 1 << 4;
const PIN: u64 = 1 << 8;
const PINS: u64 = 0xffff << 8;
const HOLD: u64 = 1 << 24;
const HOLDS: u64 = 0xffff << 24;
const WRITE_HOLD: u64 = 1 << 40;
const WRITE_HOLDS: u64 = 0xffff << 40;
/// Pins of a page that callers may keep: half of what can be counted, so that faults of the page
/// always find room for theirs.
const MOST_HOLDS: u64 = 0x8000;

/// A state word, as it was when it was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(u64);

impl Word {
    /// What the frame is used for.
    pub const fn state(self) -> State {
        match self.0 & STATE {
            FREE => State::Free,
            FILLING => State::Filling,
            RESIDENT => State::Resident,
            _ => State::Evicting,
        }
    }

    /// Whether the page has changes that the file has not.
    pub const fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    /// Whether a thread changes write access or writes the page back.
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// Whether one of the pins is a caller's, who keeps it.
    pub const fn is_held(self) -> bool {
        self.0 & HOLDS != 0
    }

    /// Whether a caller's pin is for writing at any time.
    pub const fn is_held_for_writing(self) -> bool {
        self.0 & WRITE_HOLDS != 0
    }
}

/// The result of an attempt to pin a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pin {
    /// The page stays where it is until it is unpinned.
    Pinned,
    /// A thread reads it in or takes it away: wait.
    Busy,
    /// The frame has another page, or none: look the page up again.
    Gone,
}

/// The descriptors of all frames.
#[derive(Debug)]
pub(crate) struct Frames<'a> {
    words: &'a [AtomicU64],
    keys: &'a [AtomicU64],
}

impl<'a> Frames<'a> {
    /// All words are zero: every frame is free.
    pub(crate) fn new(words: &'a [AtomicU64], keys: &'a [AtomicU64]) -> Self {
        assert_eq!(words.len(), keys.len(), "a frame has one word and one key");
        Self { words, keys }
    }

    pub(crate) fn count(&self) -> u32 {
        self.words.len() as u32
    }

    #[inline]
    pub(crate) fn word(&self, frame: Frame) -> Word {
        Word(self.words[frame as usize].load(Ordering::Acquire))
    }

    /// The page in a frame, or the last one that was in it.
    #[inline]
    pub(crate) fn key(&self, frame: Frame) -> Option<Key> {
        Key::of_word(self.keys[frame as usize].load(Ordering::Acquire))
    }

    pub(crate) fn keys(&self) -> &'a [AtomicU64] {
        self.keys
    }

    /// Free to filling. The caller has taken the frame from the free list.
    pub(crate) fn claim(&self, frame: Frame, key: Key) {
        debug_assert_eq!(self.word(frame).state(), State::Free);
        self.keys[frame as usize].store(key.word(), Ordering::Release);
        self.words[frame as usize].store(FILLING, Ordering::Release);
    }

    /// Filling to resident, with one pin of the caller.
    pub(crate) fn publish(&self, frame: Frame) {
        debug_assert_eq!(self.word(frame).state(), State::Filling);
        self.words[frame as usize].store(RESIDENT | PIN, Ordering::Release);
    }

    /// Filling or evicting to free, by the thread that owns the frame.
    pub(crate) fn free(&self, frame: Frame) {
        debug_assert!(matches!(self.word(frame).state(), State::Filling | State::Evicting));
        self.words[frame as usize].store(FREE, Ordering::Release);
    }

    /// Pins the page `key` if it is in this frame.
    #[inline]
    pub(crate) fn pin(&self, frame: Frame, key: Key) -> Pin {
        let mut word = self.word(frame);
        loop {
            if self.key(frame) != Some(key) || word.state() == State::Free {
                return Pin::Gone;
            }
            if word.state() != State::Resident || word.0 & PINS == PINS {
                return Pin::Busy;
            }
            match self.exchange(frame, word, word.0 + PIN) {
                // The key of a pinned frame does not change: this look is the one that counts.
                Ok(()) if self.key(frame) == Some(key) => return Pin::Pinned,
                Ok(()) => {
                    self.unpin(frame);
                    return Pin::Gone;
                }
                Err(newer) => word = newer,
            }
        }
    }

    #[inline]
    pub(crate) fn unpin(&self, frame: Frame) {
        let old = self.words[frame as usize].fetch_sub(PIN, Ordering::AcqRel);
        debug_assert_ne!(old & PINS, 0);
    }

    /// Makes a pin, which the caller has, one that it keeps. Returns whether there was room for one
    /// more.
    pub(crate) fn hold(&self, frame: Frame, for_writing: bool) -> bool {
        let step = if for_writing { HOLD + WRITE_HOLD } else { HOLD };
        let has_room = |word: Word| (word.0 & HOLDS) / HOLD < MOST_HOLDS;
        self.change(frame, |word| has_room(word).then(|| word.0 + step)).is_ok()
    }

    /// Ends a pin that the caller kept.
    pub(crate) fn end_hold(&self, frame: Frame, for_writing: bool) {
        let step = if for_writing { HOLD + WRITE_HOLD } else { HOLD };
        let old = self.words[frame as usize].fetch_sub(step, Ordering::AcqRel);
        debug_assert_ne!(old & HOLDS, 0);
    }

    /// Ends all pins that callers kept of a page.
    pub(crate) fn end_holds(&self, frame: Frame, key: Key) {
        let _ = self.change(frame, |word| {
            // No other thread ends these pins, so a frame that has some keeps its page.
            let has_some = word.is_held() && self.key(frame) == Some(key);
            let pins = (word.0 & HOLDS) / HOLD * PIN;
            has_some.then(|| (word.0 & !(HOLDS | WRITE_HOLDS)) - pins)
        });
    }

    /// Locks a resident frame; or returns the word that is in the way.
    pub(crate) fn try_lock(&self, frame: Frame) -> Result<Word, Word> {
        self.change(frame, |word| {
            let is_open = word.state() == State::Resident && !word.is_locked();
            is_open.then_some(word.0 | LOCKED)
        })
    }

    pub(crate) fn unlock(&self, frame: Frame) {
        let old = self.words[frame as usize].fetch_and(!LOCKED, Ordering::AcqRel);
        debug_assert_ne!(old & LOCKED, 0);
    }

    /// The caller has locked the frame, or evicts it. Returns whether the page was clean.
    pub(crate) fn set_dirty(&self, frame: Frame) -> bool {
        let old = self.words[frame as usize].fetch_or(DIRTY, Ordering::AcqRel);
        debug_assert!(old & LOCKED != 0 || old & STATE == EVICTING);
        old & DIRTY == 0
    }

    /// The caller has locked the frame, or evicts it.
    pub(crate) fn clear_dirty(&self, frame: Frame) {
        let old = self.words[frame as usize].fetch_and(!DIRTY, Ordering::AcqRel);
        debug_assert!(old & LOCKED != 0 || old & STATE == EVICTING);
    }

    /// Notes an access.
    #[inline]
    pub(crate) fn reference(&self, frame: Frame) {
        if self.words[frame as usize].load(Ordering::Relaxed) & REFERENCED == 0 {
            self.words[frame as usize].fetch_or(REFERENCED, Ordering::Relaxed);
        }
    }

    /// Whether there was an access since the last call.
    pub(crate) fn take_reference(&self, frame: Frame) -> bool {
        self.words[frame as usize].load(Ordering::Relaxed) & REFERENCED != 0
            && self.words[frame as usize].fetch_and(!REFERENCED, Ordering::Relaxed) & REFERENCED
                != 0
    }

    /// Resident to evicting, if nothing is in the way; of clean pages only, if `clean` says so.
    /// From now on the frame is the caller's. Returns its key.
    pub(crate) fn try_evict(&self, frame: Frame, clean: bool) -> Result<Key, Word> {
        let word = self.change(frame, |word| {
            let may_go = word.state() == State::Resident
                && word.0 & (PINS | LOCKED) == 0
                && !(clean && word.is_dirty());
            may_go.then_some((word.0 & !(STATE | REFERENCED)) | EVICTING)
        })?;
        self.key(frame).ok_or(word)
    }

    /// Evicting to resident: the page stays.
    pub(crate) fn keep(&self, frame: Frame) {
        let old = self.words[frame as usize].fetch_xor(EVICTING ^ RESIDENT, Ordering::AcqRel);
        debug_assert_eq!(old & STATE, EVICTING);
    }

    /// Changes a word as `change` says; or returns the word for which it says `None`.
    fn change(&self, frame: Frame, change: impl Fn(Word) -> Option<u64>) -> Result<Word, Word> {
        let mut word = self.word(frame);
        loop {
            let Some(new) = change(word) else {
                return Err(word);
            };
            match self.exchange(frame, word, new) {
                Ok(()) => return Ok(word),
                Err(newer) => word = newer,
            }
        }
    }

    #[inline]
    fn exchange(&self, frame: Frame, old: Word, new: u64) -> Result<(), Word> {
        self.words[frame as usize]
            .compare_exchange(old.0, new, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(Word)
    }
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;

    #[test]
    fn keys_are_what_they_were_made_of() {
        for (file, page) in [(0, 0), (7, 9), (Key::FILES - 1, Key::PAGES - 1)] {
            let key = Key::new(file, page).unwrap();
            assert_eq!((key.file(), key.page()), (file, page));
            assert_ne!(key.word(), 0);
        }
        assert_eq!(Key::new(Key::FILES, 0), None);
        assert_eq!(Key::new(0, Key::PAGES), None);
        assert_eq!(Key::new(3, 5).unwrap().after(2), Key::new(3, 7));
        assert_eq!(Key::new(3, 5).unwrap().after(u64::MAX), None);
        assert_eq!(Key::new(3, Key::PAGES - 1).unwrap().after(1), None);
    }

    fn one_frame(test: impl Fn(&Frames<'_>, Key)) {
        let words = [AtomicU64::new(0)];
        let keys = [AtomicU64::new(0)];
        test(&Frames::new(&words, &keys), Key::new(1, 2).unwrap());
    }

    #[test]
    fn a_pinned_or_locked_page_is_not_evicted() {
        one_frame(|frames, key| {
            frames.claim(0, key);
            assert_eq!(frames.pin(0, key), Pin::Busy);
            frames.publish(0);
            assert!(frames.try_evict(0, false).is_err(), "the filling thread's pin");
            frames.unpin(0);
            frames.try_lock(0).unwrap();
            assert!(frames.try_evict(0, false).is_err(), "the lock");
            assert!(frames.set_dirty(0));
            frames.unlock(0);
            assert!(frames.try_evict(0, true).is_err(), "dirty");
            assert_eq!(frames.try_evict(0, false), Ok(key));
            assert_eq!(frames.pin(0, key), Pin::Busy);
            frames.keep(0);
            assert!(frames.word(0).is_dirty());
            assert_eq!(frames.pin(0, key), Pin::Pinned);
        });
    }

    #[test]
    fn a_frame_has_one_page_after_the_other() {
        one_frame(|frames, key| {
            let other = Key::new(1, 3).unwrap();
            for _ in 0..5 {
                frames.claim(0, key);
                frames.publish(0);
                assert_eq!(frames.pin(0, other), Pin::Gone);
                frames.unpin(0);
                frames.try_evict(0, false).unwrap();
                frames.free(0);
                assert_eq!(frames.pin(0, key), Pin::Gone);
            }
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "too many steps for Miri")]
    fn pins_do_not_overflow() {
        one_frame(|frames, key| {
            frames.claim(0, key);
            frames.publish(0);
            assert!(frames.hold(0, true));
            for _ in 1..0x8000 {
                assert_eq!(frames.pin(0, key), Pin::Pinned);
                assert!(frames.hold(0, true));
            }
            // There is room for those who go again soon.
            (0..0x7fff).for_each(|_| assert_eq!(frames.pin(0, key), Pin::Pinned));
            assert_eq!(frames.pin(0, key), Pin::Busy);
            assert!(!frames.hold(0, true) && !frames.hold(0, false));
            (0..0x7fff).for_each(|_| frames.unpin(0));
            for _ in 0..0x8000 {
                assert!(frames.word(0).is_held_for_writing());
                frames.end_hold(0, true);
                frames.unpin(0);
            }
            assert!(!frames.word(0).is_held());
            for for_writing in [true, false, true] {
                assert_eq!(frames.pin(0, key), Pin::Pinned);
                assert!(frames.hold(0, for_writing));
            }
            frames.end_holds(0, Key::new(1, 3).unwrap());
            assert!(frames.word(0).is_held_for_writing(), "another page's");
            frames.end_holds(0, key);
            assert!(!frames.word(0).is_held() && !frames.word(0).is_held_for_writing());
            assert_eq!(frames.try_evict(0, false), Ok(key));
        });
    }
}
