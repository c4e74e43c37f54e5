//! Stores.

use std::sync::Mutex;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use vellum::{BackupOptions, Error, Options, Store, TransactionOptions};

use crate::call::{check_process, lock, work};
use crate::error::Conflict;
use crate::maintenance::{self, PyCheck, PyControlSocket};
use crate::snapshot::PySnapshot;
use crate::source;
use crate::transaction::{PyTransaction, options};
use crate::tree::PyTree;

/// An open file of trees: ordered maps from keys to values, both bytes.
///
/// Store.open() opens one; close(), or the end of a with statement, closes it. The child of a fork
/// cannot use it.
#[pyclass(name = "Store", module = "vellum.store", frozen)]
#[derive(Debug)]
pub(crate) struct PyStore {
    store: Mutex<Option<Store>>,
    process: u32,
}

impl PyStore {
    fn store(&self, py: Python<'_>) -> PyResult<Store> {
        check_process(self.process)?;
        work(py, || lock(&self.store).clone().ok_or(Error::Closed))
    }

    fn begin_with(
        &self,
        py: Python<'_>,
        options: TransactionOptions,
    ) -> PyResult<Py<PyTransaction>> {
        let store = self.store(py)?;
        let transaction = work(py, || store.begin_with(options))?;
        Py::new(py, PyTransaction::new(transaction, self.process))
    }
}

/// Calls a function with a transaction, and commits unless the function has ended it.
fn run<'py>(
    function: &Bound<'py, PyAny>,
    transaction: &Py<PyTransaction>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, of) = (function.py(), transaction.get());
    let done = function.call1((transaction,));
    if done.is_err() {
        of.abort(py)?;
    } else if !of.ended(py) {
        of.commit(py)?;
    }
    done
}

/// After so many conflicts in a row, `transact` waits between its attempts.
const EAGER_ATTEMPTS: u32 = 3;

