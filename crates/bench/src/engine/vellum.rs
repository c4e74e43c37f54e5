//! The adapter for Vellum.

use std::hint::black_box;
use std::ops::Bound;

use anyhow::{Context as _, Result};
use vellum::{
    BackendChoice, BackendKind, Error, Isolation, Options, Replacement, Snapshot, StatePlace,
    Store, Transaction, TransactionOptions, Translation, Tree,
};

use super::{
    Access, BulkWork, Conflict, DURABILITY, Direction, Durability, Engine, Pair, Session, Setting,
    TRANSACTIONS,
};

struct Vellum {
    store: Store,
    trees: Vec<Tree>,
    durability: Durability,
    /// How transactions run. Without this, `begin` and `commit` do nothing.
    transactions: Option<TransactionOptions>,
}

/// Opens or creates `data.vellum` in the directory. Options: `backend`, `evictors`, `policy`,
/// `states`, `translation`, `durability` (all but `none` use a log), `log_bytes`, `transactions`.
pub(super) fn open(setting: &Setting) -> Result<Box<dyn Engine>> {
    let known = ["backend", "evictors", "policy", "states", "translation", "log_bytes"];
    setting.check_options(&[&known[..], &[DURABILITY, TRANSACTIONS]].concat())?;
    let durability = setting.durability()?;
    let mut options = Options::new().pool_bytes(setting.cache_bytes);
    options = options.log(durability != Durability::None);
    if let Some(bytes) = setting.options.get("log_bytes") {
        options = options.log_bytes(bytes.parse().context("option 'log_bytes'")?);
    }
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
    if let Some(name) = setting.options.get("translation") {
        options = options.translation(translation(name)?);
    }
    let store = Store::open_or_create(setting.directory.join("data.vellum"), &options)?;
    let trees = setting.tables.iter().map(|name| Ok(store.tree_or_create(name)?));
    let trees = trees.collect::<Result<Vec<Tree>>>()?;
    let transactions = setting.options.get(TRANSACTIONS);
    let transactions =
        transactions.map(|name| transaction_options(name, durability)).transpose()?;
    Ok(Box::new(Vellum { store, trees, durability, transactions }))
}

fn transaction_options(isolation: &str, durability: Durability) -> Result<TransactionOptions> {
    let isolation = match isolation {
        "serializable" => Isolation::Serializable,
        "snapshot" => Isolation::Snapshot,
        _ => anyhow::bail!("option '{TRANSACTIONS}': no '{isolation}'; serializable or snapshot"),
    };
    let durability = match durability {
        Durability::None => vellum::Durability::None,
        Durability::Buffered => vellum::Durability::Buffered,
        Durability::Synced => vellum::Durability::Synced,
    };
    Ok(TransactionOptions::new().isolation(isolation).durability(durability))
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

fn translation(name: &str) -> Result<Translation> {
    Translation::named(name)
        .with_context(|| format!("option 'translation': no '{name}'; auto, mmu or table"))
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
        let trees = TreeSession { engine: self, value: Vec::new(), in_place };
        match self.transactions {
            Some(options) => {
                Ok(Box::new(TransactionSession { trees, options, state: State::Idle }))
            }
            None => Ok(Box::new(trees)),
        }
    }
}

impl Vellum {
    /// Makes what was changed durable, if each change has to be.
    fn acknowledge(&self) -> Result<()> {
        match self.durability {
            Durability::None => Ok(()),
            Durability::Buffered => Ok(self.store.request_sync()?),
            Durability::Synced => Ok(self.store.sync()?),
        }
    }
}

/// A session whose operations are each on their own.
struct TreeSession<'a> {
    engine: &'a Vellum,
    value: Vec<u8>,
    /// For each table, whether its values are blobs, which are read in place.
    in_place: Vec<bool>,
}

/// A longer value is a blob, for every page size.
const SURELY_BLOB: usize = 64 << 10;

impl Session for TreeSession<'_> {
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
        self.engine.acknowledge()
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        let updated = self.engine.trees[table].update(key, change)?;
        self.engine.acknowledge()?;
        Ok(updated)
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        let removed = self.engine.trees[table].remove(key)?;
        self.engine.acknowledge()?;
        Ok(removed)
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

