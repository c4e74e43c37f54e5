//! `vellum check`: reads every page and says whether the store is sound.

use std::path::PathBuf;

use serde_json::json;
use vellum::{CheckProgress, CheckReport, Error, Store};

use crate::command::backup::with_progress;
use crate::command::stat::{tree_rows, trees_json};
use crate::error::{AtStore, Failure, Outcome};
use crate::interrupt;
use crate::options::{Need, StoreArguments};
use crate::output::{Output, columns};
use crate::progress::{Progress, Unit};

const HELP: &str = "\
Examples:
  vellum check notes.vellum && echo sound
  vellum check notes.vellum --free-lost
  vellum check notes.vellum --repair-from sunday.vellum monday.vinc

Reads every page, and checks its checksum, its place in its tree, the order of its keys and the map
of free pages. Lists all damage; the exit code is then 1. Counts pages without a reference as lost:
they take space, but no data is missing. A crash while a tree is dropped leaves such pages. With
--free-lost the store uses them again for new entries, unless the check finds damage.

With --repair-from damaged pages that were not written since a backup are read from that, and
written to the store. This takes the newest backup, made by the program of the store or with
'vellum backup --remember', and a store that had a log ever since.";

/// Read every page of a store and say whether it is sound
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// Free the pages that nothing refers to
    #[arg(long)]
    free_lost: bool,

    /// Repair damaged pages from a backup and the increments that follow it, in their order
    #[arg(long, value_name = "BACKUP", num_args = 1.., conflicts_with = "no_log")]
    repair_from: Vec<PathBuf>,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store is damaged, or cannot be read or written.
pub fn run(arguments: &Arguments) -> Outcome {
    match arguments.free_lost || !arguments.repair_from.is_empty() {
        false => arguments.store.read(Need::Pages, |store| check(arguments, store)),
        true => arguments.store.write(Need::Pages, |store| check(arguments, store)),
    }
}

fn check(arguments: &Arguments, store: &Store) -> Outcome {
    let path = &arguments.store.path;
    if let Some((full, increments)) = arguments.repair_from.split_first() {
        let read = with_progress("read backup", |tell| store.repair_from(full, increments, tell));
        interrupt::check()?;
        read.at(path)?;
    }
    let pages = store.stat().at(path)?.used_pages;
    let progress = Progress::new("check", Unit::Items, pages);
    let tell = &mut |state: CheckProgress| {
        progress.set(state.pages_done);
        interrupt::flow()
    };
    let report = match arguments.free_lost {
        false => store.check_until(tell),
        true => store.free_lost_pages(tell),
    };
    progress.finish();
    if matches!(report, Err(Error::Cancelled)) {
        interrupt::check()?;
    }
    let report = report.at(path)?;
    let repaired = store.pool_stats().repairs;
    match arguments.json {
        true => print_json(arguments, &report, repaired),
        false => print(arguments, &report, repaired),
    }?;
    match report.damage.len() {
        0 => Ok(()),
        count => {
            let shown = path.display();
            Err(Failure::message(format!(
                "{shown}: damaged in {count} places; save what can be read with \
                 'vellum salvage'"
            )))
        }
    }
}

fn print_json(arguments: &Arguments, report: &CheckReport, repaired: u64) -> Outcome {
    let damage: Vec<_> = report.damage.iter().map(ToString::to_string).collect();
    let mut output = Output::new();
    let report = json!({
        "sound": report.is_sound(),
        "pages_checked": report.pages_checked,
        "lost_pages": report.lost_pages,
        "freed_pages": if arguments.free_lost && report.is_sound() { report.lost_pages } else { 0 },
        "repaired_pages": repaired,
        "damage": damage,
        "trees": trees_json(&report.trees),
    });
    output.line(&report.to_string())?;
    output.finish()
}

fn print(arguments: &Arguments, report: &CheckReport, repaired: u64) -> Outcome {
    let mut output = Output::new();
    for line in columns(&tree_rows(&report.trees)) {
        output.line(&line)?;
    }
    for damage in &report.damage {
        output.line(&format!("damage: {damage}"))?;
    }
    if repaired > 0 {
        output.line(&format!("{repaired} pages were damaged, and are repaired"))?;
    }
    if report.lost_pages > 0 {
        let what = match arguments.free_lost {
            true if report.is_sound() => "were lost, and are free now",
            true => "are lost, and are not freed because of the damage",
            false => "are lost: nothing refers to them; --free-lost frees them",
        };
        output.line(&format!("{} pages {what}", report.lost_pages))?;
    }
    if report.damage.is_empty() {
        output.line(&format!("{} pages checked: sound", report.pages_checked))?;
    }
    output.finish()
}
