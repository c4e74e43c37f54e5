//! `vellum stat`: the sizes of a store and its trees.

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use serde_json::{Value, json};
use vellum::{Store, StoreStat, Translation, TreeStat};

use crate::error::{AtStore, Outcome};
use crate::options::{Need, StoreArguments};
use crate::output::{Output, columns};
use crate::progress::{Progress, Unit};
use crate::size::show;

/// Time between two updates of the progress.
const UPDATE_EVERY: Duration = Duration::from_millis(100);

const HELP: &str = "\
Examples:
  vellum stat notes.vellum                     reads the header and the map of free pages
  vellum stat notes.vellum --full              reads every page of the trees, too
  vellum stat notes.vellum --json | jq .used_bytes

'filled' is the share of the trees' pages that keys and values take.";

/// Show the sizes of a store and its trees
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,

    /// Read every page of the trees, and count entries and pages
    #[arg(long)]
    full: bool,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read or is damaged.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    arguments.store.read(Need::Pages, |store| {
        let stat = store.stat().at(path)?;
        let trees = if arguments.full { tree_stats(store, &stat, path)? } else { Vec::new() };
        let mut output = Output::new();
        if arguments.json {
            let trees = match arguments.full {
                true => trees_json(&trees),
                false => store.trees().at(path)?.into(),
            };
            output.line(&store_json(store, &stat, trees).to_string())?;
            return output.finish();
        }
        for line in columns(&store_rows(store, &stat)) {
            output.line(&line)?;
        }
        if !trees.is_empty() {
            output.line("")?;
        }
        for line in columns(&tree_rows(&trees)) {
            output.line(&line)?;
        }
        output.finish()
    })
}

/// The sizes of each tree. The progress counts the pages read, out of the pages in use; it ends
/// early, because the walk reads no blobs.
fn tree_stats(store: &Store, stat: &StoreStat, path: &Path) -> Outcome<Vec<(String, TreeStat)>> {
    let progress = Progress::new("stat", Unit::Items, stat.used_pages);
    let frames = u64::from(stat.page_bytes) / 4096;
    let (walk, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            loop {
                let is_over = ended.recv_timeout(UPDATE_EVERY) != Err(RecvTimeoutError::Timeout);
                let seen = store.pool_stats();
                progress.set((seen.misses + seen.prefetches) * frames);
                if is_over {
                    break progress.finish();
                }
            }
        });
        let _until_the_end = walk;
        let stat_of = |name: String| {
            let stat = store.tree(&name).and_then(|tree| tree.stat()).at(path)?;
            Ok((name, stat))
        };
        store.trees().at(path)?.into_iter().map(stat_of).collect()
    })
}

fn store_rows(store: &Store, stat: &StoreStat) -> Vec<Vec<String>> {
    let pages = |count: u64| format!("{count} pages, {}", show(count * 4096));
    let row = |name: &str, value: String| vec![name.to_string(), value];
    vec![
        row("format version", stat.format_version.to_string()),
        row("store id", format!("{:032x}", stat.store_id)),
        row("page size of trees", show(u64::from(stat.page_bytes))),
        row("file", pages(stat.file_pages)),
        row("in use", pages(stat.used_pages)),
        row("free inside", pages(stat.free_pages)),
        row("trees", stat.trees.to_string()),
        row("pool", show(stat.pool_bytes)),
        row("pages are found by", translation(store).to_owned()),
    ]
}

/// How a store finds the memory of its pages, and why.
pub fn translation(store: &Store) -> &'static str {
    match store.pool().translation() {
        Translation::Table => "a table, because the file has outgrown the pool, or as asked",
        _ => "the MMU, because the file fits the pool, or as asked, or on exmap",
    }
}

fn store_json(store: &Store, stat: &StoreStat, trees: Value) -> Value {
    json!({
        "format_version": stat.format_version,
        "store_id": format!("{:032x}", stat.store_id),
        "tree_page_bytes": stat.page_bytes,
        "file_bytes": stat.file_pages * 4096,
        "used_bytes": stat.used_pages * 4096,
        "free_bytes": stat.free_pages * 4096,
        "pool_bytes": stat.pool_bytes,
        "translation": store.pool().translation().name(),
        "trees": trees,
    })
}

/// An object for each tree.
pub fn trees_json(trees: &[(String, TreeStat)]) -> Value {
    let object = |(name, stat): &(String, TreeStat)| {
        json!({
            "tree": name,
            "entries": stat.entries,
            "height": stat.height,
            "inner_pages": stat.inner_pages,
            "leaf_pages": stat.leaf_pages,
            "page_bytes": stat.page_bytes,
            "used_bytes": stat.used_bytes,
            "key_bytes": stat.key_bytes,
            "value_bytes": stat.value_bytes,
            "blobs": stat.blobs,
            "blob_page_bytes": stat.blob_page_bytes,
        })
    };
    trees.iter().map(object).collect()
}

/// One row per tree, under a row of headings; nothing at all without trees.
pub fn tree_rows(trees: &[(String, TreeStat)]) -> Vec<Vec<String>> {
    if trees.is_empty() {
        return Vec::new();
    }
    let headings =
        ["tree", "entries", "height", "inner", "leaves", "filled", "keys", "values", "blobs", "in"];
    let mut rows = vec![headings.iter().map(|heading| (*heading).to_string()).collect()];
    for (name, stat) in trees {
        let filled = stat.used_bytes as f64 * 100.0 / stat.page_bytes.max(1) as f64;
        rows.push(vec![
            name.clone(),
            stat.entries.to_string(),
            stat.height.to_string(),
            stat.inner_pages.to_string(),
            stat.leaf_pages.to_string(),
            format!("{filled:.0} %"),
            show(stat.key_bytes),
            show(stat.value_bytes),
            stat.blobs.to_string(),
            show(stat.blob_page_bytes),
        ]);
    }
    rows
}
