//! Snapshots.
//!
//! A cursor shares the snapshot, so that C may free handles in any order.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;

use vellum::Snapshot;

use crate::call::{OutParameter, call, given};
use crate::raw::{buffer, bytes};
use crate::store::{StoreHandle, TreeHandle};
use crate::view::copy_value;

/// `vellum_snapshot`.
#[derive(Debug)]
pub struct SnapshotHandle(pub(crate) Arc<Snapshot>);

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_snapshot_open(
    store: Option<&StoreHandle>,
    result: Option<&mut MaybeUninit<Box<SnapshotHandle>>>,
) -> c_int {
    call(|| {
        let (out, store) = (OutParameter::new(result)?, given(store, "the store")?);
        out.set(Box::new(SnapshotHandle(Arc::new(store.0.snapshot()?))));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_snapshot_get(
    snapshot: Option<&SnapshotHandle>,
    tree: Option<&TreeHandle>,
    key: *const c_void,
    key_length: usize,
    target: *mut c_void,
    length: usize,
    value_length: Option<&mut MaybeUninit<usize>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(value_length)?;
        let (snapshot, tree) = (given(snapshot, "the snapshot")?, given(tree, "the tree")?);
        let (key, target) = (bytes(key, key_length)?, buffer(target, length)?);
        out.set(copy_value(&*snapshot.0, &tree.0, key, target)?);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_snapshot_close(snapshot: Option<Box<SnapshotHandle>>) {
    call(|| {
        drop(snapshot);
        Ok(())
    });
}
