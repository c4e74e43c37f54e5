//! Cursors over the entries of a range: of a tree as it is, of a snapshot, or of a transaction.
//!
//! A cursor owns what it reads from, so that C may free handles in any order. A cursor of a tree
//! keeps the engine's cursor, and so returns what the tree has at that moment. A cursor of a
//! snapshot or a transaction copies some entries at a time, and goes on after the last of them:
//! so a transaction can change while it has cursors. When it has changed, its cursors read again.
#![allow(unsafe_code)] // exported names

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex, PoisonError};

use self_cell::self_cell;
use vellum::{Cursor, Error, Snapshot, Tree};
use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given};
use crate::range::{Bounds, CRange, bounds};
use crate::raw::CEntry;
use crate::snapshot::SnapshotHandle;
use crate::store::TreeHandle;
use crate::transaction::{Shared, TransactionHandle};
use crate::view::View;

/// `vellum_cursor`.
#[derive(Debug)]
pub struct CursorHandle(Mutex<Scan>);

self_cell!(
    struct TreeCursor {
        owner: Tree,
        #[not_covariant]
        dependent: Cursor,
    }

    impl {Debug}
);

#[derive(Debug)]
struct Scan {
    bounds: Bounds,
    position: Position,
    source: Source,
    /// The entry that was returned last, if the cursor is at one.
    entry: Entry,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    Fresh,
    /// Before the first entry of the range.
    Start,
    On,
    /// After the last entry of the range.
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

#[derive(Debug, Default)]
struct Entry {
    key: Vec<u8>,
    value: Vec<u8>,
    /// The length of a value that is too long for the pool, and so is not in `value`.
    long: Option<u64>,
}

#[derive(Debug)]
enum Source {
    Tree(TreeCursor),
    Snapshot { snapshot: Arc<Snapshot>, tree: Tree, ahead: Ahead },
    Transaction { transaction: Arc<Shared>, tree: Tree, ahead: Ahead, changes: u64 },
}

/// Entries that were read and not returned yet.
#[derive(Debug)]
struct Ahead {
    entries: std::vec::IntoIter<Entry>,
    direction: Direction,
    /// How many entries to read next.
    wanted: usize,
    amount: Amount,
}

/// How many entries a cursor reads at a time: twice as many each time, from the first number to the
/// most, and about this many bytes.
#[derive(Clone, Copy, Debug)]
struct Amount {
    first: usize,
    most: usize,
    bytes: usize,
}

/// A transaction depends on what its cursors read, so they read little ahead.
const OF_TRANSACTION: Amount = Amount { first: 1, most: 256, bytes: 64 << 10 };
/// The engine reads leaves ahead within a read.
const OF_SNAPSHOT: Amount = Amount { first: 16, most: 4096, bytes: 1 << 20 };

impl Ahead {
    fn new(amount: Amount) -> Ahead {
        let (entries, direction) = (Vec::new().into_iter(), Direction::Forward);
        Ahead { entries, direction, wanted: amount.first, amount }
    }

    /// Forgets what was read.
    fn restart(&mut self, direction: Direction) {
        *self = Ahead { direction, ..Ahead::new(self.amount) };
    }

