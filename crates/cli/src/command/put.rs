//! `vellum put`: stores a value under a key.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::error::{AtStore, Doing, Outcome};
use crate::options::{CreateArguments, Need, StoreArguments, TreeArguments};
use crate::{interrupt, key_text};

const HELP: &str = "\
Examples:
  vellum put notes.vellum greeting hello
  vellum put notes.vellum picture --file cat.png
  date | vellum put notes.vellum now           from standard input

The store and the tree are created when they are not there; an older value is replaced.";

/// Store a value under a key
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The key
    key: OsString,

    /// The value [default: standard input]
    #[arg(conflicts_with = "file")]
    value: Option<OsString>,

    /// Take the value from a file; '-' is standard input
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    #[command(flatten)]
    tree: TreeArguments,

    /// The key is in hexadecimal
    #[arg(long)]
    hex: bool,

    #[command(flatten)]
    create: CreateArguments,
}

/// Runs the command.
///
/// # Errors
/// When the value cannot be read, or the store refuses it.
pub fn run(arguments: &Arguments) -> Outcome {
    let key = key_text::from_argument(&arguments.key, arguments.hex)?;
    // The value is read first, so that a file that is not there creates no store.
    let value = value(arguments)?;
    let path = &arguments.store.path;
    let need = Need::Store(value.len() as u64);
    arguments.store.write_or_create(need, &arguments.create, |store| {
        interrupt::check()?;
        let tree = arguments.tree.find_or_create(store, path)?;
        tree.upsert(&key, &value).at(path)?;
        Ok(())
    })
}

fn value(arguments: &Arguments) -> Outcome<Vec<u8>> {
    if let Some(value) = &arguments.value {
        return Ok(value.as_bytes().to_vec());
    }
    if let Some(file) = arguments.file.as_deref().filter(|file| *file != "-") {
        return std::fs::read(file).doing(|| format!("reading {}", file.display()));
    }
    let mut value = Vec::new();
    std::io::stdin().lock().read_to_end(&mut value).doing(|| "reading standard input".into())?;
    Ok(value)
}
