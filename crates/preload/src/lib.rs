//! `libvellum_preload.so`: an `mmap` that takes chosen files from the cache daemon.
//!
//! Preloaded into a program that knows nothing of Morsels, it answers `mmap` of a file for reading
//! with memory that all such programs share (paper, section 3.1). Invariant: a call either does
//! exactly what it would have done, or maps the same bytes of a Morsel; in doubt, and after any
//! failure, it does the former.

mod calls;
mod lock;
mod mounts;
mod request;
mod rules;
mod substitute;
mod system;
