//! `vellum salvage`: copies what is sound of a damaged store to a new store.

use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use serde_json::json;
use vellum::{Error, SalvagedTree, SalvagedTrees, Store, ValueReader};

use crate::error::{AtStore, Failure, Outcome, of_stream};
use crate::interrupt;
use crate::new_file::NewFile;
use crate::options::{Need, StoreArguments, close_after};
use crate::output::Output;
use crate::progress::say;

const HELP: &str = "\
Examples:
  vellum salvage broken.vellum rescued.vellum
  vellum salvage broken.vellum rescued.vellum --json

Opens a store that is damaged, or that was not closed and has lost its log, and copies the entries
that can be read. It skips damaged pages, and names each on standard error. It does not change
STORE. NEW must not exist; it gets its name when it is complete and durable. Exit status: 0 if
nothing was skipped, 1 if something was, or if there is no NEW; the last line says which.

If the list of the trees is damaged, or a page above the leaves of a tree, the command reads the
whole file to find what is below it. It says how many entries came from such pages without a parent.
A tree whose name is lost gets a name with its number, such as lost-17. If the store was not closed,
that may be a tree that was dropped, and some of the entries may be older than the others.

It does not read a log. It refuses a store that was not closed and may have its log, unless you add
--without-log: open the store before, as every other command does. Entries of pages from different
times may come together; a backup is better.";

/// Copy what is sound of a damaged store to a new one
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The store file to make
    new: PathBuf,

    /// Read the file alone, though its log may have more
    #[arg(long)]
    without_log: bool,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// What is left of a tree.
#[derive(Default)]
pub struct Found {
    /// The entries that were saved.
    pub saved: u64,
    /// Those of them that are in nodes without a sound parent, or below such nodes.
    pub orphans: u64,
    /// The places that were skipped: pages, and values.
    pub damaged: u64,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read at all, when the new one cannot be written, and when something was
/// skipped.
pub fn run(arguments: &Arguments) -> Outcome {
    interrupt::watch()?;
    let (path, new) = (&arguments.store.path, &arguments.new);
    let copied = read(&arguments.store, |store| {
        if !arguments.without_log {
            check_log(store, path)?;
        }
        let file = NewFile::create(new)?;
        let frames = store.stat().at(path)?.page_bytes / 4096;
        // No process uses the file before it is complete, so it needs no log. The close makes it
        // durable.
        let options = arguments.store.pool.options(Need::Pages.bytes(path));
        let options = options.page_frames(frames).log(false);
        let copy = Store::open_or_create(file.path(), &options).at(new)?;
        let copied = close_after(copy, new, |copy| copy_trees(store, path, copy, new))?;
        file.complete()?;
        Ok(copied)
    })?;
    report(arguments, &copied)
}

/// Refuses a store that was not closed and has its log: recovery brings back more than salvage.
fn check_log(store: &Store, path: &Path) -> Outcome {
    match store.needs_recovery() {
        true => Err(Failure::message(format!(
            "{}: the store was not closed, and its log may have what the file has not: any command \
             that opens it recovers it, such as vellum check; if that fails, add --without-log",
            path.display()
        ))),
        false => Ok(()),
    }
}

/// Opens a store for salvage and passes it to `work`.
///
/// # Errors
/// When not even its header can be read, or with the error of `work`.
pub fn read<T>(store: &StoreArguments, work: impl FnOnce(&Store) -> Outcome<T>) -> Outcome<T> {
    let options = store.options(Need::Pages).salvage(true);
    close_after(store.open(|| Store::open(&store.path, &options))?, &store.path, work)
}

/// The trees of a store that is open for salvage, and the number of damaged places in the list of
/// them. Names these, and the trees whose names are lost, on standard error.
///
/// # Errors
/// When the store cannot be read at all, and a signal.
pub fn trees(store: &Store, path: &Path) -> Outcome<(Vec<SalvagedTree>, u64)> {
    let found = store.salvage_trees(&mut |_| interrupt::flow());
    interrupt::check()?;
    let SalvagedTrees { trees, damage, .. } = found.at(path)?;
    damage.iter().for_each(|error| say(&format!("list of trees: {error}")));
    for tree in trees.iter().filter(|tree| tree.is_lost()) {
        say(&format!("tree '{}': its name is lost", tree.name()));
    }
    Ok((trees, damage.len() as u64))
}

/// What was copied.
struct Copied {
    trees: Vec<(SalvagedTree, Found)>,
    /// The damaged places in the list of trees.
    damaged: u64,
}

fn copy_trees(store: &Store, path: &Path, copy: &Store, new: &Path) -> Outcome<Copied> {
    let (trees, damaged) = trees(store, path)?;
    let copied = trees.into_iter().map(|tree| {
        let target = copy.create_tree(&tree.name()).at(new)?;
        let mut loader = target.bulk_loader().at(new)?;
        let found = entries(&tree, path, &mut |key, reader| {
            let mut value = Salvaged { reader, failed: false };
            match loader.push_from(key, &mut value) {
                Ok(()) => Ok(None),
                Err(error) if value.failed || is_of_entry(&error) => Ok(Some(error.to_string())),
                Err(error) => Err(error).at(new),
            }
        })?;
        loader.finish().at(new)?;
        Ok((tree, found))
    });
    Ok(Copied { trees: copied.collect::<Outcome<_>>()?, damaged })
}

/// A value that may fail to be read a second time.
struct Salvaged<'v> {
    reader: ValueReader<'v>,
    failed: bool,
}

