//! `vellum load`: reads trees in the text format of Berkeley DB and LMDB.
//!
//! Entries that come in the order of their keys build the tree from the bottom; from the first one
//! out of order on, each is put in its place. A tree that a failed load has created is dropped
//! again; of one that was there before, the message says how many entries it got.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use vellum::{Error, Store, Tree};

use super::dump_format::{Entry, ReadError, Reader};
use crate::error::{AtStore, Doing, Failure, Outcome, of_stream};
use crate::interrupt;
use crate::options::{CreateArguments, DEFAULT_TREE, Need, StoreArguments};
use crate::progress::say;

const HELP: &str = "\
Examples:
  vellum load copy.vellum notes.dump
  mdb_dump -a -n notes.mdb | vellum load notes.vellum
  db_dump notes.db | vellum load notes.vellum --tree notes

Each section goes to the tree that it names, or to the one given with --tree. The store and the
trees are created when they are not there; keys that are there already get the new value. Ctrl-C
ends the load at the next entry: a tree that it was creating is removed again, and the store is
closed.";

/// Read trees in the text format of Berkeley DB and LMDB
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The dump [default: standard input, which is also '-']
    #[arg(value_name = "DUMP")]
    dump: Option<PathBuf>,

    /// Load into this tree, whatever the dump says
    #[arg(long, value_name = "NAME")]
    tree: Option<String>,

    #[command(flatten)]
    create: CreateArguments,
}

/// Runs the command.
///
/// # Errors
/// When the dump cannot be read (with the number of the line), or the store refuses something.
pub fn run(arguments: &Arguments) -> Outcome {
    let (source, name) = match arguments.dump.as_deref().filter(|file| *file != "-") {
        Some(file) => {
            let name = file.display().to_string();
            (File::open(file).doing(|| format!("opening {name}"))?, name)
        }
        None => {
            let input = std::io::stdin().as_fd().try_clone_to_owned();
            let input = input.doing(|| "opening standard input".into())?;
            (File::from(input), "standard input".to_string())
        }
    };
    let source = interrupt::Input(source);
    let mut reader = Reader::new(BufReader::with_capacity(1 << 16, source));
    // The first header is read before the store is created: a file that is no dump leaves nothing.
    let unreadable = |error: ReadError| Failure::message(format!("{name}: {error}"));
    let Some(first) = reader.section().map_err(unreadable)? else {
        return Err(Failure::message(format!("{name}: the dump is empty")));
    };
    let path = &arguments.store.path;
    arguments.store.write_or_create(Need::Much, &arguments.create, |store| {
        let mut section = Some(first);
        while let Some(header) = section {
            reader.ignored().iter().for_each(|ignored| say(&format!("{name}: {ignored}")));
            let tree = arguments.tree.clone().or(header);
            let tree = tree.unwrap_or_else(|| DEFAULT_TREE.to_string());
            let count = load_tree(store, &tree, &mut reader, path)
                .map_err(|failure| Failure::message(format!("{name}: {failure}")))?;
            say(&format!("tree '{tree}': {count} entries"));
            section = reader.section().map_err(unreadable)?;
        }
        Ok(())
    })
}

/// Loads one section and returns the number of its entries.
fn load_tree<R: BufRead>(
    store: &Store,
    name: &str,
    reader: &mut Reader<R>,
    path: &Path,
) -> Outcome<u64> {
    let existed = store.trees().at(path)?.iter().any(|known| known == name);
    let tree = store.tree_or_create(name).at(path)?;
    let mut loaded = 0;
    let result = fill(&tree, reader, &mut loaded, store.limits().max_value, path);
    let Err(failure) = result else { return Ok(loaded) };
    drop(tree);
    let left = match existed {
        true => format!("tree '{name}' got {loaded} entries before that"),
        false => {
            store.drop_tree(name).at(path)?;
            format!("nothing of tree '{name}' was kept; trees before it in the dump were")
        }
    };
    Err(Failure::message(format!("{failure}; {left}")))
}

/// Stores the entries of one section; `loaded` counts them, also when something fails.
fn fill<R: BufRead>(
    tree: &Tree,
    reader: &mut Reader<R>,
    loaded: &mut u64,
    most: u64,
    path: &Path,
) -> Outcome {
    if tree.cursor().first().at(path)? {
        return fill_one_by_one(tree, reader, loaded, path);
    }
    let mut sorted = Sorted { reader, most, last: None, rest: None, failure: None, ended: false };
    let result = tree.bulk_load(&mut sorted).at(path);
    let Sorted { reader, rest, failure, .. } = sorted;
    *loaded = result.map_err(|failure| at_line(reader.line_number(), &failure))?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    if let Some((key, value)) = rest {
        put(tree, &key, &value).at(path)?;
        *loaded += 1;
        return fill_one_by_one(tree, reader, loaded, path);
    }
    Ok(())
}

/// Stores a value, whatever the size of the pool.
fn put(tree: &Tree, key: &[u8], value: &[u8]) -> vellum::Result<()> {
    match tree.upsert(key, value) {
        Err(Error::ValueTooLong { .. }) => {
            let mut writer = tree.writer(key)?;
            writer.write_all(value).map_err(of_stream)?;
            writer.finish().map(drop)
        }
        stored => stored.map(drop),
    }
}

fn fill_one_by_one<R: BufRead>(
    tree: &Tree,
    reader: &mut Reader<R>,
    loaded: &mut u64,
    path: &Path,
) -> Outcome {
    while let Some((key, value)) = next_entry(reader)? {
        let line = reader.line_number();
        put(tree, &key, &value).at(path).map_err(|failure| at_line(line, &failure))?;
        *loaded += 1;
    }
    Ok(())
}

/// The next entry of the section, unless a signal has come.
fn next_entry<R: BufRead>(reader: &mut Reader<R>) -> Outcome<Option<Entry>> {
    interrupt::check()?;
    reader.entry().map_err(|error| Failure::message(error.to_string()))
}

fn at_line(line: u64, failure: &Failure) -> Failure {
    Failure::message(format!("line {line}: {failure}"))
}

/// The entries up to the first that is out of order or too long to be loaded in bulk, which is then
/// in `rest`, or to the first that cannot be read: then `failure` says why.
struct Sorted<'a, R> {
    reader: &'a mut Reader<R>,
    /// Greatest length of a value that is stored in one call.
    most: u64,
    last: Option<Vec<u8>>,
    rest: Option<Entry>,
    failure: Option<Failure>,
    ended: bool,
}

impl<R: BufRead> Iterator for Sorted<'_, R> {
    type Item = Entry;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        match next_entry(self.reader) {
            Ok(Some(entry))
                if self.last.as_ref().is_none_or(|last| *last < entry.0)
                    && entry.1.len() as u64 <= self.most =>
            {
                self.last = Some(entry.0.clone());
                return Some(entry);
            }
            Ok(rest) => self.rest = rest,
            Err(failure) => self.failure = Some(failure),
        }
        self.ended = true;
        None
    }
}
