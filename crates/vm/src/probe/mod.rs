//! What this machine offers, which backend is used and why, and what a page costs.
//!
//! Everything is found out by trying it, never by the kernel's version number: distributions port
//! features back, and sandboxes take them away.

mod facilities;
mod trial;

pub mod cost;

use std::sync::OnceLock;

pub use facilities::{Facilities, Facility};
pub(crate) use trial::populate_write;
pub use trial::{HugePageCost, huge_pages};

use crate::backend::madvise::Madvise;
use crate::backend::process_madvise::ProcessMadvise;
use crate::backend::{Backend, BackendChoice, BackendKind};
use crate::surface::SurfaceError;

/// The backend that [`BackendChoice::Auto`] means here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The backend.
    pub backend: BackendKind,
    /// Why this one, in one line.
    pub reason: String,
}

/// Looks at everything this machine offers. Takes a few milliseconds; nothing is cached but the
/// choice of backend.
pub fn facilities() -> Facilities {
    facilities::look()
}

/// The backend that [`BackendChoice::Auto`] means here; found out once per process.
pub fn choice() -> &'static Choice {
    static CHOICE: OnceLock<Choice> = OnceLock::new();
    CHOICE.get_or_init(|| match works(BackendKind::ProcessMadvise) {
        Ok(()) => Choice {
            backend: BackendKind::ProcessMadvise,
            reason: "one call releases a whole batch, and it was seen to work".to_owned(),
        },
        Err(reason) => Choice {
            backend: BackendKind::Madvise,
            reason: format!("process_madvise does not work here: {reason}"),
        },
    })
}

/// Whether a backend works here; where not, why not.
///
/// # Errors
/// The reason, in one line.
pub fn works(backend: BackendKind) -> Result<(), String> {
    match backend {
        BackendKind::Madvise => Ok(()),
        BackendKind::ProcessMadvise => trial::vectored_release(),
    }
}

/// The backends that work here, the plainest first.
pub fn backends() -> Vec<BackendKind> {
    BackendKind::ALL.into_iter().filter(|kind| works(*kind).is_ok()).collect()
}

/// Makes the backend for a new surface.
pub(crate) fn open(wanted: BackendChoice) -> Result<Box<dyn Backend>, SurfaceError> {
    let kind = match wanted {
        BackendChoice::Auto => choice().backend,
        BackendChoice::Only(kind) => kind,
    };
    let unavailable = |reason| SurfaceError::BackendUnavailable { backend: kind, reason };
    works(kind).map_err(unavailable)?;
    Ok(match kind {
        BackendKind::Madvise => Box::new(Madvise::new()),
        BackendKind::ProcessMadvise => {
            let populates = trial::vectored_populate().is_ok();
            Box::new(
                ProcessMadvise::new(populates).map_err(|errno| unavailable(errno.to_string()))?,
            )
        }
    })
}
