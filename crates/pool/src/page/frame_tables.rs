//! Which frame a page is in: the page tables of an exmap's surface, or a model of them.

#![allow(unsafe_code)]

#[cfg(feature = "model")]
pub(crate) use self::model::FrameTables;
#[cfg(not(feature = "model"))]
pub(crate) use self::real::FrameTables;

#[cfg(not(feature = "model"))]
mod real {
    use std::sync::atomic::AtomicU64;

    use vellum_vm::{Entry, PageTables, Surface, SurfaceError};

    /// The tables that the CPU uses.
    #[derive(Debug)]
    pub(crate) struct FrameTables(PageTables);

    impl FrameTables {
        /// Of a surface on an exmap. `frames` is what it has of them.
        pub(crate) fn new(surface: &Surface, _frames: u64) -> Result<FrameTables, SurfaceError> {
            Ok(FrameTables(surface.page_tables()?))
        }

        /// Numbers of frames are below this.
        pub(crate) fn frames(&self) -> u64 {
            self.0.frames()
        }

        /// The frame that the page is in at this moment.
        #[inline(always)]
        pub(crate) fn frame(&self, page: u64) -> Option<u64> {
            self.0.frame(page)
        }

        /// The same, without a check that the page has a PTE.
        ///
        /// # Safety
        /// It is below [`pages`](Self::pages).
        #[inline(always)]
        pub(crate) unsafe fn frame_unchecked(&self, page: u64) -> Option<u64> {
            // SAFETY: the caller's promise.
            unsafe { self.0.frame_unchecked(page) }
        }

        /// How many pages have a PTE.
        pub(crate) fn pages(&self) -> u64 {
            self.0.pages()
        }

        /// The cache line to prefetch for the frame.
        #[inline(always)]
        pub(crate) fn entry(&self, page: u64) -> *const AtomicU64 {
            std::ptr::from_ref(self.0.entry(page))
        }

        /// As [`Surface::claim`].
        pub(crate) fn claim(&self, surface: &Surface, entries: &mut [Entry]) {
            surface.claim(entries);
        }

        /// Notes that pages have just been released.
        pub(crate) fn released(&self, _entries: &[Entry]) {}
    }
}

#[cfg(feature = "model")]
mod model {
    use vellum_vm::{Entry, Surface, SurfaceError};

    use crate::sync::{AtomicU64, Mutex, Ordering, lock};

    /// Tables that behave as the processor's, for a scheduler that explores interleavings. Only the
    /// tables are modelled: the memory is the surface's own.
    #[derive(Debug)]
    pub(crate) struct FrameTables {
        /// One more than the frame; 0 for none.
        entries: Vec<AtomicU64>,
        free: Mutex<Vec<u64>>,
    }

    impl FrameTables {
        pub(crate) fn new(_surface: &Surface, frames: u64) -> Result<FrameTables, SurfaceError> {
            let entries = (0..256).map(|_| AtomicU64::new(0)).collect();
            Ok(FrameTables { entries, free: Mutex::new((0..frames).collect()) })
        }

        pub(crate) fn frames(&self) -> u64 {
            64
        }

        pub(crate) unsafe fn frame_unchecked(&self, page: u64) -> Option<u64> {
            self.frame(page)
        }

        pub(crate) fn pages(&self) -> u64 {
            self.entries.len() as u64
        }

        pub(crate) fn frame(&self, page: u64) -> Option<u64> {
            self.entries[page as usize].load(Ordering::SeqCst).checked_sub(1)
        }

        pub(crate) fn claim(&self, _surface: &Surface, entries: &mut [Entry]) {
            for entry in entries {
                let at = &self.entries[entry.range.start as usize];
                let frame = lock(&self.free).pop();
                let Some(frame) = frame else {
                    entry.result = Err(vellum_vm::Errno::NOMEM);
                    continue;
                };
                let (done, failed) = (Ordering::SeqCst, Ordering::SeqCst);
                entry.result = Ok(());
                if at.compare_exchange(0, frame + 1, done, failed).is_err() {
                    lock(&self.free).push(frame);
                    entry.result = Err(vellum_vm::Errno::EXIST);
                }
            }
        }

        pub(crate) fn released(&self, entries: &[Entry]) {
            for entry in entries.iter().filter(|entry| entry.result.is_ok()) {
                for page in entry.range.start..entry.range.start + entry.range.count {
                    let at = &self.entries[page as usize];
                    if let Some(frame) = at.swap(0, Ordering::SeqCst).checked_sub(1) {
                        lock(&self.free).push(frame);
                    }
                }
            }
        }
    }
}
