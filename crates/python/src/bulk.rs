//! Bulk loads: an empty tree is filled with the sorted pairs of an iterable.
//!
//! A load takes some pairs from Python at a time, and adds them to the store while other Python
//! threads go on. No lock is held while the iterable runs: it may use the store.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyIterator;
use vellum::{OwnedBulkLoader, Tree};

use crate::call::{check_process, work};

/// The most pairs, and about the most bytes, that a load takes at a time, between two checks for
/// Ctrl-C.
const MOST_PAIRS: usize = 4096;
const MOST_BYTES: usize = 1 << 20;

type Pair = (PyBackedBytes, PyBackedBytes);

/// Loads all pairs into the tree; returns their number. If an exception ends it, the loader gives
/// its space back. In the child of a fork within the iterable, the loader leaves the store alone.
pub(crate) fn load(
    py: Python<'_>,
    tree: Tree,
    pairs: &Bound<'_, PyIterator>,
    process: u32,
) -> PyResult<u64> {
    let mut loader = work(py, || tree.into_bulk_loader())?;
    match add_all(py, &mut loader, pairs, process) {
        Ok(()) => work(py, || loader.finish()),
        Err(error) => {
            // It takes locks of the store, and may wait for the log.
            py.detach(|| drop(loader));
            Err(error)
        }
    }
}

fn add_all(
    py: Python<'_>,
    loader: &mut OwnedBulkLoader,
    pairs: &Bound<'_, PyIterator>,
    process: u32,
) -> PyResult<()> {
    let (mut part, mut ended) = (Vec::new(), false);
    while !ended {
        ended = next_part(pairs, &mut part)?;
        py.check_signals()?;
        check_process(process)?;
        work(py, || part.iter().try_for_each(|(key, value)| loader.push(key, value)))?;
    }
    Ok(())
}

/// Takes the next pairs; returns whether they are the last ones.
fn next_part(pairs: &Bound<'_, PyIterator>, part: &mut Vec<Pair>) -> PyResult<bool> {
    part.clear();
    let mut bytes = 0;
    while part.len() < MOST_PAIRS && bytes < MOST_BYTES {
        let Some(pair) = pairs.clone().next() else { return Ok(true) };
        let (key, value): Pair = pair?.extract()?;
        bytes += key.len() + value.len();
        part.push((key, value));
    }
    Ok(false)
}
