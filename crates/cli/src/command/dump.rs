//! `vellum dump`: writes trees in the text format of Berkeley DB and LMDB.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use vellum::{Error, SalvagedTree, Store, Tree, ValueReader};

use super::dump_format::{Encoding, Writer};
use super::salvage;
use crate::error::{AtStore, Outcome};
use crate::interrupt;
use crate::new_file::NewFile;
use crate::options::{Need, StoreArguments};
use crate::output::written;

const HELP: &str = "\
Examples:
  vellum dump notes.vellum > notes.dump
  vellum dump notes.vellum --tree main --print | less
  vellum dump notes.vellum --tree main | mdb_load -n notes.mdb
  vellum dump broken.vellum --salvage -o rescued.dump

The format is VERSION=3 of db_dump and mdb_dump, one section for each tree. --salvage opens a file
that was not closed cleanly or is damaged, and skips pages that cannot be read; 'vellum salvage'
makes a store of them at once. A file given with -o
gets its name only when it is complete. If the name of a tree has a line break, the dump has the
name, with escapes, in a line vellum-database=, which other programs do not know.";

/// Write trees in the text format of Berkeley DB and LMDB
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// Only this tree [default: all]
    #[arg(long, value_name = "NAME")]
    tree: Option<String>,

    /// Printable text as it is, the rest escaped (format=print)
    #[arg(long, short)]
    print: bool,

    /// Write to a file, which must not exist; '-' is standard output, as without this option
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Open a damaged file, and write the entries that can be read
    #[arg(long)]
    salvage: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read or the output fails.
pub fn run(arguments: &Arguments) -> Outcome {
    if !arguments.salvage {
        return arguments.store.read(Need::Pages, |store| write_trees(arguments, store));
    }
    salvage::read(&arguments.store, |store| write_trees(arguments, store))
}

fn write_trees(arguments: &Arguments, store: &Store) -> Outcome {
    let path = &arguments.store.path;
    let trees = match (arguments.salvage, &arguments.tree) {
        (true, name) => {
            let (trees, _) = salvage::trees(store, path)?;
            let is_wanted = |tree: &SalvagedTree| name.as_ref().is_none_or(|n| **n == *tree.name());
            let wanted: Vec<_> = trees.into_iter().filter(is_wanted).map(Source::Damaged).collect();
            if let (Some(name), true) = (name, wanted.is_empty()) {
                return Err(Error::NoSuchTree(name.clone())).at(path);
            }
            wanted
        }
        (false, Some(name)) => vec![Source::Sound(store.tree(name).at(path)?)],
        (false, None) => {
            let tree = |name: String| Ok(Source::Sound(store.tree(&name)?));
            store.trees().and_then(|names| names.into_iter().map(tree).collect()).at(path)?
        }
    };
    let write = |sink: &mut dyn Write| {
        let encoding = if arguments.print { Encoding::Print } else { Encoding::ByteValue };
        let mut writer = Writer::new(BufWriter::with_capacity(1 << 16, sink), encoding);
        for tree in &trees {
            dump(tree, &mut writer, path)?;
        }
        written(writer.finish())
    };
    match arguments.output.as_deref().filter(|file| *file != "-") {
        None => write(&mut std::io::stdout().lock()),
        Some(file) => {
            // A signal ends the dump at the next entry. Then the unfinished file is removed.
            interrupt::watch()?;
            let mut file = NewFile::create(file)?;
            write(&mut file)?;
            file.complete()
        }
    }
}

/// A tree to write.
enum Source {
    Sound(Tree),
    Damaged(SalvagedTree),
}

fn dump<W: Write>(tree: &Source, writer: &mut Writer<W>, path: &Path) -> Outcome {
    match tree {
        Source::Damaged(tree) => {
            written(writer.begin(&tree.name()))?;
            salvage::entries(tree, path, &mut |key, value| {
                entry(writer, key, value, path).map(|()| None)
            })?;
        }
        Source::Sound(tree) => {
            written(writer.begin(&tree.name()))?;
            let mut cursor = tree.cursor();
            while cursor.forward().at(path)? {
                interrupt::check()?;
                // The store is read-only, so the key still exists.
                let Some(value) = tree.reader(cursor.key()).at(path)? else { continue };
                entry(writer, cursor.key(), value, path)?;
            }
        }
    }
    written(writer.end())
}

fn entry<W: Write>(
    writer: &mut Writer<W>,
    key: &[u8],
    mut value: ValueReader<'_>,
    path: &Path,
) -> Outcome {
    written(writer.key(key))?;
    salvage::each_part(&mut value, &mut |part| written(writer.value_part(part)), path)?;
    written(writer.end_entry())
}
