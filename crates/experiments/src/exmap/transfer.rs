//! Ways to read pages of a device, and their targets: an exmap, a surface of ordinary memory,
//! buffers.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vellum_uapi::exmap::{ALLOC, FREE, READ};
use vellum_uapi::exmap_published::OP_READ;

use super::device::{Interface, PAGE};
use super::memory::{OfKernel, Populator};
use super::pattern::{BATCH, Chooser, Claimed, Claims as _};
use super::ring::ReadRing;
use super::threads::Tally;

/// Reads that a queue keeps under way.
pub const DEPTH: usize = 256;

/// Where pages are read to.
pub enum Target<'a> {
    /// The surface of an exmap, through its proxy, or directly into populated pages.
    Exmap(Interface<'a>),
    /// A surface of ordinary memory.
    Kernel(&'a OfKernel, Box<dyn Populator + 'a>),
    /// Fixed memory, with a page for each slot.
    Buffers(Vec<Buffer>),
}

/// A page, as direct reads need it.
#[repr(C, align(4096))]
pub struct Buffer([u8; PAGE]);

impl<'a> Target<'a> {
    /// Fixed memory.
    pub fn buffers() -> Target<'a> {
        Target::Buffers((0..DEPTH).map(|_| Buffer([0; PAGE])).collect())
    }

    fn address(&mut self, slot: usize, page: u64) -> *mut u8 {
        match self {
            Target::Exmap(interface) => interface.exmap().address(page),
            Target::Kernel(memory, _) => memory.surface().address(page).as_ptr(),
            Target::Buffers(buffers) => buffers[slot].0.as_mut_ptr(),
        }
    }

    /// Frees pages.
    fn take(&mut self, pages: &[u64]) -> Result<()> {
        match self {
            Target::Exmap(interface) => interface.run_all(FREE, pages),
            Target::Kernel(_, hand) => hand.take(pages),
            Target::Buffers(_) => Ok(()),
        }
    }

    fn interface(&self) -> Result<&Interface<'a>> {
        match self {
            Target::Exmap(interface) => Ok(interface),
            _ => anyhow::bail!("only an exmap has an interface"),
        }
    }
}

/// How pages are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// One after the other from the device.
    Wait,
    /// The same, after the pages were populated in a batch.
    Prepopulated,
    /// A command for each page.
    Single,
    /// A command for a batch.
    Vector,
    /// The same by `preadv` of the proxy.
    Preadv,
    /// Through `io_uring`, so many at a time, from the device.
    Queue,
    /// The same from the proxy.
    ProxyQueue,
}

/// A thread that reads.
pub struct Reader<'a> {
    /// The target.
    pub target: Target<'a>,
    /// The device.
    pub device: &'a File,
    /// Chooses pages.
    pub chooser: Chooser,
    /// Which thread has which page.
    pub states: &'a Claimed,
}

