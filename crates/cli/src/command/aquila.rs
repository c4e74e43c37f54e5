//! `vellum aquila`: mapped files whose page faults are the program's own.

use clap::Subcommand;
use serde_json::json;
use vellum_aquila::Check;

use crate::error::{Failure, Outcome};
use crate::output::Output;

const HELP: &str = "\
Examples:
  vellum aquila doctor                 which backends work here?
  vellum aquila doctor --json          the same for programs

Aquila maps files as mmap does, and a library in the program handles the page faults, the cache and
the write-back: the crate vellum-aquila.";

/// Show how page faults can be handled in programs
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(Doctor),
}

/// Test each backend by mapping a file with it
#[derive(clap::Args)]
struct Doctor {
    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When no backend works.
pub fn run(arguments: &Arguments) -> Outcome {
    match &arguments.command {
        Command::Doctor(arguments) => doctor(arguments),
    }
}

fn doctor(arguments: &Doctor) -> Outcome {
    let checks = vellum_aquila::doctor();
    // The backends come in the order in which a program gets them.
    let best = checks.iter().find(|check| check.works);
    let mut output = Output::new();
    if arguments.json {
        let backends: Vec<_> = checks.iter().map(as_json).collect();
        let best = best.map(as_json);
        output.line(&json!({ "best": best, "backends": backends }).to_string())?;
    } else {
        for check in &checks {
            let works = if check.works { "works" } else { "does not work" };
            output.line(&format!("{}: {works} ({})", name(check), check.about))?;
        }
        if let Some(best) = best {
            output.line(&format!("programs get: {}", name(best)))?;
        }
    }
    output.finish()?;
    match best {
        Some(_) => Ok(()),
        None => Err(Failure::message("no backend works here".to_owned())),
    }
}

/// The backend, and its variant if it has several.
fn name(check: &Check) -> String {
    match (check.backend.name(), check.variant) {
        (backend, variant) if backend == variant => backend.to_owned(),
        (backend, variant) => format!("{backend}, {variant}"),
    }
}

fn as_json(check: &Check) -> serde_json::Value {
    json!({
        "backend": check.backend.name(),
        "variant": check.variant,
        "works": check.works,
        "about": check.about,
    })
}
