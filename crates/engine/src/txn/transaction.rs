//! Transactions: [`Transaction`], and [`Store::transact`].

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vellum_log::LogError;

use crate::error::{Error, Result};
use crate::key::Key;
use crate::planted::{StoreBug, is_planted};
use crate::redo::log::RedoLog;
use crate::store::Store;
use crate::sync::lock;
use crate::tree::{
    KeyRange, Tree, TreeRef, ValueReader, Write, bounds_of, bounds_of_prefix, commit,
};
use crate::txn::entries::{Changes, ViewEntries};
use crate::txn::view::View;
use crate::value::Value;
use crate::versions::{KeyBounds, ReadSet};

/// What concurrent transactions may do to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// The transactions have the effect of some order in which they run one after the other. A
    /// transaction that has read what another one changed and committed since it began fails at its
    /// commit.
    #[default]
    Serializable,
    /// A transaction sees the store as it was when the transaction began, and fails at its commit
    /// if another one has changed an entry that it changes. What it has only read may have changed
    /// (write skew).
    Snapshot,
}

/// When a commit survives a crash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// [`Transaction::commit`] returns when the transaction is durable. If a serializable
    /// transaction only reads, that is when what it has seen is durable. Without a log it syncs the
    /// store.
    #[default]
    Synced,
    /// The commit asks the log to write the transaction, and does not wait: a crash may take what
    /// was committed within some milliseconds, and what was committed later, but nothing in
    /// between. Without a log as `None`.
    Buffered,
    /// The transaction becomes durable with the next one that is synced or buffered, with the next
    /// [`Store::sync`], or when a quarter of the log's memory is filled.
    None,
}

/// How a transaction runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransactionOptions {
    /// What concurrent transactions may do to this one.
    pub isolation: Isolation,
    /// When the commit survives a crash.
    pub durability: Durability,
}

impl TransactionOptions {
    /// Serializable, and durable when `commit` returns.
    pub fn new() -> TransactionOptions {
        TransactionOptions::default()
    }

    /// Chooses the isolation.
    pub fn isolation(mut self, isolation: Isolation) -> TransactionOptions {
        self.isolation = isolation;
        self
    }

    /// Chooses the durability.
    pub fn durability(mut self, durability: Durability) -> TransactionOptions {
        self.durability = durability;
        self
    }
}

/// An atomic change of any number of entries, in any number of trees.
///
/// A transaction sees the store as it was when the transaction began, and its own changes. No other
/// thread sees them before [`commit`](Transaction::commit). A transaction that is dropped has
/// changed nothing. Transactions take no locks before they commit, so none of them waits for
/// another one until then, and there are no deadlocks; instead, a commit fails with
/// [`Conflict`](Error::Conflict) if another transaction was first. [`Store::transact`] tries again
/// then.
///
/// Changes that are made directly on a [`Tree`] are small transactions of their own.
///
/// ```
/// # use vellum::{Options, Store};
/// # let directory = tempfile::tempdir()?;
/// # let options = Options::new().pool_bytes(4 << 20);
/// # let store = Store::create(directory.path().join("store"), &options)?;
/// let accounts = store.create_tree("accounts")?;
/// accounts.extend([("Ada", [100]), ("Ben", [20])])?;
/// let mut transfer = store.begin()?;
/// let ada = transfer.get(&accounts, b"Ada")?.expect("she has an account")[0];
/// let ben = transfer.get(&accounts, b"Ben")?.expect("he has an account")[0];
/// transfer.put(&accounts, b"Ada", &[ada - 30])?;
/// transfer.put(&accounts, b"Ben", &[ben + 30])?;
/// transfer.commit()?;
/// assert_eq!(accounts.get(b"Ben")?.as_deref(), Some(&[50][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a transaction that is dropped changes nothing: commit it"]
pub struct Transaction {
    view: View,
    options: TransactionOptions,
    /// What the transaction has read, if it is serializable.
    reads: Mutex<ReadSet>,
    changes: BTreeMap<u32, TreeChanges>,
    /// The bytes of keys and values in `changes`, and in `undo`.
    bytes: u64,
    /// What an undo puts back, if there are savepoints.
    undo: Vec<Undo>,
    savepoints: Vec<Savepoint>,
}

