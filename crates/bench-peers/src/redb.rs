//! The adapter for redb.
//!
//! Durability class: every commit is `Durability::None`; the one of `settle` is `Immediate`.
//!
//! Memory: redb has its own cache and reads its file through the kernel's page cache, without
//! direct I/O. Under one limit a large cache of redb's is better: a hit costs no system call, and
//! the kernel reclaims pages of files first. So redb counts as `direct`. By measurement the process
//! grows by 1.4 bytes for each byte of cache (pages are heap blocks, and dirty ones are counted
//! separately), so the cache gets two thirds of the harness' share.
//!
//! A table is opened once in a transaction, when it is first used. A read transaction is kept, with
//! its tables: over a whole reading transaction, and between single reads while nothing is
//! committed. redb has one writer at a time. It has no bulk load; the adapter uses sorted inserts.
#![allow(unsafe_code)]

use std::hint::black_box;
use std::ops::Bound;
use std::ptr::NonNull;

use anyhow::{Context as _, Result, bail};
use redb::{
    Database, Durability, Range, ReadOnlyTable, ReadTransaction, ReadableDatabase as _,
    ReadableTable, ReadableTableMetadata as _, Table, TableDefinition, WriteTransaction,
};
use vellum_bench::engine::{
    Access, BulkWork, DURABILITY, Direction, Engine, Factory, Pair, Session, Setting,
};

use crate::commits::Commits;

/// redb with commits that need not be durable.
pub const REDB: Factory =
    Factory { name: "redb", about: "redb 4.5, Durability::None, own cache", direct: true, open };

/// Bytes that a transaction of a load puts in at most.
const LOAD_BYTES: usize = 64 << 20;

type Bytes = &'static [u8];

struct Redb {
    database: Database,
    names: Vec<String>,
    commits: Commits,
    is_synced: bool,
}

/// Opens or creates `data.redb` in the directory. Option: `durability` (`none` or `synced`).
fn open(setting: &Setting) -> Result<Box<dyn Engine>> {
    setting.check_options(&[DURABILITY])?;
    let cache = usize::try_from(setting.cache_bytes / 3 * 2).context("the cache is too large")?;
    let file = setting.directory.join("data.redb");
    let database = Database::builder().set_cache_size(cache).create(file)?;
    let (names, commits) = (setting.tables.clone(), Commits::default());
    let engine = Redb { database, names, commits, is_synced: setting.is_synced()? };
    let mut writer = Writer::begin(&engine)?;
    for table in 0..engine.names.len() {
        writer.table(&engine, table)?;
    }
    writer.commit(&engine)?;
    Ok(Box::new(engine))
}

impl Redb {
    fn definition(&self, table: usize) -> TableDefinition<'_, Bytes, Bytes> {
        TableDefinition::new(&self.names[table])
    }
}

impl Engine for Redb {
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()> {
        let mut entries = entries.peekable();
        while entries.peek().is_some() {
            let mut writer = Writer::begin(self)?;
            let (mut bytes, into) = (0, writer.table(self, table)?);
            for (key, value) in entries.by_ref() {
                into.insert(&*key, &*value)?;
                bytes += key.len() + value.len();
                if bytes >= LOAD_BYTES {
                    break;
                }
            }
            writer.commit(self)?;
        }
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        Ok(transaction.commit()?)
    }

