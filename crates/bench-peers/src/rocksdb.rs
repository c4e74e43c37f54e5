//! The adapter for RocksDB.
//!
//! Durability class: no write-ahead log; `settle` flushes memtables and waits for compactions.
//! Buffered commits go to the log, which the kernel writes when it likes; synced ones sync the log.
//!
//! Memory: reads, flushes and compactions use direct I/O. One cache holds blocks, indexes and
//! filters, and memtables are charged to it through a write buffer manager (at most a quarter).
//! Other memory is not charged, so the adapter limits it if the cache is small: the size of files
//! (while RocksDB writes a file, its index and a hash of each key are in memory), the buffers of
//! compactions and their number. All threads share one heap (`heap.rs`), because with glibc's
//! several heaps the process needed twice its cache for lookups alone. So the process stays within
//! 1.2 times its cache and 8 MiB.
//!
//! Blocks have 4 KiB and are aligned to pages, so a miss reads one page instead of two. There is no
//! compression, as the data do not compress. Full Bloom filters of 10 bits a key let lookups skip
//! levels; the last level has none, because lookups are expected to find their key. `multi_get` is
//! the batched MultiGet. Without liburing, which the crate's build leaves out, it reads blocks one
//! after the other. Measurements chose the clock cache (LRU has at most 0.9 times its lookups with
//! two threads) and hash indexes in blocks (1.1 to 1.2 times the lookups). They decided against
//! Bloom filters in memtables and smaller memtables (0.7 times TPC-C's rate). Blocks are cold after
//! a load, because it bypasses the cache.
//!
//! Loads are sorted files that are ingested. Without the option `transactions`, `begin` and
//! `commit` do nothing, and read-modify-writes are single steps by locks of the adapter, striped
//! over keys. With it, see `rocksdb_transactions.rs`.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context as _, Result, bail};
use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBAccess,
    DBCompressionType, DBRawIteratorWithThreadMode, DataBlockIndexType, IngestExternalFileOptions,
    LruCacheOptions, Options, ReadOptions, SstFileWriter, WaitForCompactOptions,
    WriteBufferManager, WriteOptions,
};
use vellum_bench::engine::{
    DURABILITY, Direction, Durability, Engine, Pair, Session, Setting, TRANSACTIONS,
};

use crate::heap;

/// Bytes of keys and values in a file that is ingested.
const FILE_BYTES: usize = 64 << 20;

/// Locks for operations that read before they write.
const STRIPES: usize = 256;

/// Bounds of a memtable's size.
const MEMTABLE: (usize, usize) = (1 << 20, 64 << 20);

/// Bounds of a file's size in the upper levels: an eighth of the cache.
const FILE: (usize, usize) = (2 << 20, 64 << 20);

/// Bounds of the bytes that a compaction reads of a file at once: a 128th of the cache.
const READ_AHEAD: (usize, usize) = (128 << 10, 2 << 20);

/// Bounds of the write buffer of a file: a 128th of the cache.
const WRITE_BEHIND: (usize, usize) = (128 << 10, 1 << 20);

/// For each so many bytes of cache, one more flush or compaction may run at a time.
const CACHE_PER_JOB: usize = 32 << 20;

struct Rocks {
    database: DB,
    names: Vec<String>,
    options: Options,
    directory: PathBuf,
    stripes: Vec<Mutex<()>>,
    write: WriteOptions,
}

/// Opens or creates the database in the directory. Options: `cache` (`clock` or `lru`), `hash`
/// (`yes` or `no`: hash indexes in blocks), `durability`, `transactions` (`serializable`).
pub(crate) fn open(setting: &Setting) -> Result<Box<dyn Engine>> {
    let options = options(setting)?;
    let directory = setting.directory.join("rocksdb");
    let database = DB::open_cf_descriptors(&options, &directory, families(setting, &options))?;
    Ok(Box::new(Rocks {
        database,
        names: setting.tables.clone(),
        options,
        directory: setting.directory.clone(),
        stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
        write: write_options(setting)?,
    }))
}

