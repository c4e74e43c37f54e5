//! Reads of a tree as it is, as a snapshot sees it, or as a transaction sees it.

use std::io::Read;
use std::ops::Bound;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use vellum::{Error, Snapshot, Transaction, Tree, ValueReader, ViewEntries};

use crate::call::{Failure, lock, of_stream};

/// A key and its value.
pub(crate) type Entry = (Vec<u8>, Vec<u8>);

/// The start and the end of a range of keys.
pub(crate) type Bounds<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// The same, in memory of its own.
pub(crate) type OwnedBounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// The keys from `start` on that come before `end`.
pub(crate) fn bounds(start: Option<&[u8]>, end: Option<&[u8]>) -> OwnedBounds {
    let start = start.map_or(Bound::Unbounded, |key| Bound::Included(key.to_vec()));
    (start, end.map_or(Bound::Unbounded, |key| Bound::Excluded(key.to_vec())))
}

/// The keys that begin with `prefix`.
pub(crate) fn bounds_of_prefix(prefix: &[u8]) -> OwnedBounds {
    // The first key that comes after all of them: of the bytes up to the last one below 255, the
    // last one is incremented.
    let end = prefix.iter().rposition(|byte| *byte != u8::MAX).map(|last| {
        let mut end = prefix[..=last].to_vec();
        end[last] += 1;
        end
    });
    (Bound::Included(prefix.to_vec()), end.map_or(Bound::Unbounded, Bound::Excluded))
}

pub(crate) fn borrowed((start, end): &OwnedBounds) -> Bounds<'_> {
    (start.as_ref().map(|key| &key[..]), end.as_ref().map(|key| &key[..]))
}

/// Takes the keys up to `key` out of a range; those from the end on, if `backward`.
pub(crate) fn pass((start, end): &mut OwnedBounds, key: Vec<u8>, backward: bool) {
    *if backward { end } else { start } = Bound::Excluded(key);
}

/// How much to read of a range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amount {
    pub(crate) entries: usize,
    /// After an entry that reaches this number of bytes the read ends.
    pub(crate) bytes: usize,
    /// Whether to begin at the end.
    pub(crate) backward: bool,
}

/// What the reads see.
pub(crate) trait View {
    /// The value of a key, which may be longer than the pool.
    fn get(&self, tree: &Tree, key: &[u8]) -> Result<Option<Vec<u8>>, Error>;

    fn contains(&self, tree: &Tree, key: &[u8]) -> Result<bool, Error>;

    fn multi_get(&self, tree: &Tree, keys: &[&[u8]]) -> Result<Vec<Option<Vec<u8>>>, Error>;

    /// The first entries of a range. Fewer than asked for if there are no more.
    fn read(&self, tree: &Tree, range: Bounds<'_>, amount: Amount) -> Result<Vec<Entry>, Error>;
}

/// A tree as it is.
#[derive(Debug)]
struct Now;

impl View for Now {
    fn get(&self, tree: &Tree, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let mut value = Vec::new();
        Ok(tree.get_into(key, &mut value)?.then_some(value))
    }

    fn contains(&self, tree: &Tree, key: &[u8]) -> Result<bool, Error> {
        tree.contains(key)
    }

    fn multi_get(&self, tree: &Tree, keys: &[&[u8]]) -> Result<Vec<Option<Vec<u8>>>, Error> {
        match tree.multi_get(keys) {
            Ok(values) => Ok(values.into_iter().map(|value| Some(value?.into_vec())).collect()),
            Err(error) if is_too_much(&error) => {
                keys.iter().map(|key| self.get(tree, key)).collect()
            }
            Err(error) => Err(error),
        }
    }

    fn read(&self, tree: &Tree, range: Bounds<'_>, amount: Amount) -> Result<Vec<Entry>, Error> {
        let mut cursor = tree.cursor();
        let (start, end) = range;
        let mut moved = match (amount.backward, start, end) {
            (false, Bound::Unbounded, _) => cursor.first()?,
            (true, _, Bound::Unbounded) => cursor.last()?,
            (false, Bound::Included(key), _) => cursor.seek(key)?,
            (true, _, Bound::Included(key)) => cursor.seek_back(key)?,
            (false, Bound::Excluded(key), _) => {
                cursor.seek(key)? && (cursor.key() != key || cursor.forward()?)
            }
            (true, _, Bound::Excluded(key)) => {
                cursor.seek_back(key)? && (cursor.key() != key || cursor.backward()?)
            }
        };
        let mut found = Found::new(amount);
        while moved && is_within(cursor.key(), range) {
            let value = match cursor.value() {
                Ok(value) => value.map(|value| value.to_vec()),
                Err(Error::NeedsReader { .. }) => self.get(tree, cursor.key())?,
                Err(error) => return found.or(error),
            };
            // Another thread may have removed the entry since the cursor moved there.
            if value.is_some_and(|value| found.push(cursor.key(), &value)) {
                break;
            }
            moved = match amount.backward {
                false => cursor.forward()?,
                true => cursor.backward()?,
            };
        }
        Ok(found.entries)
    }
}

fn is_within(key: &[u8], range: Bounds<'_>) -> bool {
    std::ops::RangeBounds::<[u8]>::contains(&range, key)
}

/// Whether a call could not have all values in the pool at once.
fn is_too_much(error: &Error) -> bool {
    matches!(error, Error::NeedsReader { .. } | Error::PoolExhausted(_))
}

/// The entries that a read has found.
struct Found {
    entries: Vec<Entry>,
    bytes: usize,
    amount: Amount,
}

impl Found {
    fn new(amount: Amount) -> Found {
        Found { entries: Vec::new(), bytes: 0, amount }
    }

