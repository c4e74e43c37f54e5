//! Lookups of many keys at once: in a tree as it is, a snapshot, or a transaction.
//!
//! The values are copied into memory of a handle, so that they pin no memory of the pool, and may
//! outlive the store.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use vellum::{Error, Tree};
use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given};
use crate::raw::{CEntry, keys, set_values};
use crate::snapshot::SnapshotHandle;
use crate::store::TreeHandle;
use crate::transaction::TransactionHandle;
use crate::view::View;

/// `vellum_values`: the bytes of the values, one after the other. The caller has pointers to them.
#[derive(Debug)]
pub struct ValuesHandle(#[expect(dead_code)] Vec<u8>);

/// What the keys have, in their order.
#[derive(Debug)]
struct Found {
    bytes: Vec<u8>,
    places: Vec<Where>,
    lacks_memory: bool,
}

#[derive(Clone, Copy, Debug)]
enum Where {
    Absent,
    /// From this byte of `bytes` on.
    At {
        begin: usize,
        length: usize,
    },
    /// A value of this length, which is too long for the pool.
    Elsewhere(u64),
}

impl Found {
    fn new(count: usize) -> Found {
        Found { bytes: Vec::new(), places: vec![Where::Absent; count], lacks_memory: false }
    }

    /// Copies a value. Without memory for it, nothing more is copied.
    fn set(&mut self, index: usize, value: &[u8]) {
        self.lacks_memory |= self.bytes.try_reserve(value.len()).is_err();
        if !self.lacks_memory {
            self.places[index] = Where::At { begin: self.bytes.len(), length: value.len() };
            self.bytes.extend_from_slice(value);
        }
    }

    /// Looks up one key after the other: there is a value that is too long for the pool, or the
    /// values together are.
    fn one_by_one<V: AsRef<[u8]>>(
        keys: &[&[u8]],
        mut get: impl FnMut(&[u8]) -> Result<Option<V>, Error>,
    ) -> Result<Found, Error> {
        let mut found = Found::new(keys.len());
        for (index, key) in keys.iter().enumerate() {
            match get(key) {
                Ok(Some(value)) => found.set(index, value.as_ref()),
                Ok(None) => {}
                Err(Error::NeedsReader { len, .. }) => found.places[index] = Where::Elsewhere(len),
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    fn in_tree(tree: &Tree, keys: &[&[u8]]) -> Result<Found, Error> {
        let mut found = Found::new(keys.len());
        let visited = tree.multi_get_with(keys, |index, value| {
            if let Some(value) = value {
                found.set(index, value);
            }
        });
        match visited {
            Err(error) if is_too_much(&error) => Found::one_by_one(keys, |key| tree.get(key)),
            visited => visited.map(|()| found),
        }
    }

    fn in_view(view: &impl View, tree: &Tree, keys: &[&[u8]]) -> Result<Found, Error> {
        let values = match view.values(tree, keys) {
            Err(error) if is_too_much(&error) => {
                return Found::one_by_one(keys, |key| view.value(tree, key));
            }
            values => values?,
        };
        let mut found = Found::new(keys.len());
        for (index, value) in values.iter().enumerate() {
            if let Some(value) = value {
                found.set(index, value);
            }
        }
        Ok(found)
    }

    /// Gives the values to the entries.
    fn give(self, entries: *mut CEntry) -> Box<ValuesHandle> {
        let values = self.places.iter().map(|out| match *out {
            Where::Absent => (std::ptr::null(), 0),
            Where::At { begin, length } => (self.bytes[begin..].as_ptr().cast::<c_void>(), length),
            Where::Elsewhere(length) => {
                (std::ptr::null(), usize::try_from(length).unwrap_or(usize::MAX))
            }
        });
        set_values(entries, values);
        Box::new(ValuesHandle(self.bytes))
    }
}

/// Whether the pool does not have the memory for the values at once.
fn is_too_much(error: &Error) -> bool {
    matches!(error, Error::NeedsReader { .. } | Error::PoolExhausted(_))
}

/// Looks up the keys of the entries by `find`.
fn look_up(
    entries: *mut CEntry,
    count: usize,
    result: Option<&mut MaybeUninit<Box<ValuesHandle>>>,
    find: impl FnOnce(&[&[u8]]) -> Outcome<Found>,
) -> Outcome {
    let out = OutParameter::new(result)?;
    let found = find(&keys(entries, count)?)?;
    if found.lacks_memory {
        let what = "there is no memory for copies of all values: look up fewer keys at a time";
        return Err(Failure::new(Errno::NOMEM, what.into()));
    }
    out.set(found.give(entries));
    Ok(())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_tree_multi_get(
    tree: Option<&TreeHandle>,
    entries: *mut CEntry,
    count: usize,
    result: Option<&mut MaybeUninit<Box<ValuesHandle>>>,
) -> c_int {
    call(|| {
        let tree = given(tree, "the tree")?;
        look_up(entries, count, result, |keys| Ok(Found::in_tree(&tree.0, keys)?))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_snapshot_multi_get(
    snapshot: Option<&SnapshotHandle>,
    tree: Option<&TreeHandle>,
    entries: *mut CEntry,
    count: usize,
    result: Option<&mut MaybeUninit<Box<ValuesHandle>>>,
) -> c_int {
    call(|| {
        let (snapshot, tree) = (given(snapshot, "the snapshot")?, given(tree, "the tree")?);
        look_up(entries, count, result, |keys| Ok(Found::in_view(&*snapshot.0, &tree.0, keys)?))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_multi_get(
    transaction: Option<&TransactionHandle>,
    tree: Option<&TreeHandle>,
    entries: *mut CEntry,
    count: usize,
    result: Option<&mut MaybeUninit<Box<ValuesHandle>>>,
) -> c_int {
    call(|| {
        let (transaction, tree) =
            (given(transaction, "the transaction")?, given(tree, "the tree")?);
        look_up(entries, count, result, |keys| {
            transaction.0.read(|of, _| Found::in_view(of, &tree.0, keys))
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_values_close(values: Option<Box<ValuesHandle>>) {
    call(|| {
        drop(values);
        Ok(())
    });
}
