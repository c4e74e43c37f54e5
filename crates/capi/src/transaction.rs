//! Transactions over any number of trees.
//!
//! A lock guards a transaction, so that several threads may use its handle. Once the transaction
//! has ended, the handle is empty.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vellum::{Durability, Isolation, Transaction, TransactionOptions};
use vellum_morsel::Errno;

use crate::call::{Failure, Outcome, Place, call, given};
use crate::raw::{buffer, bytes};
use crate::store::{StoreHandle, TreeHandle, is_new, no_key};

/// `vellum_transaction`. None once it has ended.
#[derive(Debug)]
pub struct TransactionHandle(Mutex<Option<Transaction>>);

const SNAPSHOT: u32 = 16;
const BUFFERED: u32 = 32;
const NO_SYNC: u32 = 64;

impl TransactionHandle {
    fn lock(&self) -> MutexGuard<'_, Option<Transaction>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        let (place, store) = (Place::new(result)?, given(store, "the store")?);
        let transaction = store.0.begin_with(options(flags)?)?;
        place.set(Box::new(TransactionHandle(Mutex::new(Some(transaction)))));
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
        let place = Place::new(value_length)?;
        let (transaction, tree) =
            (given(transaction, "the transaction")?, given(tree, "the tree")?);
        let (key, target) = (bytes(key, key_length)?, buffer(target, length)?);
        let transaction = transaction.lock();
        let value = transaction.as_ref().ok_or_else(ended)?.get(&tree.0, key)?;
        let value = value.ok_or_else(no_key)?;
        let count = value.len().min(target.len());
        target[..count].copy_from_slice(&value[..count]);
        place.set(value.len());
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
        let mut transaction = transaction.lock();
        let transaction = transaction.as_mut().ok_or_else(ended)?;
        match is_new {
            true => transaction.insert(&tree.0, key, value)?,
            false => transaction.put(&tree.0, key, value)?,
        }
        Ok(())
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
        let mut transaction = transaction.lock();
        match transaction.as_mut().ok_or_else(ended)?.remove(&tree.0, key)? {
            true => Ok(()),
            false => Err(no_key()),
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_commit(transaction: Option<&TransactionHandle>) -> c_int {
    call(|| {
        let transaction = given(transaction, "the transaction")?.lock().take();
        Ok(transaction.ok_or_else(ended)?.commit()?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_close(transaction: Option<Box<TransactionHandle>>) {
    call(|| {
        drop(transaction);
        Ok(())
    });
}
