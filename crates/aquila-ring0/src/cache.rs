//! A cache of file pages whose faults ring 0 handles: the core on [`Pages`].
//!
//! Threads in ring 0 and in ring 3 use it at the same time. `shootdown.rs` has virtual processors
//! forget the pages that leave, once for a batch.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::{fmt, thread};

use rustix::io::Errno;
use self_cell::self_cell;
use vellum_aquila_core::{
    Access, Advice, Cache as CoreCache, Clock, Counters, Evictor, Fault, Frame, Key, Layout, Lru,
    Policy, S3Fifo,
};

use crate::error::Result;
use crate::pages::Pages;
use crate::ring::Ring;

/// Which pages leave a cache first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replacement {
    /// CLOCK, on the accessed bits of the page tables.
    #[default]
    Clock,
    /// The least recently used pages, roughly, by faults and accessed bits.
    Lru,
    /// S3-FIFO: a scan does not drive other pages out.
    S3Fifo,
}

/// The policy of a cache.
pub(crate) enum AnyPolicy<'a> {
    Clock(Clock<'a>),
    Lru(Lru<'a>),
    S3Fifo(S3Fifo<'a>),
}

impl AnyPolicy<'_> {
    fn get(&self) -> &dyn Policy {
        match self {
            Self::Clock(policy) => policy,
            Self::Lru(policy) => policy,
            Self::S3Fifo(policy) => policy,
        }
    }
}

impl Policy for AnyPolicy<'_> {
    fn admit(&self, frame: Frame, key: Key) {
        self.get().admit(frame, key);
    }

    /// Each fault of a page that is there comes here, and CLOCK has nothing to do.
    fn touch(&self, frame: Frame) {
        match self {
            Self::Clock(policy) => policy.touch(frame),
            Self::Lru(policy) => policy.touch(frame),
            Self::S3Fifo(policy) => policy.touch(frame),
        }
    }

    fn remove(&self, frame: Frame, key: Key) {
        self.get().remove(frame, key);
    }

    fn propose(&self, evictor: &mut dyn Evictor) {
        self.get().propose(evictor);
    }
}

/// The memory of a core.
struct Words {
    core: Vec<AtomicU64>,
    policy: Vec<AtomicU64>,
    counters: Vec<Counters>,
}

pub(crate) type Core<'a> = CoreCache<'a, Pages, AnyPolicy<'a>>;

self_cell!(
    struct Cell {
        owner: Words,
        #[covariant]
        dependent: Core,
    }
);

/// A cache, as the guest has it.
pub(crate) struct PageCache {
    cell: Cell,
    /// The ring, once a file is mapped with it.
    ring: OnceLock<Arc<Ring>>,
}

impl fmt::Debug for PageCache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("PageCache").finish_non_exhaustive()
    }
}

impl PageCache {
    /// A cache of so many frames; `None` if that is none or too many.
    pub(crate) fn new(frames: u32, replacement: Replacement, pages: Pages) -> Option<Self> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let layout = Layout::new(frames, processors, 1)?;
        let policy = match replacement {
            Replacement::Clock => Clock::WORDS,
            Replacement::Lru => Lru::words(frames),
            Replacement::S3Fifo => S3Fifo::words(frames),
        };
        let words = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        let words = Words {
            core: words(layout.words()),
            policy: words(policy),
            counters: (0..processors).map(|_| Counters::default()).collect(),
        };
        let cell = Cell::new(words, |words| {
            let policy = match replacement {
                Replacement::Clock => AnyPolicy::Clock(Clock::new(&words.policy, frames)),
                Replacement::Lru => AnyPolicy::Lru(Lru::new(&words.policy, frames)),
                Replacement::S3Fifo => AnyPolicy::S3Fifo(S3Fifo::new(&words.policy, frames)),
            };
            CoreCache::new(layout, &words.core, &words.counters, policy, pages, frames)
        });
        Some(Self { cell, ring: OnceLock::new() })
    }

    pub(crate) fn core(&self) -> &Core<'_> {
        self.cell.borrow_dependent()
    }

    pub(crate) fn pages(&self) -> &Pages {
        self.core().environment()
    }

    /// The ring that files of the cache share.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn ring(&self) -> Result<Arc<Ring>> {
        if let Some(ring) = self.ring.get() {
            return Ok(Arc::clone(ring));
        }
        let ring = Arc::new(Ring::new()?);
        Ok(Arc::clone(self.ring.get_or_init(|| ring)))
    }

    /// Handles a fault of a page of a file, in ring 0. False if the page cannot be had.
    pub(crate) fn fault(&self, number: u32, page: u64, is_store: bool) -> bool {
        let (Some(file), Some(key)) = (self.pages().file(number), Key::new(number, page)) else {
            return false;
        };
        if !file.is_open.load(Ordering::Acquire) || (is_store && !file.writable) {
            return false;
        }
        // The dirty bit tells of a store, so it is the same as a load.
        let access = Access::Read;
        let advice = file.advice();
        if advice == Advice::Random {
            // Random advice reads nothing ahead, so the pattern is neither asked nor changed.
            let fault = Fault { key, access, ahead: 0, used: 0, place: file };
            return self.core().fault(&fault).is_ok();
        }
        let plan = file.pattern.plan(page, advice);
        let ahead = u64::from(plan.ahead).min(file.pages().saturating_sub(page + 1)) as u32;
        let fault = Fault { key, access, ahead, used: plan.used, place: file };
        let handled = self.core().fault(&fault);
        if let Ok(pages) = handled {
            file.pattern.advance(page, pages);
        }
        handled.is_ok()
    }

    /// Writes all dirty pages of all files back.
    ///
    /// # Errors
    /// The first error. All were tried.
    pub(crate) fn write_back_all(&self) -> Result<(), Errno> {
        let first = Key::new(0, 0).unwrap_or_else(|| unreachable!("the first key"));
        let last = Key::new(Key::FILES - 1, Key::PAGES - 1);
        let last = last.unwrap_or_else(|| unreachable!("the last key"));
        self.core().write_back(first..=last).map(drop)
    }
}
