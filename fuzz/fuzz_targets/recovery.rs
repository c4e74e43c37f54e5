//! See `recovery` in `src/log.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vellum_fuzz::log::recovery(bytes));
