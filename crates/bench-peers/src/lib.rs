//! Adapters that implement the trait of `vellum-bench` for other engines, each in a file.
//!
//! Each engine has its fastest settings in the durability class that all engines of a comparison
//! have. By default no engine logs if it can avoid that, and nothing must survive a crash before
//! `settle` returns. The header of each file names its settings and the reasons.

mod commits;
mod fjall;
#[cfg(feature = "rocksdb")]
mod heap;
mod lmdb;
mod redb;
#[cfg(feature = "rocksdb")]
mod rocksdb;
#[cfg(feature = "rocksdb")]
mod rocksdb_transactions;
mod sqlite;

use vellum_bench::engine::Factory;

pub use fjall::FJALL;
pub use lmdb::LMDB;
pub use redb::REDB;
#[cfg(feature = "rocksdb")]
pub use rocksdb::ROCKSDB;
pub use sqlite::SQLITE;

/// The peers that this program was built with.
pub const ALL: &[Factory] = &[
    LMDB,
    REDB,
    FJALL,
    SQLITE,
    #[cfg(feature = "rocksdb")]
    ROCKSDB,
];
