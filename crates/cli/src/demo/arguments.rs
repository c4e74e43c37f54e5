//! The arguments of `vellum demo`.

use std::path::PathBuf;

use crate::options::{Backend, threads};
use crate::size;

const HELP: &str = "\
Examples:
  vellum demo                                      /usr, up to 2 GiB
  vellum demo --dir ~/photos --limit 8GiB          more data than memory is fine
  vellum demo --dir /usr/share --store usr.vellum  keep the store, then look into it:
  vellum scan usr.vellum doc/

After its own updates the demonstration starts a process that updates the files in transactions, and
kills it with SIGKILL, three times. Then it shows that every acknowledged commit is there.

The store is a temporary file on a disk, which is gone however the program ends, unless --store
names a file. The exit code is 0 only if every byte was right and the pool kept within its size.";

/// Store real files, compare every byte, update, be killed, recover, check
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The directory whose files are stored
    #[arg(long, default_value = "/usr")]
    pub(super) dir: PathBuf,

    /// Stop listing files when they reach this total size
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "2GiB")]
    pub(super) limit: u64,

    /// Keep the store in this file, which must not exist [default: a temporary file]
    #[arg(long, value_name = "FILE")]
    pub(super) store: Option<PathBuf>,

    /// Memory of the buffer pool [default: an eighth of the data]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(super) pool: Option<u64>,

    /// Backend that populates and releases pages
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) backend: Backend,

    /// Threads that work on the store
    #[arg(long, value_name = "N", default_value = "2", value_parser = threads)]
    pub(super) threads: usize,

    /// Length of each phase that looks up, reads, scans or updates
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = seconds)]
    pub(super) seconds: f64,

    /// Seed of the random choices of entries
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("write seconds, from 0.01 to 86400".into()),
    }
}
