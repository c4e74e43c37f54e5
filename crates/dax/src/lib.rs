//! Files on byte-addressable storage, mapped without a fault for each page.
//!
//! A [`DaxFile`] is a file whose page tables exist before any process needs them (Alverti et al.,
//! "DaxVM", MICRO '22). With Vellum's kernel module, on ext4 that is mounted for DAX, a [`Mapping`]
//! costs one entry of the process' own page tables for each GiB, only the first access faults, and
//! all processes share the tables. Without the module, or on other storage, the same calls use
//! `mmap`: [`DaxFile::backend`] says which, and [`probe`] says why.
//!
//! ```
//! use vellum_dax::{Access, DaxFile, Options};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("log");
//! let file = DaxFile::create(&path, &Options::default())?;
//! file.append(b"hello, ")?;
//! let mapping = file.map(Access::ReadWrite)?;
//! mapping.write_at(0, b"H")?;
//! file.append(b"storage")?;
//!
//! let mut text = [0; 14];
//! mapping.read_at(0, &mut text)?; // the mapping shows what was appended since
//! assert_eq!(&text, b"Hello, storage");
//! file.sync()?; // from now on it survives a loss of power
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What a mapping shows is the file: other processes may write it at any time, and may shorten it.
//! So [`Mapping::read_at`] and [`Mapping::write_at`] copy, and references into it are `unsafe`
//! ([`Mapping::bytes`]). An access to a page that the file has lost meanwhile is SIGBUS, as it is
//! for `mmap`.
//!
//! A program that makes its stores durable itself opens the file with [`Durability::Flushed`] and
//! calls [`Mapping::persist`], which writes back the cache lines of a range and nothing else.
//!
//! The methods of a [`Mapping`] compare their range with the file's length, which is a system call:
//! a program that accesses few bytes at a time uses [`Mapping::base`] or [`Mapping::bytes`], with
//! [`flush`] and [`copy_past_caches`].
//!
//! A program that opens many files, reads each once and closes it maps them in a [`Heap`], which
//! costs neither the locks nor the TLB flushes of `mmap` and `munmap`:
//!
//! ```
//! use vellum_dax::{Access, Heap, HeapOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("page.html");
//! # std::fs::write(&path, b"<html>")?;
//! let heap = Heap::new(&HeapOptions::new(Access::Read))?;
//! let mapped = heap.map(&std::fs::File::open(path)?)?;
//! let mut start = [0; 6];
//! mapped.read_at(0, &mut start)?;
//! # assert_eq!(&start, b"<html>");
//! # Ok(())
//! # }
//! ```
//!
//! A program that writes new files through mappings takes them from a [`ZeroPool`], whose files
//! have blocks that are zeros already.
//!
//! [`store_table`] lets the first use of a file after a restart be faster, if the file is in large
//! pieces.
//!
//! Runs on Linux 5.10 and later with 4 KiB pages.

mod backend;
mod error;
mod file;
mod heap;
mod mapping;
mod persist;
mod stored;
mod sys;
mod zero_pool;

pub use backend::{Backend, BackendChoice, Probe, Tables, probe, tables};
pub use error::{Error, Result};
pub use file::{DaxFile, Durability, Options, Stat, open_file};
pub use heap::{Ephemeral, Heap, HeapOptions, HeapStat};
pub use mapping::{Access, Mapping};
pub use persist::{Flush, copy_past_caches, flush};
pub use rustix::io::Errno;
pub use stored::{StoredTable, forget_table, store_table};
pub use zero_pool::{ZeroPool, ZeroPoolOptions, ZeroPoolStat};

/// Bytes of a page.
pub const PAGE_SIZE: u64 = 4096;
