//! `vellum check`: reads every page and says whether the store is sound.

use serde_json::json;
use vellum::{CheckProgress, CheckReport, Error, Store};

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

Reads every page, and checks its checksum, its place in its tree, the order of its keys and the map
of free pages. Lists all damage; the exit code is then 1. Counts pages without a reference as lost:
they take space, but no data is missing. A crash while a tree is dropped leaves such pages. With
--free-lost the store uses them again for new entries, unless the check finds damage.";

/// Read every page of a store and say whether it is sound
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// Free the pages that nothing refers to
    #[arg(long)]
    free_lost: bool,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store is damaged, or cannot be read or written.
pub fn run(arguments: &Arguments) -> Outcome {
    match arguments.free_lost {
        false => arguments.store.read(Need::Pages, |store| check(arguments, store)),
        true => arguments.store.write(Need::Pages, |store| check(arguments, store)),
    }
}

fn check(arguments: &Arguments, store: &Store) -> Outcome {
    let path = &arguments.store.path;
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
    if arguments.json { print_json(arguments, &report) } else { print(arguments, &report) }?;
    match report.damage.len() {
        0 => Ok(()),
        count => {
            let shown = path.display();
            Err(Failure::message(format!(
                "{shown}: damaged in {count} places; save what can be read with \
                 'vellum dump --salvage'"
            )))
        }
    }
}

fn print_json(arguments: &Arguments, report: &CheckReport) -> Outcome {
    let damage: Vec<_> = report.damage.iter().map(ToString::to_string).collect();
    let mut output = Output::new();
    let report = json!({
        "sound": report.is_sound(),
        "pages_checked": report.pages_checked,
        "lost_pages": report.lost_pages,
        "freed_pages": if arguments.free_lost && report.is_sound() { report.lost_pages } else { 0 },
        "damage": damage,
        "trees": trees_json(&report.trees),
    });
    output.line(&report.to_string())?;
    output.finish()
}

fn print(arguments: &Arguments, report: &CheckReport) -> Outcome {
    let mut output = Output::new();
    for line in columns(&tree_rows(&report.trees)) {
        output.line(&line)?;
    }
    for damage in &report.damage {
        output.line(&format!("damage: {damage}"))?;
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