/// A column family for each table, and the one that must be there.
pub(crate) fn families(setting: &Setting, options: &Options) -> Vec<ColumnFamilyDescriptor> {
    let names = setting.tables.iter().map(String::as_str).chain(["default"]);
    names.map(|name| ColumnFamilyDescriptor::new(name, options.clone())).collect()
}

/// How writes use the log.
pub(crate) fn write_options(setting: &Setting) -> Result<WriteOptions> {
    let mut write = WriteOptions::default();
    match setting.durability()? {
        Durability::None => write.disable_wal(true),
        Durability::Buffered => {}
        Durability::Synced => write.set_sync(true),
    }
    Ok(write)
}

/// The options of RocksDB.
pub(crate) fn options(setting: &Setting) -> Result<Options> {
    setting.check_options(&["cache", "hash", DURABILITY, TRANSACTIONS])?;
    if !heap::share_one() {
        bail!("the allocator does not let all threads share one heap");
    }
    let bytes = usize::try_from(setting.cache_bytes).context("the cache is too large")?;
    let cache = match setting.options.get("cache").map_or("clock", String::as_str) {
        "clock" => Cache::new_hyper_clock_cache(bytes, 0),
        "lru" => {
            let mut lru = LruCacheOptions::default();
            lru.set_capacity(bytes);
            Cache::new_lru_cache_opts(&lru)
        }
        other => bail!("option 'cache': '{other}' is neither clock nor lru"),
    };
    let mut blocks = BlockBasedOptions::default();
    blocks.set_block_cache(&cache);
    blocks.set_block_size(4096);
    blocks.set_bloom_filter(10.0, false);
    blocks.set_cache_index_and_filter_blocks(true);
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(true);
    if setting.options.get("hash").is_none_or(|hash| hash == "yes") {
        blocks.set_data_block_index_type(DataBlockIndexType::BinaryAndHash);
        blocks.set_data_block_hash_ratio(0.75);
    }

    let memtables = bytes / 4;
    let manager = WriteBufferManager::new_write_buffer_manager_with_cache(memtables, false, cache);
    let mut options = Options::default();
    options.set_write_buffer_manager(&manager);
    options.set_write_buffer_size((memtables / 2).clamp(MEMTABLE.0, MEMTABLE.1));
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    options.set_compression_type(DBCompressionType::None);
    options.set_use_direct_reads(true);
    options.set_use_direct_io_for_flush_and_compaction(true);
    options.set_optimize_filters_for_hits(true);
    options.set_target_file_size_base((bytes / 8).clamp(FILE.0, FILE.1) as u64);
    options.set_compaction_readahead_size((bytes / 128).clamp(READ_AHEAD.0, READ_AHEAD.1));
    options.set_writable_file_max_buffer_size(
        (bytes / 128).clamp(WRITE_BEHIND.0, WRITE_BEHIND.1) as u64
    );
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let jobs = (bytes / CACHE_PER_JOB).min(processors).max(2);
    options.set_max_background_jobs(i32::try_from(jobs).unwrap_or(i32::MAX));
    options.set_stats_dump_period_sec(0);
    options.set_block_based_table_factory(&blocks);
    // The crate has no function for this option. Earlier settings stay.
    let aligned =
        options.get_options_from_string("block_based_table_factory={block_align=true}")?;
    Ok(aligned)
}

impl Rocks {
    fn family(&self, table: usize) -> Result<&ColumnFamily> {
        let name = &self.names[table];
        self.database.cf_handle(name).with_context(|| format!("no column family '{name}'"))
    }

