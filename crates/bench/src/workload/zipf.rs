//! Skewed choices as YCSB makes them (Cooper et al., SoCC'10), with its constants.
//!
//! The generator is that of Gray et al. (SIGMOD'94, "Quickly generating billion-record synthetic
//! databases"), section 3.2: a draw costs one power, and the sum over all ranks is computed once.

use super::values::{Random, mix};

/// YCSB's skew.
pub const THETA: f64 = 0.99;

/// Ranks 0, 1, 2, ... with probabilities that fall as `1 / (rank + 1)^theta`.
#[derive(Clone, Debug)]
pub struct Zipf {
    ranks: u64,
    theta: f64,
    alpha: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    /// Over `ranks` ranks (at least 2), with a `theta` between 0 and 1. Takes time in proportion to
    /// the ranks.
    pub fn new(ranks: u64, theta: f64) -> Zipf {
        let zeta = |ranks: u64| (1..=ranks).map(|rank| (rank as f64).powf(-theta)).sum::<f64>();
        let all = zeta(ranks);
        let eta = (1.0 - (2.0 / ranks as f64).powf(1.0 - theta)) / (1.0 - zeta(2) / all);
        Zipf { ranks, theta, alpha: 1.0 / (1.0 - theta), zeta: all, eta }
    }

    /// A rank; 0 is the most frequent one.
    #[inline]
    pub fn rank(&self, random: &mut Random) -> u64 {
        let u = random.fraction();
        let uz = u * self.zeta;
        if uz < 1.0 {
            return 0;
        }
        if uz < 1.0 + 0.5f64.powf(self.theta) {
            return 1;
        }
        let rank = self.ranks as f64 * (self.eta * u - self.eta + 1.0).powf(self.alpha);
        (rank as u64).min(self.ranks - 1)
    }

    /// A rank scattered over `0..ends`, so that frequent ones are not neighbours.
    #[inline]
    pub fn scrambled(&self, random: &mut Random) -> u64 {
        mix(self.rank(random)) % self.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_as_they_should() {
        let zipf = Zipf::new(1000, THETA);
        let mut random = Random::new(3);
        let mut counts = vec![0u32; 1000];
        for _ in 0..1_000_000 {
            counts[zipf.rank(&mut random) as usize] += 1;
        }
        let total: f64 = (1..=1000).map(|rank| f64::from(rank).powf(-THETA)).sum();
        for rank in [0usize, 1, 9, 99] {
            let expected = 1e6 * ((rank + 1) as f64).powf(-THETA) / total;
            let ratio = f64::from(counts[rank]) / expected;
            assert!((0.8..1.25).contains(&ratio), "rank {rank}: {} for {expected}", counts[rank]);
        }
    }

    #[test]
    fn scrambled_ranks_stay_within() {
        let zipf = Zipf::new(10, THETA);
        let mut random = Random::new(3);
        assert!((0..1000).all(|_| zipf.scrambled(&mut random) < 10));
    }
}