/// The changes that a transaction makes in one tree.
#[derive(Debug)]
struct TreeChanges {
    tree: Tree,
    entries: Changes,
}

/// A point in a transaction to which it can [return](Transaction::rollback_to).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Savepoint {
    /// No other savepoint of the process has this number.
    number: u64,
    undo: usize,
}

/// What a key had in the changes of a transaction, if it had been changed.
#[derive(Debug)]
struct Undo {
    tree: u32,
    key: Key,
    before: Option<Option<Arc<[u8]>>>,
}

/// The most bytes that keys and values of a transaction may take, as a part of the pool.
const BYTES_OF_POOL: u64 = 4;

/// The bytes that the list of what a transaction has read may take, as a part of the pool.
const READ_BYTES_OF_POOL: u64 = 16;

/// So often a commit begins again that was promised room in the log and found it full, because it
/// had to split leaves.
const FULL_ATTEMPTS: u32 = 100;

/// After so many conflicts in a row, `transact` reserves what the transaction reads.
const EAGER_ATTEMPTS: u32 = 3;

impl Store {
    /// Begins a transaction that is serializable, and durable when its commit returns.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed), [`CalledFromWithin`](Error::CalledFromWithin).
    pub fn begin(&self) -> Result<Transaction> {
        self.begin_with(TransactionOptions::default())
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// As [`begin`](Store::begin).
    pub fn begin_with(&self, options: TransactionOptions) -> Result<Transaction> {
        Ok(Transaction {
            view: View::begin(&self.core)?,
            options,
            reads: Mutex::new(ReadSet::new(self.core.pages.pool_bytes() / READ_BYTES_OF_POOL)),
            changes: BTreeMap::new(),
            bytes: 0,
            undo: Vec::new(),
            savepoints: Vec::new(),
        })
    }

    /// Runs a function in a transaction, and commits. If another transaction was first, begins
    /// again, until it succeeds or fails for another reason. An error of `run` aborts the
    /// transaction.
    ///
    /// A transaction that has lost three times in a row has its turn: commits of other threads that
    /// would change what it has read wait for it, for a tenth of a second at most.
    ///
    /// # Errors
    /// Those of `run` and of [`commit`](Transaction::commit), without
    /// [`Conflict`](Error::Conflict).
    ///
    /// ```
    /// # use vellum::{Options, Store};
    /// # let directory = tempfile::tempdir()?;
    /// # let options = Options::new().pool_bytes(4 << 20);
    /// # let store = Store::create(directory.path().join("store"), &options)?;
    /// let counters = store.create_tree("counters")?;
    /// std::thread::scope(|scope| {
    ///     for _ in 0..2 {
    ///         scope.spawn(|| store.transact(|transaction| {
    ///             let old = transaction.get(&counters, b"visits")?.map_or(0, |value| value[0]);
    ///             transaction.put(&counters, b"visits", &[old + 1])
    ///         }));
    ///     }
    /// });
    /// assert_eq!(counters.get(b"visits")?.as_deref(), Some(&[2][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn transact<T>(&self, run: impl FnMut(&mut Transaction) -> Result<T>) -> Result<T> {
        self.transact_with(TransactionOptions::default(), run)
    }

