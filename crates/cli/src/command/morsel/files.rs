//! Runs a command's work for each file on the command line.

use std::fs::File;
use std::path::{Path, PathBuf};

use vellum_morsel::ClientError;

use crate::error::{Doing, Failure, Outcome};
use crate::progress::say;

/// Runs `work` for each file, and goes on after a file that has failed.
///
/// `work` returns an outer error if it can do no file at all, and an inner one if only this file
/// failed.
///
/// # Errors
/// The outer error of `work`. Otherwise the failure of the last file, or the number of files that
/// have failed; their failures are printed as they happen.
pub(super) fn each_file(
    files: &[PathBuf],
    mut work: impl FnMut(&Path) -> Outcome<Outcome>,
) -> Outcome {
    let mut failed = 0_usize;
    for (index, path) in files.iter().enumerate() {
        let Err(failure) = work(path)? else { continue };
        failed += 1;
        if matches!(failure, Failure::OutputClosed) || index + 1 == files.len() {
            return Err(failure);
        }
        say(&format!("vellum: {}", failure.line()));
    }
    match failed {
        0 => Ok(()),
        _ => Err(Failure::message(format!("{failed} of {} files failed", files.len()))),
    }
}

/// Opens a file for the daemon to load.
pub(super) fn open(path: &Path) -> Outcome<File> {
    vellum_morsel::open_source(path).doing(|| path.display().to_string())
}

/// The failure of a command that the daemon did not carry out.
pub(super) fn failed(error: &ClientError) -> Failure {
    Failure::message(error.to_string())
}

/// Separates an answer about this file (inner error) from one that holds for all files (outer
/// error).
pub(super) fn of_file<T>(path: &Path, answer: Result<T, ClientError>) -> Outcome<Outcome<T>> {
    match answer {
        Ok(value) => Ok(Ok(value)),
        Err(ClientError::Refused(refusal)) => {
            Ok(Err(Failure::message(format!("{}: {refusal}", path.display()))))
        }
        Err(error) => Err(failed(&error)),
    }
}
