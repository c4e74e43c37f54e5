//! Runs a command's work for each of the files on the command line.

use std::fs::File;
use std::path::{Path, PathBuf};

use vellum_morsel::ClientError;

use crate::error::{Doing, Failure, Outcome};
use crate::progress::say;

/// Does something with each file, also after one of them has failed.
///
/// `work` returns an error of its own if no file can be done, and one within if this one cannot.
///
/// # Errors
/// That no file can be done; otherwise what the last file failed with, or that others have failed,
/// each of which is told when it does.
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

/// Opens a file that a Morsel could be made of.
pub(super) fn open(path: &Path) -> Outcome<File> {
    vellum_morsel::open_source(path).doing(|| path.display().to_string())
}

/// The failure of a command that the daemon did not carry out.
pub(super) fn failed(error: &ClientError) -> Failure {
    Failure::message(error.to_string())
}

/// Tells an answer that is about a file from one that would be the same for any other.
pub(super) fn of_file<T>(path: &Path, answer: Result<T, ClientError>) -> Outcome<Outcome<T>> {
    match answer {
        Ok(value) => Ok(Ok(value)),
        Err(ClientError::Refused(refusal)) => {
            Ok(Err(Failure::message(format!("{}: {refusal}", path.display()))))
        }
        Err(error) => Err(failed(&error)),
    }
}
