//! Trials: does a call really do what a backend needs? Each runs once per process, on scratch
//! memory, and looks at the effect, not only at the return value.

use std::fs::File;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::backend::exmap::Exmap;
use crate::backend::process_madvise::OwnProcess;
use crate::huge_page::{self, HUGE_PAGE_SIZE, HUGE_PAGES};
use crate::memory::Memory;
use crate::range::{Entry, PageRange};
use crate::scratch::{Scratch, ScratchSurface};
use crate::surface::{Surface, SurfaceError};
use crate::{PAGE_SIZE, sys};

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

/// Whether `process_madvise(MADV_POPULATE_WRITE)` works on the own process.
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

/// Whether `process_madvise(MADV_DONTNEED)` works on the own process.
pub(crate) fn vectored_release() -> Outcome {
    static OUTCOME: OnceLock<Outcome> = OnceLock::new();
    OUTCOME.get_or_init(try_vectored_release).clone()
}

/// Whether an exmap can be made here, and does what the backend needs.
pub(crate) fn exmap() -> Outcome {
    static OUTCOME: OnceLock<Outcome> = OnceLock::new();
    OUTCOME.get_or_init(try_exmap).clone()
}

/// What a huge page costs here: the quickest of a few trials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePageCost {
    /// Putting 512 pages together, the calls around it included.
    pub collapse: Duration,
    /// Splitting them again.
    pub split: Duration,
}

/// Whether huge pages can be put together in memory that is marked against them, be taken apart
/// again, and be told from others; tried once per process. `MADV_COLLAPSE` would work where they
/// are switched off (mode `never`); that is taken for the owner's wish, and counts as no.
///
/// # Errors
/// The reason, in one line.
pub fn huge_pages() -> Result<HugePageCost, String> {
    static OUTCOME: OnceLock<Result<HugePageCost, String>> = OnceLock::new();
    OUTCOME.get_or_init(try_huge_pages).clone()
}

/// Rounds of the trial with huge pages.
const ROUNDS: u64 = 3;

fn try_huge_pages() -> Result<HugePageCost, String> {
    if super::facilities::huge_page_mode().as_deref() == Some("never") {
        return Err("transparent huge pages are switched off (mode never)".to_owned());
    }
    let said = |errno: rustix::io::Errno| errno.to_string();
    let scratch = Scratch::new(2 * HUGE_PAGES).map_err(said)?;
    let unaligned = scratch.address(0).next_multiple_of(HUGE_PAGE_SIZE) - scratch.address(0);
    let range = PageRange::new((unaligned / PAGE_SIZE) as u64, HUGE_PAGES);
    let pages = range.start..range.start + HUGE_PAGES;
    let value = |page| (page % 255) as u8 + 1;
    pages.clone().for_each(|page| scratch.write(page, value(page)));
    let pagemap = File::open("/proc/self/pagemap").map_err(|error| error.to_string())?;
    let is_huge = |page| {
        huge_page::is_huge(&pagemap, scratch.address(page))
            .map_err(|errno| format!("collapsed or not cannot be seen (PAGEMAP_SCAN): {errno}"))
    };
    let mut best = HugePageCost { collapse: Duration::MAX, split: Duration::MAX };
    for leaving in pages.clone().take(ROUNDS as usize) {
        let start = Instant::now();
        scratch.advise(range, libc::MADV_HUGEPAGE).map_err(said)?;
        let collapsed = scratch.advise(range, sys::MADV_COLLAPSE);
        scratch.advise(range, libc::MADV_NOHUGEPAGE).map_err(said)?;
        best.collapse = best.collapse.min(start.elapsed());
        collapsed.map_err(said)?;
        if !is_huge(leaving)? {
            return Err("it reported success but made no huge page".to_owned());
        }
        let start = Instant::now();
        scratch.advise(PageRange::new(leaving, 1), libc::MADV_COLD).map_err(said)?;
        best.split = best.split.min(start.elapsed());
        if is_huge(leaving)? {
            return Err("MADV_COLD does not split the huge page again".to_owned());
        }
    }
    if pages.clone().any(|page| scratch.read(page) != value(page)) {
        return Err("it altered contents".to_owned());
    }
    scratch.advise(PageRange::new(range.start, 1), libc::MADV_DONTNEED).map_err(said)?;
    match scratch.resident(range) {
        Some(resident) if resident != HUGE_PAGES - 1 => {
            Err("releasing one page of it released others".to_owned())
        }
        _ => Ok(best),
    }
}

/// Tries a way of populating on pages of which one holds something.
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
    let surface = ScratchSurface::on(Surface::on(Memory::Exmap(memory), Box::new(exmap)));
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
