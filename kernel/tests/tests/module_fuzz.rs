//! The fuzzer, for a while. `VELLUM_SECONDS` has it go on for longer; the variables are said in
//! `src/fuzz/mod.rs`.

use vellum_kernel_tests::{fuzz, turn};

/// Of one thread, in which every result is known.
#[test]
fn sequences_come_to_what_they_should() {
    let Some(_turn) = turn() else { return };
    fuzz::sequences(8);
}

/// Of threads and processes.
#[test]
fn threads_and_processes_keep_their_pages() {
    let Some(_turn) = turn() else { return };
    fuzz::together(8);
}