impl Reader<'_> {
    /// Reads and frees pages for some time.
    ///
    /// # Errors
    /// If one cannot be read.
    pub fn work(mut self, way: Way, time: Duration) -> Result<Tally> {
        let start = Instant::now();
        let pages = match way {
            Way::Queue | Way::ProxyQueue => self.queue(way, start + time)?,
            _ => self.batches(way, start + time)?,
        };
        Ok(Tally { pages, refused: 0, seconds: start.elapsed().as_secs_f64() })
    }

    fn batches(&mut self, way: Way, end: Instant) -> Result<u64> {
        let (mut batch, mut pages) = (Vec::with_capacity(BATCH), 0);
        while Instant::now() < end {
            self.chooser.choose(self.states, BATCH, &mut batch);
            self.read(way, &batch)?;
            self.target.take(&batch)?;
            batch.iter().for_each(|page| self.states.release(*page));
            pages += batch.len() as u64;
        }
        Ok(pages)
    }

    fn read(&mut self, way: Way, batch: &[u64]) -> Result<()> {
        match way {
            Way::Single => {
                let interface = self.target.interface()?;
                batch.chunks(1).try_for_each(|page| interface.run_all(READ, page))
            }
            Way::Vector => self.target.interface()?.run_all(READ, batch),
            Way::Preadv => {
                let interface = self.target.interface()?;
                let parts: Vec<_> = batch.iter().map(|page| interface.part(*page)).collect();
                interface.preadv(OP_READ, &parts)
            }
            Way::Prepopulated => {
                self.target.interface()?.run_all(ALLOC, batch)?;
                self.read_waiting(batch)
            }
            Way::Wait | Way::Queue | Way::ProxyQueue => self.read_waiting(batch),
        }
    }

    fn read_waiting(&mut self, batch: &[u64]) -> Result<()> {
        for page in batch {
            let address = self.target.address(0, *page);
            let (fd, offset) = (self.device.as_raw_fd(), (page * PAGE as u64).cast_signed());
            // SAFETY: the page is a buffer, or on a surface and claimed by this thread; no
            // reference into it exists.
            let bytes = unsafe { libc::pread64(fd, address.cast(), PAGE, offset) };
            if bytes < 0 {
                return Err(std::io::Error::last_os_error())
                    .with_context(|| format!("reading page {page}"));
            }
            ensure!(bytes as usize == PAGE, "reading page {page} gave {bytes} bytes");
        }
        Ok(())
    }

    /// The ring is dropped before the target.
    fn queue(&mut self, way: Way, end: Instant) -> Result<u64> {
        let proxy = match way {
            Way::ProxyQueue => Some(self.target.interface()?.number() as u64),
            _ => None,
        };
        let mut ring = ReadRing::new(self.source(proxy.is_some())?, DEPTH)?;
        let mut free: Vec<usize> = (0..DEPTH).collect();
        let (mut page_of, mut ended) = (vec![0; DEPTH], Vec::with_capacity(DEPTH));
        let (mut wanted, mut done) = (Vec::with_capacity(BATCH), Vec::with_capacity(2 * BATCH));
        let mut pages = 0;
        loop {
            let goes_on = Instant::now() < end;
            while goes_on && let Some(slot) = free.pop() {
                if wanted.is_empty() {
                    self.chooser.choose(self.states, BATCH, &mut wanted);
                }
                let page = wanted.pop().context("no page is left to be read")?;
                page_of[slot] = page;
                let address = self.target.address(slot, page);
                let offset = proxy.unwrap_or(page * PAGE as u64);
                // SAFETY: the page is the slot's buffer, or on a surface and claimed by this
                // thread; it is neither read again nor freed before the slot comes back, and the
                // ring is dropped before the target.
                unsafe { ring.add(slot, address, offset) }?;
            }
            if ring.under_way() > 0 {
                ring.wait(&mut ended)?;
            }
            done.extend(ended.iter().map(|slot| page_of[*slot]));
            free.append(&mut ended);
            let is_over = !goes_on && ring.under_way() == 0;
            while done.len() >= BATCH || (is_over && !done.is_empty()) {
                let batch = done.split_off(done.len().saturating_sub(BATCH));
                self.target.take(&batch)?;
                batch.iter().for_each(|page| self.states.release(*page));
                pages += batch.len() as u64;
            }
            if is_over {
                wanted.iter().for_each(|page| self.states.release(*page));
                return Ok(pages);
            }
        }
    }

    fn source(&self, proxy: bool) -> Result<BorrowedFd<'_>> {
        Ok(if proxy { self.target.interface()?.descriptor() } else { self.device.as_fd() })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt as _;

    use vellum_testing::patience::PATIENCE;
    use vellum_vm::{BackendKind, PageRange};

    use super::super::memory::PageMemory as _;
    use super::super::pattern::Pattern;
    use super::*;

    const PAGES: u64 = 2000;

    #[test]
    fn every_page_that_was_read_has_gone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pages");
        std::fs::write(&path, vec![7; PAGES as usize * PAGE]).unwrap();
        let direct = libc::O_DIRECT;
        let device = OpenOptions::new().read(true).custom_flags(direct).open(&path).unwrap();
        let states = Claimed::new(PAGES);
        let memory = OfKernel::new(PAGES, BackendKind::Madvise).unwrap();
        for way in [Way::Wait, Way::Queue] {
            for target in [Target::buffers(), Target::Kernel(&memory, memory.populator(0).unwrap())]
            {
                let chooser = Chooser::new(Pattern::Random, 0, 1, PAGES);
                let reader = Reader { target, device: &device, chooser, states: &states };
                let tally = reader.work(way, Duration::from_millis(300)).unwrap();
                assert!(tally.pages > 0 && states.count() == 0, "{way:?}");
                let all = PageRange { start: 0, count: PAGES };
                assert_eq!(memory.surface().resident_pages(all).unwrap(), 0);
            }
        }
    }

    #[test]
    fn a_device_that_is_too_short_is_an_error() {
        let device = tempfile::tempfile().unwrap();
        let states = Claimed::new(PAGES);
        for way in [Way::Wait, Way::Queue] {
            let chooser = Chooser::new(Pattern::Random, 0, 1, PAGES);
            let target = Target::buffers();
            let reader = Reader { target, device: &device, chooser, states: &states };
            // The first read fails, however late it comes.
            let error = reader.work(way, PATIENCE).unwrap_err();
            assert!(format!("{error:#}").contains("0 bytes"), "{error:#}");
            states_reset(&states);
        }
    }

    fn states_reset(states: &Claimed) {
        (0..PAGES).for_each(|page| states.release(page));
    }
}
