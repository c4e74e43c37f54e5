//! Why a daemon does not start, or ends.

use std::io;

use rustix::io::Errno;

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// Another one listens there.
    #[error("a daemon listens at {path} already; stop it, or choose another --socket")]
    Running {
        /// The socket.
        path: String,
    },
    /// The socket cannot be made.
    #[error("the socket {path} cannot be made: {source}")]
    Socket {
        /// The path of the socket.
        path: String,
        /// The error of the system.
        source: io::Error,
    },
    /// It cannot wait for clients.
    #[error("waiting for clients: {0}")]
    Wait(Errno),
}
