//! `vellum morsel`: what a client of the cache daemon does.

mod load;
mod ls;
mod rm;
mod stat;

use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use vellum_morsel::{Client, ClientError};

use crate::error::{Doing, Failure, Outcome};
use crate::progress::say;

const HELP: &str = "\
Examples:
  vellum morsel load model.gguf        now, so that nobody waits for it later
  vellum morsel ls
  vellum morsel stat                   the daemon, and what this machine offers
  vellum morsel rm model.gguf

A daemon must run: see 'vellum help morseld'. Programs ask it by the crate vellum-morsel.";

/// Ask the cache daemon for files, and what it has
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The daemon's socket [default: $VELLUM_MORSELD, or /run/vellum/morseld.sock]
    #[arg(long, value_name = "PATH", global = true)]
    socket: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Load(load::Arguments),
    Ls(ls::Arguments),
    Rm(rm::Arguments),
    Stat(stat::Arguments),
}

/// Runs the command.
///
/// # Errors
/// When no daemon answers, or it refuses.
pub fn run(arguments: &Arguments) -> Outcome {
    let client = arguments.socket.as_ref().map_or_else(Client::usual, Client::new);
    match &arguments.command {
        Command::Load(arguments) => load::run(&client, arguments),
        Command::Ls(arguments) => ls::run(&client, arguments),
        Command::Rm(arguments) => rm::run(&client, arguments),
        Command::Stat(arguments) => stat::run(&client, arguments),
    }
}

/// Does something with each file, also after one of them has failed.
///
/// `work` returns an error of its own if no file can be done, and one within if this one cannot.
///
/// # Errors
/// That no file can be done; otherwise what the last file failed with, or that others have failed,
/// each of which is told when it does.
fn each_file(files: &[PathBuf], mut work: impl FnMut(&Path) -> Outcome<Outcome>) -> Outcome {
    let mut failed = 0_usize;
    for (index, path) in files.iter().enumerate() {
        let Err(failure) = work(path)? else { continue };
        failed += 1;
        if matches!(failure, Failure::OutputClosed) || index + 1 == files.len() {
            return Err(failure);
        }
        say(&format!("vellum: {}", failure.line()));
    }
    match failed {
        0 => Ok(()),
        _ => Err(Failure::message(format!("{failed} of {} files failed", files.len()))),
    }
}

fn open(path: &Path) -> Outcome<File> {
    vellum_morsel::open_source(path).doing(|| path.display().to_string())
}

fn failed(error: &ClientError) -> Failure {
    Failure::message(error.to_string())
}

/// Tells an answer that is about a file from one that would be the same for any other.
fn of_file<T>(path: &Path, answer: Result<T, ClientError>) -> Outcome<Outcome<T>> {
    match answer {
        Ok(value) => Ok(Ok(value)),
        Err(ClientError::Refused(refusal)) => {
            Ok(Err(Failure::message(format!("{}: {refusal}", path.display()))))
        }
        Err(error) => Err(failed(&error)),
    }
}
