//! An embeddable store: named B+trees and blobs in one file, on a buffer manager that lets the MMU
//! translate page identifiers.
//!
//! ```
//! use vellum::{Options, Store};
//!
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("example.vellum");
//! let store = Store::create(&path, &Options::new().pool_bytes(4 << 20))?;
//! let capitals = store.create_tree("capitals")?;
//! capitals.upsert(b"France", b"Paris")?;
//! capitals.upsert(b"Ghana", b"Accra")?;
//! assert_eq!(&*capitals.get(b"Ghana")?.expect("just stored"), b"Accra");
//! for entry in capitals.prefix(b"F") {
//!     let (country, capital) = entry?;
//!     assert_eq!((&country[..], &*capital), (&b"France"[..], &b"Paris"[..]));
//! }
//! store.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Many threads may use a tree at the same time: readers take no locks, and a change locks one
//! leaf. A value that does not fit in a leaf becomes a blob. A lookup returns a blob as one slice,
//! in place, under a guard. Values of up to 256 TiB can be [written](Tree::writer) and
//! [read](Tree::reader) as streams, whatever the size of the pool.
//!
//! A [transaction](Store::begin) changes any entries of any trees, or none. A
//! [snapshot](Store::snapshot) is a view that does not change, and that blocks no change.
//! docs/transactions.md says what they guarantee; docs/format.md describes the bytes on disk.
//!
//! A store loses nothing that was synced if its process is killed or the power fails: it writes
//! each change to a log, and the next opening recovers it. A store [without a log](Options::log)
//! can be opened again if it was closed, or if no changed page was written since its last sync. The
//! store closes when its last handle is dropped, also when a panic drops it, and when the process
//! exits. A process that is killed closes nothing.

mod backup;
mod control;
mod error;
mod key;
pub mod node;
pub mod page;
mod peer;
mod planted;
mod redo;
mod store;
mod sync;
mod tree;
mod txn;
mod value;
mod versions;
#[cfg(test)]
#[path = "versions/tests.rs"]
mod versions_tests;

pub use backup::{
    BackupOptions, BackupProgress, BackupReport, RestoreOptions, RestoreReport, restore,
};
pub use control::{
    ControlSocket, OwnerStat, request_backup, request_compact, request_resize_pool, request_stat,
};
pub use error::{Error, Result};
#[cfg(feature = "testing")]
pub use planted::{StoreBug, plant};
pub use redo::progress::{RecoveryProgress, RecoveryReport};
#[cfg(feature = "testing")]
pub use redo::record::encoded_again as record_encoded_again;
pub use store::PoolView;
pub use store::check::{CheckProgress, CheckReport};
pub use store::compact::{CompactProgress, CompactReport};
pub use store::options::Options;
pub use store::salvage::{SalvagedTree, SalvagedTrees};
pub use store::{Limits, Store, StoreStat};
pub use tree::{
    BulkLoader, Cursor, Entries, ExtractIf, KeyRange, OwnedBulkLoader, OwnedValueReader,
    OwnedValueWriter, SalvagedEntry, Tree, TreeStat, ValueReader, ValueWriter, Visit, VisitReaders,
    VisitSalvaged,
};
pub use txn::{
    Durability, Isolation, Savepoint, Snapshot, Transaction, TransactionOptions, ViewEntries,
};
pub use value::{Blob, Value};
pub use vellum_pool::device::{
    Device, DeviceError, DeviceInfo, Direct, FileDevice, FileOptions, MemoryDevice,
};
pub use vellum_pool::{
    BackendChoice, BackendKind, Latency, PageId, PageRef, PoolStats, Replacement, StatePlace,
    Translation,
};