    /// As [`transact`](Store::transact), with options.
    ///
    /// # Errors
    /// As `transact`.
    pub fn transact_with<T>(
        &self,
        options: TransactionOptions,
        mut run: impl FnMut(&mut Transaction) -> Result<T>,
    ) -> Result<T> {
        let (mut losses, mut reservation) = (0, None);
        loop {
            let mut transaction = self.begin_with(options)?;
            let done = match run(&mut transaction) {
                Ok(done) => transaction.try_commit(|| reservation = None).map(|()| done),
                Err(error) => Err(error.into()),
            };
            match done {
                Ok(done) => return Ok(done),
                Err(Failed { error: Error::Conflict, reads }) => {
                    losses += 1;
                    // Before it waits for the next one.
                    reservation = None;
                    if losses >= EAGER_ATTEMPTS {
                        let turns = &self.core.pages.versions.turns;
                        reservation = reads.map(|reads| turns.reserve(&reads));
                    }
                }
                Err(failed) => return Err(failed.error),
            }
        }
    }
}

/// A transaction that did not commit.
struct Failed {
    error: Error,
    /// What the transaction had read, if another one has changed some of it.
    reads: Option<Box<ReadSet>>,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, reads: None }
    }
}

impl Transaction {
    fn is_serializable(&self) -> bool {
        self.options.isolation == Isolation::Serializable
    }

    /// The value that the transaction itself has given the key.
    fn own(&self, tree: u32, key: &[u8]) -> Option<&Option<Arc<[u8]>>> {
        self.changes.get(&tree)?.entries.get(key)
    }

