//! `vellum morsel stat`: how the daemon is, and which backends this machine has.

use vellum_morsel::{Client, ClientError, DaemonStat};

use super::failed;
use crate::error::Outcome;
use crate::output::{Output, columns};
use crate::size::show;

const HELP: &str = "\
The backends are tried out here and now; the daemon has chosen its own when it was started.";

/// Show how the daemon is, and which backends this machine has
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {}

pub fn run(client: &Client, _: &Arguments) -> Outcome {
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
