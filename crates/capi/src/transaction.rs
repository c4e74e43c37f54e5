//! Transactions over any number of trees.
//!
//! A lock guards a transaction, so that several threads may use its handle, and so that its cursors
//! may share it. Once the transaction has ended, the handle is empty.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vellum::{Durability, Error, Isolation, Savepoint, Transaction, TransactionOptions};
use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given};
use crate::range::{CRange, bounds};
use crate::raw::{buffer, bytes};
use crate::store::{StoreHandle, TreeHandle, is_new, no_key};
use crate::view::copy_value;

/// `vellum_transaction`.
#[derive(Debug)]
pub struct TransactionHandle(pub(crate) Arc<Shared>);

/// A transaction that its handle and its cursors share. None once it has ended.
#[derive(Debug)]
pub(crate) struct Shared(Mutex<Option<Open>>);

#[derive(Debug)]
struct Open {
    transaction: Transaction,
    /// The savepoints that were neither undone nor released, with the numbers that C has for them.
    savepoints: Vec<(u64, Savepoint)>,
    /// Counts the changes, so that cursors notice them.
    changes: u64,
}

impl Open {
    /// Where a savepoint is in `savepoints`.
    fn place_of(&self, savepoint: u64) -> Result<usize, Error> {
        let at = self.savepoints.iter().position(|(number, _)| *number == savepoint);
        at.ok_or(Error::NoSuchSavepoint)
    }
}

const SNAPSHOT: u32 = 16;
const BUFFERED: u32 = 32;
const NO_SYNC: u32 = 64;

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a function on the transaction, and on the number of its changes.
    pub(crate) fn read<T, E>(
        &self,
        read: impl FnOnce(&Transaction, u64) -> Result<T, E>,
    ) -> Outcome<T>
    where
        Failure: From<E>,
    {
        let open = self.lock();
        let open = open.as_ref().ok_or_else(ended)?;
        Ok(read(&open.transaction, open.changes)?)
    }

    /// Runs a function that changes the transaction.
    fn change<T>(&self, change: impl FnOnce(&mut Transaction) -> Result<T, Error>) -> Outcome<T> {
        let mut open = self.lock();
        let open = open.as_mut().ok_or_else(ended)?;
        open.changes += 1;
        Ok(change(&mut open.transaction)?)
    }

    fn end(&self) -> Option<Transaction> {
        self.lock().take().map(|open| open.transaction)
    }
}

impl TransactionHandle {
    /// Commits, and has a function called when the transaction is durable, or never will be known
    /// to be. An error of this call is that of the commit: then the function is not called.
    pub(crate) fn commit_then(&self, durable: impl FnOnce(Outcome) + Send + 'static) -> Outcome {
        let transaction = self.0.end().ok_or_else(ended)?;
        Ok(transaction.commit_then(|end| durable(end.map_err(Failure::from)))?)
    }
}

fn ended() -> Failure {
    Failure::new(Errno::ALREADY, "the transaction has ended: close it".into())
}