impl Read for Salvaged<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match interrupt::signal_came() {
            true => Err(io::Error::other("a signal came")),
            false => self.reader.read(buffer),
        };
        self.failed |= read.is_err();
        read
    }
}

/// Whether a loader refuses an entry for what the entry is, and goes on with the next one.
fn is_of_entry(error: &Error) -> bool {
    matches!(
        error,
        Error::NotSorted { .. }
            | Error::KeyTooLong { .. }
            | Error::ValueTooLong { .. }
            | Error::TooLongForAny { .. }
    )
}

/// Takes an entry, or says why it skips it.
type TakeEntry<'t> = &'t mut dyn FnMut(&[u8], ValueReader<'_>) -> Outcome<Option<String>>;

/// Hands the readable entries of a tree to `entry`, in the order of their keys, and names the
/// damaged places on standard error.
///
/// # Errors
/// Those of `entry`, and a signal.
pub fn entries(tree: &SalvagedTree, path: &Path, entry: TakeEntry<'_>) -> Outcome<Found> {
    let (mut count, mut outcome) = (Found::default(), Ok(()));
    let name = tree.name();
    tree.salvage_entries(&mut |found| {
        let mut is_orphan = false;
        // Reads all of a value before it passes it on: a written line cannot be undone.
        let found = found.map_err(|error| error.to_string()).and_then(|entry| {
            let (key, mut value) = (entry.key, entry.value);
            is_orphan = entry.is_orphan;
            each_part(&mut value, &mut |_| Ok(()), path).map_err(|failure| failure.line())?;
            value.rewind().map_err(|error| error.to_string())?;
            Ok((key, value))
        });
        let skipped = match found {
            Ok((key, value)) => entry(key, value),
            Err(error) => Ok(Some(error)),
        };
        match skipped {
            _ if interrupt::signal_came() => outcome = interrupt::check(),
            Err(failure) => outcome = Err(failure),
            Ok(None) => {
                count.saved += 1;
                count.orphans += u64::from(is_orphan);
            }
            Ok(Some(error)) => {
                count.damaged += 1;
                say(&format!("tree '{name}': {error}"));
            }
        }
        outcome.is_ok()
    });
    outcome?;
    let Found { saved, orphans, damaged } = count;
    let of_them = match orphans {
        0 => String::new(),
        _ => format!(" ({orphans} of them from nodes without a parent)"),
    };
    say(&format!(
        "tree '{name}': {saved} entries saved{of_them}, {damaged} damaged places skipped"
    ));
    Ok(count)
}

/// Bytes of a value that are read at a time.
const BUFFER: usize = 64 << 10;

/// Hands a value to `sink`, piece by piece.
///
/// # Errors
/// Those of the value and of `sink`, and a signal.
pub fn each_part(
    value: &mut ValueReader<'_>,
    sink: &mut dyn FnMut(&[u8]) -> Outcome,
    path: &Path,
) -> Outcome {
    let mut buffer = vec![0; BUFFER.min(value.len() as usize).max(1)];
    loop {
        interrupt::check()?;
        match value.read(&mut buffer).map_err(of_stream).at(path)? {
            0 => return Ok(()),
            count => sink(&buffer[..count])?,
        }
    }
}

fn report(arguments: &Arguments, Copied { trees, damaged }: &Copied) -> Outcome {
    let sum = |of: fn(&Found) -> u64| trees.iter().map(|(_, found)| of(found)).sum::<u64>();
    let (saved, orphans) = (sum(|found| found.saved), sum(|found| found.orphans));
    let all_damaged = sum(|found| found.damaged) + damaged;
    let shown = arguments.new.display();
    let mut output = Output::new();
    let written = if arguments.json {
        let rows = trees.iter().map(|(tree, Found { saved, orphans, damaged })| {
            json!({
                "name": &*tree.name(),
                "name_is_lost": tree.is_lost(),
                "entries_saved": saved,
                "entries_without_parent": orphans,
                "damaged_places": damaged,
            })
        });
        let rows: Vec<_> = rows.collect();
        let report = json!({
            "entries_saved": saved,
            "entries_without_parent": orphans,
            "damaged_places": all_damaged,
            "damaged_places_in_list_of_trees": damaged,
            "trees": rows,
        });
        output.line(&report.to_string())
    } else {
        output.line(&format!("{shown}: {saved} entries of {} trees", trees.len()))
    };
    let written = written.and_then(|()| output.finish());
    match all_damaged {
        0 => written,
        _ => Err(Failure::message(format!(
            "{shown} is complete, without what was in {all_damaged} damaged places"
        ))),
    }
}
