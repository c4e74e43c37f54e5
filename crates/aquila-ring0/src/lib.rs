//! Ring 0 for a thread of an ordinary process, on stock KVM.
//!
//! A [`VirtualMachine`] has the memory of the process, at the same addresses.
//! [`VirtualMachine::run`] moves the calling thread into its ring 0, where the thread goes on with
//! the same code, stack and libraries, and back. There page faults can be handled without the
//! kernel: this is what Aquila (Papagiannis et al., "Memory-Mapped I/O on Steroids", EuroSys '21)
//! needs a module of its own for.
//!
//! ```no_run
//! use vellum_aquila_ring0::{VirtualMachine, is_in_ring_0};
//!
//! let machine = VirtualMachine::new()?;
//! let length = machine.run(|| {
//!     assert!(is_in_ring_0());
//!     println!("a system call");
//!     std::fs::read("/proc/self/comm").map(|name| name.len())
//! })?;
//! assert!(length.is_ok());
//! # Ok::<(), vellum_aquila_ring0::Error>(())
//! ```
//!
//! A system call of such a thread is made by the process on the same thread, and so is the rest of
//! what ring 0 cannot do: growing a stack, and raising the signal of a bad access. Threads and
//! processes that the function makes begin in ring 3. `docs/aquila.md` says how that goes and what
//! is missing.

#[cfg(target_arch = "x86_64")]
mod cache;
mod counters;
#[cfg(target_arch = "x86_64")]
mod current_processor;
#[cfg(target_arch = "x86_64")]
mod descriptors;
#[cfg(target_arch = "x86_64")]
mod entry;
mod error;
#[cfg(target_arch = "x86_64")]
mod exits;
#[cfg(target_arch = "x86_64")]
mod file;
#[cfg(target_arch = "x86_64")]
mod guest;
#[cfg(target_arch = "x86_64")]
mod machine;
#[cfg(target_arch = "x86_64")]
mod mapping;
#[cfg(target_arch = "x86_64")]
mod memory;
#[cfg(target_arch = "x86_64")]
mod message;
#[cfg(target_arch = "x86_64")]
mod native;
#[cfg(target_arch = "x86_64")]
mod pages;
#[cfg(target_arch = "x86_64")]
mod processor;
#[cfg(target_arch = "x86_64")]
mod program_files;
#[cfg(target_arch = "x86_64")]
mod ring;
#[cfg(target_arch = "x86_64")]
mod running;
#[cfg(target_arch = "x86_64")]
mod self_test;
#[cfg(target_arch = "x86_64")]
mod shootdown;
#[cfg(target_arch = "x86_64")]
mod sys;
#[cfg(not(target_arch = "x86_64"))]
mod unsupported;

#[cfg(target_arch = "x86_64")]
pub use cache::Replacement;
pub use counters::{Check, Counts};
pub use error::{Error, Result};
#[cfg(target_arch = "x86_64")]
pub use file::Io;
#[cfg(target_arch = "x86_64")]
pub use guest::Handler;
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub use machine::launch;
#[cfg(target_arch = "x86_64")]
pub use machine::{Managed, ReservedProcessor, VirtualMachine, doctor};
#[cfg(target_arch = "x86_64")]
pub use mapping::{Cache, Mapping};
#[cfg(target_arch = "x86_64")]
pub use sys::is_in_ring_0;
#[cfg(not(target_arch = "x86_64"))]
pub use unsupported::{VirtualMachine, doctor, is_in_ring_0};
pub use vellum_aquila_core::{Advice, Statistics};