    /// The next entry. Reads more of them from what is left of the range, if need be.
    fn next(
        &mut self,
        view: &impl View,
        tree: &Tree,
        left: (Bound<&[u8]>, Bound<&[u8]>),
        direction: Direction,
    ) -> Result<Option<Entry>, Error> {
        if self.direction != direction {
            self.restart(direction);
        }
        if let Some(entry) = self.entries.next() {
            // The store may have been closed since the entry was read.
            return view.check(tree).map(|()| Some(entry));
        }
        let mut entries = view.entries(tree, left)?;
        let (mut found, mut bytes) = (Vec::new(), 0);
        while found.len() < self.wanted && bytes < self.amount.bytes {
            let entry = match direction {
                Direction::Forward => entries.next_entry(),
                Direction::Backward => entries.next_entry_back(),
            };
            let entry = match entry.map(|entry| entry.map(|(key, value)| Entry::new(key, &value))) {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                Err(Error::NeedsReader { len, .. }) => Entry::of_long(entries.key(), len),
                Err(error) if found.is_empty() => return Err(error),
                // The next call meets the error again.
                Err(_) => break,
            };
            bytes += entry.key.len() + entry.value.len();
            found.push(entry);
        }
        self.wanted = (2 * self.wanted).min(self.amount.most);
        self.entries = found.into_iter();
        Ok(self.entries.next())
    }
}

impl Scan {
    fn step(&mut self, direction: Direction) -> Outcome<CEntry> {
        let Scan { bounds, position, source, entry } = self;
        let found = match source {
            Source::Tree(cursor) => cursor.with_dependent_mut(|tree, cursor| {
                // The end stays the end until the cursor moves away from it.
                match is_beyond(*position, direction) {
                    true => tree.multi_get(&[]).map(|_| None),
                    false => step_in_tree(cursor, bounds, *position, &entry.key, direction),
                }
            })?,
            Source::Snapshot { snapshot, tree, ahead } => {
                step_in_view(&**snapshot, tree, ahead, bounds, *position, &entry.key, direction)?
            }
            Source::Transaction { transaction, tree, ahead, changes } => {
                transaction.read(|transaction, now| {
                    if std::mem::replace(changes, now) != now {
                        ahead.restart(direction);
                    }
                    step_in_view(transaction, tree, ahead, bounds, *position, &entry.key, direction)
                })?
            }
        };
        let Some(found) = found else {
            *position = match direction {
                Direction::Forward => Position::End,
                Direction::Backward => Position::Start,
            };
            return Err(Failure::new(Errno::NODATA, "the range has no more entries".into()));
        };
        (*position, *entry) = (Position::On, found);
        Ok(entry.to_c())
    }
}

/// Whether the cursor has passed the last entry in this direction.
fn is_beyond(position: Position, direction: Direction) -> bool {
    match direction {
        Direction::Forward => position == Position::End,
        Direction::Backward => position == Position::Start,
    }
}

fn step_in_view(
    view: &impl View,
    tree: &Tree,
    ahead: &mut Ahead,
    bounds: &Bounds,
    position: Position,
    key: &[u8],
    direction: Direction,
) -> Result<Option<Entry>, Error> {
    if is_beyond(position, direction) {
        return view.check(tree).map(|()| None);
    }
    let mut left = bounds.keys();
    match direction {
        _ if position != Position::On => {}
        Direction::Forward => left.0 = Bound::Excluded(key),
        Direction::Backward => left.1 = Bound::Excluded(key),
    }
    ahead.next(view, tree, left, direction)
}

/// Moves the engine's cursor, and copies its entry.
fn step_in_tree(
    cursor: &mut Cursor<'_>,
    bounds: &Bounds,
    position: Position,
    key: &[u8],
    direction: Direction,
) -> Result<Option<Entry>, Error> {
    let (start, end) = bounds.keys();
    let is_on = position == Position::On;
    let from = match direction {
        _ if is_on => Bound::Excluded(key),
        Direction::Forward => start,
        Direction::Backward => end,
    };
    // After an error the engine's cursor is at no entry.
    let mut goes_on = is_on && cursor.is_on_entry();
    loop {
        let moved = match (direction, from) {
            (Direction::Forward, _) if goes_on => cursor.forward()?,
            (Direction::Backward, _) if goes_on => cursor.backward()?,
            (Direction::Forward, Bound::Unbounded) => cursor.first()?,
            (Direction::Backward, Bound::Unbounded) => cursor.last()?,
            (Direction::Forward, Bound::Included(key)) => cursor.seek(key)?,
            (Direction::Backward, Bound::Included(key)) => cursor.seek_back(key)?,
            (Direction::Forward, Bound::Excluded(key)) => {
                cursor.seek(key)? && (cursor.key() != key || cursor.forward()?)
            }
            (Direction::Backward, Bound::Excluded(key)) => {
                cursor.seek_back(key)? && (cursor.key() != key || cursor.backward()?)
            }
        };
        if !moved || !(start, end).contains(cursor.key()) {
            return Ok(None);
        }
        let entry = match cursor.value() {
            Ok(value) => value.map(|value| Entry::new(cursor.key(), &value)),
            Err(Error::NeedsReader { len, .. }) => Some(Entry::of_long(cursor.key(), len)),
            Err(error) => return Err(error),
        };
        if entry.is_some() {
            return Ok(entry);
        }
        // Another thread has removed the entry since the cursor moved there.
        goes_on = true;
    }
}

impl Entry {
    fn new(key: &[u8], value: &[u8]) -> Entry {
        Entry { key: key.to_vec(), value: value.to_vec(), long: None }
    }

