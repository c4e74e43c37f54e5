//! The kinds of keys of a store. Half of the seeds have other ones than the first kind, and their
//! choice has random numbers of its own. So the other seeds do what they did before there were
//! kinds, and find the planted bugs that they found.

use vellum_testing::random::Random;

use crate::model::Entries;

/// What the keys of a store look like. Each kind has at most some thousand keys, so that many are
/// used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A few equal bytes, and two bytes of a number.
    Numbered,
    /// Four bytes in the order of the numbers, from some before 65,536 to some after it.
    BigEndian,
    /// As separators in an inner node, the first four bytes look like the length and the flags of a
    /// reference to a value.
    Slots,
    /// Four bytes, the lowest first: keys in a row are far apart.
    LittleEndian,
    /// What a leaf has of a value with pages of its own.
    References,
    /// As long as keys can be. They differ at the front or at the back.
    Longest,
    /// Each is a prefix of all that are longer, from the empty key on.
    Prefixes,
    /// Of each of the others.
    All,
}

const KINDS: &[Kind] = &[
    Kind::BigEndian,
    Kind::Slots,
    Kind::LittleEndian,
    Kind::References,
    Kind::Longest,
    Kind::Prefixes,
    Kind::All,
];

/// Makes the keys of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keys {
    kind: Kind,
    /// The length of the longest.
    len_max: usize,
}

impl Keys {
    /// Those of a seed, for a store that takes keys up to this length.
    pub(crate) fn random(seed: u64, len_max: usize) -> Keys {
        let mut random = Random(seed.rotate_left(8));
        let kind = if random.once_in(2) { random.pick(KINDS) } else { Kind::Numbered };
        Keys { kind, len_max }
    }

    /// Some key.
    pub(crate) fn key(self, random: &mut Random) -> Vec<u8> {
        if self.kind == Kind::Numbered {
            let mut key = vec![b'k'; random.pick(&[0, 0, 1, 8, 60])];
            let number = random.pick(&[30, 200, 600]);
            key.extend((random.below(number) as u16).to_be_bytes());
            return key;
        }
        let most = random.pick(&[30, 200, 1500]);
        let kind = if self.kind == Kind::All { random.pick(KINDS) } else { self.kind };
        self.numbered(kind, random.below(most) as u16)
    }

    /// The key of this kind with this number.
    fn numbered(self, kind: Kind, number: u16) -> Vec<u8> {
        let wide = u32::from(number);
        match kind {
            Kind::Numbered => number.to_be_bytes().into(),
            // The small numbers are around 65,536.
            Kind::BigEndian if number.is_multiple_of(2) => (65_536 + wide / 2).to_be_bytes().into(),
            Kind::BigEndian => (65_535 - wide / 2).to_be_bytes().into(),
            Kind::Slots => {
                // Without common bytes at the front: a node leaves those out.
                let head = [0x0001_0014_u32, 0x8003_0014][usize::from(number % 2)];
                [&head.to_be_bytes()[..], &(number / 2).to_be_bytes()].concat()
            }
            Kind::LittleEndian => (65_500 + wide).to_le_bytes().into(),
            Kind::References => reference(wide),
            Kind::Longest => {
                let mut key = vec![number as u8; self.len_max];
                let at = if number.is_multiple_of(3) { 0 } else { self.len_max - 2 };
                key[at..at + 2].copy_from_slice(&number.to_be_bytes());
                key
            }
            Kind::Prefixes => {
                let byte = [0, b'p', 0xff][usize::from(number % 3)];
                vec![byte; usize::from(number / 3) % (self.len_max + 1)]
            }
            Kind::All => self.numbered(KINDS[usize::from(number) % (KINDS.len() - 1)], number),
        }
    }

    /// Entries of so many different keys at most, fewer if they are long. Some have values with
    /// pages of their own.
    pub(crate) fn loaded(self, count: u16) -> Entries {
        let entry = |number: u16| {
            let len = if number % 100 == 5 { 6000 } else { 30 };
            (self.numbered(self.kind, number), vec![number as u8; len].into())
        };
        // The others would make files of many megabytes, which each crash copies.
        let count = match self.kind {
            Kind::Longest => count / 8,
            Kind::Prefixes => count / 4,
            _ => count,
        };
        (0..count).map(entry).collect()
    }
}

/// The bytes of a reference to a value (docs/format.md): its first page, its length, and the frames
/// of its page or of its pieces.
fn reference(number: u32) -> Vec<u8> {
    let frames = if number.is_multiple_of(3) { 2 | 1 << 24 } else { 1 + number % 3 };
    let (page, len) = (u64::from(2 + number % 700), u64::from(4000 + number / 700));
    [&page.to_le_bytes()[..], &len.to_le_bytes(), &frames.to_le_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn half_of_the_seeds_have_other_keys_of_each_kind() {
        let kinds: Vec<_> = (1..=400).map(|seed| Keys::random(seed, 600).kind).collect();
        let count = |kind| kinds.iter().filter(|found| **found == kind).count();
        assert!((160..240).contains(&count(Kind::Numbered)), "{}", count(Kind::Numbered));
        KINDS.iter().for_each(|kind| assert!(count(*kind) > 15, "{kind:?}: {}", count(*kind)));
    }

    #[test]
    fn the_keys_of_each_kind_are_many_and_short_enough() {
        for kind in [Kind::Numbered].iter().chain(KINDS) {
            let keys = Keys { kind: *kind, len_max: 627 };
            let loaded = keys.loaded(1500);
            assert!(loaded.len() > 180, "{kind:?}: {}", loaded.len());
            let mut random = Random(1);
            let found: BTreeSet<_> = (0..3000).map(|_| keys.key(&mut random)).collect();
            assert!(found.len() > 600, "{kind:?}: {}", found.len());
            let longest = loaded.keys().chain(&found).map(Vec::len).max();
            assert!(longest <= Some(627), "{kind:?}: {longest:?}");
            let is_extreme = |len| found.iter().any(|key| key.len() == len);
            match kind {
                Kind::Longest => assert!(is_extreme(627)),
                Kind::Prefixes => assert!(is_extreme(0)),
                _ => {}
            }
        }
    }
}
