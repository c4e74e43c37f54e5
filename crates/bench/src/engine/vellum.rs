//! The adapter for Vellum.

use std::hint::black_box;

use anyhow::{Context as _, Result};
use vellum::{BackendChoice, BackendKind, Options, Replacement, StatePlace, Store, Tree};

use super::{BulkWork, Direction, Engine, Pair, Session, Setting};

struct Vellum {
    store: Store,
    trees: Vec<Tree>,
}

/// Opens or creates `data.vellum` in the directory. Options: `backend`, `evictors`, `policy`,
/// `states`.
pub(super) fn open(setting: &Setting) -> Result<Box<dyn Engine>> {
    setting.check_options(&["backend", "evictors", "policy", "states"])?;
    let mut options = Options::new().pool_bytes(setting.cache_bytes);
    if let Some(name) = setting.options.get("backend") {
        options = options.backend(backend(name)?);
    }
    if let Some(threads) = setting.options.get("evictors") {
        options = options.evictors(threads.parse().context("option 'evictors'")?);
    }
    if let Some(name) = setting.options.get("policy") {
        options = options.replacement(replacement(name)?);
    }
    if let Some(name) = setting.options.get("states") {
        options = options.states(states(name)?);
    }
    let store = Store::open_or_create(setting.directory.join("data.vellum"), &options)?;
    let trees = setting.tables.iter().map(|name| Ok(store.tree_or_create(name)?));
    let trees = trees.collect::<Result<Vec<Tree>>>()?;
    Ok(Box::new(Vellum { store, trees }))
}

/// The backend that the option `backend` names.
///
/// # Errors
/// An unknown name.
pub fn backend(name: &str) -> Result<BackendChoice> {
    let kind = BackendKind::named(name).with_context(|| {
        let known = BackendKind::ALL.map(BackendKind::name).join(", ");
        format!("option 'backend': no '{name}'; one of {known}")
    })?;
    Ok(BackendChoice::Only(kind))
}

fn replacement(name: &str) -> Result<Replacement> {
    match name {
        "clock" => Ok(Replacement::Clock),
        "s3-fifo" => Ok(Replacement::S3Fifo),
        _ => anyhow::bail!("option 'policy': no '{name}'; clock or s3-fifo"),
    }
}

/// The place of state words that the option `states` names.
///
/// # Errors
/// An unknown name.
pub fn states(name: &str) -> Result<StatePlace> {
    match name {
        "pages" => Ok(StatePlace::Pages),
        "frames" => Ok(StatePlace::Frames),
        _ => anyhow::bail!("option 'states': no '{name}'; pages or frames"),
    }
}

impl Engine for Vellum {
    fn load(&self, table: usize, entries: &mut dyn Iterator<Item = Pair>) -> Result<()> {
        self.trees[table].bulk_load(entries)?;
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        Ok(self.store.sync()?)
    }

    fn bulk(&self, table: usize, work: &BulkWork<'_>) -> Result<Option<u64>> {
        let tree = &self.trees[table];
        let count = match *work {
            BulkWork::Count => tree.stat()?.entries,
            BulkWork::Read(from, to) => {
                let (mut entries, mut count) = (tree.range(from..to), 0);
                while let Some((key, value)) = entries.next_entry()? {
                    black_box((key, &*value));
                    count += 1;
                }
                count
            }
            BulkWork::Insert(pairs) => {
                pairs.iter().try_for_each(|(key, value)| tree.upsert(key, value).map(drop))?;
                pairs.len() as u64
            }
            BulkWork::Append(pairs) => {
                tree.extend(pairs.iter().map(|(key, value)| (key, value)))?
            }
            BulkWork::PopFirst(most) => {
                let mut count = 0;
                while count < most
                    && let Some(entry) = tree.pop_first()?
                {
                    black_box(entry);
                    count += 1;
                }
                count
            }
            BulkWork::Retain(chosen) => tree.retain(|key, _| !chosen(key))?,
            BulkWork::Extract(chosen) => {
                let mut count = 0;
                for entry in tree.extract_if(.., |key, _| chosen(key)) {
                    black_box(entry?);
                    count += 1;
                }
                count
            }
            BulkWork::RemoveRange(from, to) => tree.remove_range(from..to)?,
        };
        Ok(Some(count))
    }

    fn session(&self) -> Result<Box<dyn Session + '_>> {
        let in_place = vec![false; self.trees.len()];
        Ok(Box::new(VellumSession { engine: self, value: Vec::new(), in_place }))
    }
}

struct VellumSession<'a> {
    engine: &'a Vellum,
    value: Vec<u8>,
    /// For each table, whether its values are blobs, which are read in place.
    in_place: Vec<bool>,
}

/// A longer value is a blob, for every page size.
const SURELY_BLOB: usize = 64 << 10;

impl Session for VellumSession<'_> {
    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let tree = &self.engine.trees[table];
        if self.in_place[table] {
            let value = tree.get(key)?;
            value.iter().for_each(|value| read(value));
            return Ok(value.is_some());
        }
        let found = tree.get_into(key, &mut self.value)?;
        if found {
            read(&self.value);
            if self.value.len() > SURELY_BLOB {
                self.in_place[table] = true;
                self.value = Vec::new();
            }
        }
        Ok(found)
    }

    fn multi_get(
        &mut self,
        table: usize,
        keys: &[&[u8]],
        read: &mut dyn FnMut(usize, Option<&[u8]>),
    ) -> Result<()> {
        Ok(self.engine.trees[table].multi_get_with(keys, read)?)
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        self.engine.trees[table].upsert(key, value)?;
        Ok(())
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        Ok(self.engine.trees[table].update(key, change)?)
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        Ok(self.engine.trees[table].remove(key)?)
    }

    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let mut cursor = self.engine.trees[table].cursor();
        let mut there = match direction {
            Direction::Forward => cursor.seek(from)?,
            Direction::Backward => cursor.seek_back(from)?,
        };
        while there {
            let Some(value) = cursor.value()? else { break };
            if !visit(cursor.key(), &value) {
                break;
            }
            drop(value);
            there = match direction {
                Direction::Forward => cursor.forward()?,
                Direction::Backward => cursor.backward()?,
            };
        }
        Ok(())
    }
}
