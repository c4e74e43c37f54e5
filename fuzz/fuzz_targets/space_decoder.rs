//! See `space_decoder` in `src/entry.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vellum_fuzz::entry::space_decoder(bytes));
