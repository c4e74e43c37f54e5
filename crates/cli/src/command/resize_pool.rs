//! `vellum resize-pool`: changes the memory of a process that has a store open.

use std::path::PathBuf;

use serde_json::json;

use crate::error::Outcome;
use crate::output::Output;
use crate::{owner, size};

const HELP: &str = "\
Examples:
  vellum resize-pool notes.vellum 2GiB      notes.vellum: the pool has 2.0 GiB now
  vellum stat notes.vellum                  shows the size, and how much of it is in use

The process that has the store open must have a control socket (Store::control_socket in Rust).
The command returns when the pages fit into that memory, and the rest is back with the kernel. A
pool never grows beyond the maximum with which the store was opened (Options::max_pool_bytes; the
first size if there is none). The size holds until the process closes the store.";

/// Change the size of the buffer pool in the process that has a store open
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The store file
    #[arg(value_name = "STORE")]
    path: PathBuf,

    /// The memory of the pool
    #[arg(value_parser = size::parse)]
    size: u64,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When no process answers, or the pool keeps its size.
pub fn run(arguments: &Arguments) -> Outcome {
    let (path, bytes) = (&arguments.path, arguments.size);
    owner::there(path, || vellum::request_resize_pool(path, bytes))?;
    let mut output = Output::new();
    output.line(&match arguments.json {
        true => json!({ "pool_bytes": bytes }).to_string(),
        false => format!("{}: the pool has {} now", path.display(), size::show(bytes)),
    })?;
    output.finish()
}
