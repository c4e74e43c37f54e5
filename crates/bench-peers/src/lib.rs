//! Adapters that implement the trait of `vellum-bench` for other engines, each in a file.
//!
//! Each is set up as it is fastest in the class that all engines run in: no engine logs if it can
//! avoid it, and nothing has to survive a crash before `settle` returns. The header of each file
//! names its settings and the reasons.

mod commits;
mod fjall;
#[cfg(feature = "rocksdb")]
mod heap;
mod lmdb;
mod redb;
#[cfg(feature = "rocksdb")]
mod rocksdb;
mod sqlite;

use vellum_bench::engine::Factory;

pub use fjall::FJALL;
pub use lmdb::LMDB;
pub use redb::REDB;
#[cfg(feature = "rocksdb")]
pub use rocksdb::ROCKSDB;
pub use sqlite::SQLITE;

/// The peers that were built in.
pub const ALL: &[Factory] = &[
    LMDB,
    REDB,
    FJALL,
    SQLITE,
    #[cfg(feature = "rocksdb")]
    ROCKSDB,
];
