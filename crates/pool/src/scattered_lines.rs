//! The order in which an iteration visits the lines of a table, and which lines have entries.
//!
//! A *line* is a cache line of eight entries. The iteration jumps from one line to another far
//! away. So what a clock's hand has just evicted, and what the hand has not visited for long, lie
//! evenly mixed everywhere in the table. The iteration also jumps over lines without entries.
//! Threads enter and remove entries meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::FromZeros;

/// Entries of a line.
pub(crate) const LINE: usize = 8;

/// Lines whose bits lie in one word.
const LINES_OF_WORD: usize = u64::BITS as usize;

/// The lines of one table. The *rank* of a line says how many the iteration visits before it.
#[derive(Debug)]
pub(crate) struct ScatteredLines {
    /// A bit for each line, by its rank. The bit of a line that has entries is set, or the thread
    /// that has entered the last of them is about to set it.
    used: Box<[AtomicU64]>,
    lines: usize,
    /// The step from one line to the next in the order of iteration. It has no common divisor with
    /// the number of lines, so that the iteration reaches all lines.
    stride: usize,
    /// The inverse of the stride: a line's rank is `line * inverse`.
    inverse: usize,
}

fn are_coprime(a: usize, b: usize) -> bool {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

/// The inverse of a number modulo another one that has no common divisor with it (the extended
/// algorithm of Euclid).
fn inverse_modulo(number: usize, modulus: usize) -> usize {
    let (mut rest, mut next_rest) = (modulus as i128, number as i128 % modulus as i128);
    let (mut factor, mut next_factor) = (0, 1);
    while next_rest != 0 {
        let quotient = rest / next_rest;
        (rest, next_rest) = (next_rest, rest - quotient * next_rest);
        (factor, next_factor) = (next_factor, factor - quotient * next_factor);
    }
    factor.rem_euclid(modulus as i128) as usize
}

/// A thread that looks for the next entry finds so many lines empty itself.
const LINES_LOOKED_AT: usize = 32;

/// ... and looks at the bits of so many (64 words).
pub(crate) const LINES_PASSED: usize = 64 * LINES_OF_WORD;

impl ScatteredLines {
    /// For a table of so many lines, at least one, without entries. None if there is no address
    /// space.
    pub(crate) fn new(lines: usize) -> Option<ScatteredLines> {
        // The golden section, so that the lines that follow each other lie evenly spread.
        let golden = (lines as f64 * 0.618_034) as usize;
        let stride = (golden.max(1)..).find(|stride| are_coprime(*stride, lines)).unwrap_or(1);
        let inverse = inverse_modulo(stride, lines);
        let used = <[AtomicU64]>::new_box_zeroed_with_elems(lines.div_ceil(LINES_OF_WORD));
        used.ok().map(|used| ScatteredLines { used, lines, stride, inverse })
    }

    /// How many entries the table has room for.
    pub(crate) fn entries(&self) -> usize {
        self.lines * LINE
    }

    /// Where in the table the entry at a position of the iteration is.
    pub(crate) fn entry_at(&self, position: usize) -> usize {
        self.first_entry(position / LINE) + position % LINE
    }

    /// The position of the iteration at which it comes to an entry.
    pub(crate) fn position_of(&self, entry: usize) -> usize {
        self.rank_of(entry) * LINE + entry % LINE
    }

    /// The first entry of the line with this rank.
    fn first_entry(&self, rank: usize) -> usize {
        // No overflow below 2^32 lines, which is a pool of 90 TiB.
        rank.wrapping_mul(self.stride) % self.lines * LINE
    }

    fn rank_of(&self, entry: usize) -> usize {
        (entry / LINE).wrapping_mul(self.inverse) % self.lines
    }

    fn bit(&self, rank: usize) -> (&AtomicU64, u64) {
        (&self.used[rank / LINES_OF_WORD], 1 << (rank % LINES_OF_WORD))
    }

    /// Whether the bit of an entry's line is set.
    #[cfg(test)]
    pub(crate) fn is_noted(&self, entry: usize) -> bool {
        let (word, bit) = self.bit(self.rank_of(entry));
        word.load(Ordering::SeqCst) & bit != 0
    }

    /// There is something in this entry now, which the caller has stored in the order `SeqCst`.
    pub(crate) fn note_entry(&self, entry: usize) {
        let (word, bit) = self.bit(self.rank_of(entry));
        // Together with `clear_if_empty`: the entry was stored before this load, and the bit is
        // cleared before the entries are looked at. So one of the two threads sees the other.
        if word.load(Ordering::SeqCst) & bit == 0 {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// How many positions without an entry there are from a position on, up to the end of the table
    /// at most, as far as whole lines tell: none for a position within a line. It looks into a few
    /// lines and at a few words of bits at most. `is_empty` looks at an entry in the order
    /// `SeqCst`.
    pub(crate) fn empty_from(&self, position: usize, is_empty: impl Fn(usize) -> bool) -> usize {
        if !position.is_multiple_of(LINE) {
            return 0;
        }
        let first = position / LINE;
        let (mut rank, mut cleared) = (first, 0);
        let end = self.lines.min(first + LINES_PASSED);
        while rank < end && cleared < LINES_LOOKED_AT {
            let word = self.used[rank / LINES_OF_WORD].load(Ordering::Relaxed);
            let ahead = word >> (rank % LINES_OF_WORD);
            if ahead == 0 {
                rank = (rank / LINES_OF_WORD + 1) * LINES_OF_WORD;
                continue;
            }
            rank += ahead.trailing_zeros() as usize;
            if !self.clear_if_empty(rank, &is_empty) {
                break;
            }
            rank += 1;
            cleared += 1;
        }
        (rank.min(self.lines) - first) * LINE
    }

    /// Clears the bit of a line without entries. False if there are entries.
    fn clear_if_empty(&self, rank: usize, is_empty: &impl Fn(usize) -> bool) -> bool {
        let start = self.first_entry(rank);
        let is_line_empty = || (start..start + LINE).all(is_empty);
        if !is_line_empty() {
            return false;
        }
        // So that tests see what another thread may do between the two.
        #[cfg(test)]
        std::thread::yield_now();
        let (word, bit) = self.bit(rank);
        word.fetch_and(!bit, Ordering::SeqCst);
        if is_line_empty() {
            return true;
        }
        word.fetch_or(bit, Ordering::SeqCst);
        false
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_iteration_comes_to_every_entry_once() {
        for lines in [1, 2, 3, 7, 8, 9, 100, 1_000, 4_096, 10_007] {
            let table = ScatteredLines::new(lines).unwrap();
            let entries: BTreeSet<usize> =
                (0..table.entries()).map(|position| table.entry_at(position)).collect();
            assert!(entries.iter().copied().eq(0..lines * LINE));
            for entry in 0..table.entries() {
                assert_eq!(table.entry_at(table.position_of(entry)), entry, "{lines} lines");
            }
        }
    }
}
