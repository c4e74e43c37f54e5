//! The memory on which threads allocate and free pages: an exmap, ordinary memory, or nothing.
#![allow(unsafe_code)]

use anyhow::{Result, ensure};
use vellum_uapi::exmap::{ALLOC, FREE};
use vellum_vm::{BackendChoice, BackendKind, Entry, PageRange, Surface};

use super::device::{Exmap, Interface};
use super::pattern::BATCH;
use vellum_bench::workload::values::Random;

/// A range of pages that threads can populate and free.
pub trait PageMemory: Sync {
    /// The interface of a thread. No two threads have the same interface at a time.
    ///
    /// # Errors
    /// If there is no such interface.
    fn populator(&self, interface: usize) -> Result<Box<dyn Populator + '_>>;

    /// Accesses a cache line of a populated page.
    fn touch(&self, page: u64);
}

/// A thread's way to populate and free pages, a batch at a time.
pub trait Populator {
    /// Populates pages. Moves pages that were not populated, because there is no memory or because
    /// they are present already, from `pages` to `refused`, which is empty before.
    ///
    /// # Errors
    /// If the kernel says something else.
    fn bring(&mut self, pages: &mut Vec<u64>, refused: &mut Vec<u64>) -> Result<()>;

    /// Frees pages, all of which are present.
    ///
    /// # Errors
    /// If one was not there.
    fn take(&mut self, pages: &[u64]) -> Result<()>;
}

/// No memory at all: the remaining cost is that of the benchmark itself.
#[derive(Debug)]
pub struct Nothing;

impl PageMemory for Nothing {
    fn populator(&self, _lane: usize) -> Result<Box<dyn Populator + '_>> {
        Ok(Box::new(Nothing))
    }

    fn touch(&self, _page: u64) {}
}

impl Populator for Nothing {
    fn bring(&mut self, _pages: &mut Vec<u64>, _refused: &mut Vec<u64>) -> Result<()> {
        Ok(())
    }

    fn take(&mut self, _pages: &[u64]) -> Result<()> {
        Ok(())
    }
}

/// An exmap, with private descriptors and so many pages a call.
#[derive(Debug)]
pub struct OfExmap {
    exmap: Exmap,
    batch: usize,
}

impl OfExmap {
    /// With whole batches.
    pub fn new(exmap: Exmap) -> OfExmap {
        OfExmap { exmap, batch: BATCH }
    }

    /// With a call for each page.
    pub fn page_by_page(exmap: Exmap) -> OfExmap {
        OfExmap { exmap, batch: 1 }
    }

    /// The exmap.
    pub fn exmap(&self) -> &Exmap {
        &self.exmap
    }

    /// The exmap, for other uses.
    pub fn into_exmap(self) -> Exmap {
        self.exmap
    }
}

impl PageMemory for OfExmap {
    fn populator(&self, interface: usize) -> Result<Box<dyn Populator + '_>> {
        let interface = self.exmap.interface(interface)?.private()?;
        Ok(Box::new(HandOfExmap { interface, batch: self.batch, kept: Vec::with_capacity(BATCH) }))
    }

    fn touch(&self, page: u64) {
        self.exmap.touch(page);
    }
}

struct HandOfExmap<'a> {
    interface: Interface<'a>,
    batch: usize,
    kept: Vec<u64>,
}

/// The result of an entry for a page without memory.
const NO_MEMORY: i32 = -libc::ENOMEM;

impl Populator for HandOfExmap<'_> {
    fn bring(&mut self, pages: &mut Vec<u64>, refused: &mut Vec<u64>) -> Result<()> {
        self.kept.clear();
        for part in pages.chunks(self.batch) {
            self.interface.run_pages(ALLOC, part)?;
            for (index, page) in part.iter().enumerate() {
                let entry = self.interface.get(index);
                let error = entry.result();
                ensure!(error == 0 || error == NO_MEMORY, "page {page} did not come: {error}");
                let list = if entry.pages() == 1 { &mut self.kept } else { &mut *refused };
                list.push(*page);
            }
        }
        std::mem::swap(pages, &mut self.kept);
        Ok(())
    }

    fn take(&mut self, pages: &[u64]) -> Result<()> {
        pages.chunks(self.batch).try_for_each(|part| self.interface.run_all(FREE, part))
    }
}

