//! Why an operation on a Morsel fails, and what to do.

use rustix::io::Errno;

use crate::backend::BackendKind;

/// The result of an operation on Morsels.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a Morsel failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The backend that the caller chose cannot be used.
    #[error("the backend '{backend}' cannot be used: {reason}")]
    Unavailable {
        /// Which one.
        backend: BackendKind,
        /// Why, and what to do.
        reason: String,
    },
    /// No Morsel can have this shape.
    #[error("no Morsel can have this shape: {reason}")]
    Shape {
        /// The reason.
        reason: String,
    },
    /// The range is not within the Morsel.
    #[error("bytes {start}..{end} are not within the Morsel, which has {length}")]
    OutOfRange {
        /// First byte.
        start: u64,
        /// The byte after the last one.
        end: u64,
        /// Bytes of the Morsel.
        length: u64,
    },
    /// The range does not consist of whole pages.
    #[error(
        "bytes {start}..{end} are not whole pages: begin at a multiple of 4096 and end at one, or \
         at the Morsel's end"
    )]
    Unaligned {
        /// First byte.
        start: u64,
        /// The byte after the last one.
        end: u64,
    },
    /// The address is no multiple of the extent, or not one of user space.
    #[error("address {address:#x} cannot hold the Morsel: it must be a multiple of {extent:#x}")]
    Address {
        /// The address.
        address: u64,
        /// Bytes of address space that the Morsel covers.
        extent: u64,
    },
    /// This process has another mapping at the address.
    #[error(
        "this process has something else within the {extent:#x} bytes from address {address:#x}; \
         unmap that, or bind the Morsel to another address"
    )]
    AddressBusy {
        /// The address.
        address: u64,
        /// Bytes of address space that the Morsel covers.
        extent: u64,
    },
    /// The quota of the file system is used up.
    #[error(
        "{doing}: no space left for Morsels; remove some, or mount the file system with a larger \
         size="
    )]
    NoSpace {
        /// The operation that failed.
        doing: &'static str,
    },
    /// Memory or addresses ran out.
    #[error("{doing}: not enough memory; free some, or raise the limit of the memory cgroup")]
    NoMemory {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The seal forbids it.
    #[error("{doing}: the Morsel is sealed, and a seal cannot be broken; make a new one")]
    Sealed {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The content may still change, so that no reference to it is sound.
    #[error(
        "the content is not sealed, so others may change it while you read it; seal it and map it \
         again, or copy with read_at"
    )]
    NotSealed,
    /// Pages are missing and will never come.
    #[error("{missing} pages are missing and the population is sealed; copy what is there")]
    Holes {
        /// How many.
        missing: u64,
    },
    /// The content could still be written through a mapping or by I/O, so it cannot be sealed.
    #[error(
        "the Morsel can still be written: a process has it mapped for writing, or does I/O into \
         it; drop those mappings, then seal it"
    )]
    MappedForWriting,
    /// Its owner took the Morsel from all processes.
    #[error("{doing}: the Morsel was revoked by its owner; ask for a new one")]
    Revoked {
        /// The operation that failed.
        doing: &'static str,
    },
    /// Only its owner may do this.
    #[error("only its owner may revoke a Morsel, or a process with CAP_FOWNER")]
    NotOwner,
    /// The descriptor, or the mapping, is for reading only.
    #[error("{doing}: this is for reading only; ask its maker for one that may be written")]
    ReadOnly {
        /// The operation that failed.
        doing: &'static str,
    },
    /// There is no Morsel of this name.
    #[error("there is no Morsel '{name}'")]
    NoSuchName {
        /// The name.
        name: String,
    },
    /// There is a Morsel of this name.
    #[error("there is a Morsel '{name}' already; open or unlink it")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// This can be no name.
    #[error("'{name}' is no name for a Morsel: 1 to 255 bytes, without '/' and not '.' or '..'")]
    BadName {
        /// The name.
        name: String,
    },
    /// The permissions of a name or a directory forbid it.
    #[error("{doing}: permission denied; ask the owner of the Morsel, or of the directory")]
    Permission {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The source of a fill cannot be read from.
    #[error("the source cannot be read: open a regular file or a block device for reading")]
    BadSource,
    /// The source ends before the bytes that the caller asked for.
    #[error("the source ends before byte {from}; it is shorter than expected, or was truncated")]
    SourceEnded {
        /// Bytes from the source's beginning.
        from: u64,
    },
    /// The bytes are no value of the type.
    #[error("these bytes are no value of the type: {reason}")]
    Type {
        /// Size or alignment.
        reason: String,
    },
    /// The descriptor is not that of a Morsel.
    #[error("this descriptor is not that of a Morsel: {reason}")]
    NotMorsel {
        /// The property that it lacks.
        reason: String,
    },
    /// The backend cannot do it.
    #[error("the backend '{backend}' has no {what}: load Vellum's kernel module for that")]
    Unsupported {
        /// Which one.
        backend: BackendKind,
        /// The operation that it lacks.
        what: &'static str,
    },
    /// Any other error of the system.
    #[error("{doing}: {errno}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The error of the system.
        errno: Errno,
    },
}

impl Error {
    /// The meaning of an error number from a Morsel's own descriptor.
    pub(crate) fn of(doing: &'static str, errno: Errno) -> Self {
        match errno {
            Errno::NOSPC => Self::NoSpace { doing },
            Errno::NOMEM => Self::NoMemory { doing },
            Errno::PERM => Self::Sealed { doing },
            Errno::IO => Self::Revoked { doing },
            Errno::BADF | Errno::ACCESS => Self::ReadOnly { doing },
            errno => Self::System { doing, errno },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_numbers_name_their_cause() {
        let found = |errno| Error::of("filling", errno).to_string();
        let causes = [
            (Errno::NOSPC, "size="),
            (Errno::NOMEM, "memory cgroup"),
            (Errno::PERM, "sealed"),
            (Errno::IO, "revoked"),
            (Errno::BADF, "reading only"),
            (Errno::ACCESS, "reading only"),
            (Errno::NOSYS, "not implemented"),
        ];
        for (errno, cause) in causes {
            let text = found(errno).to_lowercase();
            assert!(text.starts_with("filling: ") && text.contains(cause), "{text}");
        }
    }
}