fn options(flags: u32) -> Outcome<TransactionOptions> {
    let durability = match flags & !SNAPSHOT {
        0 => Durability::Synced,
        BUFFERED => Durability::Buffered,
        NO_SYNC => Durability::None,
        _ => return Err(Failure::argument("flags that exclude each other, or do not exist")),
    };
    let isolation = match flags & SNAPSHOT {
        0 => Isolation::Serializable,
        _ => Isolation::Snapshot,
    };
    Ok(TransactionOptions::new().durability(durability).isolation(isolation))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_begin(
    store: Option<&StoreHandle>,
    flags: u32,
    result: Option<&mut MaybeUninit<Box<TransactionHandle>>>,
) -> c_int {
    call(|| {
        let (out, store) = (OutParameter::new(result)?, given(store, "the store")?);
        let transaction = store.0.begin_with(options(flags)?)?;
        let open = Open { transaction, savepoints: Vec::new(), changes: 0 };
        out.set(Box::new(TransactionHandle(Arc::new(Shared(Mutex::new(Some(open)))))));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_get(
    transaction: Option<&TransactionHandle>,
    tree: Option<&TreeHandle>,
    key: *const c_void,
    key_length: usize,
    target: *mut c_void,
    length: usize,
    value_length: Option<&mut MaybeUninit<usize>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(value_length)?;
        let (transaction, tree) =
            (given(transaction, "the transaction")?, given(tree, "the tree")?);
        let (key, target) = (bytes(key, key_length)?, buffer(target, length)?);
        out.set(transaction.0.read(|of, _| copy_value(of, &tree.0, key, target))?);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_put(
    transaction: Option<&TransactionHandle>,
    tree: Option<&TreeHandle>,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    value_length: usize,
    flags: u32,
) -> c_int {
    call(|| {
        let (transaction, tree) =
            (given(transaction, "the transaction")?, given(tree, "the tree")?);
        let (key, value) = (bytes(key, key_length)?, bytes(value, value_length)?);
        let is_new = is_new(flags)?;
        transaction.0.change(|transaction| match is_new {
            true => transaction.insert(&tree.0, key, value),
            false => transaction.put(&tree.0, key, value),
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_remove(
    transaction: Option<&TransactionHandle>,
    tree: Option<&TreeHandle>,
    key: *const c_void,
    key_length: usize,
) -> c_int {
    call(|| {
        let (transaction, tree) =
            (given(transaction, "the transaction")?, given(tree, "the tree")?);
        let key = bytes(key, key_length)?;
        match transaction.0.change(|transaction| transaction.remove(&tree.0, key))? {
            true => Ok(()),
            false => Err(no_key()),
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_remove_range(
    transaction: Option<&TransactionHandle>,
    tree: Option<&TreeHandle>,
    range: Option<&CRange>,
    removed: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call(|| {
        let (transaction, tree) =
            (given(transaction, "the transaction")?, given(tree, "the tree")?);
        let range = bounds(range)?;
        let count = transaction.0.change(|of| of.remove_range(&tree.0, range.keys()))?;
        if let Some(removed) = removed {
            removed.write(count);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_savepoint(
    transaction: Option<&TransactionHandle>,
    savepoint: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    // No two savepoints of the process have the same number, and none has 0.
    static NEXT: AtomicU64 = AtomicU64::new(1);
    call(|| {
        let (out, transaction) =
            (OutParameter::new(savepoint)?, given(transaction, "the transaction")?);
        let mut open = transaction.0.lock();
        let open = open.as_mut().ok_or_else(ended)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        open.savepoints.push((number, open.transaction.savepoint()));
        out.set(number);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_rollback(
    transaction: Option<&TransactionHandle>,
    savepoint: u64,
) -> c_int {
    call(|| {
        let mut open = given(transaction, "the transaction")?.0.lock();
        let open = open.as_mut().ok_or_else(ended)?;
        let at = open.place_of(savepoint)?;
        open.transaction.rollback_to(open.savepoints[at].1)?;
        open.savepoints.truncate(at + 1);
        open.changes += 1;
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_release(
    transaction: Option<&TransactionHandle>,
    savepoint: u64,
) -> c_int {
    call(|| {
        let mut open = given(transaction, "the transaction")?.0.lock();
        let open = open.as_mut().ok_or_else(ended)?;
        let at = open.place_of(savepoint)?;
        open.transaction.release(open.savepoints[at].1)?;
        open.savepoints.truncate(at);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_commit(transaction: Option<&TransactionHandle>) -> c_int {
    call(|| {
        let transaction = given(transaction, "the transaction")?.0.end();
        Ok(transaction.ok_or_else(ended)?.commit()?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_close(transaction: Option<Box<TransactionHandle>>) {
    call(|| {
        // Its cursors may live on.
        drop(transaction.and_then(|transaction| transaction.0.end()));
        Ok(())
    });
}
