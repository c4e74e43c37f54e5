//! The adapter for SQLite, through rusqlite.
//!
//! Tables are `WITHOUT ROWID`, so an entry is found by one descent; statements are prepared once.
//! The page size is the smallest whose pages hold the entries that are loaded first without
//! overflow pages, from 4 KiB on.
//!
//! Durability class: `synchronous = OFF`, and a rollback journal in memory, so that a transaction
//! that fails can be undone. No write-ahead log: it would log what the class need not log, write
//! every page twice and, with two threads, halve the rates of YCSB or worse.
//!
//! Threads: all writes go through one connection, under a lock of the adapter, because SQLite drops
//! the cache and the map of a connection whenever another one has written. Reading transactions use
//! the connection of their session, so they run in parallel; writers wait until they end. A single
//! read uses the writing connection while there are writes, and its session's connection after
//! [`QUIET`] reads without a write. The adapter's lock keeps writers out, so the files need no
//! locks (`unix-none`).
//!
//! Memory: a file that fits is read through a map (SQLite maps at most 2 GiB, and reads the rest
//! into its cache), so most memory is the kernel's page cache. A larger file is not mapped: a fault
//! in the map also reads the pages around it, which SQLite cannot prevent, and that made it
//! hundreds of times slower than reads of pages. The connections share the cache that the harness
//! gives; as that is an eighth of the memory limit, [`FITS`] tells which files fit.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use anyhow::{Context as _, Result, bail};
use rusqlite::{Connection, OpenFlags, Rows, params};
use vellum_bench::engine::{Access, Direction, Engine, Factory, Pair, Session, Setting};

use crate::commits::Commits;

/// SQLite without log and flushes.
pub const SQLITE: Factory = Factory {
    name: "sqlite",
    about: "SQLite 3.54 (rusqlite 0.41), WITHOUT ROWID, journal in memory, no sync",
    direct: false,
    open,
};

/// Address space of the map.
const MAP_BYTES: u64 = 1 << 40;

/// The number of connections that share the cache.
const SHARES: u64 = 4;

/// A file of at most this many times the offered cache fits the memory limit.
const FITS: u64 = 6;

/// Reads without a write between them, after which a session trusts its own connection again.
const QUIET: u32 = 1000;

struct Sqlite {
    file: PathBuf,
    cache_bytes: u64,
    /// Whether the file is mapped; `None` if its size decides.
    mapped: Option<bool>,
    statements: Vec<Statements>,
    /// Threads that read on their own connection hold this shared. The thread that has the main
    /// connection holds it exclusively.
    lock: RwLock<()>,
    main: Mutex<Connection>,
    commits: Commits,
}

/// An operation on a table.
struct Statements {
    get: String,
    put: String,
    update: String,
    remove: String,
    forward: String,
    backward: String,
}

impl Statements {
    fn new(name: &str) -> Statements {
        let table = format!("\"{}\"", name.replace('"', "\"\""));
        Statements {
            get: format!("SELECT value FROM {table} WHERE key = ?1"),
            put: format!("REPLACE INTO {table} VALUES (?1, ?2)"),
            update: format!("UPDATE {table} SET value = ?2 WHERE key = ?1"),
            remove: format!("DELETE FROM {table} WHERE key = ?1"),
            forward: format!("SELECT key, value FROM {table} WHERE key >= ?1 ORDER BY key"),
            backward: format!("SELECT key, value FROM {table} WHERE key <= ?1 ORDER BY key DESC"),
        }
    }
}

/// Opens or creates the database in the directory. Option: `mapped` (`yes` or `no`).
fn open(setting: &Setting) -> Result<Box<dyn Engine>> {
    setting.check_options(&["mapped"])?;
    let mapped = match setting.options.get("mapped").map(String::as_str) {
        None => None,
        Some("yes") => Some(true),
        Some("no") => Some(false),
        Some(other) => bail!("option 'mapped': '{other}' is neither yes nor no"),
    };
    let file = setting.directory.join("data.sqlite");
    let main = connect(&file, setting.cache_bytes)?;
    for name in &setting.tables {
        main.execute_batch(&format!(
            "CREATE TABLE IF NOT EXISTS \"{}\" (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID",
            name.replace('"', "\"\"")
        ))?;
    }
    let engine = Sqlite {
        file,
        cache_bytes: setting.cache_bytes,
        mapped,
        statements: setting.tables.iter().map(|name| Statements::new(name)).collect(),
        lock: RwLock::new(()),
        main: Mutex::new(main),
        commits: Commits::default(),
    };
    engine.map(&engine.alone().connection)?;
    Ok(Box::new(engine))
}

