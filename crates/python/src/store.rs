//! Stores, their trees, and readers and writers of values.
//!
//! A call reads and writes Python's buffers part by part while it holds the interpreter's lock, and
//! works on the store without that lock. So Rust never has a reference to memory that other Python
//! threads may write, and those threads go on while this one waits. A call locks an object only
//! while it does not hold the interpreter's lock, so that no two threads wait for each other.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use vellum::{Error, Options, OwnedValueReader, OwnedValueWriter, Store, Tree};

use crate::{error, source};

/// Bytes that a call moves between a buffer and the store at a time, between two checks for Ctrl-C.
const PART: usize = 1 << 20;

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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a function on the store while other Python threads go on.
fn work<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, Error> + Send) -> PyResult<T> {
    py.detach(work).map_err(|error| error::of_store(&error))
}

/// The store's error inside an error of a reader or writer.
fn of_stream(error: io::Error) -> Error {
    error.downcast().unwrap_or_else(Error::Input)
}

/// Whether this process opened the store. The child of a fork does not have the pool's memory, and
/// would crash if it touched it.
fn check_process(process: u32) -> PyResult<()> {
    match process == std::process::id() {
        true => Ok(()),
        false => Err(PyValueError::new_err(
            "the store was opened by the parent of this process: open it after the fork",
        )),
    }
}

impl PyStore {
    fn store(&self, py: Python<'_>) -> PyResult<Store> {
        check_process(self.process)?;
        work(py, || lock(&self.store).clone().ok_or(Error::Closed))
    }
}

#[pymethods]
impl PyStore {
    /// Opens the store in a file.
    ///
    /// pool_bytes: memory for pages, a hard limit; None for half of what the process may use.
    /// create: make the store if it does not exist. read_only: refuse changes; several processes
    /// may open a store read-only.
    #[staticmethod]
    #[pyo3(signature = (path, *, pool_bytes=None, create=false, read_only=false))]
    fn open(
        path: &Bound<'_, PyAny>,
        pool_bytes: Option<u64>,
        create: bool,
        read_only: bool,
    ) -> PyResult<Self> {
        if create && read_only {
            return Err(PyValueError::new_err("a store cannot be created read-only"));
        }
        let mut options = Options::new().read_only(read_only);
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
    fn tree(&self, py: Python<'_>, name: &str, create: bool) -> PyResult<PyTree> {
        let store = self.store(py)?;
        let tree = work(py, || match create {
            true => store.tree_or_create(name),
            false => store.tree(name),
        });
        Ok(PyTree { tree: tree?, process: self.process })
    }

    /// The names of all trees, sorted.
    fn trees(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let store = self.store(py)?;
        work(py, || store.trees())
    }

    /// Makes durable all changes before the call.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store(py)?;
        work(py, || store.sync())
    }

    /// Makes everything durable, unlocks the file, and ends the use of the store's trees, readers
    /// and writers, which then raise ValueError.
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

/// An ordered map of a store. Store.tree() returns it.
#[pyclass(name = "Tree", module = "vellum.store", frozen)]
#[derive(Debug)]
pub(crate) struct PyTree {
    tree: Tree,
    process: u32,
}

impl PyTree {
    fn tree(&self) -> PyResult<&Tree> {
        check_process(self.process)?;
        Ok(&self.tree)
    }
}

#[pymethods]
impl PyTree {
    /// Its name.
    #[getter]
    fn name(&self) -> String {
        self.tree.name().to_string()
    }

    /// The whole value of a key; None if the tree has no such key.
    fn get<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (tree, mut value) = (self.tree()?, Vec::new());
        let is_there = work(py, || tree.get_into(key, &mut value))?;
        Ok(is_there.then(|| PyBytes::new(py, &value)))
    }

    /// Stores a value that is in memory. new: raise FileExistsError if the key has a value.
    #[pyo3(signature = (key, value, *, new=false))]
    fn put(&self, py: Python<'_>, key: &[u8], value: &[u8], new: bool) -> PyResult<()> {
        let tree = self.tree()?;
        work(py, || {
            let stored = match new {
                true => tree.insert(key, value),
                false => tree.upsert(key, value).map(drop),
            };
            if !matches!(stored, Err(Error::ValueTooLong { .. })) {
                return stored;
            }
            let mut writer = tree.writer(key)?;
            writer.write_all(value).map_err(of_stream)?;
            if new { writer.finish_new() } else { writer.finish().map(drop) }
        })
    }

