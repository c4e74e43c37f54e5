//! `vellum aquila`: mapped files whose page faults are the program's own.

mod launch;
mod top;

use clap::Subcommand;
use serde_json::json;
use vellum_aquila::Check;

use crate::error::{Failure, Outcome};
use crate::output::Output;

const HELP: &str = "\
Examples:
  vellum aquila doctor                 which backends work here?
  vellum aquila doctor --json          the same for programs
  vellum aquila run --cache 1GiB -- bfs graph.bin
                                       any program; the files that it maps for reading go through
                                       a cache of its own
  vellum aquila run --backend ring0 -- sort words
                                       any program, whose threads run in ring 0 of a guest
  vellum aquila top                    what the caches of running programs do

Aquila maps files as mmap does, and a library in the program handles the page faults, the cache and
the write-back: the crate vellum-aquila. The doctor also tests ring 0 of a guest, where a program
can handle faults without the kernel: vellum-aquila-ring0. Only 'vellum aquila run --backend ring0'
uses it.";

/// Run programs with a cache of their own for mapped files, and show what works here
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(Doctor),
    Run(launch::Arguments),
    Top(top::Arguments),
}

/// Test each backend by mapping a file with it, and ring 0 by running a guest
#[derive(clap::Args)]
struct Doctor {
    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When no backend works, or the program cannot be run.
pub fn run(arguments: &Arguments) -> Outcome {
    match &arguments.command {
        Command::Doctor(arguments) => doctor(arguments),
        Command::Run(arguments) => launch::run(arguments),
        Command::Top(arguments) => top::run(arguments),
    }
}

fn doctor(arguments: &Doctor) -> Outcome {
    let checks = vellum_aquila::doctor();
    // The backends come in the order in which a program gets them.
    let best = checks.iter().find(|check| check.works);
    // Not one of them: only programs as they are use it.
    let ring_0 = vellum_aquila_ring0::doctor();
    let mut output = Output::new();
    if arguments.json {
        let backends: Vec<_> = checks.iter().map(as_json).collect();
        let best = best.map(as_json);
        let said = json!({
            "best": best,
            "backends": backends,
            "ring_0": { "works": ring_0.works, "about": ring_0.about },
        });
        output.line(&said.to_string())?;
    } else {
        for check in &checks {
            output.line(&format!("{}: {} ({})", name(check), works(check.works), check.about))?;
        }
        let (works, about) = (works(ring_0.works), ring_0.about);
        output.line(&format!("ring 0: {works} ({about}); for 'run --backend ring0'"))?;
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

fn works(works: bool) -> &'static str {
    if works { "works" } else { "does not work" }
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