fn connect(file: &Path, cache_bytes: u64) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags_and_vfs(file, flags, "unix-none")?;
    connection.set_prepared_statement_cache_capacity(128);
    let cache = (cache_bytes / SHARES / 1024).max(256);
    connection.execute_batch(&format!(
        "PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; PRAGMA cache_size = -{cache};"
    ))?;
    Ok(connection)
}

/// The page size for such entries. An index page takes cells of a quarter of it (SQLite file
/// format, section 1.6); longer cells continue in overflow pages, which are only good if they are
/// full.
fn page_bytes(entry: usize) -> usize {
    let fits = |page: &usize| entry + 16 <= (page - 12) * 64 / 255 - 23;
    let large = if entry < 32 << 10 { 4096 } else { 65536 };
    [4096, 8192, 16384].into_iter().find(fits).unwrap_or(large)
}

/// The main connection, while no other thread uses one.
struct Alone<'a> {
    connection: MutexGuard<'a, Connection>,
    _lock: RwLockWriteGuard<'a, ()>,
}

impl Sqlite {
    fn alone(&self) -> Alone<'_> {
        let lock = self.lock.write().unwrap_or_else(PoisonError::into_inner);
        let connection = self.main.lock().unwrap_or_else(PoisonError::into_inner);
        Alone { connection, _lock: lock }
    }

    fn shared(&self) -> RwLockReadGuard<'_, ()> {
        self.lock.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps or unmaps the file for the connection, depending on its size.
    fn map(&self, connection: &Connection) -> Result<()> {
        let length = std::fs::metadata(&self.file).context("asking for the file's size")?.len();
        let mapped = self.mapped.unwrap_or(length <= self.cache_bytes.saturating_mul(FITS));
        let bytes = if mapped { MAP_BYTES } else { 0 };
        Ok(connection.execute_batch(&format!("PRAGMA mmap_size = {bytes};"))?)
    }

    /// Sets the page size for the first entries that come in.
    fn fit_pages(&self, main: &Connection, entry: usize) -> Result<()> {
        let pages: i64 = main.query_row("PRAGMA page_count", [], |row| row.get(0))?;
        // The schema has a page, and each table one, which may be empty.
        if pages <= self.statements.len() as i64 + 1 && page_bytes(entry) != 4096 {
            let page = page_bytes(entry);
            main.execute_batch(&format!("PRAGMA page_size = {page}; VACUUM;"))?;
        }
        Ok(())
    }
}

impl Engine for Sqlite {
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()> {
        let mut main = self.alone();
        let mut entries = entries.peekable();
        if let Some((key, value)) = entries.peek() {
            self.fit_pages(&main.connection, key.len() + value.len())?;
        }
        let transaction = main.connection.transaction()?;
        let mut insert = transaction.prepare_cached(&self.statements[table].put)?;
        for (key, value) in entries {
            insert.execute(params![key, value])?;
        }
        drop(insert);
        transaction.commit()?;
        self.commits.made();
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        let main = self.alone();
        main.connection.cache_flush()?;
        self.map(&main.connection)?;
        std::fs::File::open(&self.file)?.sync_all().context("syncing SQLite's file")
    }

    fn session(&self) -> Result<Box<dyn Session + '_>> {
        let own = connect(&self.file, self.cache_bytes)?;
        self.map(&own)?;
        Ok(Box::new(SqliteSession {
            engine: self,
            own,
            state: State::Idle,
            seen: 0,
            quiet: 0,
            value: Vec::new(),
        }))
    }
}

enum State<'a> {
    /// No transaction is open.
    Idle,
    /// On the session's connection.
    Reading { _shared: RwLockReadGuard<'a, ()> },
    /// On the main connection.
    Writing(Alone<'a>),
}

struct SqliteSession<'a> {
    engine: &'a Sqlite,
    own: Connection,
    state: State<'a>,
    /// The number of commits at the last single read.
    seen: u64,
    /// Single reads since then.
    quiet: u32,
    /// The buffer in which a value is changed.
    value: Vec<u8>,
}

