//! Trials: does a call really do what a backend needs? Each runs once per process, on scratch
//! memory, and checks the effect, not only the return value.

use std::sync::OnceLock;

use super::exmap::Exmap;
use super::process_madvise::OwnProcess;
use crate::error::SurfaceError;
use crate::memory::Memory;
use crate::range::{Entry, PageRange};
use crate::scratch::{Scratch, ScratchSurface};

/// Why a trial failed, in one line; Ok if it did not.
type Outcome = Result<(), String>;

/// Pages of a trial.
const PAGES: u64 = 8;

/// The ranges that trials with vectors work on: pages 1, 3, 5 and 6.
fn scattered() -> [Entry; 3] {
    [Entry::page(1), Entry::page(3), Entry::new(PageRange::new(5, 2))]
}

/// Whether a page is one of [`scattered`].
fn is_scattered(page: u64) -> bool {
    matches!(page, 1 | 3 | 5 | 6)
}

/// Whether `madvise(MADV_POPULATE_WRITE)` works.
pub(crate) fn populate_write() -> Outcome {
    static OUTCOME: OnceLock<Outcome> = OnceLock::new();
    OUTCOME
        .get_or_init(|| {
            populates(|scratch, entries| {
                for entry in entries {
                    entry.result = scratch.advise(entry.range, libc::MADV_POPULATE_WRITE);
                }
                Ok(())
            })
        })
        .clone()
}

/// Whether `process_madvise(MADV_POPULATE_WRITE)` works on the calling process.
pub(crate) fn vectored_populate() -> Outcome {
    static OUTCOME: OnceLock<Outcome> = OnceLock::new();
    OUTCOME
        .get_or_init(|| {
            populates(|scratch, entries| {
                let process = OwnProcess::open().map_err(|errno| errno.to_string())?;
                scratch.advise_vector(&process, entries, libc::MADV_POPULATE_WRITE);
                Ok(())
            })
        })
        .clone()
}

/// Whether `process_madvise(MADV_DONTNEED)` works on the calling process.
pub(crate) fn vectored_release() -> Outcome {
    static OUTCOME: OnceLock<Outcome> = OnceLock::new();
    OUTCOME.get_or_init(try_vectored_release).clone()
}

/// Whether this process can make an exmap, and the exmap does what the backend needs.
pub(crate) fn exmap() -> Outcome {
    static OUTCOME: OnceLock<Outcome> = OnceLock::new();
    OUTCOME.get_or_init(try_exmap).clone()
}

/// Tries a way of populating on pages, one of which holds data.
fn populates(populate: impl FnOnce(&Scratch, &mut [Entry]) -> Outcome) -> Outcome {
    let scratch = Scratch::new(PAGES).map_err(|errno| format!("no scratch memory: {errno}"))?;
    scratch.write(1, 9);
    let mut entries = scattered();
    populate(&scratch, &mut entries)?;
    all_done(&entries)?;
    if scratch.resident(PageRange::new(0, PAGES)).is_some_and(|resident| resident != 4) {
        return Err("it reported success but populated other pages".to_owned());
    }
    if scratch.read(1) != 9 {
        return Err("it altered contents".to_owned());
    }
    Ok(())
}

fn try_vectored_release() -> Outcome {
    let process = OwnProcess::open().map_err(|errno| errno.to_string())?;
    let scratch = Scratch::new(PAGES).map_err(|errno| format!("no scratch memory: {errno}"))?;
    (0..PAGES).for_each(|page| scratch.write(page, 1));
    let mut entries = scattered();
    scratch.advise_vector(&process, &mut entries, libc::MADV_DONTNEED);
    all_done(&entries)?;
    let kept = PAGES - (0..PAGES).filter(|page| is_scattered(*page)).count() as u64;
    if scratch.resident(PageRange::new(0, PAGES)).is_some_and(|resident| resident != kept) {
        return Err("it reported success but released other pages".to_owned());
    }
    if (0..PAGES).any(|page| scratch.read(page) != u8::from(!is_scattered(page))) {
        return Err("released pages do not read as zeros".to_owned());
    }
    Ok(())
}

fn try_exmap() -> Outcome {
    let (exmap, memory) = Exmap::open(PAGES, PAGES).map_err(|error| match error {
        SurfaceError::BackendUnavailable { reason, .. } => reason,
        other => other.to_string(),
    })?;
    let surface = ScratchSurface::new((Memory::Exmap(memory), Box::new(exmap)));
    let mut entries = scattered();
    surface.populate(&mut entries);
    all_done(&entries)?;
    (0..PAGES).filter(|page| is_scattered(*page)).for_each(|page| surface.write(page, 9));
    surface.populate(&mut entries);
    all_done(&entries)?;
    if (0..PAGES).any(|page| surface.read(page) != if is_scattered(page) { 9 } else { 0 }) {
        return Err("it altered contents".to_owned());
    }
    if surface.resident().is_some_and(|resident| resident != 4) {
        return Err("it reported success but populated other pages".to_owned());
    }
    surface.release(&mut entries);
    all_done(&entries)?;
    if (0..PAGES).any(|page| surface.read(page) != 0) {
        return Err("released pages do not read as zeros".to_owned());
    }
    if surface.resident().is_some_and(|resident| resident != 0) {
        return Err("it reported success but released nothing".to_owned());
    }
    Ok(())
}

/// The first error of a batch, as an outcome.
fn all_done(entries: &[Entry]) -> Outcome {
    entries.iter().try_for_each(|entry| entry.result).map_err(|errno| errno.to_string())
}
