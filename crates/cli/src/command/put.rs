//! `vellum put`: stores a value under a key.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Cursor, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::error::{AtStore, Doing, Outcome, of_stream};
use crate::options::{CreateArguments, Need, StoreArguments, TreeArguments};
use crate::progress::DelayedProgress;
use crate::{interrupt, key_text};

const HELP: &str = "\
Examples:
  vellum put notes.vellum greeting hello
  vellum put notes.vellum picture --file cat.png
  date | vellum put notes.vellum now           from standard input

Creates the store and the tree if they do not exist. Replaces an older value.";

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
    // Reads the beginning of the value first: if its file does not exist, the command creates no
    // store.
    let mut source = Source::open(arguments)?;
    let mut begin = Vec::new();
    let whole = source.read_up_to(PART_MAX, &mut begin)?;
    let path = &arguments.store.path;
    let need = Need::OneValue(begin.len() as u64);
    arguments.store.write_or_create(need, &arguments.create, |store| {
        interrupt::check()?;
        let tree = arguments.tree.find_or_create(store, path)?;
        if whole && begin.len() as u64 <= store.limits().max_value {
            tree.upsert(&key, &begin).at(path)?;
            return Ok(());
        }
        let mut writer = tree.writer(&key).at(path)?;
        let mut progress = DelayedProgress::new("put", source.len);
        while !begin.is_empty() {
            interrupt::check()?;
            writer.write_all(&begin).map_err(of_stream).at(path)?;
            progress.advance(begin.len() as u64);
            begin.clear();
            source.read_up_to(PART_MAX, &mut begin)?;
        }
        interrupt::check()?;
        writer.finish().at(path)?;
        progress.finish();
        Ok(())
    })
}

/// One call stores a value up to this length. Of a longer value this many bytes are read at a time.
const PART_MAX: u64 = 1 << 20;

/// Where the value comes from.
struct Source {
    bytes: Box<dyn Read>,
    name: String,
    /// Length in bytes; 0 if it is not known.
    len: u64,
}

impl Source {
    fn open(arguments: &Arguments) -> Outcome<Source> {
        if let Some(value) = &arguments.value {
            let bytes = value.as_bytes().to_vec();
            let len = bytes.len() as u64;
            return Ok(Source {
                bytes: Box::new(Cursor::new(bytes)),
                name: "the value".into(),
                len,
            });
        }
        let path = arguments.file.as_deref().filter(|file| *file != "-");
        let name = path.map_or("standard input".into(), |path| path.display().to_string());
        let file = match path {
            Some(path) => File::open(path),
            None => std::io::stdin().as_fd().try_clone_to_owned().map(File::from),
        };
        let file = file.doing(|| format!("reading {name}"))?;
        let len = file.metadata().map_or(0, |found| found.len());
        Ok(Source { bytes: Box::new(interrupt::Input(file)), name, len })
    }

    /// Appends the next bytes; true if they are the last ones.
    fn read_up_to(&mut self, most: u64, bytes: &mut Vec<u8>) -> Outcome<bool> {
        let read = self.bytes.by_ref().take(most).read_to_end(bytes);
        let read = read.doing(|| format!("reading {}", self.name))?;
        Ok((read as u64) < most)
    }
}
