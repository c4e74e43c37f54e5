//! Random numbers that a seed determines, so that a failed test can be replayed.

/// A generator: splitmix64 (Steele, Lea, Flood, OOPSLA'14) from a seed. The same seed gives the
/// same numbers.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    #[expect(clippy::should_implement_trait, reason = "the numbers do not end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 if the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// The index of an element of a slice of `len` elements; 0 if the slice is empty.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// One of some elements.
    ///
    /// # Panics
    /// If there are none.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// True once in `times` calls, on average.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// Random bytes.
pub fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of the authors' program.
    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        let mut random = Random(1_234_567);
        let numbers = [(); 3].map(|()| random.next());
        let published =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(numbers, published);
    }

    #[test]
    fn numbers_stay_below_their_bound() {
        let mut random = Random(1);
        assert!((0..1000).all(|_| random.below(7) < 7));
        assert_eq!((random.below(0), random.index(0)), (0, 0));
        assert_eq!(random.pick(&["one"]), "one");
        let times = (0..10_000).filter(|_| random.once_in(10)).count();
        assert!((800..1200).contains(&times), "{times}");
    }

    #[test]
    fn bytes_have_any_length() {
        for len in [0, 1, 8, 13] {
            assert_eq!(bytes(len, 3).len(), len);
            assert_eq!(bytes(len, 3), bytes(16, 3)[..len]);
        }
    }
}
