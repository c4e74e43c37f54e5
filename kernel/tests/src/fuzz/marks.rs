//! Marks: each page that an owner has written is full of a word that identifies the owner.

use crate::PAGE;
use crate::random::Random;

/// Words of a page.
pub(super) const WORDS: usize = PAGE / 8;

/// In the highest byte of every mark. The numbers of frames have zeros there.
const SIGN: u64 = 0xa7;

/// The expected contents of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Zeros.
    Zeros,
    /// This mark.
    Mark(u64),
    /// Each word is zero, or one of the owner's marks; more is not known.
    Own,
}

/// Makes the marks of one owner, and recognises them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner {
    number: u64,
    generation: u64,
}

impl Owner {
    /// The owner of this number.
    pub(super) fn new(number: u64) -> Self {
        Self { number: number & 0xffff, generation: 0 }
    }

    /// The same owner with other marks than the other threads make for it.
    pub(super) fn beginning(number: u64, generation: u64) -> Self {
        Self { generation, ..Self::new(number) }
    }

    /// A mark that this owner has not made yet.
    pub(super) fn mark(&mut self, page: u64) -> u64 {
        self.generation += 1;
        let (page, generation) = (page & 0xff_ffff, self.generation & 0xffff);
        SIGN << 56 | self.number << 40 | page << 16 | generation
    }

    fn has_made(&self, word: u64) -> bool {
        word >> 40 == SIGN << 16 | self.number
    }

    /// Whether the word is zero or of a mark for this page.
    pub(super) fn has_made_for(&self, word: u64, page: u64) -> bool {
        word == 0 || (self.has_made(word) && word >> 16 & 0xff_ffff == page & 0xff_ffff)
    }

    /// Whether some bytes of the word may be of such a mark, and the others zero. The kernel copies
    /// by bytes, so another thread may see an incomplete word.
    pub(super) fn is_making_for(&self, word: u64, page: u64) -> bool {
        let whole = SIGN << 40 | self.number << 24 | page & 0xff_ffff;
        let bytes = (word >> 16).to_le_bytes().into_iter().zip(whole.to_le_bytes());
        bytes.into_iter().all(|(byte, right)| byte == 0 || byte == right)
    }

    /// The position of the first word that differs from the expected one.
    fn first_wrong(&self, words: &[u64], expected: Content) -> Option<usize> {
        let is_right = |word: u64| match expected {
            Content::Zeros => word == 0,
            Content::Mark(mark) => word == mark,
            Content::Own => word == 0 || self.has_made(word),
        };
        words.iter().position(|word| !is_right(*word))
    }

    /// Fails unless the words are the expected ones.
    #[track_caller]
    pub(super) fn check(&self, words: &[u64], expected: Content, page: u64) {
        if let Some(at) = self.first_wrong(words, expected) {
            let (word, number) = (words[at], self.number);
            panic!("page {page} of owner {number}: word {at} is {word:#x}, expected {expected:x?}");
        }
    }
}

/// The words of bytes.
pub(super) fn words_of(bytes: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    bytes.chunks(8).map(word).collect()
}

/// The bytes of a page full of a word.
pub(super) fn page_of(word: u64) -> Vec<u8> {
    word.to_le_bytes().repeat(WORDS)
}

/// A page and a number of pages: at the ends of tables, and few, so that operations often meet.
pub(super) fn some_range(random: &mut Random, pages: u64) -> (u64, u64) {
    let bases = [0, 0, 500, 505, 512, 1020, 1024, pages - pages.min(20), random.below(pages)];
    let page = (random.pick(&bases) + random.below(16)) % pages;
    let count = random.pick(&[1, 1, 1, 2, 3, 7, 40, 512, 600]);
    match count {
        512 => (page / 512 * 512, 512.min(pages - page / 512 * 512)),
        _ => (page, count.min(pages - page)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_know_their_marks() {
        let (mut one, other) = (Owner::new(1), Owner::new(2));
        let mark = one.mark(5);
        assert_ne!(mark, one.mark(5));
        // Without a panic, because a child that another test forks meanwhile could wait for its
        // lock.
        assert_eq!(one.first_wrong(&[mark; 3], Content::Mark(mark)), None);
        assert_eq!(one.first_wrong(&[mark, 0], Content::Own), None);
        assert!(one.has_made_for(mark, 5) && !one.has_made_for(mark, 6));
        assert!(!other.has_made_for(mark, 5) && other.has_made_for(0, 5));
        assert!(one.is_making_for(mark & 0xffff_ffff, 5) && !one.is_making_for(mark >> 8, 5));
        assert_eq!(words_of(&page_of(mark)), [mark; WORDS]);
        assert_eq!(other.first_wrong(&[mark], Content::Own), Some(0));
        assert_eq!(one.first_wrong(&[mark, 0x1234], Content::Own), Some(1));
    }
}