impl SqliteSession<'_> {
    /// Whether no thread writes at present, as far as single reads tell.
    fn is_quiet(&mut self) -> bool {
        let now = self.engine.commits.now();
        if std::mem::replace(&mut self.seen, now) != now {
            self.quiet = 0;
        }
        self.quiet = self.quiet.saturating_add(1);
        self.quiet > QUIET
    }

    fn read<T>(&mut self, work: impl FnOnce(&Sqlite, &Connection) -> Result<T>) -> Result<T> {
        let engine = self.engine;
        let quiet = matches!(self.state, State::Idle) && self.is_quiet();
        match &self.state {
            State::Reading { .. } => work(engine, &self.own),
            State::Writing(main) => work(engine, &main.connection),
            State::Idle if quiet => {
                let _shared = engine.shared();
                work(engine, &self.own)
            }
            State::Idle => work(engine, &engine.alone().connection),
        }
    }

    fn write<T>(
        &mut self,
        work: impl FnOnce(&Sqlite, &Connection, &mut Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        let engine = self.engine;
        match &self.state {
            State::Writing(main) => work(engine, &main.connection, &mut self.value),
            State::Reading { .. } => bail!("a transaction that only reads cannot write"),
            State::Idle => {
                let result = work(engine, &engine.alone().connection, &mut self.value)?;
                engine.commits.made();
                Ok(result)
            }
        }
    }
}

impl Session for SqliteSession<'_> {
    fn isolates(&self) -> bool {
        true
    }

    fn begin(&mut self, access: Access) -> Result<()> {
        match access {
            Access::Read => {
                self.state = State::Reading { _shared: self.engine.shared() };
                execute(&self.own, "BEGIN")
            }
            Access::Write => {
                let main = self.engine.alone();
                execute(&main.connection, "BEGIN IMMEDIATE")?;
                self.state = State::Writing(main);
                Ok(())
            }
        }
    }

    fn commit(&mut self) -> Result<()> {
        match &self.state {
            State::Idle => return Ok(()),
            State::Reading { .. } => execute(&self.own, "COMMIT")?,
            State::Writing(main) => {
                execute(&main.connection, "COMMIT")?;
                self.engine.commits.made();
            }
        }
        self.state = State::Idle;
        Ok(())
    }

    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        self.read(|engine, connection| show(engine, connection, table, key, read))
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(|engine, connection, _| {
            let mut statement = connection.prepare_cached(&engine.statements[table].put)?;
            statement.execute(params![key, value])?;
            Ok(())
        })
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        self.write(|engine, connection, buffer| {
            buffer.clear();
            let copy = &mut |value: &[u8]| buffer.extend_from_slice(value);
            if !show(engine, connection, table, key, copy)? {
                return Ok(false);
            }
            change(buffer);
            let mut statement = connection.prepare_cached(&engine.statements[table].update)?;
            statement.execute(params![key, &*buffer])?;
            Ok(true)
        })
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        self.write(|engine, connection, _| {
            let mut statement = connection.prepare_cached(&engine.statements[table].remove)?;
            Ok(statement.execute(params![key])? > 0)
        })
    }

    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        self.read(|engine, connection| {
            let statements = &engine.statements[table];
            let mut statement = connection.prepare_cached(match direction {
                Direction::Forward => &statements.forward,
                Direction::Backward => &statements.backward,
            })?;
            walk(statement.query(params![from])?, visit)
        })
    }
}

impl Drop for SqliteSession<'_> {
    fn drop(&mut self) {
        // Other sessions go on with the main connection. The session's own connection is closed.
        if let State::Writing(main) = &self.state {
            drop(main.connection.execute_batch("ROLLBACK"));
        }
    }
}

fn execute(connection: &Connection, text: &str) -> Result<()> {
    connection.prepare_cached(text)?.execute([])?;
    Ok(())
}

fn show(
    engine: &Sqlite,
    connection: &Connection,
    table: usize,
    key: &[u8],
    read: &mut dyn FnMut(&[u8]),
) -> Result<bool> {
    let mut statement = connection.prepare_cached(&engine.statements[table].get)?;
    let mut rows = statement.query(params![key])?;
    let Some(row) = rows.next()? else { return Ok(false) };
    read(row.get_ref(0)?.as_blob()?);
    Ok(true)
}

fn walk(mut rows: Rows<'_>, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
    while let Some(row) = rows.next()? {
        if !visit(row.get_ref(0)?.as_blob()?, row.get_ref(1)?.as_blob()?) {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hold_entries_without_overflow_where_they_can() {
        let chosen = [128, 900, 1008, 2100, 4104, 1 << 20].map(page_bytes);
        assert_eq!(chosen, [4096, 4096, 8192, 16384, 4096, 65536]);
    }
}
