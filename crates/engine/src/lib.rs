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
//! are too long for a leaf become blobs and come back as one slice, in place, under a guard.
//!
//! The bytes on disk are described in docs/format.md. Transactions and a log are a later step;
//! until then a store has to be closed, or synced after its last change, to be opened again.

mod blob;
pub mod bulk;
mod bytes;
mod catalog;
mod check;
mod error;
mod format;
mod free_map;
mod gate;
mod header;
pub mod node;
mod open;
mod options;
pub mod page;
mod snapshot;
mod store;
mod store_core;
mod tree;
mod value;

pub use check::{CheckProgress, CheckReport};
pub use error::{Error, Result};
pub use options::Options;
pub use snapshot::Snapshot;
pub use store::{Limits, Store, StoreStat};
pub use tree::{Cursor, Entries, Tree, TreeStat, Visit};
pub use value::{Blob, Value};
pub use vellum_pool::device::{Device, DeviceInfo, Direct};
pub use vellum_pool::{BackendChoice, BackendKind, PageId, PageRef, Pool, PoolStats};
