//! Random numbers and texts as the specification wants them (TPC-C 5.11, clauses 2.1.5, 2.1.6 and
//! 4.3.2).

use crate::workload::values::Random;

/// The constant C of NURand for customers' numbers (clause 2.1.6.1).
pub const C_ID: u64 = 259;
/// The constant C of NURand for items' numbers.
pub const C_ITEM: u64 = 7911;
/// The constant C of NURand for last names when data is loaded.
pub const C_LAST_LOAD: u64 = 157;
/// The constant C of NURand for last names in transactions. Clause 2.1.6.1 requires a distance of
/// 65 to 119 from that of the load, but not 96 or 112.
pub const C_LAST_RUN: u64 = 223;

const _: () = {
    let delta = C_LAST_LOAD.abs_diff(C_LAST_RUN);
    assert!(delta >= 65 && delta <= 119 && delta != 96 && delta != 112);
    assert!(C_ID <= 1023 && C_ITEM <= 8191 && C_LAST_LOAD <= 255 && C_LAST_RUN <= 255);
};

/// Number of last names.
pub const NAMES: u32 = 1000;

/// A number from `low` to `high`, both included.
#[inline]
pub fn uniform(random: &mut Random, low: u64, high: u64) -> u64 {
    low + random.below(high - low + 1)
}

/// True in `percent` of 100 cases.
#[inline]
pub fn chance(random: &mut Random, percent: u64) -> bool {
    random.below(100) < percent
}

/// NURand(A, x, y). It is not uniform, because the bitwise or of two numbers has more ones than
/// either (clause 2.1.6).
#[inline]
pub fn non_uniform(random: &mut Random, a: u64, c: u64, low: u64, high: u64) -> u64 {
    ((uniform(random, 0, a) | uniform(random, low, high)) + c) % (high - low + 1) + low
}

const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Fills `text` with characters out of the first `kinds` of [`LETTERS`], eight from each number.
fn fill(random: &mut Random, text: &mut [u8], kinds: u32) {
    for chunk in text.chunks_mut(8) {
        let bytes = random.bits().to_le_bytes();
        for (character, byte) in chunk.iter_mut().zip(bytes) {
            *character = LETTERS[((u32::from(byte) * kinds) >> 8) as usize];
        }
    }
}

/// An a-string of `low` to `high` characters at the front of `field`; the rest of it is zeros.
/// Returns its length.
pub fn a_string(random: &mut Random, field: &mut [u8], low: usize, high: usize) -> usize {
    let length = uniform(random, low as u64, high as u64) as usize;
    fill(random, &mut field[..length], 62);
    field[length..].fill(0);
    length
}

/// An n-string: digits to the end of `field`.
pub fn n_string(random: &mut Random, field: &mut [u8]) {
    fill(random, field, 10);
}

/// A zip code: four digits and 11111 (clause 4.3.2.7).
pub fn zip(random: &mut Random, field: &mut [u8]) {
    n_string(random, &mut field[..4]);
    field[4..].fill(b'1');
}

/// The mark of a tenth of the items and of the stock (clause 4.3.3.1).
pub const ORIGINAL: &[u8; 8] = b"ORIGINAL";

/// The text of an item or of stock: 26 to 50 characters, a tenth of them with [`ORIGINAL`].
pub fn data(random: &mut Random, field: &mut [u8]) {
    let length = a_string(random, field, 26, 50);
    if chance(random, 10) {
        let at = random.below((length - ORIGINAL.len() + 1) as u64) as usize;
        field[at..at + ORIGINAL.len()].copy_from_slice(ORIGINAL);
    }
}

/// Whether a text has [`ORIGINAL`] in it.
#[inline]
pub fn is_original(text: &[u8]) -> bool {
    text.windows(ORIGINAL.len()).any(|window| window == ORIGINAL)
}

const SYLLABLES: [&str; 10] =
    ["BAR", "OUGHT", "ABLE", "PRI", "PRES", "ESE", "ANTI", "CALLY", "ATION", "EING"];

/// The last name of a number below [`NAMES`]: a syllable for each digit (clause 4.3.2.3).
pub fn last_name(number: u32) -> [u8; 16] {
    let mut name = [0; 16];
    let mut length = 0;
    for digit in [number / 100, number / 10, number] {
        let syllable = SYLLABLES[(digit % 10) as usize].as_bytes();
        name[length..length + syllable.len()].copy_from_slice(syllable);
        length += syllable.len();
    }
    name
}

/// The numbers from 1 to `end` in random order: a permutation (Fisher and Yates).
pub fn permutation(random: &mut Random, end: u32) -> Vec<u32> {
    let mut numbers: Vec<u32> = (1..=end).collect();
    for last in (1..numbers.len()).rev() {
        numbers.swap(last, random.below(last as u64 + 1) as usize);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_uniform_numbers_keep_their_range_and_are_not_uniform() {
        let mut random = Random::new(1);
        for (a, c, low, high) in
            [(1023, C_ID, 1, 3000), (8191, C_ITEM, 1, 100_000), (255, C_LAST_RUN, 0, 999)]
        {
            let width = (high - low + 1) as usize;
            let mut counts = vec![0u32; width];
            for _ in 0..width * 200 {
                let number = non_uniform(&mut random, a, c, low, high);
                assert!((low..=high).contains(&number), "{number} is not in {low}..={high}");
                counts[(number - low) as usize] += 1;
            }
            counts.sort_unstable();
            // With uniform numbers this would be about a tenth of all.
            let hottest: u32 = counts[width - width / 10..].iter().sum();
            assert!(hottest > width as u32 * 40, "{hottest} of {}", width * 200);
        }
    }

    #[test]
    fn last_names_are_the_specifications() {
        // The example of clause 4.3.2.3.
        assert_eq!(&last_name(371), b"PRICALLYOUGHT\0\0\0");
        assert_eq!(&last_name(40), b"BARPRESBAR\0\0\0\0\0\0");
        assert_eq!(&last_name(777), b"CALLYCALLYCALLY\0");
    }

    #[test]
    fn texts_have_their_lengths_and_letters() {
        let mut random = Random::new(2);
        let mut original = 0;
        for _ in 0..10_000 {
            let mut field = [1; 50];
            data(&mut random, &mut field);
            let length = field.iter().position(|byte| *byte == 0).unwrap_or(50);
            assert!((26..=50).contains(&length));
            assert!(field[..length].iter().all(u8::is_ascii_alphanumeric));
            original += u32::from(is_original(&field));
        }
        assert!((900..1100).contains(&original), "{original}");
        let mut code = [0; 9];
        zip(&mut random, &mut code);
        assert!(code[..4].iter().all(u8::is_ascii_digit) && &code[4..] == b"11111");
    }

    #[test]
    fn a_permutation_has_every_number_once() {
        let mut numbers = permutation(&mut Random::new(3), 3000);
        assert_ne!(numbers[..10], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(1..=3000));
    }
}
