//! Pseudo-random numbers from a seed.

use std::time::{SystemTime, UNIX_EPOCH};

/// xorshift64*.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        // Spreads the seeds, because neighbouring seeds would begin alike. Never 0, which gives
        // only zeros.
        Self((seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1)
    }

    /// The numbers of `VELLUM_SEED`, or else of a seed from the clock. Prints the seed.
    pub fn of_this_run() -> Self {
        let chosen = std::env::var("VELLUM_SEED").ok().and_then(|text| text.parse().ok());
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos());
        let seed = chosen.unwrap_or(clock as u64);
        println!("VELLUM_SEED={seed}");
        Self::new(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.number() >> 16) % bound
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.below(from.len() as u64)).expect("an index")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_its_numbers() {
        let numbers = |seed| {
            let mut random = Random::new(seed);
            (0..100).map(|_| random.below(10)).collect::<Vec<u64>>()
        };
        assert_eq!(numbers(1), numbers(1));
        assert_ne!(numbers(1), numbers(2));
        assert!((0..10).all(|digit| numbers(3).contains(&digit)));
    }
}
