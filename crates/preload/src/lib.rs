//! `libvellum_preload.so`: an `mmap` that takes chosen files from the cache daemon, or maps them
//! through a cache of the process' own.
//!
//! Preloaded into a program that knows nothing of that, it answers `mmap` of a file for reading
//! with memory that all such programs share ("Morsels", section 3.1), or with memory whose faults
//! and whose cache are the program's own (Aquila, "Memory-Mapped I/O on Steroids"). Invariant: a
//! call either does exactly what it would have done, or maps the same bytes; in doubt, and after
//! any failure, it does the former.

mod anchor;
mod cache_thread;
mod cached;
mod calls;
mod lease;
mod list;
mod load;
mod lock;
mod mounts;
mod owner;
mod substitute;
mod system;
