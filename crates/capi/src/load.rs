//! Bulk loads: empty trees are filled with sorted entries.
//!
//! A load owns a handle of its tree, so that C may free handles in any order. A lock guards it, so
//! that several threads may use it. An entry that is refused ends the load, so that a caller who
//! overlooks the error cannot finish without the entry.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vellum::OwnedBulkLoader;
use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given};
use crate::raw::bytes;
use crate::store::TreeHandle;

/// `vellum_load`.
#[derive(Debug)]
pub struct LoadHandle(Mutex<State>);

#[derive(Debug)]
enum State {
    Open(OwnedBulkLoader),
    /// An entry was refused, and this is why.
    Failed(Failure),
    Finished,
}

impl LoadHandle {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the loader out. A call that panics leaves none.
    fn take(&mut self) -> Outcome<OwnedBulkLoader> {
        match std::mem::replace(self, State::Finished) {
            State::Open(loader) => Ok(loader),
            State::Failed(failure) => {
                *self = State::Failed(failure.clone());
                Err(failure)
            }
            State::Finished => {
                Err(Failure::new(Errno::ALREADY, "the load was finished: close it".into()))
            }
        }
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_load_open(
    tree: Option<&TreeHandle>,
    result: Option<&mut MaybeUninit<Box<LoadHandle>>>,
) -> c_int {
    call(|| {
        let (out, tree) = (OutParameter::new(result)?, given(tree, "the tree")?.0.clone());
        let loader = tree.into_bulk_loader()?;
        out.set(Box::new(LoadHandle(Mutex::new(State::Open(loader)))));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_load_add(
    load: Option<&LoadHandle>,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    value_length: usize,
) -> c_int {
    call(|| {
        let mut state = given(load, "the load")?.lock();
        let mut loader = state.take()?;
        let entry = bytes(key, key_length).and_then(|key| Ok((key, bytes(value, value_length)?)));
        match entry.and_then(|(key, value)| Ok(loader.push(key, value)?)) {
            Ok(()) => {
                *state = State::Open(loader);
                Ok(())
            }
            Err(failure) => {
                // The loader ends here, and gives its space back.
                *state = State::Failed(failure.as_earlier());
                Err(failure)
            }
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_load_finish(load: Option<&LoadHandle>) -> c_int {
    call(|| {
        // To the end: other calls of the load wait.
        let mut state = given(load, "the load")?.lock();
        let loader = state.take()?;
        Ok(loader.finish().map(drop)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_load_close(load: Option<Box<LoadHandle>>) {
    call(|| {
        drop(load);
        Ok(())
    });
}
