//! A cache of file pages for programs that handle their own page faults.
//!
//! This is the part of Aquila (Papagiannis et al., "Memory-Mapped I/O on Steroids", EuroSys '21)
//! that is the same wherever faults are handled: in a signal handler on Linux, or in ring 0 of a
//! guest. It knows frames, keys and the order of steps; a [`Environment`] knows storage and page
//! tables. It allocates nothing, uses no floating point and has no `unsafe`: the caller gives it
//! the memory for its structures, as slices of atomic words that are zero ([`Layout`] says how
//! many).
//!
//! ```
//! use core::sync::atomic::{AtomicU64, Ordering};
//! use std::sync::Mutex;
//! use vellum_aquila_core::{Access, Cache, Clock, Counters, Fault, Key, Layout, Environment, Page};
//!
//! /// Page tables that are sets, and storage that has the number of each page in it.
//! #[derive(Default)]
//! struct Toy {
//!     reads: AtomicU64,
//!     mapped: Mutex<Vec<Key>>,
//! }
//!
//! impl Environment for Toy {
//!     type Mapping = ();
//!     type Error = ();
//!     fn processor(&self) -> usize { 0 }
//!     fn read(&self, run: &[Page], _: Option<&()>) -> Result<bool, ()> {
//!         self.reads.fetch_add(run.len() as u64, Ordering::Relaxed);
//!         Ok(false)
//!     }
//!     fn write(&self, _: &[Page]) -> Result<(), ()> { Ok(()) }
//!     fn map(&self, run: &[Page], _: &(), _writable: bool) -> Result<(), ()> {
//!         self.mapped.lock().unwrap().extend(run.iter().map(|page| page.key));
//!         Ok(())
//!     }
//!     fn protect(&self, _: &[Page]) {}
//!     fn unmap(&self, pages: &[Page]) {
//!         let is_mapped = |key: &Key| !pages.iter().any(|page| page.key == *key);
//!         self.mapped.lock().unwrap().retain(is_mapped);
//!     }
//!     fn release(&self, _: &[Page]) {}
//!     fn wait(&self, _: u32) { std::thread::yield_now(); }
//! }
//!
//! let frames = 16;
//! let layout = Layout::new(frames, 1, 1).ok_or("too large")?;
//! let words: Vec<AtomicU64> = (0..layout.words()).map(|_| AtomicU64::new(0)).collect();
//! let hand = [AtomicU64::new(0)];
//! let counters = [Counters::default()];
//! let policy = Clock::new(&hand, frames);
//! let cache = Cache::new(layout, &words, &counters, policy, Toy::default(), frames);
//!
//! for number in 0..100 {
//!     let key = Key::new(0, number).ok_or("too large")?;
//!     let fault = Fault { key, access: Access::Read, ahead: 0, used: 0, place: &() };
//!     cache.fault(&fault).map_err(|_| "the page cannot be read")?;
//! }
//! assert_eq!(cache.environment().reads.load(Ordering::Relaxed), 100);
//! assert!(cache.environment().mapped.lock().unwrap().len() <= 16); // never more than the cache
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(any(test, feature = "model")), no_std)]
#![forbid(unsafe_code)]

mod cache;
mod dirty;
mod environment;
mod frame;
mod free_lists;
mod index;
mod policy;
mod read_ahead;
mod statistics;
mod sync;

pub use cache::{Access, Cache, Error, Evicted, Fault, Layout, Taken, Tried};
pub use environment::{Environment, Page};
pub use frame::{Frame, Key};
pub use policy::{Clock, Evictor, Lru, Policy, S3Fifo};
pub use read_ahead::{Advice, MOST_PAGES, Pattern, Plan};
pub use statistics::{Counters, Statistics};
pub use sync::AtomicU64;
