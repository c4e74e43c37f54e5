//! The failure of a command: one line with the cause and what to do.

use std::io;
use std::path::Path;

/// The result of a command or of a part of one.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// An error of the store; its message says what to do.
    #[error("{}{source}", prefix(path, source))]
    Store {
        /// The file as the user named it.
        path: String,
        /// The error of the store.
        source: vellum::Error,
    },
    /// An operation of the system failed.
    #[error("{what}: {source}")]
    System {
        /// The operation, with the file's name.
        what: String,
        /// The error of the system.
        source: io::Error,
    },
    /// Another failure, with its whole message.
    #[error("{0}")]
    Message(String),
    /// The reader has closed the pipe. This is no error; the command just ends.
    #[error("the reader of the output has closed the pipe")]
    OutputClosed,
}

/// The name of the file, unless the message of the store has it already.
fn prefix(path: &str, source: &vellum::Error) -> String {
    match source {
        vellum::Error::InUse(_)
        | vellum::Error::Exists(_)
        | vellum::Error::NotFound(_)
        | vellum::Error::BackupIo { .. }
        | vellum::Error::BadBackup { .. }
        | vellum::Error::Open(_) => String::new(),
        _ => format!("{path}: "),
    }
}

impl Failure {
    /// A failure with the message `text`.
    pub fn message(text: impl Into<String>) -> Self {
        Self::Message(text.into())
    }

    /// The failure in one line.
    pub fn line(&self) -> String {
        self.to_string().replace('\n', "; ")
    }
}

/// Adds the file to an error of the store.
pub trait AtStore<T> {
    /// Names the store that the error is about.
    fn at(self, path: &Path) -> Outcome<T>;
}

impl<T> AtStore<T> for vellum::Result<T> {
    fn at(self, path: &Path) -> Outcome<T> {
        let name = || path.display().to_string();
        self.map_err(|source| Failure::Store { path: name(), source })
    }
}

/// The error of the store inside an I/O error of a reader or writer of a value.
pub fn of_stream(error: io::Error) -> vellum::Error {
    error.downcast().unwrap_or_else(vellum::Error::Input)
}

/// Adds the failed operation to an error of the system.
pub trait Doing<T> {
    /// Names the operation: 'reading FILE'.
    fn doing(self, what: impl FnOnce() -> String) -> Outcome<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Outcome<T> {
        self.map_err(|source| Failure::System { what: what(), source })
    }
}
