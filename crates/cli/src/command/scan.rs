//! `vellum scan`: keys and values in order.

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::Path;

use serde_json::Map;
use vellum::{Cursor, Error, Tree};

use crate::error::{AtStore, Outcome};
use crate::files::file_store::META_TREE;
use crate::files::record::FileRecord;
use crate::key_text;
use crate::options::{Need, StoreArguments, TreeArguments};
use crate::output::Output;

/// Bytes of a value that are shown unless --full is given.
const SHOWN: usize = 60;

const HELP: &str = "\
Examples:
  vellum scan notes.vellum                     everything: key, tab, value
  vellum scan notes.vellum user/ --limit 10    the first ten keys that start with 'user/'
  vellum scan notes.vellum --reverse --keys    keys alone, from the last
  vellum scan usr.vellum bin/                  the files of a store that 'import' made
  vellum scan notes.vellum --json | jq .key    one object per line; values in full

A byte that does not print appears as a backslash and two hexadecimal digits. Long values are cut
('...') unless --full is given. In a store made by 'import' or 'demo', and without --tree, the
command lists the paths with the size, mode, time and kind of each file. With --json, bytes that are
not UTF-8 become key_hex and value_hex; with --hex, all bytes do.";

/// List keys and values in order
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// Only keys that start with this
    prefix: Option<OsString>,

    #[command(flatten)]
    tree: TreeArguments,

    /// The prefix is in hexadecimal, and so are the keys and values shown
    #[arg(long)]
    hex: bool,

    /// From the last key to the first
    #[arg(long)]
    reverse: bool,

    /// At most this many
    #[arg(long, value_name = "N")]
    limit: Option<u64>,

    /// Keys alone
    #[arg(long)]
    keys: bool,

    /// Values in full length
    #[arg(long)]
    full: bool,

    /// Machine-readable output: one object per entry and line
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the tree is not there, or the store or the output fails.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    let prefix = match &arguments.prefix {
        Some(prefix) => key_text::from_argument(prefix, arguments.hex)?,
        None => Vec::new(),
    };
    arguments.store.read(Need::Values, |store| {
        let files = match &arguments.tree.tree {
            Some(_) => None,
            None => crate::files::file_store::FileStore::find(store).at(path)?,
        };
        let tree = match files {
            Some(_) => store.tree(META_TREE).at(path)?,
            None => arguments.tree.find(store, path)?,
        };
        scan(arguments, &tree, &prefix, files.is_some(), path)
    })
}

fn scan(
    arguments: &Arguments,
    tree: &Tree,
    prefix: &[u8],
    are_records: bool,
    path: &Path,
) -> Outcome {
    let mut output = Output::new();
    let mut line = Vec::new();
    let mut left = arguments.limit.unwrap_or(u64::MAX);
    let mut cursor = tree.cursor();
    let mut found = match arguments.reverse {
        false => cursor.seek(prefix),
        true => seek_last(&mut cursor, prefix),
    }
    .at(path)?;
    while found && left > 0 && cursor.key().starts_with(prefix) {
        line.clear();
        // Reads a value only if the command shows it.
        let value = match arguments.keys {
            true => None,
            false => value_of(tree, &cursor).at(path)?,
        };
        match arguments.json {
            true => push_object(arguments, cursor.key(), value.as_deref(), are_records, &mut line),
            false => push_entry(arguments, cursor.key(), value.as_deref(), are_records, &mut line),
        }
        line.push(b'\n');
        output.bytes(&line)?;
        drop(value);
        left -= 1;
        found = if arguments.reverse { cursor.backward() } else { cursor.forward() }.at(path)?;
    }
    output.finish()
}

/// The value of the cursor's entry; a copy of it if the pool has no room for its page.
fn value_of<'c>(tree: &Tree, cursor: &'c Cursor<'_>) -> vellum::Result<Option<Cow<'c, [u8]>>> {
    match cursor.value() {
        Err(Error::NeedsReader { .. }) => {
            let mut value = Vec::new();
            Ok(tree.get_into(cursor.key(), &mut value)?.then_some(value.into()))
        }
        found => Ok(found?.map(|value| value.into_vec().into())),
    }
}

/// An entry as JSON.
fn push_object(
    arguments: &Arguments,
    key: &[u8],
    value: Option<&[u8]>,
    are_records: bool,
    line: &mut Vec<u8>,
) {
    let mut object = Map::new();
    let mut insert = |name: &str, bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) if !arguments.hex => object.insert(name.into(), text.into()),
        _ => {
            let mut hex = Vec::new();
            key_text::push_hex(bytes, &mut hex);
            object.insert(format!("{name}_hex"), String::from_utf8_lossy(&hex).into())
        }
    };
    insert("key", key);
    let record = value.filter(|_| are_records).and_then(FileRecord::decode);
    match (record, value) {
        (Some(record), _) => _ = object.insert("file".into(), record.json()),
        (None, Some(value)) => _ = insert("value", value),
        (None, None) => {}
    }
    line.extend_from_slice(serde_json::Value::from(object).to_string().as_bytes());
}

/// An entry as a line of text.
fn push_entry(
    arguments: &Arguments,
    key: &[u8],
    value: Option<&[u8]>,
    are_records: bool,
    line: &mut Vec<u8>,
) {
    let text = if arguments.hex { key_text::push_hex } else { key_text::push_printable };
    text(key, line);
    if let Some(value) = value {
        line.push(b'\t');
        push_value(arguments, value, are_records, line);
    }
}

fn push_value(arguments: &Arguments, value: &[u8], are_records: bool, line: &mut Vec<u8>) {
    if are_records
        && !arguments.hex
        && let Some(record) = FileRecord::decode(value)
    {
        line.extend_from_slice(record.describe().as_bytes());
        return;
    }
    let shown = if arguments.full { value } else { &value[..value.len().min(SHOWN)] };
    let text = if arguments.hex { key_text::push_hex } else { key_text::push_printable };
    text(shown, line);
    if shown.len() < value.len() {
        line.extend_from_slice(format!("... ({} bytes)", value.len()).as_bytes());
    }
}

/// Moves the cursor to the last key that starts with `prefix`, or to the key before its place.
fn seek_last(cursor: &mut Cursor<'_>, prefix: &[u8]) -> vellum::Result<bool> {
    match after_prefix(prefix) {
        // The bound itself does not start with the prefix: step over it.
        Some(bound) if cursor.seek_back(&bound)? => match cursor.key() == bound {
            true => cursor.backward(),
            false => Ok(true),
        },
        Some(_) => Ok(false),
        None => cursor.last(),
    }
}

/// The smallest key above all that start with `prefix`; `None` if there is none.
fn after_prefix(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut bound = prefix[..=last].to_vec();
    bound[last] += 1;
    Some(bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_lies_above_all_keys_with_the_prefix() {
        assert_eq!(after_prefix(b"ab"), Some(b"ac".to_vec()));
        assert_eq!(after_prefix(b"a\xff\xff"), Some(b"b".to_vec()));
        assert_eq!(after_prefix(b"\xff"), None);
        assert_eq!(after_prefix(b""), None);
    }
}
