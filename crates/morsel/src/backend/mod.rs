//! The two ways of having a Morsel, and which of them this machine offers.

pub(crate) mod kernel;
mod kind;
pub(crate) mod memfd;

pub use kind::{BackendChoice, BackendKind};

/// What trying a backend has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Which one.
    pub backend: BackendKind,
    /// In a line: what it offers here; or why it cannot be used, and what to do.
    pub found: Result<String, String>,
}

/// Tries all backends, the best first.
pub fn probe() -> Vec<Probe> {
    let tried = |backend| {
        let found = match backend {
            BackendKind::Kernel => kernel::Place::find().map(|place| place.about()),
            BackendKind::Memfd => memfd::try_it(),
        };
        Probe { backend, found }
    };
    BackendKind::ALL.into_iter().map(tried).collect()
}
