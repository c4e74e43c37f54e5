//! Memory in huge pages where the kernel has some: for the frames, and for the words that find
//! them.

#![allow(unsafe_code)]

use std::sync::atomic::AtomicU64;

use anyhow::{Context as _, Result};
use vellum_pool::device::{PageRange, Surface};
use vellum_pool::{BackendChoice, BackendKind, PAGE_SIZE};
use vellum_vm::Advice;

/// Zeroed memory.
#[derive(Debug)]
pub struct HugeMemory {
    surface: Surface,
    bytes: usize,
}

impl HugeMemory {
    fn new(bytes: u64) -> Result<HugeMemory> {
        // Room for a huge page more, so that all of the memory can lie in whole ones.
        let pages = bytes.div_ceil(PAGE_SIZE as u64) + 512;
        let surface = Surface::reserve(pages, BackendChoice::Only(BackendKind::Madvise))?;
        let all = PageRange { start: 0, count: pages };
        surface.advise(all, Advice::HugePage).context("asking for huge pages")?;
        Ok(HugeMemory { surface, bytes: bytes as usize })
    }
}

/// Words that threads share.
#[derive(Debug)]
pub struct Words(HugeMemory);

impl Words {
    /// So many words, all of them zero.
    ///
    /// # Errors
    /// No memory.
    pub fn new(count: u64) -> Result<Words> {
        HugeMemory::new(count * size_of::<u64>() as u64).map(Words)
    }

    /// All of them.
    #[inline(always)]
    pub fn all(&self) -> &[AtomicU64] {
        let count = self.0.bytes / size_of::<u64>();
        // SAFETY: within the surface, aligned to pages; any bits are a word, and nothing else
        // knows this memory.
        unsafe {
            std::slice::from_raw_parts(self.0.surface.base().as_ptr().cast::<AtomicU64>(), count)
        }
    }
}

/// The memory of frames, each for one page.
#[derive(Debug)]
pub struct FrameMemory(HugeMemory);

impl FrameMemory {
    /// Room for so many pages.
    ///
    /// # Errors
    /// No memory.
    pub fn new(frames: u64) -> Result<FrameMemory> {
        HugeMemory::new(frames * PAGE_SIZE as u64).map(FrameMemory)
    }

    #[inline(always)]
    fn address(&self, frame: usize) -> *mut u8 {
        assert!(frame < self.0.bytes / PAGE_SIZE, "no frame {frame}");
        // SAFETY: within the surface by the check above.
        unsafe { self.0.surface.base().as_ptr().add(frame * PAGE_SIZE) }
    }

    /// Eight bytes of a frame that other threads may be changing: zero outside of the page.
    #[inline(always)]
    pub fn racy_word(&self, frame: usize, offset: usize) -> u64 {
        if offset > PAGE_SIZE - size_of::<u64>() || !offset.is_multiple_of(size_of::<u64>()) {
            return 0;
        }
        // SAFETY: in the frame and aligned by the checks above. The memory always exists. A read
        // that meets a change is discarded by the caller, as in the pool (its module `bytes`).
        unsafe { self.address(frame).add(offset).cast::<u64>().read_volatile() }
    }

    /// The bytes of a frame.
    ///
    /// # Safety
    /// No thread changes them as long as the slice lives.
    #[inline(always)]
    pub unsafe fn bytes(&self, frame: usize) -> &[u8] {
        // SAFETY: within the surface; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address(frame), PAGE_SIZE) }
    }

    /// The bytes of a frame, to be changed.
    ///
    /// # Safety
    /// The caller has the frame for itself as long as the slice lives, except for readers of
    /// [`racy_word`](FrameMemory::racy_word).
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, frame: usize) -> &mut [u8] {
        // SAFETY: within the surface; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.address(frame), PAGE_SIZE) }
    }
}
