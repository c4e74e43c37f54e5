//! See `backup_reader` in `src/backups.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vellum_fuzz::backups::backup_reader(bytes));
