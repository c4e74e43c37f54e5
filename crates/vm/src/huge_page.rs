//! Huge pages on a surface: the kernel collapses and splits them when the surface's owner says so,
//! and at no other time.
//!
//! A reservation is marked `MADV_NOHUGEPAGE`, so that populating one page never brings 512, even
//! with transparent huge pages set to `always`. `MADV_COLLAPSE` (Linux 6.1) refuses ranges with
//! that mark, so collapsing removes it from the range alone and sets it again; the huge page
//! survives that. Meanwhile the mapping is in up to three pieces (`vm.max_map_count`), which the
//! kernel merges again afterwards. Measured on 6.18: 5 and 20 µs for the mark, and 0.6 to 1 ms of
//! processor time for the 2 MiB between them; 5 ms where a hypervisor has yet to back the new
//! memory. A call also drains the per-CPU page caches of the other processors and waits for that, 5
//! to 25 ms where these are busy: so collapse neighbours by one call.
//!
//! `MADV_DONTNEED` of a part of a huge page clears that part's PTEs but keeps *all* of its memory
//! charged: the kernel splits the page only once memory runs short, and residency by page tables
//! does not show it. `MADV_COLD` of a part splits in place (about 0.2 ms), unless something holds
//! the page, as direct I/O does. It does not report whether it split, so this module reads the page
//! tables (`PAGEMAP_SCAN`, Linux 6.7). [`probe`](crate::probe) tries all of it.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::advice::Advice;
use crate::error::SurfaceError;
use crate::range::PageRange;
use crate::scratch::Scratch;
use crate::surface::Surface;
use crate::{HUGE_PAGE_SIZE, HUGE_PAGES, PAGE_SIZE, sys};

/// The outcome of a request that the kernel may decline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Done.
    Done,
    /// Not now; nothing is lost, and it may succeed later.
    ///
    /// Collapsing: `EAGAIN` or `EINVAL` while something holds one of the pages (direct I/O, a page
    /// that is being swapped out), `ENOMEM` without a free huge page or a mapping to spare, `EBUSY`
    /// at the limit of the memory control group. Splitting: `EBUSY` while something holds the page.
    NotNow(Errno),
}

impl Asked {
    /// It was done.
    pub fn is_done(self) -> bool {
        self == Self::Done
    }
}

impl Surface {
    /// Whether the kernel can collapse and split huge pages on this surface. The crate tries it
    /// once per process. The surface must lie at a multiple of 2 MiB, which it does in an ordinary
    /// address space. False on an exmap, whose frames are pages of 4 KiB.
    pub fn can_collapse(&self) -> bool {
        let aligned = self.base().addr().get().is_multiple_of(HUGE_PAGE_SIZE);
        self.takes_advice() && aligned && huge_pages().is_ok()
    }

    /// Puts the memory of a range into huge pages. The range starts at a multiple of
    /// [`HUGE_PAGES`], as does its end; pages in it without memory get some.
    ///
    /// Contents are never altered; other threads may read and write meanwhile, and wait for about
    /// as long as the copy takes. While it runs, one more huge page is in use than afterwards. The
    /// kernel collapses a range of several one by one; `NotNow` may mean that it collapsed some of
    /// them.
    ///
    /// No thread may release pages of the range meanwhile: a page that is populated again before
    /// the call has returned could fault in a huge page.
    ///
    /// # Errors
    /// [`SurfaceError::OutOfRange`], [`SurfaceError::Unaligned`], [`SurfaceError::NoAdvice`], or
    /// [`SurfaceError::AdviceRefused`] if the range stays open to huge pages because the kernel
    /// refused to set the mark again: stop using huge pages then.
    pub fn collapse(&self, range: PageRange) -> Result<Asked, SurfaceError> {
        self.check_range(range)?;
        if !range.start.is_multiple_of(HUGE_PAGES) || !range.count.is_multiple_of(HUGE_PAGES) {
            return Err(SurfaceError::Unaligned { range });
        }
        self.check_advice(Advice::Collapse)?;
        if let Err(errno) = self.ask_once(range, Advice::HugePage) {
            return Ok(Asked::NotNow(errno));
        }
        let collapsed = self.ask_once(range, Advice::Collapse);
        self.advise(range, Advice::NoHugePage)?;
        Ok(collapsed.map_or_else(Asked::NotNow, |()| Asked::Done))
    }

