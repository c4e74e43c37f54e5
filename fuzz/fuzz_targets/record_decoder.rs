//! See `record_decoder` in `src/log.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vellum_fuzz::log::record_decoder(bytes));
