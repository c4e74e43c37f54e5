//! File tables compared with the kernel's own ways to files on persistent memory: the experiments
//! of "DaxVM: Stressing the Limits of Memory as a File Interface" (MICRO '22).

mod append;
mod kernel;
mod map;
mod once;
mod search;
mod source_tree;
mod way;

pub use append::DAX_APPEND;
pub use map::DAX_MAP;
pub use once::DAX_ONCE;
pub use search::DAX_SEARCH;
