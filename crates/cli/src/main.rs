//! `vellum`: the demonstration, the probe, everyday work on a store file, and the cache daemon.
//!
//! Each command is a file in `command/`; `files/` keeps the files of a directory in a store, for
//! `import` and `demo`. All output goes through [`output`], because it is no error if the reader
//! closes the pipe early. Exit codes: 0 done, 1 failed (one line says why), 2 wrong usage, 130
//! ended by a signal.

mod command;
mod demo;
mod error;
mod files;
mod interrupt;
mod key_text;
mod new_file;
mod options;
mod output;
mod owner;
mod progress;
mod random;
mod recovery;
mod size;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use error::{Failure, Outcome};

const AFTER_HELP: &str = "\
Examples:
  vellum demo --dir /usr/share --limit 256MiB   store real files and verify every byte
  vellum probe                                  what this kernel offers, and what it costs
  vellum bench list                             measurements, also of other engines
  vellum put notes.vellum greeting hello        creates the file if it does not exist
  vellum get notes.vellum greeting
  vellum import photos.vellum ~/photos          a directory, then: vellum scan photos.vellum
  vellum dump notes.vellum | vellum load copy.vellum
  vellum compact notes.vellum                   return free space to the file system
  vellum backup notes.vellum sunday.vellum      then: vellum restore --to notes.vellum sunday.vellum
  vellum morseld --limit 16GiB                  keeps files in memory for all programs; then:
  vellum morsel load model.gguf

Sizes are bytes or take KiB, MiB, GiB, TiB (K, M, G, T): 512MiB, 1.5GiB.
'vellum help COMMAND' explains each command.";

#[derive(Parser)]
#[command(
    name = "vellum",
    version,
    about = "An embeddable store for data larger than memory: demonstration, probe and tools",
    after_help = AFTER_HELP,
    max_term_width = 100
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::Arguments),
    #[command(name = demo::victim::NAME, hide = true)]
    DemoVictim(demo::victim::Arguments),
    Probe(command::probe::Arguments),
    Bench(vellum_experiments::command::Arguments),
    /// Run as a worker of the benchmarks, which start this program again
    #[command(name = vellum_bench::worker::NAME, hide = true)]
    BenchWorker,
    Import(command::import::Arguments),
    Export(command::export::Arguments),
    Get(command::get::Arguments),
    Put(command::put::Arguments),
    Rename(command::rename::Arguments),
    Rm(command::rm::Arguments),
    Scan(command::scan::Arguments),
    Trees(command::trees::Arguments),
    Stat(command::stat::Arguments),
    Check(command::check::Arguments),
    Dump(command::dump::Arguments),
    Load(command::load::Arguments),
    Compact(command::compact::Arguments),
    ResizePool(command::resize_pool::Arguments),
    Backup(command::backup::Arguments),
    Restore(command::restore::Arguments),
    Salvage(command::salvage::Arguments),
    Log(command::log::Arguments),
    Morseld(command::morseld::Arguments),
    Morsel(command::morsel::Arguments),
    Dax(command::dax::Arguments),
    Aquila(command::aquila::Arguments),
    #[cfg_attr(not(feature = "sim"), command(hide = true))]
    Sim(command::sim::Arguments),
    #[command(hide = true)]
    WriteManuals(command::manuals::Arguments),
}

fn main() -> ExitCode {
    let outcome = run(Arguments::parse().command);
    let signal_came = interrupt::signal_came();
    let line = match outcome {
        Ok(()) | Err(Failure::OutputClosed) if !signal_came => return ExitCode::SUCCESS,
        Ok(()) | Err(Failure::OutputClosed) => {
            "a signal came, but the command had already finished".into()
        }
        Err(failure) => failure.line(),
    };
    // If standard error is closed, only the exit code tells of the failure.
    let _ = writeln!(std::io::stderr(), "vellum: {line}");
    if signal_came { ExitCode::from(interrupt::EXIT_CODE) } else { ExitCode::FAILURE }
}

fn run(command: Command) -> Outcome {
    match command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::DemoVictim(arguments) => demo::victim::run(&arguments),
        Command::Probe(arguments) => command::probe::run(&arguments),
        Command::Bench(arguments) => command::bench::run(&arguments),
        Command::BenchWorker => command::bench::work(),
        Command::Import(arguments) => command::import::run(&arguments),
        Command::Export(arguments) => command::export::run(&arguments),
        Command::Get(arguments) => command::get::run(&arguments),
        Command::Put(arguments) => command::put::run(&arguments),
        Command::Rename(arguments) => command::rename::run(&arguments),
        Command::Rm(arguments) => command::rm::run(&arguments),
        Command::Scan(arguments) => command::scan::run(&arguments),
        Command::Trees(arguments) => command::trees::run(&arguments),
        Command::Stat(arguments) => command::stat::run(&arguments),
        Command::Check(arguments) => command::check::run(&arguments),
        Command::Dump(arguments) => command::dump::run(&arguments),
        Command::Load(arguments) => command::load::run(&arguments),
        Command::Compact(arguments) => command::compact::run(&arguments),
        Command::ResizePool(arguments) => command::resize_pool::run(&arguments),
        Command::Backup(arguments) => command::backup::run(&arguments),
        Command::Restore(arguments) => command::restore::run(&arguments),
        Command::Salvage(arguments) => command::salvage::run(&arguments),
        Command::Log(arguments) => command::log::run(&arguments),
        Command::Morseld(arguments) => command::morseld::run(&arguments),
        Command::Morsel(arguments) => command::morsel::run(&arguments),
        Command::Dax(arguments) => command::dax::run(&arguments),
        Command::Aquila(arguments) => command::aquila::run(&arguments),
        Command::Sim(arguments) => command::sim::run(&arguments),
        Command::WriteManuals(arguments) => {
            command::manuals::run(&arguments, &Arguments::command())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_consistent() {
        Arguments::command().debug_assert();
    }
}
