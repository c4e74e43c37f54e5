//! Error numbers, for callers that have no other errors: C programs, and Python's `OSError`.

use rustix::io::Errno;

use crate::client::ClientError;
use crate::error::Error;

impl Error {
    /// The error number that is closest to it. The system's own error numbers are passed on.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Shape { .. }
            | Self::OutOfRange { .. }
            | Self::Unaligned { .. }
            | Self::Address { .. }
            | Self::BadName { .. }
            | Self::BadSource
            | Self::Type { .. }
            | Self::NotMorsel { .. } => Errno::INVAL,
            Self::Unavailable { .. } => Errno::NODEV,
            Self::Unsupported { .. } => Errno::OPNOTSUPP,
            Self::AddressBusy { .. } | Self::NameTaken { .. } => Errno::EXIST,
            Self::NoSuchName { .. } => Errno::NOENT,
            Self::NoSpace { .. } => Errno::NOSPC,
            Self::NoMemory { .. } => Errno::NOMEM,
            Self::Sealed { .. } | Self::NotOwner => Errno::PERM,
            Self::ReadOnly { .. } | Self::Permission { .. } => Errno::ACCESS,
            Self::NotSealed | Self::MappedForWriting => Errno::BUSY,
            Self::Holes { .. } => Errno::NXIO,
            Self::Revoked { .. } => Errno::IO,
            Self::SourceEnded { .. } => Errno::NODATA,
            Self::System { errno, .. } => *errno,
        }
    }
}

impl ClientError {
    /// The error number that is closest to it.
    pub fn errno(&self) -> Errno {
        match self {
            Self::NoDaemon { source, .. } | Self::Permission { source, .. } => {
                Errno::from_io_error(source).unwrap_or(Errno::CONNREFUSED)
            }
            Self::DaemonEnded => Errno::CONNRESET,
            Self::Refused(_) => Errno::CANCELED,
            Self::Protocol { .. } => Errno::PROTO,
            Self::Morsel(error) => error.errno(),
        }
    }
}
