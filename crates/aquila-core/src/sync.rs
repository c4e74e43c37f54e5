//! The atomics of this crate, in one place.
//!
//! With the feature `model` they are shuttle's, whose scheduler explores interleavings (see
//! `tests/model.rs`); otherwise they are the core library's.

#[cfg(feature = "model")]
pub use shuttle::sync::atomic::{AtomicU64, Ordering};

#[cfg(not(feature = "model"))]
pub use core::sync::atomic::{AtomicU64, Ordering};
