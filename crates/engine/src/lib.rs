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
//! Trees are for many threads at a time: readers take no locks, changes lock a leaf. Values that
//! are too long for a leaf become blobs and come back as one slice, in place, under a guard. Longer
//! ones, up to 256 TiB, are [written](Tree::writer) and [read](Tree::reader) as streams, with any
//! pool.
//!
//! The bytes on disk are described in docs/format.md. Transactions and a log are a later step;
//! until then a store has to be closed, or synced after its last change, to be opened again. It is
//! closed when its last handle is dropped, also by a panic, and when the process exits; a process
//! that is killed closes nothing.

mod error;
pub mod node;
pub mod page;
mod store;
mod sync;
mod tree;
mod value;

pub use error::{Error, Result};
pub use store::PoolView;
pub use store::Snapshot;
pub use store::check::{CheckProgress, CheckReport};
pub use store::options::Options;
pub use store::{Limits, Store, StoreStat};
pub use tree::{
    BulkLoader, Cursor, Entries, ExtractIf, KeyRange, OwnedValueReader, OwnedValueWriter, Tree,
    TreeStat, ValueReader, ValueWriter, Visit, VisitReaders,
};
pub use value::{Blob, Value};
pub use vellum_pool::device::{
    Device, DeviceError, DeviceInfo, Direct, FileDevice, FileOptions, MemoryDevice,
};
pub use vellum_pool::{
    BackendChoice, BackendKind, PageId, PageRef, PoolStats, Replacement, StatePlace,
};