/// A session with transactions. An operation outside of one that changes something is a transaction
/// of its own; one that only reads is on its own.
struct TransactionSession<'a> {
    trees: TreeSession<'a>,
    options: TransactionOptions,
    state: State,
}

#[allow(clippy::large_enum_variant)] // one for each thread, and a box would cost each transaction
enum State {
    /// No transaction is open.
    Idle,
    Reading(Snapshot),
    Writing(Transaction),
}

impl<'a> TransactionSession<'a> {
    fn tree(&self, table: usize) -> &'a Tree {
        &self.trees.engine.trees[table]
    }

    /// Changes something in the transaction under way, or in one of its own. The latter is repeated
    /// until it wins.
    fn change<T>(&mut self, mut change: impl FnMut(&mut Transaction) -> Result<T>) -> Result<T> {
        match &mut self.state {
            State::Writing(transaction) => return change(transaction),
            State::Reading(_) => anyhow::bail!("a transaction that only reads cannot write"),
            State::Idle => {}
        }
        loop {
            let mut transaction = self.trees.engine.store.begin_with(self.options)?;
            let done = change(&mut transaction)?;
            match transaction.commit() {
                Err(Error::Conflict) => {}
                committed => return committed.map(|()| done).map_err(Into::into),
            }
        }
    }
}

impl Session for TransactionSession<'_> {
    fn isolates(&self) -> bool {
        true
    }

    fn begin(&mut self, access: Access) -> Result<()> {
        let store = &self.trees.engine.store;
        self.state = match access {
            Access::Read => State::Reading(store.snapshot()?),
            Access::Write => State::Writing(store.begin_with(self.options)?),
        };
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle | State::Reading(_) => Ok(()),
            State::Writing(transaction) => match transaction.commit() {
                Err(Error::Conflict) => Err(Conflict.into()),
                other => Ok(other?),
            },
        }
    }

    fn get(&mut self, table: usize, key: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let tree = self.tree(table);
        let value = match &self.state {
            State::Idle => return self.trees.get(table, key, read),
            State::Reading(snapshot) => snapshot.get(tree, key)?,
            State::Writing(transaction) => transaction.get(tree, key)?,
        };
        value.iter().for_each(|value| read(value));
        Ok(value.is_some())
    }

    fn multi_get(
        &mut self,
        table: usize,
        keys: &[&[u8]],
        read: &mut dyn FnMut(usize, Option<&[u8]>),
    ) -> Result<()> {
        let tree = self.tree(table);
        let values = match &self.state {
            State::Idle => return self.trees.multi_get(table, keys, read),
            State::Reading(snapshot) => snapshot.multi_get(tree, keys)?,
            State::Writing(transaction) => transaction.multi_get(tree, keys)?,
        };
        values.iter().enumerate().for_each(|(index, value)| read(index, value.as_deref()));
        Ok(())
    }

    fn put(&mut self, table: usize, key: &[u8], value: &[u8]) -> Result<()> {
        let tree = self.tree(table);
        self.change(|transaction| Ok(transaction.put(tree, key, value)?))
    }

    fn update(
        &mut self,
        table: usize,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        let tree = self.tree(table);
        self.change(|transaction| {
            let updated = transaction.update(tree, key, |value| {
                let mut value = value?.to_vec();
                change(&mut value);
                Some(value)
            });
            Ok(updated?)
        })
    }

    fn remove(&mut self, table: usize, key: &[u8]) -> Result<bool> {
        let tree = self.tree(table);
        self.change(|transaction| Ok(transaction.remove(tree, key)?))
    }

    fn scan(
        &mut self,
        table: usize,
        from: &[u8],
        direction: Direction,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let tree = self.tree(table);
        let range = match direction {
            Direction::Forward => (Bound::Included(from), Bound::Unbounded),
            Direction::Backward => (Bound::Unbounded, Bound::Included(from)),
        };
        let mut entries = match &self.state {
            State::Idle => return self.trees.scan(table, from, direction, visit),
            State::Reading(snapshot) => snapshot.range(tree, range)?,
            State::Writing(transaction) => transaction.range(tree, range)?,
        };
        loop {
            let entry = match direction {
                Direction::Forward => entries.next_entry()?,
                Direction::Backward => entries.next_entry_back()?,
            };
            let Some((key, value)) = entry else { return Ok(()) };
            if !visit(key, &value) {
                return Ok(());
            }
        }
    }
}