    fn of_long(key: &[u8], length: u64) -> Entry {
        Entry { key: key.to_vec(), value: Vec::new(), long: Some(length) }
    }

    fn to_c(&self) -> CEntry {
        let (value, length) = match self.long {
            None => (self.value.as_ptr().cast(), self.value.len()),
            Some(length) => (std::ptr::null(), usize::try_from(length).unwrap_or(usize::MAX)),
        };
        CEntry {
            key: self.key.as_ptr().cast(),
            key_length: self.key.len(),
            value,
            value_length: length,
        }
    }
}

fn open(bounds: Bounds, source: Source) -> Box<CursorHandle> {
    let (position, entry) = (Position::Fresh, Entry::default());
    Box::new(CursorHandle(Mutex::new(Scan { bounds, position, source, entry })))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_tree_scan(
    tree: Option<&TreeHandle>,
    range: Option<&CRange>,
    result: Option<&mut MaybeUninit<Box<CursorHandle>>>,
) -> c_int {
    call(|| {
        let (out, tree) = (OutParameter::new(result)?, given(tree, "the tree")?);
        let bounds = bounds(range)?;
        tree.0.multi_get(&[])?;
        out.set(open(bounds, Source::Tree(TreeCursor::new(tree.0.clone(), Tree::cursor))));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_snapshot_scan(
    snapshot: Option<&SnapshotHandle>,
    tree: Option<&TreeHandle>,
    range: Option<&CRange>,
    result: Option<&mut MaybeUninit<Box<CursorHandle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let (snapshot, tree) = (given(snapshot, "the snapshot")?, given(tree, "the tree")?);
        let bounds = bounds(range)?;
        snapshot.0.check(&tree.0)?;
        let (snapshot, tree) = (snapshot.0.clone(), tree.0.clone());
        out.set(open(bounds, Source::Snapshot { snapshot, tree, ahead: Ahead::new(OF_SNAPSHOT) }));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_scan(
    transaction: Option<&TransactionHandle>,
    tree: Option<&TreeHandle>,
    range: Option<&CRange>,
    result: Option<&mut MaybeUninit<Box<CursorHandle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let (transaction, tree) =
            (given(transaction, "the transaction")?.0.clone(), given(tree, "the tree")?.0.clone());
        let bounds = bounds(range)?;
        let changes = transaction.read(|of, changes| of.check(&tree).map(|()| changes))?;
        let ahead = Ahead::new(OF_TRANSACTION);
        out.set(open(bounds, Source::Transaction { transaction, tree, ahead, changes }));
        Ok(())
    })
}

fn step(
    cursor: Option<&CursorHandle>,
    direction: Direction,
    entry: Option<&mut MaybeUninit<CEntry>>,
) -> c_int {
    call(|| {
        let (out, cursor) = (OutParameter::new(entry)?, given(cursor, "the cursor")?);
        out.set(cursor.0.lock().unwrap_or_else(PoisonError::into_inner).step(direction)?);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_cursor_next(
    cursor: Option<&CursorHandle>,
    entry: Option<&mut MaybeUninit<CEntry>>,
) -> c_int {
    step(cursor, Direction::Forward, entry)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_cursor_previous(
    cursor: Option<&CursorHandle>,
    entry: Option<&mut MaybeUninit<CEntry>>,
) -> c_int {
    step(cursor, Direction::Backward, entry)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_cursor_close(cursor: Option<Box<CursorHandle>>) {
    call(|| {
        drop(cursor);
        Ok(())
    });
}
