//! Tests of Morsels, on every backend that this machine has.

// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod address;
mod common;
mod content;
mod fork;
mod hostile;
mod huge_pages;
mod model;
mod names;
mod passing;
mod seals;
