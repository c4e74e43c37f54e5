//! Huge pages on a surface, put together and taken apart when its owner says so, and never else.
//!
//! A reservation is marked `MADV_NOHUGEPAGE`, so that populating one page never brings 512, even
//! with transparent huge pages set to `always`. `MADV_COLLAPSE` (Linux 6.1) refuses ranges with
//! that mark, so collapsing lifts it from the range alone and puts it back; the huge page survives
//! that. For this time the mapping is in up to three pieces (`vm.max_map_count`), merged again
//! afterwards. Measured on 6.18: 5 and 20 µs for the mark, and 0.6 to 1 ms of processor time for
//! the 2 MiB between them; 5 ms where a hypervisor has yet to back the new memory. A call also
//! drains the other processors' page caches and waits for that, 5 to 25 ms where these are busy:
//! so neighbours are better collapsed by one call.
//!
//! `MADV_DONTNEED` of a part of a huge page takes that part's addresses away but keeps *all* of
//! its memory charged: the kernel splits the page only once memory runs short, and residency by
//! page tables does not show it. `MADV_COLD` of a part splits in place (about 0.2 ms), unless
//! somebody holds the page, as direct I/O from it does; it does not say whether it did, hence the
//! look into the page tables (`PAGEMAP_SCAN`, Linux 6.7). [`probe`](crate::probe) tries all of it.

use std::fs::File;
use std::os::fd::AsFd;

use rustix::io::Errno;

use crate::probe;
use crate::range::PageRange;
use crate::surface::{Advice, Surface, SurfaceError};
use crate::{PAGE_SIZE, sys};

/// Pages of a huge page: 2 MiB, on x86-64 and on aarch64 with pages of 4 KiB.
pub const HUGE_PAGES: u64 = 512;

/// Bytes of a huge page.
pub const HUGE_PAGE_SIZE: usize = HUGE_PAGES as usize * PAGE_SIZE;

/// What became of a request that the kernel may decline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Done.
    Done,
    /// Not now; nothing is lost, and it may succeed later.
    ///
    /// Collapsing: `EAGAIN` or `EINVAL` while somebody holds one of the pages (direct I/O, a page
    /// on its way to swap), `ENOMEM` without a free huge page or a mapping to spare, `EBUSY` at
    /// the limit of the memory control group. Splitting: `EBUSY` while somebody holds the page.
    NotNow(Errno),
}

impl Asked {
    /// It was done.
    pub fn is_done(self) -> bool {
        self == Self::Done
    }
}

impl Surface {
    /// Whether huge pages can be had here, and taken apart again: tried once per process, and
    /// needs the surface to lie at a multiple of 2 MiB, which it does in an ordinary address space.
    /// False on an exmap, whose frames are pages of 4 KiB.
    pub fn can_collapse(&self) -> bool {
        let aligned = self.base().addr().get().is_multiple_of(HUGE_PAGE_SIZE);
        self.takes_advice() && aligned && probe::huge_pages().is_ok()
    }

    /// Puts the memory of a range into huge pages. The range starts at a multiple of
    /// [`HUGE_PAGES`], as does its end; pages in it without memory get some.
    ///
    /// Contents are never altered; others may read and write meanwhile, and wait for about as long
    /// as the copy takes. While it runs, a huge page more than afterwards is in use. A range of
    /// several goes huge page by huge page; `NotNow` may mean that some of them were done.
    ///
    /// Nobody may release pages of the range meanwhile: a page that is populated anew before the
    /// call has returned could bring a huge page with it.
    ///
    /// # Errors
    /// [`SurfaceError::OutOfRange`], [`SurfaceError::Unaligned`], [`SurfaceError::NoAdvice`], or
    /// [`SurfaceError::AdviceRefused`] if the range stays open to huge pages, since the kernel
    /// would not take its leave back: stop using huge pages then.
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

    /// Splits the huge page that `page` lies in into pages of 4 KiB again, in place, and takes
    /// `page` for cold: name one that is to leave. Done as well where it lies in no huge page.
    ///
    /// Contents are never altered; others may read and write meanwhile. Do this before releasing a
    /// part of a huge page; the whole of one is released without. Pages that hold nothing but zeros
    /// may share the kernel's zero page afterwards, as if they had never been written (6.12).
    ///
    /// # Errors
    /// [`SurfaceError::OutOfRange`]; [`SurfaceError::NoAdvice`], [`SurfaceError::AdviceRefused`] or
    /// [`SurfaceError::Pagemap`] where [`can_collapse`](Self::can_collapse) is false.
    pub fn split(&self, page: u64) -> Result<Asked, SurfaceError> {
        // A split may fail after the page-table entries were taken apart, because somebody took
        // hold of the page just then: the second call looks at the page behind the entries.
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
