//! Which backend a surface gets, and why.

use std::sync::OnceLock;

use super::exmap::Exmap;
use super::madvise::Madvise;
use super::process_madvise::ProcessMadvise;
use super::trial;
use super::{Backend, BackendChoice, BackendKind};
use crate::error::SurfaceError;
use crate::limits;
use crate::memory::Memory;

/// Frames of a short surface if the caller does not say how many it needs: 1 MiB.
pub(crate) const MIN_FRAMES: u64 = 256;
/// Frames of a long surface if the caller does not say how many it needs: 64 MiB.
pub(crate) const MAX_FRAMES: u64 = 16_384;

/// The backend that [`BackendChoice::Auto`] means here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The backend.
    pub backend: BackendKind,
    /// Why this one, in one line.
    pub reason: String,
}

/// The backend that [`BackendChoice::Auto`] takes on this machine; tried once per process.
///
/// Exmap is for surfaces that say how many frames they need, if the module can provide these; other
/// surfaces get the backend of [`choice_without_exmap`].
pub fn choice() -> &'static Choice {
    static CHOICE: OnceLock<Choice> = OnceLock::new();
    CHOICE.get_or_init(|| match works(BackendKind::Exmap) {
        Ok(()) => Choice {
            backend: BackendKind::Exmap,
            reason: format!(
                "it was seen to work; this user may lock {}; what does not fit, and what does not \
                 say its size, is on {}",
                limits::lockable(),
                choice_without_exmap().backend
            ),
        },
        Err(_) => choice_without_exmap().clone(),
    })
}

/// The backend for surfaces that do not say how many frames they need, and for those whose frames
/// the module cannot provide; tried once per process.
pub fn choice_without_exmap() -> &'static Choice {
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

/// Whether a backend works on this machine, or why not.
///
/// # Errors
/// The reason, in one line.
pub fn works(backend: BackendKind) -> Result<(), String> {
    match backend {
        BackendKind::Madvise => Ok(()),
        BackendKind::ProcessMadvise => trial::vectored_release(),
        BackendKind::Exmap => trial::exmap(),
    }
}

/// The backends that work on this machine, the simplest first.
pub fn backends() -> Vec<BackendKind> {
    BackendKind::ALL.into_iter().filter(|kind| works(*kind).is_ok()).collect()
}

/// Makes the memory of a surface of `pages` pages, with its backend. `frames` is the largest number
/// of pages that are populated at a time, if the caller knows it.
pub(crate) fn open(
    wanted: BackendChoice,
    pages: u64,
    frames: Option<u64>,
) -> Result<(Memory, Box<dyn Backend>), SurfaceError> {
    let kind = match (wanted, frames) {
        (BackendChoice::Only(kind), _) => kind,
        (BackendChoice::Auto, Some(_)) => choice().backend,
        (BackendChoice::Auto, None) => choice_without_exmap().backend,
    };
    let unavailable = |reason| SurfaceError::BackendUnavailable { backend: kind, reason };
    works(kind).map_err(unavailable)?;
    let madvise = || Madvise::new(trial::populate_write().is_ok());
    let backend: Box<dyn Backend> = match kind {
        BackendKind::Madvise => Box::new(madvise()),
        BackendKind::ProcessMadvise => {
            let populates = trial::vectored_populate().is_ok();
            let backend = ProcessMadvise::new(populates, madvise());
            Box::new(backend.map_err(|errno| unavailable(errno.to_string()))?)
        }
        BackendKind::Exmap => {
            let frames = frames.unwrap_or(pages.clamp(MIN_FRAMES, MAX_FRAMES));
            return match (Exmap::open(pages, frames), wanted) {
                (Ok((exmap, memory)), _) => Ok((Memory::Exmap(memory), Box::new(exmap))),
                // The module has no frames, or this user may not lock them.
                (Err(_), BackendChoice::Auto) => open(wanted, pages, None),
                (Err(error), BackendChoice::Only(_)) => Err(error),
            };
        }
    };
    Ok((Memory::reserve(pages)?, backend))
}
