//! The promises of surfaces, tested on the real kernel. Each test of `batches`, `read` and `model`
//! runs on each backend that works here, and again on a simulated old kernel.
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
