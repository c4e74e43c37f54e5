//! `vellum morsel load`: has the daemon load files.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;
use vellum_morsel::Client;

use super::files::{each_file, of_file, open};
use crate::error::Outcome;
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::size;

/// Have the daemon load files, and wait until it has them
#[derive(clap::Args)]
pub struct Arguments {
    /// The files
    #[arg(required = true)]
    files: Vec<PathBuf>,

    /// Machine-readable output: an object for each file, one a line
    #[arg(long)]
    json: bool,
}

pub fn run(client: &Client, arguments: &Arguments) -> Outcome {
    let mut output = Output::new();
    let done = each_file(&arguments.files, |path| {
        Ok(load(client, path, arguments.json)?.and_then(|line| output.line(&line)))
    });
    // Prints the files that were loaded before a failure, too.
    output.finish().and(done)
}

/// Loads a file and returns the line to print.
fn load(client: &Client, path: &Path, json: bool) -> Outcome<Outcome<String>> {
    let file = match open(path) {
        Ok(file) => file,
        Err(failure) => return Ok(Err(failure)),
    };
    let start = Instant::now();
    let mut shown: Option<Progress> = None;
    let loaded = client.load(&file, |progress| {
        let shown =
            shown.get_or_insert_with(|| Progress::new("loading", Unit::Bytes, progress.total));
        shown.set(progress.done);
    });
    if let Some(shown) = shown {
        shown.finish();
    }
    let loaded = match of_file(path, loaded)? {
        Ok(loaded) => loaded,
        Err(failure) => return Ok(Err(failure)),
    };
    let (length, backend) = (loaded.morsel.length(), loaded.morsel.backend());
    let (name, seconds) = (path.display(), start.elapsed().as_secs_f64());
    if json {
        let (name, backend) = (name.to_string(), backend.to_string());
        let (was_there, bytes) = (loaded.was_there, length);
        let object = json!({
            "file": name,
            "was_there": was_there,
            "bytes": bytes,
            "seconds": seconds,
            "backend": backend,
        });
        return Ok(Ok(object.to_string()));
    }
    let how = if loaded.was_there { "was there" } else { "loaded" };
    Ok(Ok(format!("{name}: {how}, {}, {seconds:.3} s, backend {backend}", size::show(length))))
}