    /// Removes a key and its value; returns whether the key existed.
    fn remove(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        let tree = self.tree()?;
        work(py, || tree.remove(key))
    }

    /// A ValueReader, a file to read the value of a key from. Raises KeyError if the tree has no
    /// such key.
    fn reader<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyBytes>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tree, bytes) = (self.tree()?.clone(), key.as_bytes());
        let reader = work(py, || tree.into_reader(bytes))?;
        let reader = reader.ok_or_else(|| PyKeyError::new_err(key.clone().unbind()))?;
        let native = NativeReader { len: reader.len(), reader: Mutex::new(Some(reader)) };
        py.import("vellum.store")?.getattr("ValueReader")?.call1((native,))
    }

    /// A ValueWriter, a file to write the value of a key to. new: finish() raises FileExistsError
    /// if the key has a value.
    #[pyo3(signature = (key, *, new=false))]
    fn writer<'py>(&self, py: Python<'py>, key: &[u8], new: bool) -> PyResult<Bound<'py, PyAny>> {
        let tree = self.tree()?.clone();
        let writer = work(py, || tree.into_writer(key))?;
        let native = NativeWriter { writer: Mutex::new(Some(writer)), new };
        py.import("vellum.store")?.getattr("ValueWriter")?.call1((native,))
    }
}

/// The native part of ValueReader; None once it is closed.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeReader {
    reader: Mutex<Option<OwnedValueReader>>,
    len: u64,
}

impl NativeReader {
    fn work<T: Send>(
        &self,
        py: Python<'_>,
        with: impl FnOnce(&mut OwnedValueReader) -> io::Result<T> + Send,
    ) -> PyResult<T> {
        work(py, || {
            let mut reader = lock(&self.reader);
            with(reader.as_mut().ok_or(Error::Closed)?).map_err(of_stream)
        })
    }
}

#[pymethods]
impl NativeReader {
    /// Reads into a buffer; returns how many bytes it read, which may be fewer than the buffer
    /// holds.
    fn readinto(&self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let Some(target) = buffer.as_mut_slice(py) else {
            return Err(PyBufferError::new_err("the buffer is read-only or not contiguous"));
        };
        let mut part = vec![0; target.len().min(PART)];
        let count = self.work(py, |reader| reader.read(&mut part))?;
        target.iter().zip(&part[..count]).for_each(|(cell, byte)| cell.set(*byte));
        Ok(count)
    }

    /// Moves to a position, counted from the beginning.
    fn seek(&self, py: Python<'_>, to: u64) -> PyResult<u64> {
        self.work(py, |reader| reader.seek(SeekFrom::Start(to)))
    }

    fn tell(&self, py: Python<'_>) -> PyResult<u64> {
        self.work(py, Seek::stream_position)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(lock(&self.reader).take()));
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.len)?)
    }
}

/// The native part of ValueWriter; None once it is finished or aborted.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeWriter {
    writer: Mutex<Option<OwnedValueWriter>>,
    new: bool,
}

#[pymethods]
impl NativeWriter {
    /// Writes all of a buffer. If a signal handler raises, a part may be written.
    fn write(&self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<()> {
        let Some(bytes) = buffer.as_slice(py) else {
            return Err(PyBufferError::new_err("the buffer is not contiguous"));
        };
        for part in bytes.chunks(PART) {
            let part: Vec<u8> = part.iter().map(|cell| cell.get()).collect();
            work(py, || {
                let mut writer = lock(&self.writer);
                writer.as_mut().ok_or(Error::Closed)?.write_all(&part).map_err(of_stream)
            })?;
            py.check_signals()?;
        }
        Ok(())
    }

    fn tell(&self, py: Python<'_>) -> u64 {
        py.detach(|| lock(&self.writer).as_ref().map_or(0, OwnedValueWriter::len))
    }

    /// Gives the value to its key; returns whether it replaced a value.
    fn finish(&self, py: Python<'_>) -> PyResult<bool> {
        work(py, || {
            let writer = lock(&self.writer).take().ok_or(Error::Closed)?;
            if self.new { writer.finish_new().map(|()| false) } else { writer.finish() }
        })
    }

    /// Drops the value; returns whether the writer was unfinished.
    fn abort(&self, py: Python<'_>) -> bool {
        py.detach(|| lock(&self.writer).take().is_some())
    }
}
