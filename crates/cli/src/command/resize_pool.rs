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

The process that has the store open must have a control socket (Store::control_socket in Rust). A
pool never grows beyond the maximum with which the store was opened (Options::max_pool_bytes; the
first size if there is none), and has at least eight pages of trees. The size holds until the
process closes the store.

A pool that shrinks evicts pages, and writes those that have changed; threads that need memory wait
meanwhile. The command returns when the pages fit, and the rest of the memory is back with the
kernel, or says why the pool keeps its size. A smaller pool also bounds what a transaction may
change, and the values that are read as a whole. After Ctrl-C the process goes on with the change:
'vellum stat' shows the size.";

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
    let bytes = owner::there(path, || vellum::request_resize_pool(path, bytes))?;
    let mut output = Output::new();
    output.line(&match arguments.json {
        true => json!({ "pool_bytes": bytes }).to_string(),
        false => format!("{}: the pool has {} now", path.display(), size::show(bytes)),
    })?;
    output.finish()
}
