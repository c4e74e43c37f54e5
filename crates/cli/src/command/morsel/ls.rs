//! `vellum morsel ls`: the files that the daemon has.

use serde_json::{Value, json};
use vellum_morsel::{Client, Object};

use super::files::failed;
use crate::error::Outcome;
use crate::output::{Output, columns};
use crate::size;

const HELP: &str = "\
The file used last comes first. Users see the files that they have asked for; root and the daemon's
own user see all. 'mapped' is known with the kernel module only.";

/// List the files that the daemon has in memory
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// Machine-readable output: an array of objects
    #[arg(long)]
    json: bool,
}

pub fn run(client: &Client, arguments: &Arguments) -> Outcome {
    let objects = client.list().map_err(|error| failed(&error))?;
    let mut output = Output::new();
    if arguments.json {
        output.line(&objects.iter().map(object_json).collect::<Value>().to_string())?;
        return output.finish();
    }
    for line in columns(&rows(&objects)) {
        output.line(&line)?;
    }
    output.finish()
}

fn object_json(object: &Object) -> Value {
    json!({
        "file": object.name,
        "bytes": object.length,
        "uses": object.uses,
        "mapped": object.mounts,
    })
}

/// A row per file, under a row of headings; nothing at all without files.
fn rows(objects: &[Object]) -> Vec<Vec<String>> {
    if objects.is_empty() {
        return Vec::new();
    }
    let headings = ["file", "size", "uses", "mapped"];
    let mut rows = vec![headings.map(str::to_string).to_vec()];
    rows.extend(objects.iter().map(|object| {
        let mounts = object.mounts.map_or_else(|| "?".to_string(), |mounts| mounts.to_string());
        vec![object.name.clone(), size::show(object.length), object.uses.to_string(), mounts]
    }));
    rows
}
