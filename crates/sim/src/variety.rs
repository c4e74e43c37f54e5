//! Other sizes of stores, steps and pools of some seeds. Their random numbers are their own, so the
//! other seeds do what they did before, and find the planted bugs that they found.

use vellum_testing::random::Random;

use crate::recovery::Sizes;

/// What a store has besides the common.
#[derive(Debug)]
pub(crate) struct Variety {
    /// The numbers of what varies.
    pub random: Random,
    /// Once in so many steps one of the rarer ones, if at all.
    once_in: Option<u64>,
    /// Whether there are snapshots and transactions. Without them a removal drops whole leaves.
    pub has_views: bool,
    /// A recovered store may have a larger pool.
    grows: bool,
}

impl Variety {
    /// That of a seed.
    pub(crate) fn random(seed: u64, sizes: &mut Sizes) -> Variety {
        let mut random = Random(seed.rotate_left(24));
        let once_in = random.once_in(2).then(|| random.pick(&[4, 15]));
        let has_views = once_in.is_none() || random.once_in(2);
        if once_in.is_some() && random.once_in(4) {
            sizes.have_pages_of(random.pick(&[4, 16]));
        }
        let grows = once_in.is_some() && random.once_in(2);
        Variety { random, once_in, has_views, grows }
    }

    /// Whether the next step is one of the rarer ones.
    pub(crate) fn is_due(&mut self) -> bool {
        self.once_in.is_some_and(|times| self.random.once_in(times))
    }

    /// The sizes of a recovered store: perhaps its pool is larger than before. Not smaller: then
    /// the store may have values that do not fit.
    pub(crate) fn grown(&mut self, sizes: Sizes) -> Sizes {
        let grows = self.grows && self.random.once_in(4) && sizes.pool_bytes < 8 << 20;
        let times = if grows { 2 } else { 1 };
        Sizes { pool_bytes: times * sizes.pool_bytes, ..sizes }
    }
}
