//! The adapter for LMDB, through heed.
//!
//! Durability class: `NO_SYNC`, and `WRITE_MAP` with `MAP_ASYNC`, so commits write to the map and
//! nothing is flushed before `settle`. Synced commits use LMDB's own defaults. `NO_READ_AHEAD`,
//! because lookups are random and data may be larger than memory. The map is a terabyte of address
//! space; the file is sparse.
//!
//! Memory: LMDB has no cache and relies on the kernel's page cache. The adapter does not use the
//! harness' share for a cache.
//!
//! Reads happen in place, in a transaction that is kept: over a whole reading transaction, and
//! between single reads while nothing is committed. `NO_TLS` ties the slots of readers to
//! transactions, so a thread may have several sessions. LMDB has one writer at a time, so writers
//! wait for each other. Keys have at most 511 bytes and at least one.
#![allow(unsafe_code)]

use std::hint::black_box;
use std::ops::Bound;

use anyhow::{Context as _, Result, bail};
use heed::types::Bytes;
use heed::{
    CommitOrAbort, Database, Env, EnvFlags, EnvOpenOptions, PutFlags, RoTxn, RwTxn, WithoutTls,
};
use vellum_bench::engine::{
    Access, BulkWork, DURABILITY, Direction, Engine, Factory, Pair, Session, Setting,
};

use crate::commits::Commits;

/// LMDB as it is fastest for data that need not survive a crash.
pub const LMDB: Factory = Factory {
    name: "lmdb",
    about: "LMDB 0.9.70 (heed 0.23), no read-ahead, no sync, writable map",
    direct: false,
    open,
};

/// Address space of the map; the file has only the written pages.
const MAP_BYTES: usize = 1 << 40;

/// Bytes that a transaction of a load puts in at most.
const LOAD_BYTES: usize = 64 << 20;

type Table = Database<'static, Bytes, Bytes>;

struct Lmdb {
    env: Env<WithoutTls>,
    tables: Vec<Table>,
    commits: Commits,
}

/// Opens or creates the environment in the directory. Options: `write_map` (`yes` or `no`);
/// `durability` (`none` or `synced`).
fn open(setting: &Setting) -> Result<Box<dyn Engine>> {
    setting.check_options(&["write_map", DURABILITY])?;
    let is_synced = setting.is_synced()?;
    let mut flags = EnvFlags::NO_READ_AHEAD | EnvFlags::NO_MEM_INIT;
    if !is_synced {
        flags |= EnvFlags::NO_SYNC;
    }
    match setting.options.get("write_map").map_or("yes", String::as_str) {
        "yes" if !is_synced => flags |= EnvFlags::WRITE_MAP | EnvFlags::MAP_ASYNC,
        "yes" => (),
        "no" => (),
        other => bail!("option 'write_map': '{other}' is neither yes nor no"),
    }
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(MAP_BYTES).max_readers(256).max_dbs(setting.tables.len() as u32);
    // SAFETY: the directory is the engine's alone, so no other program changes or truncates the
    // file under the map, and the flags only give up durability, not consistency while the process
    // lives.
    let env = unsafe { options.flags(flags).open(&setting.directory) };
    let env = env.with_context(|| format!("opening LMDB in {}", setting.directory.display()))?;
    let tables = setting.tables.iter().map(|name| table(&env, name)).collect::<Result<_>>()?;
    Ok(Box::new(Lmdb { env, tables, commits: Commits::default() }))
}

fn table(env: &Env<WithoutTls>, name: &str) -> Result<Table> {
    let created = env.create_databases_and_commit(env.write_txn()?, |opener, transaction| {
        opener.create_database(transaction, Some(name)).map(CommitOrAbort::<_, ()>::Commit)
    });
    created?.commit().context("LMDB did not commit a new table")
}

impl Engine for Lmdb {
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()> {
        let mut entries = entries.peekable();
        while entries.peek().is_some() {
            let mut transaction = self.env.write_txn()?;
            let mut bytes = 0;
            for (key, value) in entries.by_ref() {
                let append = PutFlags::APPEND;
                self.tables[table].put_with_flags(&mut transaction, append, &key, &value)?;
                bytes += key.len() + value.len();
                if bytes >= LOAD_BYTES {
                    break;
                }
            }
            transaction.commit()?;
        }
        self.commits.made();
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        Ok(self.env.force_sync()?)
    }

    fn bulk(&self, table: usize, work: &BulkWork<'_>) -> Result<Option<u64>> {
        let table = self.tables[table];
        if let BulkWork::Count | BulkWork::Read(..) = work {
            let transaction = self.env.read_txn()?;
            let &BulkWork::Read(from, to) = work else { return Ok(Some(table.len(&transaction)?)) };
            let range = (Bound::Included(from), Bound::Excluded(to));
            let mut count = 0;
            for entry in table.range(&transaction, &range)? {
                black_box(entry?);
                count += 1;
            }
            return Ok(Some(count));
        }
        let mut transaction = self.env.write_txn()?;
        let count = match *work {
            BulkWork::Count | BulkWork::Read(..) => 0,
            BulkWork::Insert(pairs) => {
                for (key, value) in pairs {
                    table.put(&mut transaction, key, value)?;
                }
                pairs.len() as u64
            }
            BulkWork::Append(pairs) => {
                for (key, value) in pairs {
                    table.put_with_flags(&mut transaction, PutFlags::APPEND, key, value)?;
                }
                pairs.len() as u64
            }
            BulkWork::PopFirst(most) => remove(table, &mut transaction, most, |_| true, true)?,
            BulkWork::Retain(chosen) => remove(table, &mut transaction, u64::MAX, chosen, false)?,
            BulkWork::Extract(chosen) => remove(table, &mut transaction, u64::MAX, chosen, true)?,
            BulkWork::RemoveRange(from, to) => {
                let range = (Bound::Included(from), Bound::Excluded(to));
                table.delete_range(&mut transaction, &range)? as u64
            }
        };
        transaction.commit()?;
        self.commits.made();
        Ok(Some(count))
    }

