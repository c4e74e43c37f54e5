//! Trees: as they are, and as a snapshot or a transaction sees them.

use std::io::Write;

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use vellum::{Error, Tree};

use crate::bulk;
use crate::call::{check_process, of_stream, work};
use crate::entries::PyEntries;
use crate::stream::{NativeReader, NativeWriter};
use crate::view::{OwnedBounds, SharedTransaction, Source, bounds, bounds_of_prefix, change};

/// Reads a tree, as a snapshot sees it: snapshot[tree] returns one. Tree and TransactionTree have
/// the same functions.
#[pyclass(name = "TreeView", module = "vellum.store", frozen, subclass)]
#[derive(Debug)]
pub(crate) struct PyTreeView {
    tree: Tree,
    source: Source,
    process: u32,
}

impl PyTreeView {
    pub(crate) fn new(tree: &Bound<'_, PyTree>, source: Source) -> PyTreeView {
        let of = tree.as_super().get();
        PyTreeView { tree: of.tree.clone(), source, process: of.process }
    }

    fn tree(&self) -> PyResult<&Tree> {
        check_process(self.process)?;
        Ok(&self.tree)
    }

    fn entries(&self, range: OwnedBounds, reverse: bool) -> PyEntries {
        PyEntries::new(self.tree.clone(), self.source.clone(), range, reverse, self.process)
    }
}

#[pymethods]
impl PyTreeView {
    /// The tree's name.
    #[getter]
    fn name(&self) -> String {
        self.tree.name().to_string()
    }

    /// The whole value of a key; None if the tree has no such key.
    fn get<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let tree = self.tree()?;
        let value = work(py, || self.source.with(|view, _| view.get(tree, key)))?;
        Ok(value.map(|value| PyBytes::new(py, &value)))
    }

    /// The values of many keys, in their order: None for a key that the tree does not have. Reads
    /// together what is not in memory.
    fn multi_get<'py>(
        &self,
        py: Python<'py>,
        keys: Vec<PyBackedBytes>,
    ) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
        let tree = self.tree()?;
        let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
        let values = work(py, || self.source.with(|view, _| view.multi_get(tree, &keys)))?;
        Ok(values.into_iter().map(|value| Some(PyBytes::new(py, &value?))).collect())
    }

    /// Whether the tree has a key.
    fn __contains__(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        let tree = self.tree()?;
        work(py, || self.source.with(|view, _| view.contains(tree, key)))
    }

    /// Iterates over the keys from start on that come before end, and their values. Without start
    /// or end, from the first key or to the last. reverse: begin at the end.
    #[pyo3(signature = (start=None, end=None, *, reverse=false))]
    fn range(
        &self,
        start: Option<&[u8]>,
        end: Option<&[u8]>,
        reverse: bool,
    ) -> PyResult<PyEntries> {
        check_process(self.process)?;
        Ok(self.entries(bounds(start, end), reverse))
    }

    /// Iterates over the keys that begin with prefix, and their values. reverse: begin at the end.
    #[pyo3(signature = (prefix, *, reverse=false))]
    fn prefix(&self, prefix: &[u8], reverse: bool) -> PyResult<PyEntries> {
        check_process(self.process)?;
        Ok(self.entries(bounds_of_prefix(prefix), reverse))
    }
}

/// An ordered map of a store. Store.tree() returns it.
#[pyclass(name = "Tree", module = "vellum.store", frozen, extends = PyTreeView)]
#[derive(Debug)]
pub(crate) struct PyTree;

impl PyTree {
    pub(crate) fn new(py: Python<'_>, tree: Tree, process: u32) -> PyResult<Py<PyTree>> {
        let view = PyTreeView { tree, source: Source::Now, process };
        Py::new(py, (PyTree, view))
    }
}