    fn bulk(&self, table: usize, work: &BulkWork<'_>) -> Result<Option<u64>> {
        if let BulkWork::Count | BulkWork::Read(..) = work {
            let mut reader = Reader::begin(self)?;
            let table = reader.table(self, table)?;
            let &BulkWork::Read(from, to) = work else { return Ok(Some(table.len()?)) };
            let mut count = 0;
            for entry in table.range(from..to)? {
                let (key, value) = entry?;
                black_box((key.value(), value.value()));
                count += 1;
            }
            return Ok(Some(count));
        }
        let mut writer = Writer::begin(self)?;
        let table = writer.table(self, table)?;
        let mut count = 0;
        match *work {
            BulkWork::Count | BulkWork::Read(..) => {}
            // redb can only insert; it has no append.
            BulkWork::Insert(pairs) | BulkWork::Append(pairs) => {
                for (key, value) in pairs {
                    table.insert(&**key, &**value)?;
                    count += 1;
                }
            }
            BulkWork::PopFirst(most) => {
                while count < most
                    && let Some((key, value)) = table.pop_first()?
                {
                    black_box((key.value(), value.value()));
                    count += 1;
                }
            }
            BulkWork::Retain(chosen) => {
                let before = table.len()?;
                table.retain(|key, _| !chosen(key))?;
                count = before - table.len()?;
            }
            BulkWork::Extract(chosen) => {
                for entry in table.extract_if(|key, _| chosen(key))? {
                    let (key, value) = entry?;
                    black_box((key.value(), value.value()));
                    count += 1;
                }
            }
            BulkWork::RemoveRange(from, to) => {
                let before = table.len()?;
                table.retain_in(from..to, |_, _| false)?;
                count = before - table.len()?;
            }
        }
        writer.commit(self)?;
        Ok(Some(count))
    }

    fn session(&self) -> Result<Box<dyn Session + '_>> {
        Ok(Box::new(RedbSession { engine: self, state: State::Idle, value: Vec::new() }))
    }
}

/// A read transaction with the tables that were used in it.
struct Reader {
    tables: Vec<Option<ReadOnlyTable<Bytes, Bytes>>>,
    transaction: ReadTransaction,
}

impl Reader {
    fn begin(engine: &Redb) -> Result<Reader> {
        let tables = engine.names.iter().map(|_| None).collect();
        Ok(Reader { tables, transaction: engine.database.begin_read()? })
    }

    #[inline]
    fn table(&mut self, engine: &Redb, table: usize) -> Result<&ReadOnlyTable<Bytes, Bytes>> {
        let place = &mut self.tables[table];
        if place.is_none() {
            *place = Some(self.transaction.open_table(engine.definition(table))?);
        }
        place.as_ref().context("the table was just opened")
    }
}

/// A write transaction with the tables that were used in it, which borrow it.
struct Writer {
    tables: Vec<Option<Table<'static, Bytes, Bytes>>>,
    /// A pointer from a box; `None` after the commit.
    transaction: Option<NonNull<WriteTransaction>>,
}

impl Writer {
    fn begin(engine: &Redb) -> Result<Writer> {
        let mut transaction = engine.database.begin_write()?;
        let durability = if engine.is_synced { Durability::Immediate } else { Durability::None };
        transaction.set_durability(durability)?;
        let transaction = Some(NonNull::from(Box::leak(Box::new(transaction))));
        Ok(Writer { tables: engine.names.iter().map(|_| None).collect(), transaction })
    }

    fn table(&mut self, engine: &Redb, table: usize) -> Result<&mut Table<'static, Bytes, Bytes>> {
        let place = &mut self.tables[table];
        if place.is_none() {
            let transaction = self.transaction.context("the transaction has ended")?;
            // SAFETY: it does not move until `end` frees it. `end` first drops all tables, which
            // are the only values that borrow it, and no code gets a `&mut` to it before.
            let transaction: &'static WriteTransaction = unsafe { transaction.as_ref() };
            *place = Some(transaction.open_table(engine.definition(table))?);
        }
        place.as_mut().context("the table was just opened")
    }

    fn commit(mut self, engine: &Redb) -> Result<()> {
        if let Some(transaction) = self.end() {
            transaction.commit()?;
            engine.commits.made();
        }
        Ok(())
    }

    /// Closes the tables, and the transaction unless it was taken before.
    fn end(&mut self) -> Option<Box<WriteTransaction>> {
        self.tables.clear();
        let transaction = self.transaction.take()?;
        // SAFETY: the pointer came from a box, and `take` hands it out once. No table is left that
        // borrows the value.
        Some(unsafe { Box::from_raw(transaction.as_ptr()) })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.end());
    }
}

enum State {
    /// No transaction is open.
    Idle,
    /// A read transaction that is still open, and the number of commits when it was opened.
    Kept(u64, Reader),
    Reading(Reader),
    Writing(Writer),
}

