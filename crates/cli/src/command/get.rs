//! `vellum get`: the value of a key, or a file that was imported.

use std::ffi::OsString;
use std::io::Read;

use crate::error::{AtStore, Failure, Outcome, of_stream};
use crate::files::file_store::FileStore;
use crate::key_text;
use crate::options::{Need, StoreArguments, TreeArguments};
use crate::output::Output;
use crate::progress::DelayedProgress;

/// Bytes of a value that are written at a time.
const BUFFER: usize = 256 << 10;

const HELP: &str = "\
Examples:
  vellum get notes.vellum greeting             the value, byte for byte, without a line break
  vellum get notes.vellum --hex 00ff           a key in hexadecimal
  vellum get usr.vellum bin/env > env          a file of a store that 'import' or 'demo' made
  vellum get usr.vellum bin/env --meta         its size, mode, time and kind

In a store made by 'import' or 'demo', and without --tree, KEY is the path of a file.
If the key does not exist, the command fails (exit code 1).";

/// Write the value of a key to standard output
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The key, or the path of an imported file
    key: OsString,

    #[command(flatten)]
    tree: TreeArguments,

    /// The key is in hexadecimal
    #[arg(long)]
    hex: bool,

    /// Write the size, mode, time and kind of an imported file instead of its content
    #[arg(long, conflicts_with_all = ["tree", "hex"])]
    meta: bool,
}

/// Runs the command.
///
/// # Errors
/// When the key is not there, or the store or the output fails.
pub fn run(arguments: &Arguments) -> Outcome {
    let key = key_text::from_argument(&arguments.key, arguments.hex)?;
    let path = &arguments.store.path;
    let missing = || {
        let (store, key) = (path.display(), key_text::printable(&key));
        Failure::message(format!("{store}: there is no '{key}'"))
    };
    arguments.store.read(Need::Pages, |store| {
        let mut output = Output::new();
        let files = match &arguments.tree.tree {
            Some(_) => None,
            None => FileStore::find(store).at(path)?,
        };
        if let Some(files) = files {
            let record = files.record(&key).at(path)?.ok_or_else(missing)?;
            if arguments.meta {
                output.line(&record.describe())?;
            } else {
                files.read(&key, &record, path, &mut |bytes| output.bytes(bytes))?;
            }
            return output.finish();
        }
        if arguments.meta {
            let store = path.display();
            return Err(Failure::message(format!("{store}: no files were imported here")));
        }
        let tree = arguments.tree.find(store, path)?;
        let mut value = tree.reader(&key).at(path)?.ok_or_else(missing)?;
        let mut progress = DelayedProgress::new("get", value.len());
        let mut buffer = vec![0; BUFFER.min(value.len() as usize).max(1)];
        loop {
            match value.read(&mut buffer).map_err(of_stream).at(path)? {
                0 => break,
                count => {
                    output.bytes(&buffer[..count])?;
                    progress.advance(count as u64);
                }
            }
        }
        progress.finish();
        output.finish()
    })
}
