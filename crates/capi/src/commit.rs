//! Commits that return before they are durable.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::process::id;
use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given};
use crate::transaction::TransactionHandle;

/// `vellum_commit`.
#[derive(Debug)]
pub struct CommitHandle(Arc<Commit>);

/// A commit that a handle and the log share.
#[derive(Debug)]
struct Commit {
    /// None until it is known.
    end: Mutex<Option<Outcome>>,
    known: Condvar,
    process: u32,
}

impl Commit {
    fn set(&self, end: Outcome) {
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
        self.known.notify_all();
    }

    /// Waits for the end, for at most this time if there is one.
    fn wait(&self, time: Option<Duration>) -> Outcome {
        if self.process != id() {
            // Another thread may have held the lock at the fork.
            let what = "the commit is of the parent of this process";
            return Err(Failure::new(Errno::SHUTDOWN, what.into()));
        }
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let is_unknown = |end: &mut Option<Outcome>| end.is_none();
        let end = match time {
            None => self.known.wait_while(end, is_unknown).unwrap_or_else(PoisonError::into_inner),
            Some(time) => {
                let waited = self.known.wait_timeout_while(end, time, is_unknown);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        let unknown =
            || Err(Failure::new(Errno::INPROGRESS, "the commit is not yet durable".into()));
        end.clone().unwrap_or_else(unknown)
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_commit_then(
    transaction: Option<&TransactionHandle>,
    durable: Option<extern "C" fn(argument: *mut c_void, error: c_int)>,
    argument: *mut c_void,
) -> c_int {
    call(|| {
        let transaction = given(transaction, "the transaction")?;
        let durable = given(durable, "the function")?;
        let argument = AtomicPtr::new(argument);
        transaction.commit_then(move |end| {
            // This keeps the message for the function.
            let error = call(|| end);
            durable(argument.into_inner(), error);
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_transaction_commit_start(
    transaction: Option<&TransactionHandle>,
    result: Option<&mut MaybeUninit<Box<CommitHandle>>>,
) -> c_int {
    call(|| {
        let (out, transaction) =
            (OutParameter::new(result)?, given(transaction, "the transaction")?);
        let commit =
            Arc::new(Commit { end: Mutex::new(None), known: Condvar::new(), process: id() });
        let shared = commit.clone();
        transaction.commit_then(move |end| shared.set(end))?;
        out.set(Box::new(CommitHandle(commit)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_commit_wait(commit: Option<&CommitHandle>, milliseconds: c_int) -> c_int {
    call(|| {
        let time = u64::try_from(milliseconds).ok().map(Duration::from_millis);
        given(commit, "the commit")?.0.wait(time)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_commit_close(commit: Option<Box<CommitHandle>>) {
    call(|| {
        drop(commit);
        Ok(())
    });
}
