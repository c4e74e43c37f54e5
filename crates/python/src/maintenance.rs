//! Backups, checks and compactions of stores.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use vellum::{BackupOptions, CheckReport, ControlSocket, Error, RestoreOptions, Store};

use crate::call::{check_process, lock, work};
use crate::source::{self, LOOK};

/// What a check found.
#[pyclass(name = "Check", module = "vellum.store", frozen, get_all)]
#[derive(Debug)]
pub(crate) struct PyCheck {
    /// Pages of 4 KiB that are in use.
    pages_checked: u64,
    /// Pages of 4 KiB that nothing refers to.
    lost_pages: u64,
    /// All damage that was found, in words.
    damage: Vec<String>,
}

#[pymethods]
impl PyCheck {
    fn __repr__(&self) -> String {
        let Self { pages_checked, lost_pages, damage } = self;
        let damaged = damage.len();
        format!(
            "<vellum.store.Check pages_checked={pages_checked} lost_pages={lost_pages} \
             damaged={damaged}>"
        )
    }
}

impl From<CheckReport> for PyCheck {
    fn from(report: CheckReport) -> Self {
        let damage = report.damage.iter().map(ToString::to_string).collect();
        Self { pages_checked: report.pages_checked, lost_pages: report.lost_pages, damage }
    }
}

/// Where other processes have this one work for them while it has its store open: vellum backup,
/// compact, stat and resize-pool. Store.control_socket() makes one; close(), or the end of a with
/// statement, ends what they have asked for, and removes it.
#[pyclass(name = "ControlSocket", module = "vellum.store", frozen)]
#[derive(Debug)]
pub(crate) struct PyControlSocket {
    socket: Mutex<Option<ControlSocket>>,
    process: u32,
}

impl PyControlSocket {
    pub(crate) fn new(socket: ControlSocket, process: u32) -> Self {
        Self { socket: Mutex::new(Some(socket)), process }
    }
}

#[pymethods]
impl PyControlSocket {
    /// Removes the socket.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        py.detach(|| drop(lock(&self.socket).take()));
        Ok(())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        py.detach(|| lock(&self.socket).is_none())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

/// Tells the caller's function how far a call is, and ends the call after an exception: that of the
/// function, or of a handler of a signal.
struct Teller {
    progress: Option<Py<PyAny>>,
    looked: Instant,
    raised: Option<PyErr>,
}

impl Teller {
    fn tell(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        if self.progress.is_none() && self.looked.elapsed() < LOOK {
            return ControlFlow::Continue(());
        }
        self.looked = Instant::now();
        let told = Python::attach(|py| {
            if let Some(progress) = &self.progress {
                progress.call1(py, (done, total))?;
            }
            py.check_signals()
        });
        match told {
            Ok(()) => ControlFlow::Continue(()),
            Err(raised) => {
                self.raised = Some(raised);
                ControlFlow::Break(())
            }
        }
    }
}

/// A function that is told how far a call is.
type Tell<'t> = dyn FnMut(u64, u64) -> ControlFlow<()> + Send + 't;

/// Runs a call that tells how far it is.
fn told<T: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    call: impl FnOnce(&mut Tell<'_>) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut teller = Teller { progress, looked: Instant::now(), raised: None };
    let done = work(py, || call(&mut |done, total| teller.tell(done, total)));
    match teller.raised {
        Some(raised) => Err(raised),
        None => done,
    }
}

/// Backs the store up. Returns the length of the new file in bytes.
pub(crate) fn backup(
    py: Python<'_>,
    store: &Store,
    path: &Path,
    options: &BackupOptions,
    progress: Option<Py<PyAny>>,
) -> PyResult<u64> {
    told(py, progress, |tell| {
        let report =
            store.backup(path, options, &mut |now| tell(now.bytes_done, now.bytes_total))?;
        Ok(report.file_bytes)
    })
}

/// Has damaged pages of the store repaired from a backup and its increments.
pub(crate) fn repair_from(
    py: Python<'_>,
    store: &Store,
    backup: &Path,
    increments: &[PathBuf],
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    told(py, progress, |tell| {
        store.repair_from(backup, increments, &mut |now| tell(now.bytes_done, now.bytes_total))
    })
}

pub(crate) fn check(
    py: Python<'_>,
    store: &Store,
    free_lost: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<PyCheck> {
    let report = told(py, progress, |tell| match free_lost {
        true => store.free_lost_pages(&mut |now| tell(now.pages_done, now.pages_total)),
        false => store.check_until(&mut |now| tell(now.pages_done, now.pages_total)),
    })?;
    Ok(report.into())
}

/// Compacts the store. Returns by how many bytes the file has become shorter.
pub(crate) fn compact(py: Python<'_>, store: &Store, progress: Option<Py<PyAny>>) -> PyResult<u64> {
    told(py, progress, |tell| {
        let report = store.compact(&mut |now| tell(now.pages_seen, now.pages_total))?;
        Ok(report.bytes_before.saturating_sub(report.bytes_after))
    })
}

/// Makes a store of a backup and the increments that follow it, in their order. Returns the length
/// of the new file in bytes.
///
/// replace: replace a file of this name, when the store is complete. check: read the new file and
/// check it. progress: called with (done, total), in bytes; an exception of it ends the call.
#[pyfunction]
#[pyo3(signature = (
    path, backup, increments=Vec::new(), *, replace=false, check=true, progress=None
))]
pub(crate) fn restore(
    path: &Bound<'_, PyAny>,
    backup: &Bound<'_, PyAny>,
    increments: Vec<Bound<'_, PyAny>>,
    replace: bool,
    check: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<u64> {
    let (py, path, backup) = (path.py(), source::path(path)?, source::path(backup)?);
    let increments: Vec<PathBuf> =
        increments.iter().map(source::path).collect::<PyResult<Vec<_>>>()?;
    let options = RestoreOptions::new().replace(replace).check(check);
    told(py, progress, |tell| {
        let report = vellum::restore(path, backup, &increments, &options, &mut |now| {
            tell(now.bytes_done, now.bytes_total)
        })?;
        Ok(report.file_bytes)
    })
}
