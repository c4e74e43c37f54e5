//! `vellum stat`: how a store and its trees are laid out.

use std::path::Path;

use vellum::{Store, TreeStat};

use crate::error::{AtStore, Outcome};
use crate::options::{Need, StoreArguments};
use crate::output::{Output, columns};
use crate::size::show;

const HELP: &str = "\
Example:
  vellum stat notes.vellum

'filled' is the share of the trees' pages that keys and values take.";

/// Show how a store and its trees are laid out
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    #[command(flatten)]
    store: StoreArguments,
}

/// Runs the command.
///
/// # Errors
/// When the store cannot be read or is damaged.
pub fn run(arguments: &Arguments) -> Outcome {
    let path = &arguments.store.path;
    arguments.store.read(Need::Pages, |store| {
        let mut output = Output::new();
        for line in columns(&store_rows(store, path)?) {
            output.line(&line)?;
        }
        let mut trees = Vec::new();
        for name in store.trees().at(path)? {
            let stat = store.tree(&name).and_then(|tree| tree.stat()).at(path)?;
            trees.push((name, stat));
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

fn store_rows(store: &Store, path: &Path) -> Outcome<Vec<Vec<String>>> {
    let stat = store.stat().at(path)?;
    let pages = |count: u64| format!("{count} pages, {}", show(count * 4096));
    let row = |name: &str, value: String| vec![name.to_string(), value];
    Ok(vec![
        row("format version", stat.format_version.to_string()),
        row("store id", format!("{:032x}", stat.store_id)),
        row("page size of trees", show(u64::from(stat.page_bytes))),
        row("file", pages(stat.file_pages)),
        row("in use", pages(stat.used_pages)),
        row("free inside", pages(stat.free_pages)),
        row("trees", stat.trees.to_string()),
        row("pool", show(stat.pool_bytes)),
    ])
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
