//! Morsels beside what the kernel has: the experiments of "Morsels: Explicit Virtual Memory
//! Objects" (DIMES'23).

mod map;
mod pipeline;

pub use map::MORSEL_MAP;
pub use pipeline::MORSEL_PIPELINE;
