//! What the cache daemon and its clients say to each other.
//!
//! A connection is one request and its replies. A request about a file carries a descriptor of it,
//! open for reading: that is its name, and the proof that the client may read it.

pub(crate) mod frame;

use std::ffi::OsString;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Names another socket than [`USUAL_SOCKET`].
pub const SOCKET_VARIABLE: &str = "VELLUM_MORSELD";

/// Where the daemon listens by convention.
pub const USUAL_SOCKET: &str = "/run/vellum/morseld.sock";

/// The socket at `$VELLUM_MORSELD`, or else the usual one.
pub fn usual_socket() -> PathBuf {
    let named = std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty());
    named.unwrap_or_else(|| OsString::from(USUAL_SOCKET)).into()
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The Morsel of the file whose descriptor comes along.
    Load,
    /// That the Morsels of that file are forgotten.
    Remove,
    /// What there is.
    List,
    /// How the daemon is.
    Stat,
    /// As `Load`, unless the file is being changed.
    LoadAtRest,
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The load goes on; others follow.
    Progress { done: u64, total: u64 },
    /// A descriptor comes along.
    Loaded { length: u64, was_there: bool },
    /// So many are forgotten.
    Removed { objects: u64 },
    /// One of the list; others follow.
    Listed(Object),
    /// That was the list.
    EndOfList,
    /// How the daemon is.
    Stat(DaemonStat),
    /// It is not done.
    Refused(Refusal),
}

/// A file that the daemon has as a Morsel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Object {
    /// Its path when it was loaded, as the daemon saw it. Files are told apart by device and inode,
    /// which stand here for one that was found again and that nobody has asked for since.
    pub name: String,
    /// Bytes.
    pub length: u64,
    /// How often it was handed out.
    pub uses: u64,
    /// Mappings, of whatever processes; `None`: the backend does not know.
    pub mounts: Option<u64>,
}

/// How a daemon is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DaemonStat {
    /// Name of its backend.
    pub backend: String,
    /// Bytes that it may keep.
    pub limit: u64,
    /// Bytes that it keeps, with what is being loaded.
    pub used: u64,
    /// Files that it has.
    pub objects: u64,
    /// Loads that it has begun.
    pub loads: u64,
    /// Requests that it answered with what was there.
    pub hits: u64,
    /// Files that it has forgotten to make room.
    pub evictions: u64,
}

/// Why the daemon does not do what it was asked for, and what to do.
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
    /// There is nothing in it.
    #[error("the file is empty, and a Morsel has at least one byte")]
    Empty,
    /// It would never fit.
    #[error("the file takes {bytes} bytes, more than the daemon's limit of {limit}: raise --limit")]
    TooLarge {
        /// Of the file.
        bytes: u64,
        /// Of the daemon.
        limit: u64,
    },
    /// It does not fit beside what is in use or being loaded.
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
    /// Somebody wrote to the file, or truncated it, while it was read.
    #[error("the file changed while it was loaded; try again when nobody writes to it")]
    Changed,
    /// Nobody waits for it any more.
    #[error("the load was given up, since nobody waited for it; ask again")]
    GivenUp,
    /// Too many connections.
    #[error("too many connections at a time; try again later")]
    Busy,
    /// The message is none.
    #[error("the message cannot be read: {reason}")]
    BadMessage {
        /// What is wrong with it.
        reason: String,
    },
    /// Anything else, in words.
    #[error("the daemon failed: {reason}")]
    Failed {
        /// What it says.
        reason: String,
    },
    /// The file is being changed, or may be.
    #[error("the file is not at rest: {reason}")]
    InUse {
        /// Why that is thought.
        reason: String,
    },
}
