//! What the libraries that stand in front of a program's `mmap` share: the [`Request`] of a call,
//! and the [`Rules`] that say which files a user wants to be taken.
//!
//! `libvellum_preload.so` and `libvellum_ring0.so` ask both before they answer a call. What they
//! answer with is theirs.
//!
//! ```
//! use vellum_interpose::{Request, Rules};
//!
//! let request = Request {
//!     length: 5000,
//!     rights: libc::PROT_READ,
//!     flags: libc::MAP_SHARED,
//!     file: 3,
//!     offset: 4096,
//! };
//! assert!(request.is_for_reading());
//! assert_eq!(request.bytes(), Some(4096..12_288));
//!
//! let rules = Rules::new("*.gguf:/models/*", "1073741824");
//! assert!(rules.take(100, || Some(b"/data/small.gguf".to_vec())));
//! assert!(!rules.take(100, || Some(b"/data/small".to_vec())));
//! ```

mod request;
mod rules;

pub use request::{PAGE_SIZE, Request};
pub use rules::Rules;