    /// Splits the huge page that `page` lies in into pages of 4 KiB again, in place, and advises
    /// the kernel that `page` is cold: name one that is about to be released. Returns `Done` as
    /// well if `page` lies in no huge page.
    ///
    /// Contents are never altered; other threads may read and write meanwhile. Do this before
    /// releasing a part of a huge page; a whole one needs no split. Pages that hold nothing but
    /// zeros may share the kernel's zero page afterwards, as if they had never been written (6.12).
    ///
    /// # Errors
    /// [`SurfaceError::OutOfRange`]; [`SurfaceError::NoAdvice`], [`SurfaceError::AdviceRefused`] or
    /// [`SurfaceError::Pagemap`] where [`can_collapse`](Self::can_collapse) is false.
    pub fn split(&self, page: u64) -> Result<Asked, SurfaceError> {
        // A split may fail after the kernel split the page-table entries, because another reference
        // to the page was taken just then: the second call splits the page itself.
        for _ in 0..2 {
            self.advise(PageRange::new(page, 1), Advice::Cold)?;
        }
        let is_huge = self.is_huge(page)?;
        Ok(if is_huge { Asked::NotNow(Errno::BUSY) } else { Asked::Done })
    }

    /// Whether a page is mapped as a part of a huge page, by the kernel's own page tables.
    ///
    /// # Errors
    /// [`SurfaceError::OutOfRange`], or [`SurfaceError::Pagemap`] before Linux 6.7.
    pub fn is_huge(&self, page: u64) -> Result<bool, SurfaceError> {
        self.check_range(PageRange::new(page, 1))?;
        let address = self.address(page).addr().get();
        is_huge(self.pagemap()?, address).map_err(|errno| SurfaceError::Pagemap { errno })
    }
}

/// Whether the page at an address of this process is mapped as a part of a huge page.
pub(crate) fn is_huge(pagemap: &File, address: usize) -> Result<bool, Errno> {
    sys::pagemap_scan(pagemap.as_fd(), address, PAGE_SIZE, sys::PAGE_IS_HUGE)
        .map(|regions| regions > 0)
}

/// The cost of a huge page on this machine: the quickest of a few trials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePageCost {
    /// Putting 512 pages together, the calls around it included.
    pub collapse: Duration,
    /// Splitting them again.
    pub split: Duration,
}

/// Whether the kernel can collapse huge pages in memory that is marked against them, split them
/// again, and tell them from others; tried once per process. `MADV_COLLAPSE` would work where huge
/// pages are switched off (mode `never`); the crate respects that as the wish of the machine's
/// owner, and says no.
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
    if huge_page_mode().as_deref() == Some("never") {
        return Err("transparent huge pages are switched off (mode never)".to_owned());
    }
    let said = |errno: Errno| errno.to_string();
    let scratch = Scratch::new(2 * HUGE_PAGES).map_err(said)?;
    let unaligned = scratch.address(0).next_multiple_of(HUGE_PAGE_SIZE) - scratch.address(0);
    let range = PageRange::new((unaligned / PAGE_SIZE) as u64, HUGE_PAGES);
    let pages = range.start..range.start + HUGE_PAGES;
    let value = |page| (page % 255) as u8 + 1;
    pages.clone().for_each(|page| scratch.write(page, value(page)));
    let pagemap = File::open("/proc/self/pagemap").map_err(|error| error.to_string())?;
    let collapsed_at = |page| {
        is_huge(&pagemap, scratch.address(page))
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
        if !collapsed_at(leaving)? {
            return Err("it reported success but made no huge page".to_owned());
        }
        let start = Instant::now();
        scratch.advise(PageRange::new(leaving, 1), libc::MADV_COLD).map_err(said)?;
        best.split = best.split.min(start.elapsed());
        if collapsed_at(leaving)? {
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

/// Where the machine's owner sets the mode of transparent huge pages.
pub(crate) const HUGE_PAGE_MODE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// The mode that the machine's owner set: `always`, `madvise` or `never`.
pub(crate) fn huge_page_mode() -> Option<String> {
    let text = std::fs::read_to_string(HUGE_PAGE_MODE).ok()?;
    selected(&text).map(str::to_owned)
}

/// The word in brackets: how the kernel marks the selected one.
fn selected(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_in_brackets_is_selected() {
        assert_eq!(selected("always [madvise] never\n"), Some("madvise"));
        assert_eq!(selected("always madvise never\n"), None);
    }
}
