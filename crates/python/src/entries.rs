//! Iterators over the entries of a range.
//!
//! An iterator reads some entries at a time, and goes on after the last of them, so a transaction
//! can change while it has iterators. When it has changed, its iterators read again.

use std::collections::VecDeque;
use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use vellum::Tree;

use crate::call::{Failure, check_process, lock, work};
use crate::view::{Amount, Entry, OwnedBounds, Source, borrowed, pass};

/// The entries of a range, as tuples of a key and its value.
#[pyclass(name = "Entries", module = "vellum.store", frozen)]
#[derive(Debug)]
pub(crate) struct PyEntries {
    scan: Mutex<Scan>,
    process: u32,
}

#[derive(Debug)]
struct Scan {
    tree: Tree,
    source: Source,
    /// What is left of the range after the entries in `ahead`, and after the last one returned.
    left: OwnedBounds,
    returned: Option<Vec<u8>>,
    ahead: VecDeque<Entry>,
    changes: u64,
    amount: Amount,
    most: usize,
    ended: bool,
}

/// The most entries, and about the most bytes, that an iterator reads at a time.
const MOST_ENTRIES: usize = 4096;
const MOST_BYTES: usize = 1 << 20;

/// The same in a transaction, which depends on what its iterators have read.
const MOST_IN_TRANSACTION: usize = 256;

impl PyEntries {
    pub(crate) fn new(
        tree: Tree,
        source: Source,
        left: OwnedBounds,
        backward: bool,
        process: u32,
    ) -> PyEntries {
        let (entries, most) = match source {
            Source::Transaction(_) => (1, MOST_IN_TRANSACTION),
            _ => (16, MOST_ENTRIES),
        };
        let amount = Amount { entries, bytes: MOST_BYTES, backward };
        let (returned, ahead) = (None, VecDeque::new());
        let scan =
            Scan { tree, source, left, returned, ahead, changes: 0, amount, most, ended: false };
        PyEntries { scan: Mutex::new(scan), process }
    }
}

impl Scan {
    fn next(&mut self) -> Result<Option<Entry>, Failure> {
        if self.ended {
            return Ok(None);
        }
        let Scan { tree, source, left, returned, ahead, changes, amount, most, .. } = self;
        source.with(|view, now| {
            if std::mem::replace(changes, now) != now {
                ahead.clear();
                amount.entries = 1;
            }
            if !ahead.is_empty() {
                // The store may have been closed since the entries were read.
                return view.multi_get(tree, &[]).map(drop);
            }
            if let Some(key) = returned.take() {
                pass(left, key, amount.backward);
            }
            *ahead = view.read(tree, borrowed(left), *amount)?.into();
            amount.entries = (2 * amount.entries).min(*most);
            Ok(())
        })?;
        let next = self.ahead.pop_front();
        self.ended = next.is_none();
        self.returned = next.as_ref().map(|(key, _)| key.clone());
        Ok(next)
    }
}

#[pymethods]
impl PyEntries {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        check_process(self.process)?;
        // Functions such as list() take all entries without a look.
        py.check_signals()?;
        let next = work(py, || lock(&self.scan).next())?;
        Ok(next.map(|(key, value)| (PyBytes::new(py, &key), PyBytes::new(py, &value))))
    }
}
