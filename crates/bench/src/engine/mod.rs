//! What every engine under measurement looks like: [`Engine`], [`Session`], and how one is opened.
//!
//! The trait is as narrow as the workloads allow and asks of nobody what he is bad at: reads see a
//! value in place, loads come sorted, transactions begin and end where an engine needs them. All
//! engines run in the same durability class: nothing is logged, and nothing has to survive a crash
//! before [`Engine::settle`] returns.

pub(crate) mod vellum;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

/// An ordered entry: key and value.
pub type Pair = (Vec<u8>, Vec<u8>);

/// How an engine is opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setting {
    /// Where its files are: a directory that exists, and that nobody else uses.
    pub directory: PathBuf,
    /// Bytes of memory for the engine's own cache of pages. What an engine needs beside that, and
    /// what the kernel caches of its files, has to fit the memory limit that it runs under.
    pub cache_bytes: u64,
    /// Names of its tables; workloads mean them by their index.
    pub tables: Vec<String>,
    /// What only one engine understands, such as Vellum's `backend`. Unknown names are an error.
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
    /// Its pages pass the kernel's page cache, so its cache may take most of the memory limit.
    /// Otherwise the kernel needs the limit for the page cache.
    pub direct: bool,
    /// Opens what is there, or creates it.
    pub open: fn(&Setting) -> Result<Box<dyn Engine>>,
}

/// Vellum itself, as users get it.
pub const VELLUM: Factory =
    Factory { name: "vellum", about: "direct I/O, no log", direct: true, open: vellum::open };

/// The engines of a run.
#[derive(Clone, Debug)]
pub struct Engines(Vec<Factory>);

impl Engines {
    /// Vellum and `peers`.
    pub fn new(peers: &[Factory]) -> Engines {
        Engines(std::iter::once(VELLUM).chain(peers.iter().copied()).collect())
    }

    /// Only those of these names, Vellum always among them; all if there are no names.
    ///
    /// # Errors
    /// As [`get`](Engines::get).
    pub fn only(self, names: &[String]) -> Result<Engines> {
        if names.is_empty() {
            return Ok(self);
        }
        names.iter().try_for_each(|name| self.get(name).map(drop))?;
        let wanted = |factory: &Factory| {
            factory.name == VELLUM.name || names.iter().any(|name| name == factory.name)
        };
        Ok(Engines(self.0.into_iter().filter(wanted).collect()))
    }

    /// All of them, Vellum first.
    pub fn all(&self) -> &[Factory] {
        &self.0
    }

    /// The engine of that name.
    ///
    /// # Errors
    /// Says which names there are, and how to get the peers.
    pub fn get(&self, name: &str) -> Result<Factory> {
        let found = self.0.iter().find(|factory| factory.name == name).copied();
        found.with_context(|| {
            let names: Vec<&str> = self.0.iter().map(|factory| factory.name).collect();
            format!(
                "no engine '{name}' here, only {}; build with --features peers (rocksdb: \
                 --features rocksdb) for the others",
                names.join(", ")
            )
        })
    }
}

/// An open engine. Threads each take a session of their own.
pub trait Engine: Send + Sync {
    /// Fills an empty table with sorted entries, the fastest way the engine has.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()>;

    /// Writes everything to the device and ends what the engine still had to do, compactions
    /// included, so that measurements start from a state of rest.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn settle(&self) -> Result<()>;

    /// What one thread works with.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn session(&self) -> Result<Box<dyn Session + '_>>;
}

/// What a transaction is going to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Change something.
    Write,
}

/// Which way a scan goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To larger keys.
    Forward,
    /// To smaller keys.
    Backward,
}

/// One thread's access to an engine.
///
/// Operations outside of a transaction are transactions of their own. Engines without transactions
/// do nothing at `begin` and `commit`; their single operations are atomic.
pub trait Session {
    /// Begins a transaction; there is none under way.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn begin(&mut self, _access: Access) -> Result<()> {
        Ok(())
    }

    /// Ends it. A transaction that only read just ends.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn commit(&mut self) -> Result<()> {
        Ok(())
    }

    /// Shows the value of `key` to `read`, in place where the engine can; false if there is none.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool>;

    /// Shows the values of many keys, by their index, in any order.
    ///
    /// # Errors
    /// Whatever the engine says.
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

    /// Stores a value, whether the key is there or not.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()>;

    /// Changes a value in place, keeping its length, as one atomic step even outside of a
    /// transaction; false if there is none.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool>;

    /// Removes an entry; false if there is none.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool>;

    /// Visits entries in order, from the first key not before `from` (forward) or not after it
    /// (backward), until `visit` returns false.
    ///
    /// # Errors
    /// Whatever the engine says.
    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()>;
}
