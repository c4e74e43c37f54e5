//! The cache daemon, by its socket: clients in threads and processes, good ones and bad ones.

// These are tests, where unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod bounds;
mod bystander;
mod common;
mod loading;
mod messages;
mod restart;
mod sources;
mod start;
