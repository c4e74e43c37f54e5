//! Work on a store that another process may have open.

use std::io::ErrorKind;
use std::path::Path;

use vellum::Error;

use crate::error::{AtStore, Failure, Outcome};

/// Has the process that has the store open do the work, by the request `there`, if one answers;
/// does it `here` otherwise. `does` says what a process without a control socket does itself, such
/// as "backs it up itself (Store::backup)".
///
/// # Errors
/// What the other process says, or the failure here.
pub fn there_or_here<T>(
    path: &Path,
    does: &str,
    there: impl FnOnce() -> vellum::Result<T>,
    here: impl FnOnce() -> Outcome<T>,
) -> Outcome<T> {
    let unanswered = match there() {
        Err(Error::Control { source, .. }) if !is_of_owner(source.kind()) => source,
        answer => return answer.at(path),
    };
    match here() {
        Err(Failure::Store { source: Error::InUse(what), .. }) => {
            Err(Failure::message(match unanswered.kind() {
                ErrorKind::NotFound => format!(
                    "{what}; a program that has a store open {does}, or for this command if it has \
                     a control socket (Store::control_socket); or wait for it with --wait"
                ),
                // There is a socket. Only the user and root may use it, or the owner has ended.
                _ => format!("{what}, and asking that process failed: {unanswered}"),
            }))
        }
        done => done,
    }
}

/// Has the process that has the store open do the work, by the request `there`.
///
/// # Errors
/// No process answers; what it says.
pub fn there<T>(path: &Path, there: impl FnOnce() -> vellum::Result<T>) -> Outcome<T> {
    match there() {
        Err(Error::Control { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            let shown = path.display();
            Err(Failure::message(match path.exists() {
                true => format!(
                    "{shown}: no process answers for it: one must have it open for writing, and a \
                     control socket (Store::control_socket)"
                ),
                false => format!("{shown} does not exist"),
            }))
        }
        answer => answer.at(path),
    }
}

/// Whether a process that has the store open answered, and then failed to go on.
fn is_of_owner(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, Other, TimedOut, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionReset | Other | TimedOut | UnexpectedEof)
}
