//! The places of the state words: an array with one for each page of the file, or one for each
//! frame of the pool.

use vellum_vm::{Errno, ReserveError, Surface};

use crate::error::PoolError;
use crate::page::PageId;
use crate::page::frame_states::FrameStates;
use crate::page::state::{PageState, Word};
use crate::page::state_array::StateArray;

/// Where a pool keeps the state words of its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StatePlace {
    /// In an array: 8 bytes for each page of the file that was ever used.
    #[default]
    Pages,
    /// With the frames: 8 bytes for each frame of the pool, however large the file. For pools on
    /// exmap, by processes that may see their page tables (`CAP_SYS_ADMIN`).
    Frames,
}

/// The state words of a pool.
#[derive(Debug)]
pub(crate) enum States {
    Pages(StateArray),
    Frames(FrameStates),
}

impl States {
    /// For the pages of a surface that has so many frames.
    ///
    /// # Errors
    /// No address space, or no look into the page tables.
    pub(crate) fn new(
        place: StatePlace,
        surface: &Surface,
        frames: u64,
        pages: u64,
    ) -> Result<States, PoolError> {
        Ok(match place {
            StatePlace::Pages => States::Pages(StateArray::new(pages)?),
            StatePlace::Frames => States::Frames(FrameStates::new(surface, frames, pages)?),
        })
    }

    /// Where they are.
    pub(crate) fn place(&self) -> StatePlace {
        match self {
            States::Pages(_) => StatePlace::Pages,
            States::Frames(_) => StatePlace::Frames,
        }
    }

    /// Makes room for `pages` pages; never shrinks. The surface has them already.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        match self {
            States::Pages(states) => states.grow(pages),
            States::Frames(states) => states.grow(pages),
        }
    }

    /// Bytes of memory that they take at this moment.
    pub(crate) fn resident_bytes(&self) -> Result<u64, Errno> {
        match self {
            States::Pages(states) => states.resident_bytes(),
            States::Frames(states) => states.resident_bytes(),
        }
    }

    /// How many pages have a state.
    pub(crate) fn pages(&self) -> u64 {
        match self {
            States::Pages(states) => states.pages(),
            States::Frames(states) => states.pages(),
        }
    }

    /// The word of a page, if the file is that long, and what it said when the page had it.
    ///
    /// Where words are with the frames, a page that is not resident has none: what is returned for
    /// it tells evicted pages from free ones, and every attempt to change it fails. And a page may
    /// leave its frame, and the word, at any time. Exchanging the word for what was seen then
    /// fails, and its version is another one; so look again after every failure.
    #[inline(always)]
    pub(crate) fn look(&self, page: PageId) -> Option<(&PageState, Word)> {
        match self {
            States::Pages(states) => states.get(page).map(|state| (state, state.load())),
            States::Frames(states) => states.look(page),
        }
    }

    /// The word of a page that the caller holds.
    #[inline(always)]
    pub(crate) fn held(&self, page: PageId) -> &PageState {
        match self {
            States::Pages(states) => {
                states.get(page).expect("a page that is held lies in the file")
            }
            States::Frames(states) => states.held(page),
        }
    }

    /// The cache line that the next access to the page's state reads first.
    #[inline(always)]
    pub(crate) fn line(&self, page: PageId) -> Option<*const u8> {
        match self {
            States::Pages(states) => states.get(page).map(|state| std::ptr::from_ref(state).cast()),
            States::Frames(states) => states.entry(page),
        }
    }
}
