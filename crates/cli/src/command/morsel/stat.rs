//! `vellum morsel stat`: the state of the daemon, and the backends that this machine has.

use serde_json::{Value, json};
use vellum_morsel::{Client, ClientError, DaemonStat};

use super::files::failed;
use crate::error::Outcome;
use crate::output::{Output, columns};
use crate::size::show;

const HELP: &str = "\
The command tries the backends itself. The daemon chose its own backend when it started.";

/// Show the state of the daemon, and which backends this machine has
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

pub fn run(client: &Client, arguments: &Arguments) -> Outcome {
    if arguments.json {
        return run_json(client);
    }
    let mut output = Output::new();
    for probe in vellum_morsel::probe() {
        let found = probe.found.unwrap_or_else(|why| format!("not here: {why}"));
        output.line(&format!("backend {}: {found}", probe.backend))?;
    }
    match client.stat() {
        Ok(stat) => {
            for line in columns(&rows(&stat)) {
                output.line(&line)?;
            }
            output.finish()
        }
        Err(error @ ClientError::NoDaemon { .. }) => {
            output.line(&error.to_string())?;
            output.finish()
        }
        Err(error) => Err(failed(&error)),
    }
}

fn run_json(client: &Client) -> Outcome {
    let backends = vellum_morsel::probe().into_iter().map(|probe| {
        let (name, found) = (probe.backend.to_string(), probe.found.is_ok());
        let about = probe.found.unwrap_or_else(|why| why);
        json!({ "backend": name, "found": found, "about": about })
    });
    let daemon = match client.stat() {
        Ok(stat) => json!({
            "backend": stat.backend,
            "used_bytes": stat.used,
            "limit_bytes": stat.limit,
            "files": stat.objects,
            "loads": stat.loads,
            "hits": stat.hits,
            "evictions": stat.evictions,
        }),
        Err(ClientError::NoDaemon { .. }) => Value::Null,
        Err(error) => return Err(failed(&error)),
    };
    let mut output = Output::new();
    let backends: Value = backends.collect();
    output.line(&json!({ "backends": backends, "daemon": daemon }).to_string())?;
    output.finish()
}

fn rows(stat: &DaemonStat) -> Vec<Vec<String>> {
    let row = |name: &str, value: String| vec![name.to_string(), value];
    vec![
        row("backend of the daemon", stat.backend.clone()),
        row("memory", format!("{} of {}", show(stat.used), show(stat.limit))),
        row("files", stat.objects.to_string()),
        row("loads", stat.loads.to_string()),
        row("answered from memory", stat.hits.to_string()),
        row("forgotten to make room", stat.evictions.to_string()),
    ]
}
