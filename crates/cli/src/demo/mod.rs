//! `vellum demo`: stores real files and verifies them, with a pool of an eighth of the data.
//!
//! Lists a directory, stores its files, compares every byte with the file system, looks up, scans
//! and updates from several threads, closes, kills processes that update in transactions, opens
//! again, checks every page and compares again. The demonstration does not trust the store: it
//! verifies contents against the file system, or against fingerprints that it took when it read the
//! files.

mod arguments;
mod figures;
mod fingerprint;
mod kills;
mod memory_watch;
mod plan;
mod report;
mod run;
mod store_file;
mod updates;
pub mod victim;
mod workload;

pub use arguments::Arguments;
pub use run::run;
