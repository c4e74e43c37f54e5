//! `vellum load`: reads trees in the text format of Berkeley DB and LMDB.
//!
//! While the entries come in the order of their keys, a bulk load builds the tree from the bottom.
//! From the first entry out of order on, the command inserts each entry by itself. A long value
//! goes from the dump into the store part by part, and is never in memory as a whole. After a
//! failure the command drops a tree that it has created; for a tree that existed before, the
//! message says how many entries it got.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use vellum::{BulkLoader, Error, Store, Tree};

use super::dump_format::{ReadError, Reader};
use crate::error::{AtStore, Doing, Failure, Outcome, of_stream};
use crate::interrupt;
use crate::options::{CreateArguments, DEFAULT_TREE, Need, StoreArguments};
use crate::progress::say;

const HELP: &str = "\
Examples:
  vellum load copy.vellum notes.dump
  mdb_dump -a -n notes.mdb | vellum load notes.vellum
  db_dump notes.db | vellum load notes.vellum --tree notes

Each section goes to the tree that it names, or to the one given with --tree. Creates the store and
the trees if they do not exist; a key that exists gets the new value. Ctrl-C ends the load at the
next entry, or inside a long value: the command removes the tree that it was creating, and closes
the store. It streams long values: none is in memory as a whole.";

/// Read trees in the text format of Berkeley DB and LMDB
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The dump [default: standard input, which is also '-']
    #[arg(value_name = "DUMP")]
    dump: Option<PathBuf>,

    /// Load all sections into this tree, instead of the trees that they name
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
            let input = io::stdin().as_fd().try_clone_to_owned();
            let input = input.doing(|| "opening standard input".into())?;
            (File::from(input), "standard input".to_string())
        }
    };
    let source = interrupt::Input(source);
    let mut reader = Reader::new(BufReader::with_capacity(1 << 16, source));
    // Reads the first header before it creates the store: a file that is no dump creates no store.
    let unreadable = |error: ReadError| Failure::message(format!("{name}: {error}"));
    let Some(first) = reader.section().map_err(unreadable)? else {
        return Err(Failure::message(format!("{name}: the dump is empty")));
    };
    let path = &arguments.store.path;
    arguments.store.write_or_create(Need::Default, &arguments.create, |store| {
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
    let whole = store.limits().max_value.min(PART_MAX) as usize;
    let result = fill(&tree, reader, &mut loaded, whole, path);
    let Err(failure) = result else { return Ok(loaded) };
    drop(tree);
    let left = match existed {
        true => format!("tree '{name}' got {loaded} entries before that"),
        false => {
            store.drop_tree(name).at(path)?;
            format!("nothing of tree '{name}' was kept, but the trees before it in the dump were")
        }
    };
    Err(Failure::message(format!("{failure}; {left}")))
}

/// One call stores a value up to this length. Of a longer value this many bytes are read at a time.
const PART_MAX: u64 = 1 << 20;

/// Stores the entries of one section. `loaded` counts the entries that the tree has, after a
/// failure too. One call stores a value of up to `whole` bytes.
fn fill<R: BufRead>(
    tree: &Tree,
    reader: &mut Reader<R>,
    loaded: &mut u64,
    whole: usize,
    path: &Path,
) -> Outcome {
    let mut target = match tree.bulk_loader() {
        Err(Error::NotEmpty) => Target::Tree(tree),
        loader => Target::Loader(loader.at(path)?),
    };
    let mut value = Vec::new();
    let mut next = || {
        interrupt::check()?;
        let unreadable = |error: ReadError| Failure::message(error.to_string());
        let Some(key) = reader.key().map_err(unreadable)? else { return Ok(false) };
        if target.is_past(&key) {
            *loaded += std::mem::replace(&mut target, Target::Tree(tree)).finish().at(path)?;
        }
        value.clear();
        let stored = match reader.value(&mut value, whole).map_err(unreadable)? {
            false => target.put(&key, &value),
            true => target.put_from(&key, &mut Parts { reader, part: &mut value, used: 0 }),
        };
        match stored {
            // An error of the reader: it names the line already, and is no error of the store.
            Err(Error::Input(error)) => Err(Failure::message(error.to_string())),
            stored => stored.at(path).map_err(|failure| at_line(reader.line_number(), &failure)),
        }?;
        *loaded += u64::from(matches!(target, Target::Tree(_)));
        Ok(true)
    };
    let outcome = loop {
        match next() {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(failure) => break Err(failure),
        }
    };
    // The entries before a bad line stay, in a bulk load as in single inserts.
    let finished = target.finish().at(path);
    *loaded += finished.as_ref().copied().unwrap_or(0);
    outcome.and(finished.map(drop).map_err(|failure| at_line(reader.line_number(), &failure)))
}

fn at_line(line: u64, failure: &Failure) -> Failure {
    Failure::message(format!("line {line}: {failure}"))
}

/// Where entries go.
enum Target<'a> {
    /// An empty tree, as long as the entries come in the order of their keys.
    Loader(BulkLoader<'a>),
    Tree(&'a Tree),
}

impl Target<'_> {
    /// Whether the loader is past this key, so that it cannot take it.
    fn is_past(&self, key: &[u8]) -> bool {
        match self {
            Self::Loader(loader) => loader.last_key().is_some_and(|last| key <= last),
            Self::Tree(_) => false,
        }
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> vellum::Result<()> {
        match self {
            Self::Loader(loader) => loader.push(key, value),
            Self::Tree(tree) => tree.upsert(key, value).map(drop),
        }
    }

    fn put_from(&mut self, key: &[u8], value: &mut dyn Read) -> vellum::Result<()> {
        match self {
            Self::Loader(loader) => loader.push_from(key, value),
            Self::Tree(tree) => {
                let mut writer = tree.writer(key)?;
                io::copy(value, &mut writer).map_err(of_stream)?;
                writer.finish().map(drop)
            }
        }
    }

    /// Returns how many entries this call has added to the tree.
    fn finish(self) -> vellum::Result<u64> {
        match self {
            Self::Loader(loader) => loader.finish(),
            Self::Tree(_) => Ok(0),
        }
    }
}

/// A long value, part by part. The caller has read the first part.
struct Parts<'a, R> {
    reader: &'a mut Reader<R>,
    part: &'a mut Vec<u8>,
    used: usize,
}

impl<R: BufRead> Read for Parts<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.used == self.part.len() {
            self.part.clear();
            self.used = 0;
            self.reader.value(self.part, PART_MAX as usize).map_err(io::Error::other)?;
        }
        let count = (&self.part[self.used..]).read(buffer)?;
        self.used += count;
        Ok(count)
    }
}
