//! The two backends of Morsels, and which of them this machine offers.

pub(crate) mod kernel;
mod kind;
pub(crate) mod memfd;

pub use kind::{BackendChoice, BackendKind};

/// The result of trying a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Which one.
    pub backend: BackendKind,
    /// One line: what it offers on this machine; or why it cannot be used, and what to do.
    pub found: Result<String, String>,
}

/// Tries all backends, the best first.
pub fn probe() -> Vec<Probe> {
    let tried = |backend| {
        let found = match backend {
            BackendKind::Kernel => kernel::MorselFs::find().map(|morselfs| morselfs.about()),
            BackendKind::Memfd => memfd::try_it(),
        };
        Probe { backend, found }
    };
    BackendKind::ALL.into_iter().map(tried).collect()
}
