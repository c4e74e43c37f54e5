//! `vellum dax`: files on byte-addressable storage, and their page tables.

mod file;
mod prezero;
mod probe;
mod stat;
mod store;
mod tables;

use clap::Subcommand;

use crate::error::Outcome;

const HELP: &str = "\
Examples:
  vellum dax probe                     is the kernel module there?
  vellum dax probe /mnt/pmem/model     can this file have a file table?
  vellum dax stat /mnt/pmem/model      its table
  vellum dax tables                    all tables in this kernel (root)
  vellum dax prezero /mnt/pmem/zeroed  keeps zeroed files ready for programs
  vellum dax store /mnt/pmem/model     has its table made faster after a restart (root)

A file table is the page tables of a file on persistent memory, which processes map by one entry:
only the first access faults. Needs Vellum's kernel module and ext4 mounted with -o dax; without
them the crate vellum-dax maps files by mmap.";

/// Show files on byte-addressable storage, and their page tables
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Probe(probe::Arguments),
    Stat(stat::Arguments),
    Tables(tables::Arguments),
    Prezero(prezero::Arguments),
    Store(store::Arguments),
}

/// Runs the command.
///
/// # Errors
/// When a file cannot be opened, or the module refuses something.
pub fn run(arguments: &Arguments) -> Outcome {
    match &arguments.command {
        Command::Probe(arguments) => probe::run(arguments),
        Command::Stat(arguments) => stat::run(arguments),
        Command::Tables(arguments) => tables::run(arguments),
        Command::Prezero(arguments) => prezero::run(arguments),
        Command::Store(arguments) => store::run(arguments),
    }
}
