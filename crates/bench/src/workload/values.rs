//! Keys and values that follow from a number, so that every answer can be checked.

/// Mixes a 64-bit number: the finaliser of SplitMix64, a bijection.
#[inline]
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The key of an entry, in the order of their numbers.
#[inline]
pub fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// Fills a value with bytes that follow from its number and do not compress, because a compressing
/// device must not make pages smaller.
pub fn fill(number: u64, value: &mut [u8]) {
    let mut state = mix(number);
    for chunk in value.chunks_mut(8) {
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
        state = mix(state);
    }
}

/// Whether a value begins as [`fill`] made it.
#[inline]
pub fn is_of(number: u64, value: &[u8]) -> bool {
    value.first_chunk() == Some(&mix(number).to_le_bytes())
}

/// A generator of random numbers for the hot loops: a few cycles, good enough to choose keys.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator that begins at `seed`.
    pub fn new(seed: u64) -> Random {
        Random(mix(seed))
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`, which is above 0.
    #[inline]
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// A number from 0 to below 1.
    #[inline]
    pub fn fraction(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_recognised() {
        let mut value = [0; 120];
        fill(7, &mut value);
        assert!(is_of(7, &value) && !is_of(8, &value));
        assert!(!is_of(7, &value[..5]));
    }

    #[test]
    fn random_numbers_are_spread() {
        let mut random = Random::new(1);
        let mut counts = [0u32; 10];
        for _ in 0..100_000 {
            counts[random.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (9_000..11_000).contains(count)), "{counts:?}");
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.fraction())));
    }
}
