//! `vellum import`: the files under a directory.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use vellum::Store;

use crate::error::{AtStore, Outcome};
use crate::files::file_store::{FileStore, chunk_bytes, max_path};
use crate::files::importer::{Importer, Stored};
use crate::files::listing::{self, Listing};
use crate::files::workers;
use crate::options::{CreateArguments, Need, StoreArguments, threads};
use crate::output::Output;
use crate::progress::{Progress, Unit};
use crate::{interrupt, size};

const HELP: &str = "\
Examples:
  vellum import usr.vellum /usr/share          creates the store if it does not exist
  vellum import usr.vellum /usr/share          the second time: only files that have changed
  vellum scan usr.vellum doc/                  then: list, read
  vellum get usr.vellum doc/README > README

Stores regular files and symbolic links, with paths relative to DIR. Skips and counts other kinds of
files, files that it cannot read, and folders on other file systems. Tree 'meta' has a record for
each path, tree 'content' the bytes in chunks. Ctrl-C ends the import at the next file; the same
command continues from there.";

/// Store the files under a directory
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The directory
    dir: PathBuf,

    /// Stop when the files reach this total size
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "1024TiB")]
    limit: u64,

    /// Threads that read and store
    #[arg(long, value_name = "N", default_value = "2", value_parser = threads)]
    threads: usize,

    #[command(flatten)]
    create: CreateArguments,
}

/// Runs the command.
///
/// # Errors
/// When the directory cannot be read or the store refuses something.
pub fn run(arguments: &Arguments) -> Outcome {
    // Lists the directory first: if it does not exist, the command creates no store.
    let skip = identity(&arguments.store.path);
    let mut listing = listing::list(&arguments.dir, arguments.limit, &skip)?;
    arguments.store.write_or_create(Need::Default, &arguments.create, |store| {
        let longest = max_path(store.limits().max_key);
        let too_long = drop_long_paths(&mut listing, longest);
        let counts = import(arguments, store, &listing)?;
        let mut output = Output::new();
        for line in report(&listing, &counts, too_long) {
            output.line(&line)?;
        }
        output.finish()
    })
}

/// Device and inode of the store, if it exists. The import skips it, so that it is not stored in
/// itself.
pub fn identity(store: &Path) -> Vec<(u64, u64)> {
    std::fs::metadata(store).map(|found| (found.dev(), found.ino())).into_iter().collect()
}

/// Removes from the listing the files whose path is too long for a key, and returns how many.
pub fn drop_long_paths(listing: &mut Listing, longest: usize) -> u64 {
    let before = listing.files.len();
    listing.files.retain(|found| found.path.len() <= longest);
    (before - listing.files.len()) as u64
}

#[derive(Default)]
struct Counts {
    stored: AtomicU64,
    unchanged: AtomicU64,
    changing: AtomicU64,
    unreadable: AtomicU64,
}

fn import(arguments: &Arguments, store: &Store, listing: &Listing) -> Outcome<Counts> {
    let path = &arguments.store.path;
    let files = FileStore::create(store).at(path)?;
    let pool = store.stat().at(path)?.pool_bytes;
    let importer = Importer { files: &files, root: &arguments.dir, chunk_bytes: chunk_bytes(pool) };
    let counts = Counts::default();
    let progress = Progress::new("import", Unit::Bytes, listing.bytes);
    let result = workers::for_each(arguments.threads, listing.files.len(), |index| {
        interrupt::check()?;
        let found = &listing.files[index];
        let count =
            match importer.store(found, &mut |_, bytes| progress.advance(bytes.len() as u64)) {
                Ok(Stored::Yes) => &counts.stored,
                Ok(Stored::Unchanged) => &counts.unchanged,
                Ok(Stored::Changing) => &counts.changing,
                Ok(Stored::Unreadable) => &counts.unreadable,
                Err(error) => return Err(error).at(path),
            };
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    progress.finish();
    result.map(|()| counts)
}

fn report(listing: &Listing, counts: &Counts, too_long: u64) -> Vec<String> {
    let left_out = &listing.left_out;
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let mut lines = vec![format!("{} files stored", count(&counts.stored))];
    let rest = [
        (count(&counts.unchanged), "unchanged since they were stored"),
        (count(&counts.changing), "left out: they changed while they were read"),
        (count(&counts.unreadable) + left_out.unreadable, "left out: they cannot be read"),
        (left_out.special, "left out: sockets, devices, pipes"),
        (left_out.elsewhere, "folders left out: they are on other file systems"),
        (left_out.over_limit, "left out: they do not fit the limit"),
        (too_long, "left out: their path is too long for a key"),
    ];
    lines.extend(
        rest.iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}")),
    );
    if left_out.ended_early {
        lines.push("the files have reached the limit; the rest was not listed".into());
    }
    lines
}
