//! The interface of every engine under measurement: [`Engine`], [`Session`], and how one is opened.
//!
//! The trait is as narrow as the workloads allow, and favours no engine: reads see a value in
//! place, loads are sorted, transactions begin and end where an engine needs them. All engines of a
//! comparison run in the same class of [`Durability`]. By default no engine logs, and nothing must
//! survive a crash before [`Engine::settle`] returns.

mod registry;
pub mod vellum;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

pub use registry::{Engines, VELLUM};

/// An ordered entry: key and value.
pub type Pair = (Vec<u8>, Vec<u8>);

/// The option of the engines that have more than one class of [`Durability`].
pub const DURABILITY: &str = "durability";

/// The option of engines that can do without transactions: `serializable` (or as much of it as they
/// have), or `snapshot`. Without it, `begin` and `commit` do nothing.
pub const TRANSACTIONS: &str = "transactions";

/// What a crash may take of committed changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// All since the last [`Engine::settle`].
    None,
    /// The newest of them: the engine writes them in order and soon, and no commit waits for that.
    Buffered,
    /// Nothing: a commit returns when the change is durable.
    Synced,
}

/// The error of a transaction that lost against another one. It has changed nothing and has ended;
/// the caller begins again.
#[derive(Clone, Copy, Debug)]
pub struct Conflict;

impl std::fmt::Display for Conflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("another transaction was first")
    }
}

impl std::error::Error for Conflict {}

/// How an engine is opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setting {
    /// The directory of its files, which exists and which no other program uses.
    pub directory: PathBuf,
    /// Bytes of memory for the engine's own cache of pages. The memory limit also covers the
    /// engine's other memory, and the pages of its files that the kernel caches.
    pub cache_bytes: u64,
    /// Names of its tables. Workloads use their index.
    pub tables: Vec<String>,
    /// Options of a single engine, such as Vellum's `backend`. Unknown names are an error.
    pub options: BTreeMap<String, String>,
}

impl Setting {
    /// One table, no options.
    pub fn new(directory: &Path, cache_bytes: u64) -> Setting {
        Setting {
            directory: directory.to_path_buf(),
            cache_bytes,
            tables: vec!["data".to_owned()],
            options: BTreeMap::new(),
        }
    }

    /// What the option `durability` asks for: `none`, `buffered` or `synced`.
    ///
    /// # Errors
    /// Another value.
    pub fn durability(&self) -> Result<Durability> {
        match self.options.get(DURABILITY).map_or("none", String::as_str) {
            "none" => Ok(Durability::None),
            "buffered" => Ok(Durability::Buffered),
            "synced" => Ok(Durability::Synced),
            other => bail!("option '{DURABILITY}': no '{other}'; none, buffered or synced"),
        }
    }

    /// As [`durability`](Setting::durability), for an engine that has no buffered commits.
    ///
    /// # Errors
    /// Another value than `none` and `synced`.
    pub fn is_synced(&self) -> Result<bool> {
        match self.durability()? {
            Durability::None => Ok(false),
            Durability::Synced => Ok(true),
            Durability::Buffered => bail!("option '{DURABILITY}': this engine has no buffered"),
        }
    }

    /// Refuses options that are not among `known`.
    ///
    /// # Errors
    /// Names the first one.
    pub fn check_options(&self, known: &[&str]) -> Result<()> {
        match self.options.keys().find(|name| !known.contains(&name.as_str())) {
            Some(name) => bail!("no option '{name}' here; known are: {}", known.join(", ")),
            None => Ok(()),
        }
    }
}

/// An engine by name.
#[derive(Clone, Copy, Debug)]
pub struct Factory {
    /// The name in rows and on the command line, such as `lmdb`.
    pub name: &'static str,
    /// Version and how it is configured, in a line.
    pub about: &'static str,
    /// Whether its pages bypass the kernel's page cache. Then its own cache may take most of the
    /// memory limit; otherwise the kernel needs the limit for the page cache.
    pub direct: bool,
    /// Opens the existing files, or creates them.
    pub open: fn(&Setting) -> Result<Box<dyn Engine>>,
}

