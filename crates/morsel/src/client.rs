//! Asking the cache daemon for files (paper, section 3.1).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::Error;
use crate::morsel::Morsel;
use crate::protocol::frame::{self, FrameError};
use crate::protocol::{self, DaemonStat, Object, Refusal, Reply, Request};
use crate::seals::Seals;

/// How long the daemon may be silent; while it loads, it reports progress ten times a second.
const SILENCE: Duration = Duration::from_secs(30);

/// Why the daemon gave nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No daemon listens.
    #[error(
        "no cache daemon answers at {socket} ({source}): start one with `vellum morseld`, or name \
         its socket in VELLUM_MORSELD"
    )]
    NoDaemon {
        /// The path of the socket.
        socket: String,
        /// The error of the system.
        source: io::Error,
    },
    /// A process listens, and this user may not connect.
    #[error(
        "this user may not connect to the socket {socket}: have the daemon started with a --mode \
         that lets you, or name another socket in VELLUM_MORSELD"
    )]
    Permission {
        /// The path of its socket.
        socket: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The daemon ended before it answered.
    #[error("the cache daemon ended before it had answered; ask again once it is back")]
    DaemonEnded,
    /// The daemon refuses the request.
    #[error("{0}")]
    Refused(Refusal),
    /// Another program listens there, or a daemon of another version.
    #[error("the program that answers is not the cache daemon of this version: {reason}")]
    Protocol {
        /// The reason.
        reason: String,
    },
    /// The Morsel that the daemon sent cannot be used.
    #[error(transparent)]
    Morsel(#[from] Error),
}

/// The progress of a load, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that have been read.
    pub done: u64,
    /// The file.
    pub total: u64,
}

/// A file as a Morsel: its content is sealed.
#[derive(Debug)]
pub struct Loaded {
    /// The file's bytes.
    pub morsel: Morsel,
    /// Whether the daemon had it already.
    pub was_there: bool,
}

/// A client of the cache daemon. Every request is a connection of its own, so a client outlives the
/// daemon, and its Morsels outlive both.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the daemon that listens at a socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// A client of the daemon at `$VELLUM_MORSELD`, or else at `/run/vellum/morseld.sock`.
    pub fn usual() -> Self {
        Self::new(protocol::usual_socket())
    }

    /// The Morsel of a file, which is open for reading. If the daemon does not have it, it loads
    /// the file now, and `progress` gets the load's progress.
    ///
    /// # Errors
    /// [`ClientError::NoDaemon`], [`ClientError::DaemonEnded`], or [`ClientError::Refused`] with
    /// the reason.
    pub fn load(&self, file: &File, progress: impl FnMut(Progress)) -> Result<Loaded, ClientError> {
        self.load_by(Request::Load, file, progress)
    }

    /// As [`load`](Self::load), for callers that a later change would mislead: the daemon refuses a
    /// file that a process has open for writing or has changed within the last seconds, and one for
    /// which it cannot tell.
    ///
    /// # Errors
    /// As [`load`](Self::load), and [`Refusal::InUse`].
    pub fn load_at_rest(
        &self,
        file: &File,
        progress: impl FnMut(Progress),
    ) -> Result<Loaded, ClientError> {
        self.load_by(Request::LoadAtRest, file, progress)
    }

    fn load_by(
        &self,
        request: Request,
        file: &File,
        mut progress: impl FnMut(Progress),
    ) -> Result<Loaded, ClientError> {
        let mut answer = self.ask(request, Some(file.as_fd()))?;
        loop {
            match answer.next()? {
                (Reply::Progress { done, total }, _) => progress(Progress { done, total }),
                (Reply::Loaded { length, was_there }, Some(descriptor)) => {
                    let morsel = Morsel::from_descriptor(descriptor)?;
                    if morsel.length() != length || !morsel.stat()?.seals.has(Seals::CONTENT) {
                        return Err(unexpected(
                            "a Morsel that is not sealed, or of another length",
                        ));
                    }
                    return Ok(Loaded { morsel, was_there });
                }
                _ => return Err(unexpected("an answer to something else")),
            }
        }
    }

    /// Has the daemon forget a file, which is open for reading; returns how many versions of it the
    /// daemon had. Processes that have them keep them.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn remove(&self, file: &File) -> Result<u64, ClientError> {
        match self.ask(Request::Remove, Some(file.as_fd()))?.next()? {
            (Reply::Removed { objects }, _) => Ok(objects),
            _ => Err(unexpected("an answer to something else")),
        }
    }

    /// The files that the daemon has, most recently used first: those that this user has asked for;
    /// root and the daemon's own user get all.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn list(&self) -> Result<Vec<Object>, ClientError> {
        let mut answer = self.ask(Request::List, None)?;
        let mut objects = Vec::new();
        loop {
            match answer.next()? {
                (Reply::Listed(object), _) => objects.push(object),
                (Reply::EndOfList, _) => return Ok(objects),
                _ => return Err(unexpected("an answer to something else")),
            }
        }
    }

    /// The daemon's counters.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn stat(&self) -> Result<DaemonStat, ClientError> {
        match self.ask(Request::Stat, None)?.next()? {
            (Reply::Stat(stat), _) => Ok(stat),
            _ => Err(unexpected("an answer to something else")),
        }
    }

    fn ask(&self, request: Request, file: Option<BorrowedFd<'_>>) -> Result<Answer, ClientError> {
        let stream = UnixStream::connect(&self.socket).map_err(|source| {
            let socket = self.socket.display().to_string();
            match source.kind() {
                io::ErrorKind::PermissionDenied => ClientError::Permission { socket, source },
                _ => ClientError::NoDaemon { socket, source },
            }
        })?;
        match frame::write(&stream, &request, file, SILENCE) {
            // The daemon may have sent the reason before it hung up.
            Ok(()) | Err(FrameError::End) => Ok(Answer(stream)),
            Err(error) => Err(failed(error)),
        }
    }
}

/// The replies to a request.
struct Answer(UnixStream);

impl Answer {
    fn next(&mut self) -> Result<(Reply, Option<OwnedFd>), ClientError> {
        match frame::read(&self.0, SILENCE) {
            Ok((Reply::Refused(refusal), _)) => Err(ClientError::Refused(refusal)),
            Ok(reply) => Ok(reply),
            Err(error) => Err(failed(error)),
        }
    }
}

fn failed(error: FrameError) -> ClientError {
    match error {
        FrameError::End => ClientError::DaemonEnded,
        error => ClientError::Protocol { reason: error.to_string() },
    }
}

fn unexpected(what: &str) -> ClientError {
    ClientError::Protocol { reason: format!("it sent {what}") }
}
