//! `vellum dax probe`: whether there are file tables here, and whether a file can have one.

use std::path::PathBuf;

use serde_json::{Value, json};
use vellum_dax::Flush;

use crate::error::Outcome;
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
    let flush = match Flush::of_this_cpu() {
        Flush::Clwb => "clwb",
        Flush::Clflushopt => "clflushopt",
        Flush::Clflush => "clflush",
        Flush::None => "none",
    };
    let mut file = None;
    if let Some(path) = &arguments.file {
        let opened = super::file::open(path)?;
        file = Some((
            path.display().to_string(),
            opened.backend(),
            opened.why_no_table().map(str::to_owned),
        ));
    }
    let mut output = Output::new();
    if arguments.json {
        let file = file.map_or(Value::Null, |(path, backend, why)| {
            json!({ "path": path, "backend": backend.name(), "why_no_table": why })
        });
        let backend = probe.backend.name();
        let machine = json!({ "backend": backend, "about": probe.about, "flush": flush });
        output.line(&json!({ "machine": machine, "file": file }).to_string())?;
        return output.finish();
    }
    output.line(&format!("files are mapped by: {} ({})", probe.backend, probe.about))?;
    output.line(&format!("this CPU writes cache lines back by: {flush}"))?;
    match file {
        Some((path, backend, None)) => output.line(&format!("{path}: {backend}"))?,
        Some((path, backend, Some(why))) => output.line(&format!("{path}: {backend}, as {why}"))?,
        None => {}
    }
    output.finish()
}