struct RedbSession<'a> {
    engine: &'a Redb,
    state: State,
    /// The buffer in which a value is changed.
    value: Vec<u8>,
}

impl RedbSession<'_> {
    /// Makes sure that there is a transaction that sees the newest state.
    #[inline]
    fn refresh(&mut self) -> Result<()> {
        if let State::Idle | State::Kept(..) = self.state {
            let now = self.engine.commits.now();
            if !matches!(self.state, State::Kept(at, _) if at == now) {
                self.state = State::Idle;
                self.state = State::Kept(now, Reader::begin(self.engine)?);
            }
        }
        Ok(())
    }

    /// Runs `change` in the transaction under way, or in one of its own.
    fn write<T>(
        &mut self,
        table: usize,
        change: impl FnOnce(&mut Table<'static, Bytes, Bytes>, &mut Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        match &mut self.state {
            State::Writing(writer) => change(writer.table(self.engine, table)?, &mut self.value),
            State::Reading(_) => bail!("a transaction that only reads cannot write"),
            State::Idle | State::Kept(..) => {
                self.state = State::Idle;
                let mut writer = Writer::begin(self.engine)?;
                let result = change(writer.table(self.engine, table)?, &mut self.value)?;
                writer.commit(self.engine)?;
                Ok(result)
            }
        }
    }
}

impl Session for RedbSession<'_> {
    fn isolates(&self) -> bool {
        true
    }

    fn begin(&mut self, access: Access) -> Result<()> {
        self.state = State::Idle;
        self.state = match access {
            Access::Read => State::Reading(Reader::begin(self.engine)?),
            Access::Write => State::Writing(Writer::begin(self.engine)?),
        };
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Writing(writer) => writer.commit(self.engine),
            _ => Ok(()),
        }
    }

    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        self.refresh()?;
        match &mut self.state {
            State::Kept(_, reader) | State::Reading(reader) => {
                show(reader.table(self.engine, table)?, key, read)
            }
            State::Writing(writer) => show(writer.table(self.engine, table)?, key, read),
            State::Idle => bail!("no transaction is open"),
        }
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(table, |table, _| {
            table.insert(key, value)?;
            Ok(())
        })
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        self.write(table, |table, buffer| {
            buffer.clear();
            match table.get(key)? {
                Some(value) => buffer.extend_from_slice(value.value()),
                None => return Ok(false),
            }
            change(buffer);
            table.insert(key, &**buffer)?;
            Ok(true)
        })
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        self.write(table, |table, _| Ok(table.remove(key)?.is_some()))
    }

    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        self.refresh()?;
        match &mut self.state {
            State::Kept(_, reader) | State::Reading(reader) => {
                walk(reader.table(self.engine, table)?, from, direction, visit)
            }
            State::Writing(writer) => {
                walk(writer.table(self.engine, table)?, from, direction, visit)
            }
            State::Idle => bail!("no transaction is open"),
        }
    }
}

#[inline]
fn show(
    table: &impl ReadableTable<Bytes, Bytes>,
    key: &[u8],
    read: &mut dyn FnMut(&[u8]),
) -> Result<bool> {
    match table.get(key)? {
        Some(value) => read(value.value()),
        None => return Ok(false),
    }
    Ok(true)
}

fn walk(
    table: &impl ReadableTable<Bytes, Bytes>,
    from: &[u8],
    direction: Direction,
    visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
) -> Result<()> {
    let mut entries: Range<'_, Bytes, Bytes> = match direction {
        Direction::Forward => table.range::<&[u8]>(from..)?,
        Direction::Backward => table.range::<&[u8]>((Bound::Unbounded, Bound::Included(from)))?,
    };
    loop {
        let entry = match direction {
            Direction::Forward => entries.next(),
            Direction::Backward => entries.next_back(),
        };
        let Some(entry) = entry else { return Ok(()) };
        let (key, value) = entry?;
        if !visit(key.value(), value.value()) {
            return Ok(());
        }
    }
}
