//! The fuzzer for a short time. `VELLUM_SECONDS` sets the time; `src/fuzz/mod.rs` has all
//! variables.

use vellum_kernel_tests::{fuzz, turn};

/// Sequences of one thread. Every result is known.
#[test]
fn sequences_have_the_results_of_the_model() {
    let Some(_turn) = turn() else { return };
    fuzz::sequences(8);
}

/// Rounds of threads and processes.
#[test]
fn threads_and_processes_keep_their_pages() {
    let Some(_turn) = turn() else { return };
    fuzz::together(8);
}
