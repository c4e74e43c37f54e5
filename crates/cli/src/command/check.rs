//! `vellum check`: reads every page and says whether the store is sound.

use serde_json::json;
use vellum::CheckReport;

use crate::command::stat::{tree_rows, trees_json};
use crate::error::{AtStore, Failure, Outcome};
use crate::options::{Need, StoreArguments};
use crate::output::{Output, columns};
use crate::progress::{Progress, Unit};

const HELP: &str = "\
Example:
  vellum check notes.vellum && echo sound

Reads every page, and checks its checksum, its place in its tree, the order of its keys and the map
of free pages. Lists all damage; the exit code is then 1. Counts pages without a reference as lost:
they take space, but no data is missing.";

/// Read every page of a store and say whether it is sound
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
/// When the store is damaged or cannot be read.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    arguments.store.read(Need::Pages, |store| {
        let pages = store.stat().at(path)?.used_pages;
        let progress = Progress::new("check", Unit::Items, pages);
        let report = store.check(&mut |state| progress.set(state.pages_done)).at(path);
        progress.finish();
        let report = report?;
        if arguments.json { print_json(&report) } else { print(&report) }?;
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
    })
}

fn print_json(report: &CheckReport) -> Outcome {
    let damage: Vec<_> = report.damage.iter().map(ToString::to_string).collect();
    let mut output = Output::new();
    let report = json!({
        "sound": report.is_sound(),
        "pages_checked": report.pages_checked,
        "lost_pages": report.lost_pages,
        "damage": damage,
        "trees": trees_json(&report.trees),
    });
    output.line(&report.to_string())?;
    output.finish()
}

fn print(report: &CheckReport) -> Outcome {
    let mut output = Output::new();
    for line in columns(&tree_rows(&report.trees)) {
        output.line(&line)?;
    }
    for damage in &report.damage {
        output.line(&format!("damage: {damage}"))?;
    }
    if report.lost_pages > 0 {
        output.line(&format!("{} pages are lost: nothing refers to them", report.lost_pages))?;
    }
    if report.damage.is_empty() {
        output.line(&format!("{} pages checked: sound", report.pages_checked))?;
    }
    output.finish()
}
