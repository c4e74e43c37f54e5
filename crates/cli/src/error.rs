//! What a command fails with: one line, the cause and what to do.

use std::io;
use std::path::Path;

/// The result of a command or of a part of one.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The store refused; its own message says what to do.
    #[error("{}{source}", prefix(path, source))]
    Store {
        /// The file as the user named it.
        path: String,
        /// What the store said.
        source: vellum::Error,
    },
    /// An operation of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What was being done, with the file's name.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Anything else, said in full.
    #[error("{0}")]
    Message(String),
    /// The reader of the output has gone: not an error, the command just ends.
    #[error("the reader of the output has gone")]
    OutputClosed,
}

/// The file before a message of the store that does not name it.
fn prefix(path: &str, source: &vellum::Error) -> String {
    match source {
        vellum::Error::InUse(_)
        | vellum::Error::Exists(_)
        | vellum::Error::NotFound(_)
        | vellum::Error::Open(_) => String::new(),
        _ => format!("{path}: "),
    }
}

impl Failure {
    /// A failure that is explained by `text` alone.
    pub fn message(text: impl Into<String>) -> Self {
        Self::Message(text.into())
    }

    /// What failed, in one line.
    pub fn line(&self) -> String {
        self.to_string().replace('\n', "; ")
    }
}

/// Adds the file to an error of the store.
pub trait AtStore<T> {
    /// Says that `path` is the store that the error is about.
    fn at(self, path: &Path) -> Outcome<T>;
}

impl<T> AtStore<T> for vellum::Result<T> {
    fn at(self, path: &Path) -> Outcome<T> {
        let name = || path.display().to_string();
        self.map_err(|source| Failure::Store { path: name(), source })
    }
}

/// The error of the store in one of a reader or writer of a value.
pub fn of_stream(error: io::Error) -> vellum::Error {
    error.downcast().unwrap_or_else(vellum::Error::Input)
}

/// Adds what was being done to an error of the system.
pub trait Doing<T> {
    /// Says what was being done.
    fn doing(self, what: impl FnOnce() -> String) -> Outcome<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Outcome<T> {
        self.map_err(|source| Failure::System { what: what(), source })
    }
}
