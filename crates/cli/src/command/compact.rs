//! `vellum compact`: returns a store's free space to the file system.

use std::ops::ControlFlow;

use indicatif::HumanCount;
use serde_json::json;
use vellum::{CompactProgress, CompactReport};
use vellum_pool::PAGE_SIZE;

use crate::error::{AtStore, Failure, Outcome};
use crate::options::{Need, StoreArguments};
use crate::output::Output;
use crate::progress::DelayedProgress;
use crate::{interrupt, owner, size};

const HELP: &str = "\
Examples:
  vellum compact notes.vellum           notes.vellum: 812.0 MiB before, 340.2 MiB now; moved ...
  vellum compact notes.vellum --json

Removed entries leave free pages in the file, which the store uses for new ones: 'vellum stat' shows
how many there are. This command moves pages from the end of the file to free places before it, and
cuts the end off. It needs no space for that, and leaves all entries as they are.

Ctrl-C ends the command after the current step, and what is free in the end of the file is cut off.
A later call goes on. If the process is killed, the next command recovers the store from its log.

If a process has the store open for writing, that process compacts it while it runs, if it has a
control socket (Store::control_socket in Rust). Pages that are half full stay so: 'vellum dump' and
'vellum load' make a store with full ones.";

/// Return the free space of a store's file to the file system
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store is damaged, or cannot be read or written.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    let before = path.metadata().map_or(0, |file| file.len());
    interrupt::watch()?;
    let there = || with_progress(|progress| vellum::request_compact(path, progress));
    let here = || {
        arguments.store.write(Need::Values, |store| {
            interrupt::check()?;
            with_progress(|progress| store.compact(progress)).at(path)
        })
    };
    let does = "compacts it itself (Store::compact)";
    let report = owner::there_or_here(path, does, there, here);
    if report.is_err() {
        // What has moved stays where it is, and the owner may still be at work.
        interrupt::check()?;
    }
    let report = report?;
    // Closing the store may have made the file shorter still.
    let after = path.metadata().map_or(report.bytes_after, |file| file.len());
    print(arguments, &report, before.max(report.bytes_before), after.min(report.bytes_after))?;
    match report.is_complete {
        true => Ok(()),
        false => {
            interrupt::check()?;
            let what =
                "the process that has the store open ended the compaction early: run it again";
            Err(Failure::message(what))
        }
    }
}

/// Runs a compaction, shows its progress if it takes long, and ends it after a signal.
fn with_progress<T>(
    compact: impl FnOnce(&mut dyn FnMut(CompactProgress) -> ControlFlow<()>) -> T,
) -> T {
    let (mut shown, mut pass, mut seen) = (None::<DelayedProgress>, 0, 0);
    let report = compact(&mut |progress: CompactProgress| {
        if progress.pass == 0 {
            return interrupt::flow();
        }
        if progress.pass != pass {
            finish(shown.take());
            (pass, seen) = (progress.pass, 0);
        }
        let bytes = |pages: u64| pages.saturating_mul(PAGE_SIZE as u64);
        let total = bytes(progress.pages_total);
        let shown = shown.get_or_insert_with(|| DelayedProgress::new("compact", total));
        let more = progress.pages_seen.saturating_sub(seen);
        shown.advance(bytes(more));
        seen += more;
        interrupt::flow()
    });
    finish(shown);
    report
}

/// Removes the bar of a pass.
fn finish(shown: Option<DelayedProgress>) {
    if let Some(shown) = shown {
        shown.finish();
    }
}

fn print(arguments: &Arguments, report: &CompactReport, before: u64, after: u64) -> Outcome {
    let mut output = Output::new();
    if arguments.json {
        let report = json!({
            "bytes_before": before,
            "bytes_after": after,
            "pages_moved": report.pages_moved,
            "pages_left": report.pages_left,
            "complete": report.is_complete,
            "seconds": report.duration.as_secs_f64(),
        });
        output.line(&report.to_string())?;
        return output.finish();
    }
    let (file, moved) = (arguments.store.path.display(), HumanCount(report.pages_moved));
    let (before, after) = (size::show(before), size::show(after));
    let pages = if report.pages_moved == 1 { "page" } else { "pages" };
    let mut line = format!("{file}: {before} before, {after} now; moved {moved} {pages}");
    if report.pages_left > 0 {
        let left = HumanCount(report.pages_left);
        line += &format!("; {left} more are in the way of a shorter file");
    }
    output.line(&line)?;
    output.finish()
}
