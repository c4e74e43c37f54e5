//! The messages between the cache daemon and its clients.
//!
//! A connection is one request and its replies. A request about a file carries a descriptor of it,
//! open for reading. The descriptor names the file, and proves that the client may read it.

pub(crate) mod frame;

use std::ffi::OsString;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The variable that names another socket than [`USUAL_SOCKET`].
pub const SOCKET_VARIABLE: &str = "VELLUM_MORSELD";

/// Where the daemon listens by convention.
pub const USUAL_SOCKET: &str = "/run/vellum/morseld.sock";

/// The socket at `$VELLUM_MORSELD`, or else the usual one.
pub fn usual_socket() -> PathBuf {
    let named = std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty());
    named.unwrap_or_else(|| OsString::from(USUAL_SOCKET)).into()
}

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Asks for the Morsel of the file whose descriptor comes with the message.
    Load,
    /// Asks the daemon to forget the Morsels of that file.
    Remove,
    /// Asks for the list of files.
    List,
    /// Asks for the daemon's counters.
    Stat,
    /// As `Load`, unless the file is being changed.
    LoadAtRest,
}

/// An answer of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The load goes on; others follow.
    Progress { done: u64, total: u64 },
    /// A descriptor comes along.
    Loaded { length: u64, was_there: bool },
    /// The number of forgotten Morsels.
    Removed { objects: u64 },
    /// One of the list; others follow.
    Listed(Object),
    /// The end of the list.
    EndOfList,
    /// The daemon's counters.
    Stat(DaemonStat),
    /// The daemon refuses the request.
    Refused(Refusal),
}

/// A file that the daemon has as a Morsel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Object {
    /// Its path when it was loaded, as the daemon saw it. Device and inode identify files; they
    /// stand here for a file that the daemon found again and that no client has asked for since.
    pub name: String,
    /// Bytes.
    pub length: u64,
    /// How often the daemon handed it out.
    pub uses: u64,
    /// Mappings, of all processes; `None`: the backend does not know.
    pub mounts: Option<u64>,
}

/// The counters of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DaemonStat {
    /// Name of its backend.
    pub backend: String,
    /// Bytes that it may keep.
    pub limit: u64,
    /// Bytes that it keeps or is loading.
    pub used: u64,
    /// Files that it has.
    pub objects: u64,
    /// Loads that it has begun.
    pub loads: u64,
    /// Requests that it answered from memory.
    pub hits: u64,
    /// Files that it has evicted to make room.
    pub evictions: u64,
}

/// Why the daemon refuses a request, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No descriptor came along.
    #[error("the request names no file: send a descriptor along")]
    NoFile,
    /// The descriptor does not prove that the client may read the file.
    #[error("the descriptor is not for reading: open the file with O_RDONLY")]
    NotReadable,
    /// The file is a directory, a device, a pipe or a socket.
    #[error("only a regular file can be loaded")]
    NotRegular,
    /// The file is empty.
    #[error("the file is empty, and a Morsel has at least one byte")]
    Empty,
    /// The file would never fit.
    #[error("the file takes {bytes} bytes, more than the daemon's limit of {limit}: raise --limit")]
    TooLarge {
        /// Of the file.
        bytes: u64,
        /// Of the daemon.
        limit: u64,
    },
    /// The file does not fit together with the files that are in use or being loaded.
    #[error(
        "{bytes} bytes do not fit now: files that are in use or being loaded take the daemon's \
         limit of {limit}; try again later, or raise --limit"
    )]
    Full {
        /// Of the file.
        bytes: u64,
        /// Of the daemon.
        limit: u64,
    },
    /// A process wrote to the file, or truncated it, while the daemon read it.
    #[error("the file changed while it was loaded; try again when no process writes to it")]
    Changed,
    /// No client waits for it any more.
    #[error("the load was cancelled, because no client waited for it; ask again")]
    GivenUp,
    /// Too many connections.
    #[error("too many connections at a time; try again later")]
    Busy,
    /// The message cannot be decoded.
    #[error("the message cannot be read: {reason}")]
    BadMessage {
        /// The reason.
        reason: String,
    },
    /// Anything else, in words.
    #[error("the daemon failed: {reason}")]
    Failed {
        /// The reason.
        reason: String,
    },
    /// The file is being changed, or may be.
    #[error("the file is not at rest: {reason}")]
    InUse {
        /// The reason for this conclusion.
        reason: String,
    },
}
