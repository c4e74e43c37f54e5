//! File tables compared with the kernel's own ways to files on persistent memory: the experiments
//! of "DaxVM: Stressing the Limits of Memory as a File Interface" (MICRO '22).

mod append;
mod http;
mod kernel;
mod map;
mod once;
mod search;
mod serve;
mod server;
mod source_tree;
mod way;

pub use append::DAX_APPEND;
pub use map::DAX_MAP;
pub use once::DAX_ONCE;
pub use search::DAX_SEARCH;
pub use serve::DAX_SERVE;
