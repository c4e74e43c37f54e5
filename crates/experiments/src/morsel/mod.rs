//! Morsels compared with the kernel's own ways to share memory: the experiments of "Morsels:
//! Explicit Virtual Memory Objects" (DIMES'23).

mod daemons;
mod load;
mod map;
mod pipeline;
mod start;

pub use load::MORSEL_LOAD;
pub use map::MORSEL_MAP;
pub use pipeline::MORSEL_PIPELINE;
pub use start::MORSEL_START;
