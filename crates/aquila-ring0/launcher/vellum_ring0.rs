//! `libvellum_ring0.so`: moves programs as they are to ring 0, when it is preloaded (`vellum aquila
//! run --backend ring0`).
//!
//! Invariant: the program's threads run in ring 0, or the process ends with a message. What the
//! functions do is in the crate, `launch`: no other program may have functions of these names.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

vellum_aquila_ring0::launcher!();
