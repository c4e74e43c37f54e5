//! Why a file is refused.

/// The result of reading a header.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file does not begin as files of the format do.
    #[error("not a {format} file: {reason}")]
    Format {
        /// The format that was expected.
        format: &'static str,
        /// The reason.
        reason: String,
    },
    /// The file ends before a part that its header announces.
    #[error("the file ends within {what}: it was truncated, or its header is damaged")]
    Truncated {
        /// The part that is cut off.
        what: &'static str,
    },
    /// It exceeds what any honest file needs.
    #[error("{what} is {found}; at most {limit} is read")]
    Limit {
        /// The quantity that is too large.
        what: &'static str,
        /// How large it is.
        found: u64,
        /// How large it may be.
        limit: u64,
    },
    /// The header contradicts itself or the format.
    #[error("the header is damaged: {reason}")]
    Header {
        /// The contradiction.
        reason: String,
    },
    /// A tensor cannot lie where the header says.
    #[error("tensor '{name}': {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// The reason.
        reason: String,
    },
}
