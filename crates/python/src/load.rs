//! Files as sealed Morsels: the cache daemon's, or else ones of this process' own.

use std::ffi::CString;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

use pyo3::exceptions::{PyOSError, PyRuntimeWarning, PyValueError};
use pyo3::prelude::*;
use vellum_morsel::{BackendChoice, Client, ClientError, Error, Morsel, Provider, Seals, Shape};

use crate::error;

/// Bytes that are read between two looks at whether the user has interrupted.
const PIECE: u64 = 64 << 20;

/// A file as a Morsel.
pub(crate) struct Loaded {
    pub(crate) morsel: Morsel,
    /// Whether it is the daemon's, so that other processes have the same memory.
    pub(crate) shared: bool,
}

/// Asks the daemon first. If there is none, the file is read into a Morsel of this process' own; if
/// there is one and it gives nothing, the same happens with a warning.
pub(crate) fn load(py: Python<'_>, file: &File) -> PyResult<Loaded> {
    let asked = py.detach(|| Client::usual().load(file, |_| {}));
    match asked {
        Ok(loaded) => return Ok(Loaded { morsel: loaded.morsel, shared: true }),
        Err(ClientError::NoDaemon { .. } | ClientError::Permission { .. }) => {}
        Err(why) => {
            warn(py, &format!("the file is read into memory of this process alone: {why}"))?;
        }
    }
    Ok(Loaded { morsel: privately(py, file)?, shared: false })
}

fn warn(py: Python<'_>, message: &str) -> PyResult<()> {
    let message = CString::new(message.replace('\0', "?"))?;
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1)
}

/// Reads a file into a new Morsel.
fn privately(py: Python<'_>, file: &File) -> PyResult<Morsel> {
    let before = file.metadata()?;
    if !before.is_file() {
        return Err(error::of(&Error::BadSource));
    }
    if before.len() == 0 {
        return Err(PyValueError::new_err("the file is empty, and a Morsel has a byte at least"));
    }
    let failed = |error| error::of(&error);
    let provider = Provider::new(BackendChoice::Auto).map_err(failed)?;
    let morsel = provider.create(&shape(before.len())).map_err(failed)?;
    let mut done = 0;
    while done < before.len() {
        let piece = PIECE.min(before.len() - done);
        match py.detach(|| morsel.fill(file, done, done, piece)) {
            Ok(filled) if filled == piece => done += piece,
            Ok(_) | Err(Error::SourceEnded { .. }) => return Err(changed()),
            Err(error) => return Err(failed(error)),
        }
        py.check_signals()?;
    }
    if version(&file.metadata()?) != version(&before) {
        return Err(changed());
    }
    morsel.seal(Seals::CONTENT).map_err(failed)?;
    Ok(morsel)
}

/// A forked child keeps it, as it would a mapped file: Python's own processes are forked.
fn shape(length: u64) -> Shape {
    let shape = Shape::of_length(length).inherit();
    if shape.order() >= 2 { shape.huge() } else { shape }
}

/// What differs once somebody has written to a file.
fn version(file: &Metadata) -> (u64, i64, i64) {
    (file.len(), file.mtime(), file.mtime_nsec())
}

fn changed() -> PyErr {
    PyOSError::new_err("the file changed while it was read; try again when nobody writes to it")
}
