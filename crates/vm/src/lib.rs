//! Surfaces: explicit virtual memory on a stock Linux kernel.
//!
//! A [`Surface`] is a range of addresses as large as the storage that it shows. The program, not
//! the kernel, decides which of its pages hold memory: it *populates* and *releases* them in
//! batches, *reads* files into them, *advises* the kernel and queries *residency*. A
//! [`Reservation`] is the growable mapping that surfaces use; it also serves arrays that grow with
//! the storage.
//!
//! A backend populates and releases pages. The crate tries the backends at run time and chooses one
//! ([`BackendChoice`]). [`probe`] says what this machine offers and what a page costs, and
//! [`memory_limit`] how much memory this process may use.
//!
//! It is for programs that manage memory page by page, such as buffer managers: the address of a
//! page is its number, so a look-up needs no table but the CPU's own.
//!
//! ```
//! use vellum_vm::{BackendChoice, Entry, PAGE_SIZE, PageRange, Surface};
//!
//! // Addresses for 1,000 pages, and memory for none.
//! let surface = Surface::reserve(1000, BackendChoice::Auto)?;
//! let mut batch = [Entry::page(7), Entry::new(PageRange::new(100, 4))];
//! assert_eq!(surface.populate(&mut batch), 0); // no entry has failed
//! assert_eq!(surface.resident_pages(PageRange::new(0, 1000))?, 5);
//! let page = surface.address(7);
//! // SAFETY: the page has memory, and no other code uses it.
//! unsafe { page.write_bytes(0xAB, PAGE_SIZE) };
//!
//! // SAFETY: no code uses these pages from here on.
//! unsafe { surface.release(&mut batch) };
//! assert_eq!(surface.resident_pages(PageRange::new(0, 1000))?, 0);
//! surface.grow(1_000_000)?; // in place: addresses stay
//! assert_eq!(surface.address(7), page);
//! # Ok::<(), vellum_vm::SurfaceError>(())
//! ```
//!
//! Where to go next: [`Surface`] has all operations on batches, [`Advice`] the advice to the
//! kernel, [`BackendChoice`] the backends. A buffer manager on top of this is the crate
//! `vellum-pool`.
//!
//! Runs on Linux 5.10 and later with 4 KiB pages, on x86-64 and aarch64.

mod advice;
mod backend;
mod error;
mod huge_page;
mod lane;
mod limits;
mod mapping;
mod memory;
mod range;
mod residency;
mod scratch;
mod surface;
mod sys;

pub mod memory_limit;
pub mod probe;

pub use advice::Advice;
pub use backend::exmap::PageTables;
pub use backend::{BackendChoice, BackendKind, FaultBehaviour};
pub use error::{ReserveError, SurfaceError};
pub use huge_page::Asked;
pub use mapping::Reservation;
pub use range::{Entry, PageRange};
pub use residency::Residency;
pub use rustix::io::Errno;
pub use surface::{END_OF_FILE, Surface};

/// Bytes of a page, the unit of this crate.
pub const PAGE_SIZE: usize = 4096;

/// Pages of a huge page: 2 MiB, on x86-64 and on aarch64 with pages of 4 KiB.
pub const HUGE_PAGES: u64 = 512;

/// Bytes of a huge page.
pub const HUGE_PAGE_SIZE: usize = HUGE_PAGES as usize * PAGE_SIZE;