    /// Adds an entry. Returns true if these are enough.
    fn push(&mut self, key: &[u8], value: &[u8]) -> bool {
        self.bytes += key.len() + value.len();
        self.entries.push((key.to_vec(), value.to_vec()));
        self.entries.len() >= self.amount.entries || self.bytes >= self.amount.bytes
    }

    /// The entries before an error. The next read begins at the error.
    fn or(self, error: Error) -> Result<Vec<Entry>, Error> {
        if self.entries.is_empty() { Err(error) } else { Ok(self.entries) }
    }
}

fn read_all(mut reader: ValueReader<'_>) -> Result<Vec<u8>, Error> {
    let mut value = Vec::new();
    reader.read_to_end(&mut value).map_err(of_stream)?;
    Ok(value)
}

/// The first of the entries that a view sees.
fn read_entries(
    view: &dyn View,
    tree: &Tree,
    mut entries: ViewEntries<'_>,
    amount: Amount,
) -> Result<Vec<Entry>, Error> {
    let mut found = Found::new(amount);
    loop {
        let next = match amount.backward {
            false => entries.next_entry(),
            true => entries.next_entry_back(),
        };
        let is_last = next.map(|entry| entry.is_none_or(|(key, value)| found.push(key, &value)));
        let is_last = match is_last {
            Err(Error::NeedsReader { .. }) => view
                .get(tree, entries.key())
                .map(|value| value.is_some_and(|value| found.push(entries.key(), &value))),
            other => other,
        };
        match is_last {
            Ok(false) => {}
            Ok(true) => return Ok(found.entries),
            Err(error) => return found.or(error),
        }
    }
}

macro_rules! view {
    ($($type:ty),+) => {
        $(impl View for $type {
            fn get(&self, tree: &Tree, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
                match self.get(tree, key) {
                    Ok(value) => Ok(value.map(|value| value.into_vec())),
                    Err(Error::NeedsReader { .. }) => {
                        self.reader(tree, key)?.map(read_all).transpose()
                    }
                    Err(error) => Err(error),
                }
            }

            fn contains(&self, tree: &Tree, key: &[u8]) -> Result<bool, Error> {
                self.contains(tree, key)
            }

            fn multi_get(
                &self,
                tree: &Tree,
                keys: &[&[u8]],
            ) -> Result<Vec<Option<Vec<u8>>>, Error> {
                match self.multi_get(tree, keys) {
                    Ok(values) => {
                        Ok(values.into_iter().map(|value| Some(value?.into_vec())).collect())
                    }
                    Err(error) if is_too_much(&error) => {
                        keys.iter().map(|key| View::get(self, tree, key)).collect()
                    }
                    Err(error) => Err(error),
                }
            }

            fn read(
                &self,
                tree: &Tree,
                range: Bounds<'_>,
                amount: Amount,
            ) -> Result<Vec<Entry>, Error> {
                read_entries(self, tree, self.range(tree, range)?, amount)
            }
        })+
    };
}

view!(Snapshot, Transaction);

/// A snapshot that its object and its iterators share. None once it is closed.
pub(crate) type SharedSnapshot = Arc<RwLock<Option<Snapshot>>>;

/// A transaction that its object, its iterators and its savepoints share. None once it has ended.
pub(crate) type SharedTransaction = Arc<Mutex<Option<Open>>>;

/// A transaction that has not ended.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) transaction: Transaction,
    /// Counts the changes, so that iterators notice them.
    pub(crate) changes: u64,
}

/// Runs a function that changes a transaction.
pub(crate) fn change<T>(
    transaction: &SharedTransaction,
    change: impl FnOnce(&mut Transaction) -> Result<T, Error>,
) -> Result<T, Failure> {
    let mut open = lock(transaction);
    let open = open.as_mut().ok_or(ENDED)?;
    open.changes += 1;
    Ok(change(&mut open.transaction)?)
}

pub(crate) const ENDED: Failure = Failure::Ended("the transaction has ended: begin a new one");
const CLOSED: Failure = Failure::Ended("the snapshot is closed: take a new one");

/// Where an object reads from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Now,
    Snapshot(SharedSnapshot),
    Transaction(SharedTransaction),
}

impl Source {
    /// Runs a function on what the reads see, and on a number that changes with it.
    pub(crate) fn with<T>(
        &self,
        read: impl FnOnce(&dyn View, u64) -> Result<T, Error>,
    ) -> Result<T, Failure> {
        Ok(match self {
            Source::Now => read(&Now, 0)?,
            Source::Snapshot(snapshot) => {
                let snapshot = snapshot.read().unwrap_or_else(PoisonError::into_inner);
                read(snapshot.as_ref().ok_or(CLOSED)?, 0)?
            }
            Source::Transaction(transaction) => {
                let open = lock(transaction);
                let open = open.as_ref().ok_or(ENDED)?;
                read(&open.transaction, open.changes)?
            }
        })
    }
}
