//! `vellum dump`: writes trees in the text format of Berkeley DB and LMDB.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use vellum::{Store, Tree};

use super::dump_format::{Encoding, Writer};
use crate::error::{AtStore, Outcome};
use crate::interrupt;
use crate::new_file::NewFile;
use crate::options::{Need, StoreArguments, using};
use crate::output::written;
use crate::progress::say;

const HELP: &str = "\
Examples:
  vellum dump notes.vellum > notes.dump
  vellum dump notes.vellum --tree main --print | less
  vellum dump notes.vellum --tree main | mdb_load -n notes.mdb
  vellum dump broken.vellum --salvage -o rescued.dump

The format is VERSION=3 of db_dump and mdb_dump, one section for each tree. --salvage opens a file
that was not closed cleanly or is damaged, and passes over the pages that cannot be read. A file
given with -o has its name only when it is complete. The name of a tree with a line break in it is
written in a line vellum-database=, with escapes, that other programs do not know.";

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

    /// Write to a file, which must not be there yet; '-' is standard output, as without this
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Read what can be read of a damaged file
    #[arg(long)]
    salvage: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read or the output fails.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    let options = arguments.store.options(Need::Values);
    let options = match arguments.salvage {
        true => options.salvage(true),
        false => options.read_only(true),
    };
    let store = arguments.store.open(|| Store::open(path, &options))?;
    using(store, path, |store| {
        let names = match &arguments.tree {
            Some(name) => vec![name.clone()],
            None => store.trees().at(path)?,
        };
        let write = |sink: &mut dyn Write| {
            let encoding = if arguments.print { Encoding::Print } else { Encoding::ByteValue };
            let mut writer = Writer::new(BufWriter::with_capacity(1 << 16, sink), encoding);
            for name in &names {
                dump(store, name, arguments.salvage, &mut writer, path)?;
            }
            written(writer.finish())
        };
        match arguments.output.as_deref().filter(|file| *file != "-") {
            None => write(&mut std::io::stdout().lock()),
            Some(file) => {
                // A signal ends the dump at the next entry, so that nothing is left of the file.
                interrupt::watch()?;
                let mut file = NewFile::create(file)?;
                write(&mut file)?;
                file.complete()
            }
        }
    })
}

fn dump<W: Write>(
    store: &Store,
    name: &str,
    salvage: bool,
    writer: &mut Writer<W>,
    path: &Path,
) -> Outcome {
    let tree = store.tree(name).at(path)?;
    written(writer.begin(name))?;
    if salvage {
        salvage_entries(&tree, writer)?;
    } else {
        for entry in tree.entries() {
            interrupt::check()?;
            let (key, value) = entry.at(path)?;
            written(writer.entry(&key, &value))?;
        }
    }
    written(writer.end())
}

/// Writes what can be read of a tree, and says on standard error what cannot.
fn salvage_entries<W: Write>(tree: &Tree, writer: &mut Writer<W>) -> Outcome {
    let (mut saved, mut damaged) = (0_u64, 0_u64);
    let mut outcome = Ok(());
    let name = tree.name();
    tree.salvage(&mut |entry| {
        match entry {
            _ if interrupt::was_asked() => outcome = interrupt::check(),
            Ok((key, value)) => {
                outcome = written(writer.entry(key, value));
                saved += 1;
            }
            Err(error) => {
                damaged += 1;
                say(&format!("tree '{name}': {error}"));
            }
        }
        outcome.is_ok()
    });
    outcome?;
    say(&format!("tree '{name}': {saved} entries saved, {damaged} damaged places passed over"));
    Ok(())
}
