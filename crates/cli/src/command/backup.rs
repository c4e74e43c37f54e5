//! `vellum backup`: a copy of a store that is a store, or an increment.

use std::ops::ControlFlow;
use std::path::PathBuf;

use serde_json::json;
use vellum::{BackupOptions, BackupProgress, BackupReport, Store};

use crate::error::{AtStore, Outcome};
use crate::options::{Need, StoreArguments};
use crate::output::Output;
use crate::progress::DelayedProgress;
use crate::{interrupt, owner, size};

const HELP: &str = "\
Examples:
  vellum backup notes.vellum sunday.vellum     a full backup, which is a store itself
  vellum backup notes.vellum monday.vinc --since sunday.vellum
  vellum backup notes.vellum tuesday.vinc --since monday.vinc
  vellum restore --to notes.vellum sunday.vellum monday.vinc tuesday.vinc

FILE gets its name when it is complete, durable and checked; after an error, or Ctrl-C, there is no
new file. A full backup opens as any store. Opening it for writing makes it another store than the
one that increments follow.

If a process has the store open for writing, that process makes the backup, if it has a control
socket (Store::control_socket in Rust). Otherwise no process may have it open for writing: a store
that was not closed is recovered from its log first. An increment has the pages that differ.

With --remember the store remembers what is written to it from this backup on. Then the next
increment reads only that, and 'vellum check --repair-from' can repair the pages that were not
written. A program that backs its own store up always has it remember. An increment of another
backup reads every page of the store. A full backup that an increment follows is read as well.";

/// Copy a store, or what has changed in it, to a file
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The file to make
    file: PathBuf,

    /// Make an increment: only what has changed since this backup, or this increment
    #[arg(long, value_name = "BASE")]
    since: Option<PathBuf>,

    /// Replace FILE if it exists
    #[arg(long)]
    force: bool,

    /// Open the store for writing, so that it remembers what is written after this backup
    #[arg(long, conflicts_with = "no_log")]
    remember: bool,

    /// Read every page of the store for an increment, also if the store knows what has changed
    #[arg(long, requires = "since")]
    read_all: bool,

    /// Do not read FILE again to check every page
    #[arg(long)]
    no_check: bool,

    /// The most bytes of the store to read in a second, so that others have the disk, too
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    rate: Option<u64>,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read or is damaged, or the file cannot be written.
pub fn run(arguments: &Arguments) -> Outcome {
    interrupt::watch()?;
    let path = &arguments.store.path;
    let mut options = BackupOptions::new().replace(arguments.force).check(!arguments.no_check);
    if let Some(base) = &arguments.since {
        options = options.since(base).read_all(arguments.read_all);
    }
    if let Some(bytes) = arguments.rate {
        options = options.bytes_per_second(bytes);
    }
    let there = || {
        with_progress("backup", |progress| {
            vellum::request_backup(path, &arguments.file, &options, progress)
        })
    };
    let here = || {
        let back_up = |store: &Store| {
            with_progress("backup", |progress| store.backup(&arguments.file, &options, progress))
                .at(path)
        };
        match arguments.remember {
            false => arguments.store.read(Need::Pages, back_up),
            true => arguments.store.write(Need::Pages, back_up),
        }
    };
    let does = "backs it up itself (Store::backup)";
    let report = owner::there_or_here(path, does, there, here);
    if report.is_err() {
        // A signal, and not the function that it cancelled, is the cause.
        interrupt::check()?;
    }
    print(&report?, arguments)
}

/// Runs a backup or a restore, shows its progress if it takes long, and ends it after a signal.
pub fn with_progress<T>(
    label: &'static str,
    work: impl FnOnce(&mut dyn FnMut(BackupProgress) -> ControlFlow<()>) -> T,
) -> T {
    let (mut shown, mut done) = (None::<DelayedProgress>, 0);
    let result = work(&mut |BackupProgress { bytes_done, bytes_total, .. }| {
        if bytes_total == 0 {
            return interrupt::flow();
        }
        let shown = shown.get_or_insert_with(|| DelayedProgress::new(label, bytes_total));
        shown.advance(bytes_done.saturating_sub(done));
        done = bytes_done;
        interrupt::flow()
    });
    if let Some(shown) = shown {
        shown.finish();
    }
    result
}

fn print(report: &BackupReport, arguments: &Arguments) -> Outcome {
    let mut output = Output::new();
    if arguments.json {
        let report = json!({
            "store_id": format!("{:032x}", report.store_id),
            "lsn": report.lsn,
            "file_bytes": report.file_bytes,
            "read_bytes": report.read_bytes,
            "used_bytes": report.used_bytes,
            "checked": !arguments.no_check,
            "seconds": report.duration.as_secs_f64(),
        });
        output.line(&report.to_string())?;
        return output.finish();
    }
    let (file, bytes) = (arguments.file.display(), size::show(report.file_bytes));
    let (used, read) = (size::show(report.used_bytes), size::show(report.read_bytes));
    let checked = if arguments.no_check { "not checked" } else { "checked" };
    output.line(&match &arguments.since {
        Some(base) => format!(
            "{file}: {bytes} changed since {}, of a store of {used}, of which {read} were read; \
             {checked}",
            base.display()
        ),
        None => format!("{file}: {bytes}, of which the store uses {used}; {checked}"),
    })?;
    output.finish()
}