/// Memory that the kernel faults in when a page is touched, and that the program frees.
#[derive(Debug)]
pub struct OfKernel(Surface);

impl OfKernel {
    /// A surface of `pages` pages that are freed that way.
    ///
    /// # Errors
    /// If the kernel cannot.
    pub fn new(pages: u64, backend: BackendKind) -> Result<OfKernel> {
        Ok(OfKernel(Surface::reserve(pages, BackendChoice::Only(backend))?))
    }

    /// The surface.
    pub fn surface(&self) -> &Surface {
        &self.0
    }
}

impl PageMemory for OfKernel {
    fn populator(&self, _lane: usize) -> Result<Box<dyn Populator + '_>> {
        Ok(Box::new(HandOfKernel { surface: &self.0, entries: Vec::with_capacity(BATCH) }))
    }

    fn touch(&self, page: u64) {
        // SAFETY: the page lies on the surface, and no reference into it exists.
        unsafe { self.0.address(page).as_ptr().write_volatile(1) };
    }
}

struct HandOfKernel<'a> {
    surface: &'a Surface,
    entries: Vec<Entry>,
}

impl Populator for HandOfKernel<'_> {
    fn bring(&mut self, pages: &mut Vec<u64>, _refused: &mut Vec<u64>) -> Result<()> {
        // The first access populates a page.
        pages.iter().for_each(|page| {
            // SAFETY: the page lies on the surface, and no reference into it exists.
            unsafe { self.surface.address(*page).as_ptr().write_volatile(1) };
        });
        Ok(())
    }

    fn take(&mut self, pages: &[u64]) -> Result<()> {
        self.entries.clear();
        let one = |page: &u64| Entry::new(PageRange { start: *page, count: 1 });
        self.entries.extend(pages.iter().map(one));
        // SAFETY: only the threads of this benchmark know these pages, and no reference into them
        // exists.
        let failed = unsafe { self.surface.release(&mut self.entries) };
        ensure!(failed == 0, "releasing {failed} of {} pages failed", pages.len());
        Ok(())
    }
}

/// Allocates all page tables of the surface, so that no measurement includes that.
///
/// # Errors
/// If a page does not come.
pub fn make_tables(memory: &dyn PageMemory, pages: u64) -> Result<()> {
    let mut hand = memory.populator(0)?;
    let (mut batch, mut refused) = (Vec::with_capacity(BATCH), Vec::new());
    let mut firsts = (0..pages).step_by(512).peekable();
    while firsts.peek().is_some() {
        batch.extend(firsts.by_ref().take(BATCH / 8));
        hand.bring(&mut batch, &mut refused)?;
        ensure!(refused.is_empty(), "pages {refused:?} did not come");
        hand.take(&batch)?;
        batch.clear();
    }
    Ok(())
}

/// Brings the pool into the order that it has after long use: allocates and frees all of its frames
/// at random, through all interfaces.
///
/// # Errors
/// If the kernel refuses.
pub fn shuffle(memory: &dyn PageMemory, frames: u64, pages: u64, interfaces: usize) -> Result<()> {
    let mut hands = (0..interfaces)
        .map(|interface| memory.populator(interface))
        .collect::<Result<Vec<Box<dyn Populator + '_>>>>()?;
    let step = (pages / frames).max(1);
    let wanted: Vec<u64> = (0..frames.min(pages)).map(|frame| frame * step).collect();
    let (mut there, mut refused) = (Vec::with_capacity(wanted.len()), Vec::new());
    for (turn, part) in wanted.chunks(BATCH).enumerate() {
        let mut batch = part.to_vec();
        hands[turn % interfaces].bring(&mut batch, &mut refused)?;
        there.extend(batch);
        refused.clear();
    }
    let mut random = Random::new(1);
    for last in (1..there.len()).rev() {
        there.swap(last, random.below(last as u64 + 1) as usize);
    }
    for (turn, part) in there.chunks(BATCH).enumerate() {
        hands[turn % interfaces].take(part)?;
    }
    Ok(())
}
