//! `vellum dax stat`: the table of a file.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;

use crate::error::{Failure, Outcome};
use crate::output::{Output, columns};
use crate::size::show;

const HELP: &str = "\
The command makes the table if there is none, and says how long that took. A table that no process
uses is kept while the kernel has the file cached, and does not need the memory.";

/// Show the file table of a file
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The file
    file: PathBuf,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let start = Instant::now();
    let file = super::file::open(&arguments.file)?;
    let seconds = start.elapsed().as_secs_f64();
    let shown = arguments.file.display();
    let failed = |error| Failure::message(format!("{shown}: {error}"));
    let Some(stat) = file.stat().map_err(failed)? else {
        let why = file.why_no_table().unwrap_or_default();
        return Err(Failure::message(format!("{shown} has no file table: {why}")));
    };
    let length = file.length().map_err(failed)?;
    let mut output = Output::new();
    if arguments.json {
        let value = json!({
            "length_bytes": length,
            "pages": stat.pages,
            "present_pages": stat.present,
            "table_bytes": stat.table_bytes,
            "mappings": stat.mappings,
            "served_by_file": stat.served_by_file,
            "ephemeral_mappings": stat.ephemeral,
            "stale": stat.is_stale,
            "open_seconds": seconds,
        });
        output.line(&value.to_string())?;
        return output.finish();
    }
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let rows = [
        row("length", show(length)),
        row("pages", format!("{}, of which {} need no fault", stat.pages, stat.present)),
        row("page tables", show(stat.table_bytes)),
        row("mappings", format!("{} in all processes", stat.mappings)),
        row("served by the file system", format!("{} of these", stat.served_by_file)),
        row("ephemeral mappings", format!("{} in all processes", stat.ephemeral)),
        row("opened in", format!("{:.1} ms", seconds * 1e3)),
    ];
    for line in columns(&rows) {
        output.line(&line)?;
    }
    output.finish()
}
