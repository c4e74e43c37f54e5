//! The cache daemon, tested through its socket, with well-behaved and hostile clients in threads
//! and processes.

// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod bounds;
mod bystander;
mod common;
mod loading;
mod messages;
mod restart;
mod sources;
mod start;