    /// The lock for operations on a key (FNV-1a).
    fn lock(&self, table: usize, key: &[u8]) -> MutexGuard<'_, ()> {
        let seed = 0xcbf2_9ce4_8422_2325 ^ table as u64;
        let hash = key
            .iter()
            .fold(seed, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let stripe = &self.stripes[(hash >> 32) as usize % STRIPES];
        stripe.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fills a table with sorted files of a bounded size, which `ingest` takes.
pub(crate) fn load(
    options: &Options,
    directory: &Path,
    entries: &mut dyn Iterator<Item = Pair>,
    ingest: impl FnOnce(&IngestExternalFileOptions, Vec<PathBuf>) -> Result<()>,
) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut entries = entries.peekable();
    let mut files = Vec::new();
    while entries.peek().is_some() {
        let file = directory.join(format!("{}.sst", files.len()));
        let mut writer = SstFileWriter::create(options);
        writer.open(&file)?;
        let mut bytes = 0;
        for (key, value) in entries.by_ref() {
            writer.put(&key, &value)?;
            bytes += key.len() + value.len();
            if bytes >= FILE_BYTES {
                break;
            }
        }
        writer.finish()?;
        files.push(file);
    }
    if !files.is_empty() {
        let mut options = IngestExternalFileOptions::default();
        options.set_move_files(true);
        ingest(&options, files)?;
    }
    std::fs::remove_dir_all(directory).context("removing what was ingested")
}

/// Writes memtables out and waits for compactions: `wait` is the database's function for that.
pub(crate) fn settle(
    wait: impl FnOnce(&WaitForCompactOptions) -> Result<(), rocksdb::Error>,
) -> Result<()> {
    let mut options = WaitForCompactOptions::default();
    options.set_flush(true);
    Ok(wait(&options)?)
}

impl Engine for Rocks {
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
            read: ReadOptions::default(),
            value: Vec::new(),
        }))
    }
}

struct RocksSession<'a> {
    engine: &'a Rocks,
    families: Vec<&'a ColumnFamily>,
    read: ReadOptions,
    /// The buffer in which a value is changed.
    value: Vec<u8>,
}

impl RocksSession<'_> {
    fn store(&self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        let Rocks { database, write, .. } = self.engine;
        Ok(database.put_cf_opt(self.families[table], key, value, write)?)
    }
}

impl Session for RocksSession<'_> {
    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let database = &self.engine.database;
        match database.get_pinned_cf_opt(self.families[table], key, &self.read)? {
            Some(value) => read(&value),
            None => return Ok(false),
        }
        Ok(true)
    }

    fn multi_get(
        &mut self,
        table: usize,
        keys: &[&[u8]],
        read: &mut dyn FnMut(usize, Option<&[u8]>),
    ) -> Result<()> {
        let keys = keys.iter().copied();
        let family = self.families[table];
        let found = self.engine.database.batched_multi_get_cf_opt(family, keys, false, &self.read);
        for (index, value) in found.into_iter().enumerate() {
            read(index, value?.as_deref());
        }
        Ok(())
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        let _lock = self.engine.lock(table, key);
        self.store(table, key, value)
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        let mut buffer = std::mem::take(&mut self.value);
        buffer.clear();
        let _lock = self.engine.lock(table, key);
        let found = self.get(table, key, &mut |value| buffer.extend_from_slice(value))?;
        if found {
            change(&mut buffer);
            self.store(table, key, &buffer)?;
        }
        self.value = buffer;
        Ok(found)
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        let _lock = self.engine.lock(table, key);
        let found = self.get(table, key, &mut |_| ())?;
        if found {
            let Rocks { database, write, .. } = self.engine;
            database.delete_cf_opt(self.families[table], key, write)?;
        }
        Ok(found)
    }

    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let entries = self.engine.database.raw_iterator_cf(self.families[table]);
        walk(entries, from, direction, visit)
    }
}

/// Visits entries from a key on.
pub(crate) fn walk<D: DBAccess>(
    mut entries: DBRawIteratorWithThreadMode<'_, D>,
    from: &[u8],
    direction: Direction,
    visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
) -> Result<()> {
    match direction {
        Direction::Forward => entries.seek(from),
        Direction::Backward => entries.seek_for_prev(from),
    }
    while let Some((key, value)) = entries.item() {
        if !visit(key, value) {
            return Ok(());
        }
        match direction {
            Direction::Forward => entries.next(),
            Direction::Backward => entries.prev(),
        }
    }
    Ok(entries.status()?)
}
