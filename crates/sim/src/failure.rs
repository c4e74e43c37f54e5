//! What a simulation found wrong.

use std::fmt;

use vellum::Error;
use vellum_log::LogError;

/// What a simulation found wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(String);

/// The result of a part of a simulation.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Something is wrong.
    pub fn new(what: impl Into<String>) -> Failure {
        Failure(what.into())
    }

    /// The store refused what it must do.
    pub(crate) fn of<'w>(what: &'w str) -> impl Fn(Error) -> Failure + 'w {
        move |error| Failure(format!("{what}: {error}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// Fails with a message unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err($crate::failure::Failure::new(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;

/// Whether an error may come from a full disk or log, or from a planned fault.
pub(crate) fn is_from_outside(error: &Error) -> bool {
    matches!(
        error,
        Error::DiskFull(_)
            | Error::Io(_)
            | Error::Poisoned(_)
            | Error::NotDurable(_)
            | Error::PoolExhausted(_)
            | Error::Log(LogError::Full { .. } | LogError::Poisoned { .. } | LogError::Io { .. })
    )
}
