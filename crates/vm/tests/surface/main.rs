//! What surfaces promise, tried on the real kernel: every test of `batches`, `read` and `model`
//! runs for each backend that works here, and all of them again on the plainest kernel there is.
#![allow(unsafe_code, clippy::unwrap_used)]

#[macro_use]
mod common;

mod batches;
mod exmap;
mod huge_pages;
mod model;
mod old_kernel;
mod page_tables;
mod read;
mod reservation;
