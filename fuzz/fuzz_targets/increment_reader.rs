//! See `increment_reader` in `src/entry.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vellum_fuzz::entry::increment_reader(bytes));