    fn note_read(&self, tree: u32, key: &[u8]) {
        if self.is_serializable() {
            lock(&self.reads).note_key(tree, key);
        }
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// As [`Tree::get`]; [`OtherStore`](Error::OtherStore).
    pub fn get<'t>(&'t self, tree: &'t Tree, key: &[u8]) -> Result<Option<Value<'t>>> {
        let tree = self.view.tree_ref(tree)?;
        if let Some(own) = self.own(tree.state.id, key) {
            return Ok(own.as_deref().map(|value| Value::Inline(Cow::Borrowed(value))));
        }
        self.note_read(tree.state.id, key);
        self.view.get(tree, key)
    }

    /// Whether `key` has a value.
    ///
    /// # Errors
    /// As [`get`](Transaction::get).
    pub fn contains(&self, tree: &Tree, key: &[u8]) -> Result<bool> {
        let tree = self.view.tree_ref(tree)?;
        if let Some(own) = self.own(tree.state.id, key) {
            return Ok(own.is_some());
        }
        self.note_read(tree.state.id, key);
        self.view.contains(tree, key)
    }

    /// The values of many keys, in their order. Reads the pages that are not resident together.
    ///
    /// # Errors
    /// As [`get`](Transaction::get).
    pub fn multi_get<'t>(
        &'t self,
        tree: &'t Tree,
        keys: &[&[u8]],
    ) -> Result<Vec<Option<Value<'t>>>> {
        let tree = self.view.tree_ref(tree)?;
        let id = tree.state.id;
        let others: Vec<&[u8]> =
            keys.iter().copied().filter(|key| self.own(id, key).is_none()).collect();
        others.iter().for_each(|key| self.note_read(id, key));
        let mut read = self.view.multi_get(tree, &others)?.into_iter();
        let value = |key: &&[u8]| match self.own(id, key) {
            Some(own) => own.as_deref().map(|value| Value::Inline(Cow::Borrowed(value))),
            None => read.next().flatten(),
        };
        Ok(keys.iter().map(value).collect())
    }

    /// A reader of the value of `key`, of any length.
    ///
    /// # Errors
    /// As [`Tree::reader`]; [`OtherStore`](Error::OtherStore).
    pub fn reader<'t>(&'t self, tree: &'t Tree, key: &[u8]) -> Result<Option<ValueReader<'t>>> {
        let tree = self.view.tree_ref(tree)?;
        if let Some(own) = self.own(tree.state.id, key) {
            let reader = |value: &'t [u8]| ValueReader::inline(tree, Cow::Borrowed(value));
            return Ok(own.as_deref().map(reader));
        }
        self.note_read(tree.state.id, key);
        self.view.reader(tree, key)
    }

    /// All entries, in the order of their keys.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed), [`OtherStore`](Error::OtherStore).
    pub fn entries<'t>(&'t self, tree: &'t Tree) -> Result<ViewEntries<'t>> {
        self.range(tree, ..)
    }

    /// The entries of a range of keys, in the order of their keys, from both ends. A serializable
    /// transaction depends on the part of the range that the iterator has passed: also on keys that
    /// are not there.
    ///
    /// # Errors
    /// As [`entries`](Transaction::entries).
    pub fn range<'t>(&'t self, tree: &'t Tree, range: impl KeyRange) -> Result<ViewEntries<'t>> {
        let tree = self.view.tree_ref(tree)?;
        Ok(self.entries_in(tree, bounds_of(&range)))
    }

    /// The entries whose keys begin with `prefix`, in the order of their keys.
    ///
    /// # Errors
    /// As [`entries`](Transaction::entries).
    pub fn prefix<'t>(&'t self, tree: &'t Tree, prefix: &[u8]) -> Result<ViewEntries<'t>> {
        let tree = self.view.tree_ref(tree)?;
        Ok(self.entries_in(tree, bounds_of_prefix(prefix)))
    }

    fn entries_in<'t>(&'t self, tree: TreeRef<'t>, bounds: KeyBounds) -> ViewEntries<'t> {
        let changes = self.changes.get(&tree.state.id).map(|changes| &changes.entries);
        let reads = self.is_serializable().then_some(&self.reads);
        ViewEntries::new(&self.view, tree, bounds, changes, reads)
    }

    /// Stores a value. Reads nothing: transactions that only put the same key do not conflict, and
    /// the last one to commit counts.
    ///
    /// # Errors
    /// Limits; [`TransactionTooLarge`](Error::TransactionTooLarge). Then the transaction is
    /// unchanged.
    pub fn put(&mut self, tree: &Tree, key: &[u8], value: &[u8]) -> Result<()> {
        let tree_ref = self.view.tree_ref(tree)?;
        tree_ref.check_dropped()?;
        tree_ref.pages.check_writable()?;
        tree_ref.check_entry(key, value)?;
        self.change(tree, tree_ref.state.id, key, Some(value))
    }

    /// Stores a value for a new key.
    ///
    /// # Errors
    /// [`KeyExists`](Error::KeyExists); as [`put`](Transaction::put) and
    /// [`get`](Transaction::get).
    pub fn insert(&mut self, tree: &Tree, key: &[u8], value: &[u8]) -> Result<()> {
        match self.contains(tree, key)? {
            true => Err(Error::KeyExists),
            false => self.put(tree, key, value),
        }
    }

    /// Changes the value of `key` to what `change` returns for it; `None` stands for no value.
    /// Returns whether there is a value now.
    ///
    /// # Errors
    /// As [`put`](Transaction::put) and [`get`](Transaction::get).
    pub fn update<V: AsRef<[u8]>>(
        &mut self,
        tree: &Tree,
        key: &[u8],
        change: impl FnOnce(Option<&[u8]>) -> Option<V>,
    ) -> Result<bool> {
        let new = change(self.get(tree, key)?.as_deref());
        match &new {
            Some(value) => self.put(tree, key, value.as_ref())?,
            None => drop(self.remove(tree, key)?),
        }
        Ok(new.is_some())
    }

    /// Removes an entry. Returns true if the tree had it.
    ///
    /// # Errors
    /// As [`put`](Transaction::put) and [`get`](Transaction::get).
    pub fn remove(&mut self, tree: &Tree, key: &[u8]) -> Result<bool> {
        let tree_ref = self.view.tree_ref(tree)?;
        tree_ref.check_key(key)?;
        tree_ref.pages.check_writable()?;
        let is_there = self.contains(tree, key)?;
        if is_there {
            self.change(tree, tree_ref.state.id, key, None)?;
        }
        Ok(is_there)
    }

    /// Removes the entries of a range of keys. Returns their number.
    ///
    /// # Errors
    /// As [`remove`](Transaction::remove). Then some of the entries are removed in the transaction.
    pub fn remove_range(&mut self, tree: &Tree, range: impl KeyRange) -> Result<u64> {
        let tree_ref = self.view.tree_ref(tree)?;
        tree_ref.pages.check_writable()?;
        let most = self.bytes_max();
        let (mut keys, mut bytes) = (Vec::new(), 0);
        for key in self.entries_in(tree_ref, bounds_of(&range)).keys() {
            let key = key?;
            bytes += key.len() as u64;
            if bytes > most {
                return Err(too_many_bytes(most));
            }
            keys.push(key);
        }
        for key in &keys {
            self.change(tree, tree_ref.state.id, key, None)?;
        }
        Ok(keys.len() as u64)
    }

    fn bytes_max(&self) -> u64 {
        self.view.core().pages.pool_bytes() / BYTES_OF_POOL
    }

    fn change(&mut self, tree: &Tree, id: u32, key: &[u8], value: Option<&[u8]>) -> Result<()> {
        let changes = self.changes.get(&id);
        let before = changes.and_then(|changes| changes.entries.get_key_value(key));
        let replaced = match self.savepoints.is_empty() {
            true => before.map_or(0, |(key, before)| size(key, before)),
            false => 0,
        };
        let value: Option<Arc<[u8]>> = value.map(Arc::from);
        let (bytes, most) = (self.bytes - replaced + size(key, &value), self.bytes_max());
        if bytes > most {
            return Err(too_many_bytes(most));
        }
        self.bytes = bytes;
        let key = before.map_or_else(|| Key::from(key), |(key, _)| key.clone());
        let changes = self
            .changes
            .entry(id)
            .or_insert_with(|| TreeChanges { tree: tree.clone(), entries: Changes::new() });
        let before = changes.entries.insert(key.clone(), value);
        if !self.savepoints.is_empty() {
            self.undo.push(Undo { tree: id, key, before });
        }
        Ok(())
    }

    /// A point to which [`rollback_to`](Transaction::rollback_to) returns.
    pub fn savepoint(&mut self) -> Savepoint {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let point = Savepoint { number, undo: self.undo.len() };
        self.savepoints.push(point);
        point
    }

    /// Undoes the changes since a savepoint. The savepoint stays; those after it are gone. What the
    /// transaction has read counts still.
    ///
    /// # Errors
    /// [`NoSuchSavepoint`](Error::NoSuchSavepoint).
    pub fn rollback_to(&mut self, savepoint: Savepoint) -> Result<()> {
        let Some(at) = self.savepoints.iter().position(|point| *point == savepoint) else {
            return Err(Error::NoSuchSavepoint);
        };
        self.savepoints.truncate(at + 1);
        for Undo { tree, key, before } in self.undo.drain(savepoint.undo..).rev() {
            let Some(changes) = self.changes.get_mut(&tree) else { continue };
            let undone = match before {
                Some(before) => changes.entries.insert(key.clone(), before),
                None => changes.entries.remove(&key),
            };
            self.bytes -= undone.map_or(0, |value| size(&key, &value));
        }
        Ok(())
    }

    /// Forgets a savepoint, and those after it. The changes stay.
    ///
    /// While there is a savepoint, the transaction keeps every value that it replaces. These count
    /// for the size of the transaction, until the oldest savepoint is released.
    ///
    /// # Errors
    /// [`NoSuchSavepoint`](Error::NoSuchSavepoint).
    pub fn release(&mut self, savepoint: Savepoint) -> Result<()> {
        let Some(at) = self.savepoints.iter().position(|point| *point == savepoint) else {
            return Err(Error::NoSuchSavepoint);
        };
        self.savepoints.truncate(at);
        if self.savepoints.is_empty() {
            for Undo { key, before, .. } in self.undo.drain(..) {
                self.bytes -= before.map_or(0, |value| size(&key, &value));
            }
        }
        Ok(())
    }

    /// Makes all changes of the transaction, or none. Depending on the transaction's
    /// [`Durability`], waits until they are durable.
    ///
    /// # Errors
    /// [`Conflict`](Error::Conflict): another transaction has changed since what this one has read
    /// or, with [`Isolation::Snapshot`], what it changes. A full disk, pool or log; a failed read;
    /// [`TransactionTooLarge`](Error::TransactionTooLarge), [`VersionsFull`](Error::VersionsFull).
    /// Then nothing has changed. [`NotDurable`](Error::NotDurable): the changes are made, and it is
    /// unknown whether a crash takes them.
    pub fn commit(self) -> Result<()> {
        self.try_commit(|| ()).map_err(|failed| failed.error)
    }

    /// As `commit`. Calls `applied` when the changes are made, before it waits for the log.
    fn try_commit(self, applied: impl FnOnce()) -> Result<(), Failed> {
        let durability = self.options.durability;
        if self.only_reads() {
            applied();
            return match (durability, self.newest_seen()?) {
                (Durability::Synced, Some((log, lsn))) => {
                    log.wait_durable(lsn).map_err(|error| not_durable(error).into())
                }
                _ => Ok(()),
            };
        }
        let (view, lsn) = self.apply()?;
        applied();
        let core = view.core();
        match (durability, &core.pages.redo_log) {
            (Durability::Synced, Some(log)) => log.wait_durable(lsn).map_err(not_durable)?,
            (Durability::Synced, None) => core.sync().map_err(not_durable)?,
            (Durability::Buffered, Some(log)) => log.request_flush(lsn),
            (Durability::Buffered, None) | (Durability::None, _) => {}
        }
        Ok(())
    }

    /// As [`commit`](Transaction::commit), but returns before the transaction is durable, and has
    /// `durable` called when it is, or when it is unknown whether it will be. So one thread can
    /// have many commits under way.
    ///
    /// A thread of the store, which does nothing else, calls these functions, one after the other.
    /// It holds no lock of the store. So `durable` may use the store: read, change and commit, also
    /// by `commit_then`. It must not wait for another such function. A slow one delays the others,
    /// and a close; it delays no commit and no checkpoint. It may close the store or drop its last
    /// handle: this waits for no such function then. If it is known within this call whether the
    /// transaction is durable, this may call `durable` itself.
    ///
    /// A [`close`](crate::Store::close) that begins after this has returned ends after `durable`
    /// has returned, also with an error.
    ///
    /// This asks for durability whatever the transaction's [`Durability`]. Without a log it waits
    /// for a sync of the store.
    ///
    /// # Errors
    /// As `commit`. Then `durable` is not called.
    pub fn commit_then(self, durable: impl FnOnce(Result<()>) + Send + 'static) -> Result<()> {
        if self.only_reads() {
            if let Some((log, lsn)) = self.newest_seen()? {
                call_when_durable(log, lsn, durable);
                return Ok(());
            }
            drop(self);
            durable(Ok(()));
            return Ok(());
        }
        let (view, lsn) = self.apply().map_err(|failed| failed.error)?;
        let end = match &view.core().pages.redo_log {
            Some(log) => {
                call_when_durable(log, lsn, durable);
                return Ok(());
            }
            None => view.core().sync().map_err(not_durable),
        };
        // The view must not last as long as the function.
        drop(view);
        durable(end);
        Ok(())
    }

    fn only_reads(&self) -> bool {
        self.changes.values().all(|changes| changes.entries.is_empty())
    }

    /// The number of the newest record in the log that may have written what a serializable
    /// transaction has read, if a crash could still take that record. A transaction that changes
    /// something need not ask: its own record comes later in the log.
    ///
    /// The leaf of a key has the number of its newest change, or a later one.
    fn newest_seen(&self) -> Result<Option<(&RedoLog, u64)>> {
        let core = self.view.core();
        core.pages.check_open()?;
        let Some(log) = &core.pages.redo_log else { return Ok(None) };
        let newest = log.newest();
        if newest < log.durable() {
            return Ok(None);
        }
        let mut reads = lock(&self.reads);
        reads.note_forgotten_iterators();
        if !reads.ranges().is_empty() {
            return Ok(Some((log, newest)));
        }
        let live: Vec<_> = core.trees().live().collect();
        let mut seen = 0;
        for (id, key) in reads.keys() {
            let tree = live.iter().find(|tree| tree.id == id);
            let tree = tree.map(|tree| TreeRef { pages: &core.pages, state: tree });
            // Nothing is known of a tree that is gone, or of a leaf that cannot be read.
            let lsn = tree.and_then(|tree| tree.newest_change(key).ok());
            seen = seen.max(lsn.unwrap_or(newest));
            if seen >= newest {
                break;
            }
        }
        Ok(Some((log, seen)))
    }

    /// Makes the changes. Returns the number of the log's record.
    fn apply(self) -> Result<(View, u64), Failed> {
        let mut reads = self.reads.into_inner().unwrap_or_else(|broken| broken.into_inner());
        reads.note_forgotten_iterators();
        if self.options.isolation == Isolation::Snapshot && !is_planted(StoreBug::UncheckedWrites) {
            // The number of changes has a bound of its own.
            reads = ReadSet::new(u64::MAX);
            for (tree, changes) in &self.changes {
                changes.entries.keys().for_each(|key| reads.note_key(*tree, key));
            }
        }
        let pages = &self.view.core().pages;
        pages.versions.turns.wait(
            self.changes
                .iter()
                .flat_map(|(tree, changes)| changes.entries.keys().map(move |key| (*tree, key))),
        );
        let count = self.changes.values().map(|changes| changes.entries.len()).sum();
        let (mut record, mut attempts) = (0, 0);
        let lsn = loop {
            let writes = self.changes.values().flat_map(|TreeChanges { tree, entries }| {
                entries.iter().map(|(key, value)| Write {
                    tree: tree.tree_ref(),
                    key,
                    value: value.as_deref(),
                })
            });
            let change = pages.change_for(record)?;
            match commit(pages, &change, Some(self.view.validation(&reads)), (count, writes)) {
                // Between two changes a checkpoint can make room in the log. Leaves that this
                // attempt has split need no room in the next one.
                Err(Error::Log(LogError::Full { .. }))
                    if change.wanted() > record || attempts < FULL_ATTEMPTS =>
                {
                    record = record.max(change.wanted());
                    attempts += 1;
                }
                Err(Error::Conflict) => {
                    return Err(Failed { error: Error::Conflict, reads: Some(Box::new(reads)) });
                }
                done => break done?,
            }
        };
        // Without a record, the transaction has found that its changes change nothing: it removes
        // what is not there. Then it depends on what it has found.
        let newest = || pages.redo_log.as_ref().map_or(0, |log| log.newest());
        let lsn = if lsn == 0 { newest() } else { lsn };
        Ok((self.view, lsn))
    }

    /// Ends the transaction. It has changed nothing. Dropping it does the same.
    pub fn abort(self) {}
}

/// What a change takes of the memory of a transaction, in bytes.
fn size(key: &[u8], value: &Option<Arc<[u8]>>) -> u64 {
    (key.len() + value.as_ref().map_or(0, |value| value.len())) as u64
}

#[cold]
fn call_when_durable(log: &RedoLog, lsn: u64, durable: impl FnOnce(Result<()>) + Send + 'static) {
    log.on_durable(lsn, |done| durable(done.map_err(not_durable)));
}

fn not_durable(cause: impl Into<Error>) -> Error {
    Error::NotDurable(Box::new(cause.into()))
}

#[cold]
fn too_many_bytes(most: u64) -> Error {
    Error::TransactionTooLarge(format!(
        "its keys and values may take {most} bytes, a quarter of the pool"
    ))
}
