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
#[cfg(feature = "rocksdb")]
use vellum_bench::engine::TRANSACTIONS;

pub use fjall::FJALL;
pub use lmdb::LMDB;
pub use redb::REDB;
pub use sqlite::SQLITE;

/// RocksDB without log, with direct I/O; with transactions if the setting asks for them.
#[cfg(feature = "rocksdb")]
pub const ROCKSDB: Factory = Factory {
    name: "rocksdb",
    about: "RocksDB 11.8 (rocksdb 0.25), no log, direct I/O, own cache, no compression",
    direct: true,
    open: |setting| match setting.options.contains_key(TRANSACTIONS) {
        true => rocksdb_transactions::open(setting),
        false => rocksdb::open(setting),
    },
};

/// The peers that this program was built with.
pub const ALL: &[Factory] = &[
    LMDB,
    REDB,
    FJALL,
    SQLITE,
    #[cfg(feature = "rocksdb")]
    ROCKSDB,
];
