//! Transactions and their savepoints.

use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use vellum::{Durability, Isolation, Savepoint, Transaction, TransactionOptions};

use crate::call::{Failure, check_process, lock, work};
use crate::commits::PyEnds;
use crate::tree::{PyTransactionTree, PyTree};
use crate::view::{ENDED, Open, SharedTransaction, change};

/// The options with these names.
pub(crate) fn options(isolation: &str, durability: &str) -> PyResult<TransactionOptions> {
    let isolation = match isolation {
        "serializable" => Isolation::Serializable,
        "snapshot" => Isolation::Snapshot,
        other => {
            return Err(PyValueError::new_err(format!(
                "isolation is 'serializable' or 'snapshot', not {other:?}"
            )));
        }
    };
    let durability = match durability {
        "synced" => Durability::Synced,
        "buffered" => Durability::Buffered,
        "none" => Durability::None,
        other => {
            return Err(PyValueError::new_err(format!(
                "durability is 'synced', 'buffered' or 'none', not {other:?}"
            )));
        }
    };
    Ok(TransactionOptions::new().isolation(isolation).durability(durability))
}

/// Changes of entries of any trees of a store, all or none. Store.begin() returns one.
///
/// transaction[tree] reads and changes a tree. The transaction sees the store as it was when the
/// transaction began, and its own changes. Others see these after the commit. The end of a with
/// statement commits, and an exception there aborts. A transaction without a reference is aborted.
#[pyclass(name = "Transaction", module = "vellum.store", frozen)]
#[derive(Debug)]
pub(crate) struct PyTransaction {
    transaction: SharedTransaction,
    process: u32,
}

impl PyTransaction {
    pub(crate) fn new(transaction: Transaction, process: u32) -> PyTransaction {
        let open = Open { transaction, changes: 0 };
        PyTransaction { transaction: Arc::new(Mutex::new(Some(open))), process }
    }
}

#[pymethods]
impl PyTransaction {
    /// The tree as the transaction sees and changes it.
    fn __getitem__(&self, tree: &Bound<'_, PyTree>) -> PyResult<Py<PyTransactionTree>> {
        check_process(self.process)?;
        PyTransactionTree::new(tree, &self.transaction)
    }

    /// A Savepoint, to which the transaction can return. In a with statement an exception undoes
    /// the changes of the statement, and goes on. The end of the statement releases the savepoint.
    /// While the transaction has a savepoint, it keeps what its changes replace, which counts
    /// against the most that it may change.
    fn savepoint(&self, py: Python<'_>) -> PyResult<PySavepoint> {
        check_process(self.process)?;
        let savepoint =
            work(py, || change(&self.transaction, |transaction| Ok(transaction.savepoint())))?;
        Ok(PySavepoint { transaction: self.transaction.clone(), savepoint, process: self.process })
    }

    /// Makes all changes, or none, and ends the transaction. Raises Conflict if another transaction
    /// was first: nothing has changed then.
    pub(crate) fn commit(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        work(py, || {
            let open = lock(&self.transaction).take().ok_or(ENDED)?;
            open.transaction.commit().map_err(Failure::Store)
        })
    }

    /// As commit(), but returns before the transaction is durable, whatever its durability: a
    /// concurrent.futures.Future whose result is None when it is. So one thread can have thousands
    /// of commits under way. With asyncio: await asyncio.wrap_future(transaction.commit_future()).
    ///
    /// An exception of this call is one of the commit: nothing has changed. The future has an
    /// OSError if it is unknown whether the changes, which are made, are durable. It cannot be
    /// cancelled. The callbacks of futures run on one thread, or on a few if a handler of a signal
    /// has committed. They may use the store, but must not wait for such a future. Store.close()
    /// waits for the commits, and so does the end of the interpreter, for their callbacks as well.
    /// In the child of a fork its parent's futures never end. The handler of a signal may call
    /// this. The first call of a process raises RuntimeError if the interpreter ends, and so does
    /// any call after all futures have ended: commit() works. Without a log the call itself waits
    /// for a sync of the store.
    fn commit_future(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        check_process(self.process)?;
        let begun = py.import("vellum._commits")?.call_method0("begin")?;
        let (ends, future): (Py<PyEnds>, Py<PyAny>) = begun.extract()?;
        let (list, result) = (ends.get().list(), future.clone_ref(py));
        // Here no signal handler runs until the commit is counted and under way.
        let is_begun = work(py, || {
            let Some(begun) = list.begin() else { return Ok(false) };
            let open = lock(&self.transaction).take().ok_or(ENDED)?;
            open.transaction.commit_then(move |end| begun.put(future, end))?;
            Ok::<_, Failure>(true)
        })?;
        if !is_begun {
            return Err(PyRuntimeError::new_err("the interpreter ends: use commit()"));
        }
        Ok(result)
    }

    /// Drops all changes, and ends the transaction.
    pub(crate) fn abort(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        py.detach(|| {
            let open = lock(&self.transaction).take();
            drop(open);
        });
        Ok(())
    }

    /// Whether it was committed or aborted.
    #[getter]
    pub(crate) fn ended(&self, py: Python<'_>) -> bool {
        py.detach(|| lock(&self.transaction).is_none())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        if self.ended(py) {
            return Ok(());
        }
        match is_raised(exception) {
            true => self.abort(py),
            false => self.commit(py),
        }
    }
}

/// Whether a with statement ends by an exception.
fn is_raised(exception: &Bound<'_, PyTuple>) -> bool {
    exception.get_item(0).is_ok_and(|kind| !kind.is_none())
}

/// A point in a transaction. Transaction.savepoint() sets one.
#[pyclass(name = "Savepoint", module = "vellum.store", frozen)]
#[derive(Debug)]
pub(crate) struct PySavepoint {
    transaction: SharedTransaction,
    savepoint: Savepoint,
    process: u32,
}

#[pymethods]
impl PySavepoint {
    /// Undoes the transaction's changes since the savepoint. The savepoint stays, and those after
    /// it are gone: they raise ValueError. What the transaction has read counts still.
    fn rollback(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        work(py, || change(&self.transaction, |of| of.rollback_to(self.savepoint)))
    }

    /// Forgets the savepoint and those after it: they raise ValueError. The changes stay. When the
    /// oldest savepoint goes, the transaction gives back the memory of what its changes replaced.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        work(py, || change(&self.transaction, |of| of.release(self.savepoint)))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        check_process(self.process)?;
        let undo = is_raised(exception);
        // If the transaction has ended, or the savepoint is gone, there is nothing to do, and the
        // exception of the statement is the one to raise.
        let _ = py.detach(|| {
            change(&self.transaction, |of| {
                if undo {
                    of.rollback_to(self.savepoint)?;
                }
                of.release(self.savepoint)
            })
        });
        Ok(())
    }
}
