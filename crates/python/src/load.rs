//! Files as sealed Morsels: from the cache daemon, or else read by this process.

use std::ffi::CString;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;

use pyo3::exceptions::{PyOSError, PyRuntimeWarning, PyValueError};
use pyo3::prelude::*;
use vellum_morsel::{BackendChoice, Client, ClientError, Error, Morsel, Provider, Seals, Shape};

use crate::{error, source};

/// Bytes that a load reads between two checks for Ctrl-C.
const PIECE: u64 = 16 << 20;

/// A file as a Morsel.
pub(crate) struct Loaded {
    pub(crate) morsel: Morsel,
    /// Whether it came from the daemon, so that other processes share the memory.
    pub(crate) shared: bool,
}

/// Asks the daemon first. If no daemon runs, reads the file into a Morsel of this process. If the
/// daemon refuses, does the same and warns.
///
/// `level`: the Python frame that the warning names; 1 is the caller of this function.
pub(crate) fn load(py: Python<'_>, file: &File, level: i32) -> PyResult<Loaded> {
    match ask(py, file.try_clone()?)? {
        Ok(loaded) => return Ok(Loaded { morsel: loaded.morsel, shared: true }),
        Err(ClientError::NoDaemon { .. } | ClientError::Permission { .. }) => {}
        Err(why) => {
            warn(py, &format!("the file is read into memory of this process alone: {why}"), level)?;
        }
    }
    Ok(Loaded { morsel: privately(py, file)?, shared: false })
}

/// Asks the daemon in another thread, so that the caller can check for Ctrl-C however long the
/// daemon is silent. If the caller is interrupted, that thread ends when the daemon answers.
fn ask(py: Python<'_>, file: File) -> PyResult<Result<vellum_morsel::Loaded, ClientError>> {
    let (answer, answers) = mpsc::channel();
    let work = move || {
        // Without a receiver the caller was interrupted.
        let _ = answer.send(Client::usual().load(&file, |_| {}));
    };
    thread::Builder::new().name("vellum-load".into()).spawn(work)?;
    let answers = Mutex::new(answers);
    loop {
        let waited = py.detach(|| {
            answers.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(source::LOOK)
        });
        match waited {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Ok(Err(ClientError::DaemonEnded)),
        }
    }
}

fn warn(py: Python<'_>, message: &str, level: i32) -> PyResult<()> {
    let message = CString::new(message.replace('\0', "?"))?;
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, level)
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

/// A forked child keeps the memory, as it would a mapped file: multiprocessing may fork.
fn shape(length: u64) -> Shape {
    let shape = Shape::of_length(length).inherit();
    if shape.order() >= 2 { shape.huge() } else { shape }
}

/// A value that changes when a process writes to the file.
fn version(file: &Metadata) -> (u64, i64, i64) {
    (file.len(), file.mtime(), file.mtime_nsec())
}

fn changed() -> PyErr {
    PyOSError::new_err("the file changed during the read; retry when no process writes to it")
}
