//! `vellum morsel`: a client of the cache daemon.

mod files;
mod load;
mod ls;
mod rm;
mod stat;

use std::path::PathBuf;

use clap::Subcommand;
use vellum_morsel::Client;

use crate::error::Outcome;

const HELP: &str = "\
Examples:
  vellum morsel load model.gguf        now, so that no program waits for it later
  vellum morsel ls
  vellum morsel stat                   the daemon, and what this machine offers
  vellum morsel rm model.gguf

A daemon must run: see 'vellum help morseld'. Programs ask it through the crate vellum-morsel.";

/// Ask the cache daemon for files, and list those that it has
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
