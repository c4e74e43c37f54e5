//! Snapshots.

use std::sync::{Arc, PoisonError, RwLock};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use vellum::Snapshot;

use crate::call::check_process;
use crate::tree::{PyTree, PyTreeView};
use crate::view::{SharedSnapshot, Source};

/// A view of a store that does not change. Store.snapshot() takes one; close(), or the end of a
/// with statement, ends it. snapshot[tree] reads a tree.
///
/// While a snapshot is open, the store keeps in memory the values that others replace.
#[pyclass(name = "Snapshot", module = "vellum.store", frozen)]
#[derive(Debug)]
pub(crate) struct PySnapshot {
    snapshot: SharedSnapshot,
    process: u32,
}

impl PySnapshot {
    pub(crate) fn new(snapshot: Snapshot, process: u32) -> PySnapshot {
        PySnapshot { snapshot: Arc::new(RwLock::new(Some(snapshot))), process }
    }
}

#[pymethods]
impl PySnapshot {
    /// The tree as the snapshot sees it.
    fn __getitem__(&self, tree: &Bound<'_, PyTree>) -> PyResult<PyTreeView> {
        check_process(self.process)?;
        Ok(PyTreeView::new(tree, Source::Snapshot(self.snapshot.clone())))
    }

    /// Ends the snapshot. What reads from it raises ValueError then.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        py.detach(|| drop(self.snapshot.write().unwrap_or_else(PoisonError::into_inner).take()));
        Ok(())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        py.detach(|| self.snapshot.read().unwrap_or_else(PoisonError::into_inner).is_none())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}