#[pymethods]
impl PyTree {
    /// Stores a value that is in memory. new: raise FileExistsError if the key has a value.
    #[pyo3(signature = (key, value, *, new=false))]
    fn put(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        key: &[u8],
        value: &[u8],
        new: bool,
    ) -> PyResult<()> {
        let tree = slf.as_super().get().tree()?;
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
    fn remove(slf: &Bound<'_, Self>, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        let tree = slf.as_super().get().tree()?;
        work(py, || tree.remove(key))
    }

    /// Fills an empty tree with the pairs of an iterable: keys, in the order of their bytes, and
    /// values. Returns how many. The tree has all of them at the end, atomically. After an
    /// exception, also one of the iterable, it has none. Raises ValueError if a key does not come
    /// after the one before it, and OSError (ENOTEMPTY) if the tree has entries.
    fn load(slf: &Bound<'_, Self>, py: Python<'_>, entries: &Bound<'_, PyAny>) -> PyResult<u64> {
        let view = slf.as_super().get();
        let tree = view.tree()?.clone();
        let pairs = entries.try_iter()?;
        // The iterable may have forked.
        check_process(view.process)?;
        bulk::load(py, tree, &pairs, view.process)
    }

    /// A ValueReader, a file to read the value of a key from. Raises KeyError if the tree has no
    /// such key.
    fn reader<'py>(
        slf: &Bound<'py, Self>,
        py: Python<'py>,
        key: &Bound<'py, PyBytes>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tree, bytes) = (slf.as_super().get().tree()?.clone(), key.as_bytes());
        let reader = work(py, || tree.into_reader(bytes))?;
        let reader = reader.ok_or_else(|| PyKeyError::new_err(key.clone().unbind()))?;
        let native = NativeReader::new(reader);
        py.import("vellum.store")?.getattr("ValueReader")?.call1((native,))
    }

    /// A ValueWriter, a file to write the value of a key to. new: finish() raises FileExistsError
    /// if the key has a value.
    #[pyo3(signature = (key, *, new=false))]
    fn writer<'py>(
        slf: &Bound<'py, Self>,
        py: Python<'py>,
        key: &[u8],
        new: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tree = slf.as_super().get().tree()?.clone();
        let writer = work(py, || tree.into_writer(key))?;
        let native = NativeWriter::new(writer, new);
        py.import("vellum.store")?.getattr("ValueWriter")?.call1((native,))
    }
}

/// A tree as a transaction sees and changes it: transaction[tree] returns one.
#[pyclass(name = "TransactionTree", module = "vellum.store", frozen, extends = PyTreeView)]
#[derive(Debug)]
pub(crate) struct PyTransactionTree {
    transaction: SharedTransaction,
}

impl PyTransactionTree {
    pub(crate) fn new(
        tree: &Bound<'_, PyTree>,
        transaction: &SharedTransaction,
    ) -> PyResult<Py<PyTransactionTree>> {
        let view = PyTreeView::new(tree, Source::Transaction(transaction.clone()));
        Py::new(tree.py(), (PyTransactionTree { transaction: transaction.clone() }, view))
    }
}

#[pymethods]
impl PyTransactionTree {
    /// Gives a key a value. new: raise FileExistsError if the key has a value.
    #[pyo3(signature = (key, value, *, new=false))]
    fn put(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        key: &[u8],
        value: &[u8],
        new: bool,
    ) -> PyResult<()> {
        let (tree, transaction) = (slf.as_super().get().tree()?, &slf.get().transaction);
        work(py, || {
            change(transaction, |transaction| match new {
                true => transaction.insert(tree, key, value),
                false => transaction.put(tree, key, value),
            })
        })
    }

    /// Removes a key and its value; returns whether the key existed.
    fn remove(slf: &Bound<'_, Self>, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        let (tree, transaction) = (slf.as_super().get().tree()?, &slf.get().transaction);
        work(py, || change(transaction, |transaction| transaction.remove(tree, key)))
    }

    /// Removes the keys from start on that come before end, and their values; returns how many.
    #[pyo3(signature = (start=None, end=None))]
    fn remove_range(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        start: Option<&[u8]>,
        end: Option<&[u8]>,
    ) -> PyResult<u64> {
        let (tree, transaction) = (slf.as_super().get().tree()?, &slf.get().transaction);
        let range = bounds(start, end);
        work(py, || change(transaction, |transaction| transaction.remove_range(tree, range)))
    }
}
