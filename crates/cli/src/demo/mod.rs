//! `vellum demo`: the whole round on real files, with a pool an eighth of the data.
//!
//! Lists a directory, stores its files, compares every byte with the file system, looks up, scans
//! and updates from several threads, closes, opens again, checks every page and compares again.
//! Nothing counts as verified by the store's own word: contents come from the file system, or from
//! fingerprints that were taken when they were read from it.

mod arguments;
mod figures;
mod fingerprint;
mod place;
mod plan;
mod report;
mod run;
mod updates;
mod watch;
mod workload;

pub use arguments::Arguments;
pub use run::run;
