//! `vellum dax probe`: whether there are file tables here, and whether a file can have one.

use std::path::PathBuf;

use serde_json::json;
use vellum_dax::{Access, Flush, Heap, HeapOptions};

use crate::error::{Failure, Outcome};
use crate::output::Output;

/// Show whether files can have file tables here
#[derive(clap::Args)]
pub struct Arguments {
    /// A file that is to have one
    file: Option<PathBuf>,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let probe = vellum_dax::probe();
    let flush = Flush::of_this_cpu().name();
    let heap = Heap::new(&HeapOptions { capacity: 1, ..HeapOptions::new(Access::Read) });
    let heap = heap.map_err(|error| Failure::message(error.to_string()))?;
    let path = arguments.file.as_deref();
    let file = path
        .map(|path| Ok::<_, Failure>((path.display(), super::file::open(path)?)))
        .transpose()?;
    let mut output = Output::new();
    if arguments.json {
        let file = file.map(|(path, file)| {
            let (backend, why) = (file.backend().name(), file.why_no_table());
            json!({ "path": path.to_string(), "backend": backend, "why_no_table": why })
        });
        let backend = probe.backend.name();
        let ephemeral = heap.backend().name();
        let machine = json!({
            "backend": backend, "about": probe.about, "ephemeral": ephemeral, "flush": flush
        });
        output.line(&json!({ "machine": machine, "file": file }).to_string())?;
        return output.finish();
    }
    output.line(&format!("files are mapped by: {} ({})", probe.backend, probe.about))?;
    let why = heap.why_no_heap().map_or(String::new(), |why| format!(" ({why})"));
    output.line(&format!("ephemeral mappings are made by: {}{why}", heap.backend()))?;
    output.line(&format!("this CPU writes cache lines back by: {flush}"))?;
    if let Some((path, file)) = file {
        let why = file.why_no_table().map_or(String::new(), |why| format!(", as {why}"));
        output.line(&format!("{path}: {}{why}", file.backend()))?;
    }
    output.finish()
}
