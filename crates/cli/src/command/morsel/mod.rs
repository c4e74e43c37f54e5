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

fn open(path: &Path) -> Outcome<File> {
    File::open(path).doing(|| path.display().to_string())
}

fn failed(error: &ClientError) -> Failure {
    Failure::message(error.to_string())
}

fn failed_at(path: &Path) -> impl Fn(ClientError) -> Failure {
    move |error| match error {
        ClientError::Refused(refusal) => Failure::message(format!("{}: {refusal}", path.display())),
        error => failed(&error),
    }
}