/// An open engine. Threads each take a session of their own.
pub trait Engine: Send + Sync {
    /// Fills an empty table with sorted entries, the fastest way the engine has.
    ///
    /// # Errors
    /// Errors of the engine.
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()>;

    /// Writes everything to the device and finishes the engine's pending work, compactions
    /// included, so that measurements start from a state of rest.
    ///
    /// # Errors
    /// Errors of the engine.
    fn settle(&self) -> Result<()>;

    /// Performs `work`, committed but not durable, in the fastest way that the engine offers its
    /// users. Returns the number of entries, or `None` if the adapter does not support it.
    ///
    /// # Errors
    /// Errors of the engine.
    fn bulk(&self, _table: usize, _work: &BulkWork<'_>) -> Result<Option<u64>> {
        Ok(None)
    }

    /// The handle that one thread works with.
    ///
    /// # Errors
    /// Errors of the engine.
    fn session(&self) -> Result<Box<dyn Session + '_>>;
}

/// Work on many entries at a time. Its result is the number of entries that it concerns.
#[derive(Clone, Copy, Debug)]
pub enum BulkWork<'a> {
    /// Counts the table's entries.
    Count,
    /// Reads each entry of a range, its end excluded.
    Read(&'a [u8], &'a [u8]),
    /// Stores entries in the given order, each by one call, in one transaction.
    Insert(&'a [Pair]),
    /// Stores sorted entries after all existing ones.
    Append(&'a [Pair]),
    /// Removes this many entries from the beginning, one by one, and reads each.
    PopFirst(u64),
    /// Removes the entries whose key is chosen.
    Retain(fn(&[u8]) -> bool),
    /// Removes the entries whose key is chosen, and reads each.
    Extract(fn(&[u8]) -> bool),
    /// Removes a range, its end excluded.
    RemoveRange(&'a [u8], &'a [u8]),
}

/// The kind of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Change something.
    Write,
}

/// The direction of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To larger keys.
    Forward,
    /// To smaller keys.
    Backward,
}

/// One thread's access to an engine.
///
/// An operation outside of a transaction is its own transaction. Engines without transactions do
/// nothing at `begin` and `commit`; their single operations are atomic.
pub trait Session {
    /// Whether transactions see nothing of one another before they commit. If so, any operation
    /// between `begin` and `commit`, and `commit` itself, may end the transaction with
    /// [`Conflict`].
    fn isolates(&self) -> bool {
        false
    }

    /// Begins a transaction. None is open.
    ///
    /// # Errors
    /// Errors of the engine.
    fn begin(&mut self, _access: Access) -> Result<()> {
        Ok(())
    }

    /// Commits the transaction. A transaction that has only read just ends.
    ///
    /// # Errors
    /// Errors of the engine.
    fn commit(&mut self) -> Result<()> {
        Ok(())
    }

    /// Passes the value of `key` to `read`, in place if the engine can; false if there is none.
    ///
    /// # Errors
    /// Errors of the engine.
    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool>;

    /// Passes the values of many keys, with their index, in any order.
    ///
    /// # Errors
    /// Errors of the engine.
    fn multi_get(
        &mut self,
        table: usize,
        keys: &[&[u8]],
        read: &mut dyn FnMut(usize, Option<&[u8]>),
    ) -> Result<()> {
        for (index, key) in keys.iter().enumerate() {
            if !self.get(table, key, &mut |value| read(index, Some(value)))? {
                read(index, None);
            }
        }
        Ok(())
    }

    /// Stores a value, whether the key exists or not.
    ///
    /// # Errors
    /// Errors of the engine.
    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()>;

    /// Changes a value in place, keeping its length, as one atomic step even outside of a
    /// transaction; false if there is none.
    ///
    /// # Errors
    /// Errors of the engine.
    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool>;

    /// Removes an entry; false if there is none.
    ///
    /// # Errors
    /// Errors of the engine.
    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool>;

    /// Visits entries in order, from the first key not before `from` (forward) or not after it
    /// (backward), until `visit` returns false.
    ///
    /// # Errors
    /// Errors of the engine.
    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()>;
}
