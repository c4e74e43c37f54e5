//! The adapter for fjall, an LSM tree.
//!
//! Durability class: fjall always has a journal. With `manual_journal_persist` a write only reaches
//! the buffer of the journal's writer; nothing is flushed before `settle`. Synced commits persist
//! the journal (`PersistMode::SyncData`) before they return, outside of the adapter's lock.
//!
//! Memory: fjall has a cache of blocks and reads its files through the kernel's page cache, without
//! direct I/O. A hit in its own cache is cheaper (see redb), so it counts as `direct`. Memtables
//! get an eighth of the harness' share, the cache the rest.
//!
//! No compression, because the data do not compress; values stay with their keys. Lookups are
//! expected to find their key, so the last level has no filters (`expect_point_read_hits`). Loads
//! are ingested as sorted tables. `settle` flushes memtables and waits for compactions.
//!
//! A reading transaction is a snapshot. Transactions that write are fjall's single-writer ones; a
//! lock of the adapter keeps single writes out of them, which then need no transaction.

use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use fjall::config::{CompressionPolicy, HashRatioPolicy};
use fjall::{
    CompressionType, Iter, Keyspace, KeyspaceCreateOptions, PersistMode, Readable as _,
    SingleWriterTxDatabase, SingleWriterTxKeyspace, SingleWriterWriteTx, Snapshot,
};
use vellum_bench::engine::{
    Access, DURABILITY, Direction, Engine, Factory, Pair, Session, Setting,
};

/// fjall without flushes of its journal.
pub const FJALL: Factory = Factory {
    name: "fjall",
    about: "fjall 3.1, journal not flushed, own cache, no compression",
    direct: true,
    open,
};

/// Bounds of a memtable's size.
const MEMTABLE: (u64, u64) = (1 << 20, 64 << 20);

/// Slots for a key in the hash index of a block: faster lookups for hardly any space.
const HASH_RATIO: f32 = 0.75;

/// How long no compaction must have run until the engine is at rest.
const REST: Duration = Duration::from_millis(200);

struct Fjall {
    /// Held by each thread that changes data.
    writing: Mutex<()>,
    tables: Vec<SingleWriterTxKeyspace>,
    database: SingleWriterTxDatabase,
    is_synced: bool,
}

/// Opens or creates the database in the directory. Option: `durability` (`none` or `synced`).
fn open(setting: &Setting) -> Result<Box<dyn Engine>> {
    setting.check_options(&[DURABILITY])?;
    let memtables = setting.cache_bytes / 8;
    // A thread fills one while another thread writes another one out.
    let memtable = memtables / 2 / setting.tables.len().max(1) as u64;
    let database = SingleWriterTxDatabase::builder(setting.directory.join("fjall"))
        .cache_size(setting.cache_bytes - memtables)
        .manual_journal_persist(true)
        .journal_compression(CompressionType::None)
        .open()?;
    let options = || {
        KeyspaceCreateOptions::default()
            .manual_journal_persist(true)
            .max_memtable_size(memtable.clamp(MEMTABLE.0, MEMTABLE.1))
            .data_block_compression_policy(CompressionPolicy::all(CompressionType::None))
            .index_block_compression_policy(CompressionPolicy::all(CompressionType::None))
            .expect_point_read_hits(true)
            .data_block_hash_ratio_policy(HashRatioPolicy::all(HASH_RATIO))
    };
    let tables = setting.tables.iter().map(|name| Ok(database.keyspace(name, options)?));
    let tables = tables.collect::<Result<_>>()?;
    let is_synced = setting.is_synced()?;
    Ok(Box::new(Fjall { writing: Mutex::new(()), tables, database, is_synced }))
}

impl Fjall {
    fn table(&self, table: usize) -> &Keyspace {
        self.tables[table].as_ref()
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes what was committed durable, if each commit has to be.
    fn acknowledge(&self) -> Result<()> {
        if self.is_synced {
            self.database.persist(PersistMode::SyncData)?;
        }
        Ok(())
    }
}

impl Engine for Fjall {
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()> {
        let mut entries = entries.peekable();
        if entries.peek().is_none() {
            return Ok(());
        }
        let _writing = self.lock();
        let mut ingestion = self.table(table).start_ingestion()?;
        for (key, value) in entries {
            ingestion.write(key, value)?;
        }
        Ok(ingestion.finish()?)
    }