#[pymethods]
impl PyStore {
    /// Opens the store in a file.
    ///
    /// pool_bytes: memory for pages, a hard limit; None for half of what the process may use.
    /// create: make the store if it does not exist. read_only: refuse changes; several processes
    /// may open a store read-only. log: write changes to a log, in the folder log_folder or one
    /// next to the file, so that a crash loses nothing that was durable. None: a store in a file
    /// has a log, one on a block device has none.
    #[staticmethod]
    #[pyo3(signature = (
        path, *, pool_bytes=None, create=false, read_only=false, log=None, log_folder=None
    ))]
    fn open(
        path: &Bound<'_, PyAny>,
        pool_bytes: Option<u64>,
        create: bool,
        read_only: bool,
        log: Option<bool>,
        log_folder: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        if create && read_only {
            return Err(PyValueError::new_err("a store cannot be created read-only"));
        }
        if read_only && (log == Some(true) || log_folder.is_some()) {
            return Err(PyValueError::new_err("a store that is open read-only has no log"));
        }
        let mut options = Options::new().read_only(read_only);
        if let Some(folder) = log_folder {
            options = options.log_folder(source::path(folder)?);
        }
        if let Some(log) = log {
            options = options.log(log);
        }
        if let Some(bytes) = pool_bytes {
            options = options.pool_bytes(bytes);
        }
        let (py, path) = (path.py(), source::path(path)?);
        let store = work(py, || match create {
            true => Store::open_or_create(path, &options),
            false => Store::open(path, &options),
        })?;
        Ok(Self { store: Mutex::new(Some(store)), process: std::process::id() })
    }

    /// The tree with this name. create: make it if it does not exist.
    #[pyo3(signature = (name, *, create=false))]
    fn tree(&self, py: Python<'_>, name: &str, create: bool) -> PyResult<Py<PyTree>> {
        let store = self.store(py)?;
        let tree = work(py, || match create {
            true => store.tree_or_create(name),
            false => store.tree(name),
        });
        PyTree::new(py, tree?, self.process)
    }

    /// The names of all trees, sorted.
    fn trees(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let store = self.store(py)?;
        work(py, || store.trees())
    }

    /// Begins a transaction.
    ///
    /// isolation: 'serializable': the commit raises Conflict if another transaction has changed
    /// what this one has read; 'snapshot': only if it has changed what this one changes.
    /// durability: 'synced': the commit returns when the transaction is durable; 'buffered': at
    /// once, and a crash may take the last milliseconds; 'none': durable with the next transaction
    /// that is, or the next sync().
    #[pyo3(signature = (*, isolation="serializable", durability="synced"))]
    fn begin(
        &self,
        py: Python<'_>,
        isolation: &str,
        durability: &str,
    ) -> PyResult<Py<PyTransaction>> {
        self.begin_with(py, options(isolation, durability)?)
    }

    /// Calls function(transaction), commits, and returns what the function has returned. If another
    /// transaction was first, begins again, so the function may run several times. An exception of
    /// the function aborts the transaction. The options are those of begin().
    #[pyo3(signature = (function, *, isolation="serializable", durability="synced"))]
    fn transact<'py>(
        &self,
        function: &Bound<'py, PyAny>,
        isolation: &str,
        durability: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, options) = (function.py(), options(isolation, durability)?);
        let mut attempts = 0;
        loop {
            match run(function, &self.begin_with(py, options)?) {
                Err(error) if error.is_instance_of::<Conflict>(py) => {}
                done => return done,
            }
            py.check_signals()?;
            attempts += 1;
            if attempts > EAGER_ATTEMPTS {
                let wait = Duration::from_micros(50 << (attempts - EAGER_ATTEMPTS).min(6));
                py.detach(|| std::thread::sleep(wait));
            }
        }
    }

    /// A Snapshot: a view of the store as it is now, which later changes do not affect.
    fn snapshot(&self, py: Python<'_>) -> PyResult<PySnapshot> {
        let store = self.store(py)?;
        Ok(PySnapshot::new(work(py, || store.snapshot())?, self.process))
    }

    /// Makes durable all changes before the call.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store(py)?;
        work(py, || store.sync())
    }

    /// Changes the size of the pool, in bytes, while threads use the store, up to the size with
    /// which the store was opened. Returns when the kernel has the rest of the memory.
    fn resize_pool(&self, py: Python<'_>, pool_bytes: u64) -> PyResult<()> {
        let store = self.store(py)?;
        work(py, || store.resize_pool(pool_bytes))
    }

    /// Copies the store to a new file, which is a store itself, with the state of one moment. Other
    /// threads go on. Returns the length of the new file in bytes.
    ///
    /// since: make an increment, which has what changed since that backup or increment; restore()
    /// joins them. If since is the newest one of a store with a log, no more of the store is read.
    /// read_all: read all of it. replace: replace a file of this name, when the new one is
    /// complete. check: read the new file and check it. bytes_per_second: read no faster. progress:
    /// called with (done, total), in bytes; an exception of it ends the call.
    #[pyo3(signature = (
        path,
        *,
        since=None,
        read_all=false,
        replace=false,
        check=true,
        bytes_per_second=None,
        progress=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are named in Python")]
    fn backup(
        &self,
        path: &Bound<'_, PyAny>,
        since: Option<&Bound<'_, PyAny>>,
        read_all: bool,
        replace: bool,
        check: bool,
        bytes_per_second: Option<u64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<u64> {
        let (py, path) = (path.py(), source::path(path)?);
        let mut options = BackupOptions::new().replace(replace).check(check);
        if let Some(since) = since {
            options = options.since(source::path(since)?).read_all(read_all);
        }
        if let Some(bytes) = bytes_per_second {
            options = options.bytes_per_second(bytes);
        }
        maintenance::backup(py, &self.store(py)?, &path, &options, progress)
    }

    /// Lets other processes of the same user, and of root, have this one work for them while it has
    /// the store open: vellum backup, compact, stat and resize-pool. path is the path of the
    /// store's file; the socket is path.control. Returns a ControlSocket, which lasts until it is
    /// closed. It does not keep the store open.
    fn control_socket(&self, path: &Bound<'_, PyAny>) -> PyResult<PyControlSocket> {
        let (py, path) = (path.py(), source::path(path)?);
        let store = self.store(py)?;
        let socket = work(py, || store.control_socket(path))?;
        Ok(PyControlSocket::new(socket, self.process))
    }

    /// Has damaged pages repaired from a backup and the increments that follow it, in their order,
    /// until the next backup of the store is complete. A reader does not notice. It repairs pages
    /// that were not written since the last of these files, which must be the newest backup of the
    /// store; the store must have had a log ever since. check() repairs all of them at once, and
    /// close() makes that durable; sync() does not.
    ///
    /// progress: called with (done, total), in bytes; an exception of it ends the call.
    #[pyo3(signature = (backup, increments=Vec::new(), *, progress=None))]
    fn repair_from(
        &self,
        backup: &Bound<'_, PyAny>,
        increments: Vec<Bound<'_, PyAny>>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let (py, backup) = (backup.py(), source::path(backup)?);
        let increments: Vec<_> = increments.iter().map(source::path).collect::<PyResult<_>>()?;
        maintenance::repair_from(py, &self.store(py)?, &backup, &increments, progress)
    }

    /// Reads and checks every page. Changes wait meanwhile. Returns a Check.
    ///
    /// free_lost: free the pages that nothing refers to, unless there is damage. progress: called
    /// with (done, total), in pages; an exception of it ends the call.
    #[pyo3(signature = (*, free_lost=false, progress=None))]
    fn check(
        &self,
        py: Python<'_>,
        free_lost: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<PyCheck> {
        maintenance::check(py, &self.store(py)?, free_lost, progress)
    }

    /// Returns the free space of the file to the file system, while threads use the store. Returns
    /// by how many bytes the file has become shorter.
    ///
    /// progress: called with (done, total), in pages; an exception of it ends the call.
    #[pyo3(signature = (*, progress=None))]
    fn compact(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<u64> {
        maintenance::compact(py, &self.store(py)?, progress)
    }

    /// Makes everything durable, unlocks the file, and ends the use of all objects of the store,
    /// which then raise ValueError.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        work(py, || {
            let store = lock(&self.store).take();
            store.map_or(Ok(()), Store::close)
        })
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        py.detach(|| lock(&self.store).is_none())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}