    fn session(&self) -> Result<Box<dyn Session + '_>> {
        Ok(Box::new(LmdbSession { engine: self, state: State::Idle, value: Vec::new() }))
    }
}

/// Removes up to `most` entries with a chosen key, by a cursor. Copies each entry, because
/// `extract_if` returns it.
fn remove(
    table: Table,
    transaction: &mut RwTxn<'_>,
    most: u64,
    chosen: impl Fn(&[u8]) -> bool,
    wanted: bool,
) -> Result<u64> {
    let mut entries = table.iter_mut(transaction)?;
    let mut count = 0;
    while count < most
        && let Some(entry) = entries.next()
    {
        let (key, value) = entry?;
        if !chosen(key) {
            continue;
        }
        if wanted {
            black_box((key.to_vec(), value.to_vec()));
        }
        // SAFETY: no reference into the table is used after this; the copies are the values' own.
        unsafe { entries.del_current()? };
        count += 1;
    }
    Ok(count)
}

enum State<'a> {
    /// No transaction is open.
    Idle,
    /// A read transaction that is still open, and the number of commits when it was opened.
    Kept(u64, RoTxn<'a, WithoutTls>),
    Reading(RoTxn<'a, WithoutTls>),
    Writing(RwTxn<'a>),
}

struct LmdbSession<'a> {
    engine: &'a Lmdb,
    state: State<'a>,
    /// The buffer in which a value is changed.
    value: Vec<u8>,
}

impl LmdbSession<'_> {
    /// The transaction under way, or one that sees the newest state.
    #[inline]
    fn reader(&mut self) -> Result<&RoTxn<'_>> {
        if let State::Idle | State::Kept(..) = self.state {
            let now = self.engine.commits.now();
            if !matches!(self.state, State::Kept(at, _) if at == now) {
                self.state = State::Idle;
                self.state = State::Kept(now, self.engine.env.read_txn()?);
            }
        }
        match &self.state {
            State::Kept(_, transaction) | State::Reading(transaction) => Ok(transaction),
            State::Writing(transaction) => Ok(transaction),
            State::Idle => bail!("no transaction is open"),
        }
    }

    /// Runs `change` in the transaction under way, or in one of its own.
    fn write<T>(
        &mut self,
        change: impl FnOnce(&Lmdb, &mut RwTxn<'_>, &mut Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        match &mut self.state {
            State::Writing(transaction) => change(self.engine, transaction, &mut self.value),
            State::Reading(_) => bail!("a transaction that only reads cannot write"),
            State::Idle | State::Kept(..) => {
                self.state = State::Idle;
                let mut transaction = self.engine.env.write_txn()?;
                let result = change(self.engine, &mut transaction, &mut self.value)?;
                transaction.commit()?;
                self.engine.commits.made();
                Ok(result)
            }
        }
    }
}

impl Session for LmdbSession<'_> {
    fn isolates(&self) -> bool {
        true
    }

    fn begin(&mut self, access: Access) -> Result<()> {
        self.state = State::Idle;
        self.state = match access {
            Access::Read => State::Reading(self.engine.env.read_txn()?),
            Access::Write => State::Writing(self.engine.env.write_txn()?),
        };
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        if let State::Writing(transaction) = std::mem::replace(&mut self.state, State::Idle) {
            transaction.commit()?;
            self.engine.commits.made();
        }
        Ok(())
    }

    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let table = self.engine.tables[table];
        match table.get(self.reader()?, key)? {
            Some(value) => read(value),
            None => return Ok(false),
        }
        Ok(true)
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(|engine, transaction, _| {
            Ok(engine.tables[table].put(transaction, key, value)?)
        })
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        self.write(|engine, transaction, buffer| {
            let Some(value) = engine.tables[table].get(transaction, key)? else {
                return Ok(false);
            };
            buffer.clear();
            buffer.extend_from_slice(value);
            change(buffer);
            engine.tables[table].put(transaction, key, buffer)?;
            Ok(true)
        })
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        self.write(|engine, transaction, _| Ok(engine.tables[table].delete(transaction, key)?))
    }

    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let table = self.engine.tables[table];
        let transaction = self.reader()?;
        match direction {
            // LMDB has no empty keys, and refuses to look them up.
            Direction::Forward if from.is_empty() => walk(table.iter(transaction)?, visit),
            Direction::Backward if from.is_empty() => Ok(()),
            Direction::Forward => {
                let range = (Bound::Included(from), Bound::Unbounded);
                walk(table.range(transaction, &range)?, visit)
            }
            Direction::Backward => {
                let range = (Bound::Unbounded, Bound::Included(from));
                walk(table.rev_range(transaction, &range)?, visit)
            }
        }
    }
}

fn walk<'a>(
    entries: impl Iterator<Item = heed::Result<(&'a [u8], &'a [u8])>>,
    visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
) -> Result<()> {
    for entry in entries {
        let (key, value) = entry?;
        if !visit(key, value) {
            break;
        }
    }
    Ok(())
}