    fn settle(&self) -> Result<()> {
        for table in 0..self.tables.len() {
            self.table(table).rotate_memtable_and_wait()?;
        }
        let database = self.database.inner();
        let mut completed = None;
        while database.outstanding_flushes() > 0
            || database.active_compactions() > 0
            || completed.replace(database.compactions_completed())
                != Some(database.compactions_completed())
        {
            std::thread::sleep(REST);
        }
        Ok(self.database.persist(PersistMode::SyncAll)?)
    }

    fn session(&self) -> Result<Box<dyn Session + '_>> {
        Ok(Box::new(FjallSession { engine: self, state: State::Idle, buffer: Vec::new() }))
    }
}

enum State<'a> {
    /// No transaction is open.
    Idle,
    Reading(Snapshot),
    Writing(SingleWriterWriteTx<'a>, MutexGuard<'a, ()>),
}

struct FjallSession<'a> {
    engine: &'a Fjall,
    state: State<'a>,
    /// The buffer in which a value is changed.
    buffer: Vec<u8>,
}

impl FjallSession<'_> {
    #[inline]
    fn value(&self, table: usize, key: &[u8]) -> Result<Option<fjall::Slice>> {
        let table = self.engine.table(table);
        Ok(match &self.state {
            State::Idle => table.get(key)?,
            State::Reading(snapshot) => snapshot.get(table, key)?,
            State::Writing(transaction, _) => transaction.get(table, key)?,
        })
    }

    fn range(&self, table: usize, range: (Bound<&[u8]>, Bound<&[u8]>)) -> Iter {
        let table = self.engine.table(table);
        match &self.state {
            State::Idle => table.range::<&[u8], _>(range),
            State::Reading(snapshot) => snapshot.range::<&[u8], _>(table, range),
            State::Writing(transaction, _) => transaction.range::<&[u8], _>(table, range),
        }
    }

    /// Runs `change` under the lock of writers: in the transaction under way, or without any.
    fn write<T>(&mut self, change: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let engine = self.engine;
        let lock = match &self.state {
            State::Idle => engine.lock(),
            State::Writing(..) => return change(self),
            State::Reading(_) => bail!("a transaction that only reads cannot write"),
        };
        let done = change(self)?;
        drop(lock);
        engine.acknowledge()?;
        Ok(done)
    }

    fn store(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        match &mut self.state {
            State::Writing(transaction, _) => {
                transaction.insert(&self.engine.tables[table], key, value);
            }
            _ => self.engine.table(table).insert(key, value)?,
        }
        Ok(())
    }

    fn delete(&mut self, table: usize, key: &[u8]) -> Result<()> {
        match &mut self.state {
            State::Writing(transaction, _) => transaction.remove(&self.engine.tables[table], key),
            _ => self.engine.table(table).remove(key)?,
        }
        Ok(())
    }
}

impl Session for FjallSession<'_> {
    fn isolates(&self) -> bool {
        true
    }

    fn begin(&mut self, access: Access) -> Result<()> {
        self.state = State::Idle;
        self.state = match access {
            Access::Read => State::Reading(self.engine.database.read_tx()),
            Access::Write => {
                let lock = self.engine.lock();
                State::Writing(self.engine.database.write_tx(), lock)
            }
        };
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        if let State::Writing(transaction, lock) = std::mem::replace(&mut self.state, State::Idle) {
            transaction.commit()?;
            drop(lock);
            self.engine.acknowledge()?;
        }
        Ok(())
    }

    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        match self.value(table, key)? {
            Some(value) => read(&value),
            None => return Ok(false),
        }
        Ok(true)
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(|session| session.store(table, key, value))
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        self.write(|session| {
            let Some(value) = session.value(table, key)? else { return Ok(false) };
            session.buffer.clear();
            session.buffer.extend_from_slice(&value);
            change(&mut session.buffer);
            let buffer = std::mem::take(&mut session.buffer);
            session.store(table, key, &buffer)?;
            session.buffer = buffer;
            Ok(true)
        })
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        self.write(|session| {
            if session.value(table, key)?.is_none() {
                return Ok(false);
            }
            session.delete(table, key)?;
            Ok(true)
        })
    }

    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let from = Bound::Included(from);
        let mut entries = match direction {
            Direction::Forward => self.range(table, (from, Bound::Unbounded)),
            Direction::Backward => self.range(table, (Bound::Unbounded, from)),
        };
        loop {
            let entry = match direction {
                Direction::Forward => entries.next(),
                Direction::Backward => entries.next_back(),
            };
            let Some(entry) = entry else { return Ok(()) };
            let (key, value) = entry.into_inner()?;
            if !visit(&key, &value) {
                return Ok(());
            }
        }
    }
}
