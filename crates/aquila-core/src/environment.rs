//! What the cache needs of its environment: storage, page tables, processors.

use core::fmt;

use crate::frame::{Frame, Key};

/// A page and the frame that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// The page.
    pub key: Key,
    /// The frame.
    pub frame: Frame,
    /// Whether it has changes that the file has not. Meaningful for [`Environment::unmap`].
    pub dirty: bool,
}

/// The environment of a cache.
///
/// Threads call it in the middle of their page faults: on Linux that is inside a signal handler. So
/// no method allocates, panics, or takes a lock that the faulting thread may hold.
///
/// A *run* is pages of one file that follow one another, in order.
pub trait Environment: Sync {
    /// Where a fault wants its page: a mapping.
    type Mapping: ?Sized;

    /// Why reading, writing or mapping failed.
    type Error: Copy + fmt::Debug;

    /// The number of the processor that the thread runs on. A hint: the thread may move.
    fn processor(&self) -> usize;

    /// The NUMA node of that processor.
    fn node(&self) -> usize {
        0
    }

    /// Reads a run from its file into its frames, which no page table maps. If there is a place,
    /// the environment may map the whole run there, for reading only, where that costs less than a
    /// call of [`map`](Self::map). Returns whether it has.
    ///
    /// # Errors
    /// What the storage said. The frames' contents do not matter then.
    fn read(&self, run: &[Page], place: Option<&Self::Mapping>) -> Result<bool, Self::Error>;

    /// Writes a run from its frames to its file. No thread changes the frames meanwhile, except
    /// through pins for writing, and by stores of which dirty bits tell afterwards.
    ///
    /// # Errors
    /// What the storage said: the pages are still dirty.
    fn write(&self, run: &[Page]) -> Result<(), Self::Error>;

    /// Maps a run at a place: for reading and writing, or for reading only. A page that is mapped
    /// there already keeps the access that it has or gets more, never less.
    ///
    /// # Errors
    /// Why the page cannot be mapped.
    fn map(&self, run: &[Page], place: &Self::Mapping, writable: bool) -> Result<(), Self::Error>;

    /// Takes write access to the pages away in all mappings and on all processors: with one
    /// shootdown for all pages. Afterwards every store faults. An environment that
    /// [tells stores](Self::tells_stores) may leave the access and clear the pages' dirty bits:
    /// afterwards [`was_stored_to`](Self::was_stored_to) tells of every store.
    fn protect(&self, pages: &[Page]);

    /// Unmaps the pages, which are in order, in all mappings and on all processors: with one
    /// shootdown for all. The frames keep their contents. An environment may leave clean pages
    /// mapped for reading until [`release`](Self::release). One that tells stores unmaps all.
    fn unmap(&self, pages: &[Page]);

    /// The contents of the frames are no longer needed. Afterwards no processor reaches them.
    fn release(&self, pages: &[Page]);

    /// Waits a little while, before the thread looks again whether another one has finished. The
    /// attempt counts from zero.
    fn wait(&self, attempt: u32);

    /// Whether threads of the environment's own write dirty pages ([`Cache::write_some`]). Then no
    /// thread that needs a frame does: it evicts clean pages only, and asks for more. The
    /// environment must see to it that there are some ([`Cache::taken`]).
    ///
    /// [`Cache::write_some`]: crate::Cache::write_some
    /// [`Cache::taken`]: crate::Cache::taken
    fn writes_apart(&self) -> bool {
        false
    }

    /// Asks those threads to write. `asked` is zero at first, and the same each time that a thread
    /// asks for the same reason.
    ///
    /// # Errors
    /// They have tried everything since that thread first asked, and what the storage said.
    fn ask_to_write(&self, asked: &mut u64) -> Result<(), Self::Error> {
        let _ = asked;
        Ok(())
    }

    /// Whether a page was accessed since the last call, where page tables tell that.
    fn was_accessed(&self, page: Page) -> bool {
        let _ = page;
        false
    }

    /// Whether page tables have dirty bits, and the environment maps pages for writing without a
    /// fault that tells of the store. It does not map pages in [`read`](Self::read) then.
    fn tells_stores(&self) -> bool {
        false
    }

    /// Whether a thread has stored to a page since the page was read or last
    /// [protected](Self::protect), where page tables tell that. The answer for a page that was
    /// unmapped is final, until it is released.
    fn was_stored_to(&self, page: Page) -> bool {
        let _ = page;
        false
    }
}
