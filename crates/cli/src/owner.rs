//! Commands that the process which has the store open does for this one.

use std::io::ErrorKind;
use std::path::Path;

use vellum::Error;

use crate::error::{AtStore, Failure, Outcome};

/// The store could not be opened. If another process has it open, asks that one; `does` says what a
/// process without a control socket does itself, such as "backs it up itself (Store::backup)".
///
/// # Errors
/// The failure, if it had another cause; what the other process says.
pub fn ask<T>(
    path: &Path,
    failure: Failure,
    does: &str,
    request: impl FnOnce() -> vellum::Result<T>,
) -> Outcome<T> {
    let Failure::Store { source: Error::InUse(what), .. } = failure else {
        return Err(failure);
    };
    match request() {
        Err(Error::Control { source, .. }) if has_no_owner(source.kind()) => {
            Err(Failure::message(format!(
                "{what}; a program that has a store open {does}, or for this command if it has a \
                 control socket (Store::control_socket); or wait for it with --wait"
            )))
        }
        answer => answer.at(path),
    }
}

/// Whether no process listens at the control socket.
fn has_no_owner(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::ConnectionRefused)
}
