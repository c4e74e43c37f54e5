//! RocksDB with transactions: its `OptimisticTransactionDB`.
//!
//! A transaction that writes notes each key that it reads (`get_for_update`), and its commit fails
//! if one of them was changed meanwhile. RocksDB does not validate ranges, so phantoms are
//! possible: that is less than serializable, and RocksDB has no more. A transaction that only reads
//! is a snapshot. The other settings are those of `rocksdb.rs`.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use rocksdb::{
    ColumnFamily, ErrorKind, OptimisticTransactionDB, OptimisticTransactionOptions, Options,
    ReadOptions, SingleThreaded, SnapshotWithThreadMode, Transaction, WriteOptions,
};
use vellum_bench::engine::{Access, Conflict, Direction, Engine, Pair, Session, Setting};

use crate::rocksdb::{families, load, options, settle, walk, write_options};

type Database = OptimisticTransactionDB<SingleThreaded>;

struct RocksTransactions {
    database: Database,
    names: Vec<String>,
    options: Options,
    directory: PathBuf,
    write: WriteOptions,
}

/// As `open` of `rocksdb.rs`, with transactions.
pub(crate) fn open(setting: &Setting) -> Result<Box<dyn Engine>> {
    let options = options(setting)?;
    let directory = setting.directory.join("rocksdb");
    let families = families(setting, &options);
    Ok(Box::new(RocksTransactions {
        database: Database::open_cf_descriptors(&options, directory, families)?,
        names: setting.tables.clone(),
        options,
        directory: setting.directory.clone(),
        write: write_options(setting)?,
    }))
}

impl RocksTransactions {
    fn family(&self, table: usize) -> Result<&ColumnFamily> {
        let name = &self.names[table];
        self.database.cf_handle(name).with_context(|| format!("no column family '{name}'"))
    }

    fn begin(&self) -> Transaction<'_, Database> {
        let mut options = OptimisticTransactionOptions::default();
        options.set_snapshot(true);
        self.database.transaction_opt(&self.write, &options)
    }
}

impl Engine for RocksTransactions {
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()> {
        let directory = self.directory.join(format!("load-{table}"));
        let family = self.family(table)?;
        load(&self.options, &directory, entries, |options, files| {
            Ok(self.database.ingest_external_file_cf_opts(family, options, files)?)
        })
    }

    fn settle(&self) -> Result<()> {
        settle(|options| self.database.wait_for_compact(options))
    }

    fn session(&self) -> Result<Box<dyn Session + '_>> {
        let families = (0..self.names.len()).map(|table| self.family(table));
        Ok(Box::new(RocksSession {
            engine: self,
            families: families.collect::<Result<_>>()?,
            state: State::Idle,
            read: ReadOptions::default(),
            value: Vec::new(),
        }))
    }
}

enum State<'a> {
    /// No transaction is open.
    Idle,
    Reading(SnapshotWithThreadMode<'a, Database>),
    Writing(Transaction<'a, Database>),
}

struct RocksSession<'a> {
    engine: &'a RocksTransactions,
    families: Vec<&'a ColumnFamily>,
    state: State<'a>,
    read: ReadOptions,
    /// The buffer in which a value is changed.
    value: Vec<u8>,
}

/// Passes on what a commit says.
fn committed(result: Result<(), rocksdb::Error>) -> Result<()> {
    match result {
        Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::TryAgain) => {
            Err(Conflict.into())
        }
        other => Ok(other?),
    }
}

impl<'a> RocksSession<'a> {
    /// Changes something in the transaction under way, or in one of its own. The latter is repeated
    /// until it wins.
    fn change<T>(
        &mut self,
        mut change: impl FnMut(&mut Self, &Transaction<'a, Database>) -> Result<T>,
    ) -> Result<T> {
        loop {
            match std::mem::replace(&mut self.state, State::Idle) {
                State::Writing(transaction) => {
                    let done = change(self, &transaction);
                    self.state = State::Writing(transaction);
                    return done;
                }
                State::Reading(snapshot) => {
                    self.state = State::Reading(snapshot);
                    bail!("a transaction that only reads cannot write");
                }
                State::Idle => {
                    let transaction = self.engine.begin();
                    let done = change(self, &transaction)?;
                    match committed(transaction.commit()) {
                        Err(error) if error.is::<Conflict>() => {}
                        other => return other.map(|()| done),
                    }
                }
            }
        }
    }
}

impl Session for RocksSession<'_> {
    fn isolates(&self) -> bool {
        true
    }

    fn begin(&mut self, access: Access) -> Result<()> {
        self.state = match access {
            Access::Read => State::Reading(self.engine.database.snapshot()),
            Access::Write => State::Writing(self.engine.begin()),
        };
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Writing(transaction) => committed(transaction.commit()),
            State::Reading(_) | State::Idle => Ok(()),
        }
    }

    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let family = self.families[table];
        let value = match &self.state {
            State::Idle => self.engine.database.get_pinned_cf_opt(family, key, &self.read)?,
            State::Reading(snapshot) => snapshot.get_pinned_cf(family, key)?,
            State::Writing(transaction) => {
                transaction.get_pinned_for_update_cf_opt(family, key, false, &self.read)?
            }
        };
        value.iter().for_each(|value| read(value));
        Ok(value.is_some())
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        let family = self.families[table];
        self.change(|_, transaction| Ok(transaction.put_cf(family, key, value)?))
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        let family = self.families[table];
        self.change(|session, transaction| {
            let found =
                transaction.get_pinned_for_update_cf_opt(family, key, true, &session.read)?;
            let Some(found) = found else { return Ok(false) };
            session.value.clear();
            session.value.extend_from_slice(&found);
            change(&mut session.value);
            transaction.put_cf(family, key, &session.value)?;
            Ok(true)
        })
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        let family = self.families[table];
        self.change(|session, transaction| {
            let found =
                transaction.get_pinned_for_update_cf_opt(family, key, true, &session.read)?;
            if found.is_none() {
                return Ok(false);
            }
            transaction.delete_cf(family, key)?;
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
        let family = self.families[table];
        match &self.state {
            State::Idle => {
                walk(self.engine.database.raw_iterator_cf(family), from, direction, visit)
            }
            State::Reading(snapshot) => {
                walk(snapshot.raw_iterator_cf(family), from, direction, visit)
            }
            State::Writing(transaction) => {
                walk(transaction.raw_iterator_cf(family), from, direction, visit)
            }
        }
    }
}
