//! Traces of page accesses, and how many of them a cache of a given size answers.
//!
//! All but [`cost`] is pure and seeded: the same numbers on every machine. [`Kind`] says which
//! traces there are and makes them; [`reference`](mod@reference) counts the hits of FIFO, exact LRU
//! and of Belady's optimum; [`simulate`] those of any
//! [`ReplacementPolicy`](vellum_pool::ReplacementPolicy), driven as the pool drives it. [`cost`]
//! measures the cost of a policy for a miss, from several threads.

pub mod cost;
mod kind;
pub mod reference;
pub mod simulate;

pub use kind::Kind;

/// A sequence of accesses to pages of one frame.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Which it is, such as `zipf 0.99`.
    pub name: String,
    /// Accesses are below this.
    pub pages: u32,
    /// The pages, in the order of their accesses.
    pub accesses: Vec<u32>,
    /// Accesses before this one fill the cache; their hits do not count.
    pub counted_from: usize,
}

impl Trace {
    /// Hits among the counted accesses, as a share of them.
    pub fn share(&self, hits: usize) -> f64 {
        hits as f64 / (self.accesses.len() - self.counted_from).max(1) as f64
    }
}
