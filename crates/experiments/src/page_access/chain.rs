//! The order in which pages are read: one pseudo-random cycle through all of them.

/// A cyclic order of `2^bits` pages, spread over a range `2^spread` times as large.
///
/// Page number `n` of the order is an invertible mix of `n`, so the next page follows from a page's
/// own number. So a device can generate its pages, and no table of the order is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    bits: u32,
    spread: u32,
}

/// An odd number with no pattern in its bits.
const FACTOR: u64 = 0xd1b5_4a32_d192_ed03;
/// Rounds of mixing, each a multiplication and a shift.
const ROUNDS: u32 = 3;

impl Chain {
    /// A chain of `2^bits` pages in a range of `2^(bits + spread)`.
    ///
    /// # Panics
    /// With `bits` beyond 1 to 40: a programming error.
    pub fn new(bits: u32, spread: u32) -> Chain {
        assert!((1..=40).contains(&bits) && spread < 20, "a chain of 2^{bits} pages");
        Chain { bits, spread }
    }

    /// How many pages are read.
    pub fn pages(self) -> u64 {
        1 << self.bits
    }

    /// All pages of the range are read.
    pub fn is_dense(self) -> bool {
        self.spread == 0
    }

    /// The number of pages of the range over which they are spread.
    pub fn range(self) -> u64 {
        1 << (self.bits + self.spread)
    }

    fn mask(self) -> u64 {
        self.pages() - 1
    }

    /// Half of the bits or more: then a shift to the right and exclusive or undoes itself.
    fn fold(self) -> u32 {
        self.bits.div_ceil(2)
    }

    fn mix(self, number: u64) -> u64 {
        (0..ROUNDS).fold(number, |mixed, _| {
            let mixed = mixed.wrapping_mul(FACTOR) & self.mask();
            mixed ^ (mixed >> self.fold())
        })
    }

    fn unmix(self, mixed: u64) -> u64 {
        (0..ROUNDS).fold(mixed, |mixed, _| {
            let unfolded = mixed ^ (mixed >> self.fold());
            unfolded.wrapping_mul(inverse(FACTOR)) & self.mask()
        })
    }

    /// Page of the range that holds the data of the `index`-th page, 0 to `pages() - 1`. Where
    /// within its part of the range it lies is as good as random.
    pub fn place(self, index: u64) -> u64 {
        let within = index.wrapping_mul(FACTOR) >> 40 & ((1 << self.spread) - 1);
        (index << self.spread) | within
    }

    /// All pages of the range that are used, in ascending order.
    pub fn places(self) -> impl Iterator<Item = u64> {
        (0..self.pages()).map(move |index| self.place(index))
    }

    /// Pages to begin at, so far from each other that no walk finds pages that another walk has
    /// left in a cache. The first [`pages`](Self::pages) of them are all pages.
    pub fn starts(self) -> impl Iterator<Item = u64> {
        (0u64..).map(move |number| self.place(number.wrapping_mul(77) & self.mask()))
    }

    /// The page to read after `place`.
    pub fn next(self, place: u64) -> u64 {
        let number = self.unmix((place >> self.spread) & self.mask());
        self.place(self.mix(number.wrapping_add(1) & self.mask()))
    }
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration.
fn inverse(odd: u64) -> u64 {
    (0..5)
        .fold(odd, |inverse, _| inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cycle_visits_every_page_once() {
        for (bits, spread) in [(1, 0), (3, 0), (8, 0), (13, 0), (3, 3), (10, 7)] {
            let chain = Chain::new(bits, spread);
            let mut seen = vec![false; chain.range() as usize];
            let first = chain.place(0);
            let mut place = first;
            for _ in 0..chain.pages() {
                assert!(!seen[place as usize], "{chain:?} comes to {place} twice");
                seen[place as usize] = true;
                place = chain.next(place);
            }
            assert_eq!(place, first, "{chain:?} is no cycle");
            assert!(chain.places().all(|place| seen[place as usize]));
        }
    }

    #[test]
    fn as_many_starts_as_pages_are_all_pages() {
        let chain = Chain::new(9, 2);
        let mut starts: Vec<u64> = chain.starts().take(chain.pages() as usize).collect();
        starts.sort_unstable();
        assert!(starts.into_iter().eq(chain.places()));
    }

    #[test]
    fn neighbours_in_the_order_are_no_neighbours_in_memory() {
        let chain = Chain::new(16, 0);
        let near = chain.places().filter(|place| chain.next(*place).abs_diff(*place) < 64).count();
        assert!(near < 400, "{near} of 65536 steps are short");
    }
}
