//! `vellum stat`: the sizes of a store and its trees.

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use serde_json::{Value, json};
use vellum::{Latency, OwnerStat, PoolStats, Store, StoreStat, Translation, TreeStat};

use crate::error::{AtStore, Outcome};
use crate::options::{Need, StoreArguments};
use crate::output::{Output, columns, fields};
use crate::owner;
use crate::progress::{Progress, Unit};
use crate::size::show;

/// Time between two updates of the progress.
const UPDATE_EVERY: Duration = Duration::from_millis(100);

const HELP: &str = "\
Examples:
  vellum stat notes.vellum                     reads the header and the map of free pages
  vellum stat notes.vellum --full              reads every page of the trees, too
  vellum stat notes.vellum --json | jq .used_bytes

'filled' is the share of the trees' pages that keys and values take.

If a process has the store open for writing, and has a control socket (Store::control_socket in
Rust), that process tells the state of the store: its pool since the store was opened, its snapshots
and transactions, but not the names of the trees. With --full the command must open the store
itself, and fails if a process has it open for writing. A store that a crashed process left is
recovered first.";

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
    let here = || arguments.store.read(Need::Pages, |store| show_store(arguments, store));
    if arguments.full {
        return here();
    }
    let there = || vellum::request_stat(path).map(Some);
    let does = "knows it itself (Store::stat)";
    match owner::there_or_here(path, does, there, || here().map(|()| None))? {
        Some(owner) => show_owner(arguments, &owner),
        None => Ok(()),
    }
}

fn show_store(arguments: &Arguments, store: &Store) -> Outcome {
    let path = &arguments.store.path;
    let (stat, translation) = (store.stat().at(path)?, store.pool().translation());
    let trees = if arguments.full { tree_stats(store, &stat, path)? } else { Vec::new() };
    let mut output = Output::new();
    if arguments.json {
        let mut object = store_json(&stat, translation);
        object["trees"] = match arguments.full {
            true => trees_json(&trees),
            false => store.trees().at(path)?.into(),
        };
        output.line(&object.to_string())?;
        return output.finish();
    }
    for line in fields(&store_fields(&stat, translation)) {
        output.line(&line)?;
    }
    if !trees.is_empty() {
        output.line("")?;
    }
    for line in columns(&tree_rows(&trees)) {
        output.line(&line)?;
    }
    output.finish()
}

/// Shows a store that another process has open.
fn show_owner(arguments: &Arguments, owner: &OwnerStat) -> Outcome {
    let mut output = Output::new();
    if arguments.json {
        let (stat, mut object) = (&owner.store, store_json(&owner.store, owner.translation));
        object["process"] = owner.process.into();
        object["clean"] = stat.clean.into();
        object["views"] = stat.views.into();
        object["oldest_view_seconds"] = stat.oldest_view.map(|age| age.as_secs_f64()).into();
        object["version_bytes"] = stat.version_bytes.into();
        object["pool"] = pool_json(&owner.pool);
        output.line(&object.to_string())?;
        return output.finish();
    }
    let mut shown = store_fields(&owner.store, owner.translation);
    shown.extend(owner_fields(owner));
    for line in fields(&shown) {
        output.line(&line)?;
    }
    output.finish()
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

/// Bytes of pages of 4 KiB.
fn bytes(pages: u64) -> u64 {
    pages.saturating_mul(4096)
}

fn store_fields(stat: &StoreStat, translation: Translation) -> Vec<(&'static str, String)> {
    let pages = |count: u64| format!("{count} pages, {}", show(bytes(count)));
    vec![
        ("format version", stat.format_version.to_string()),
        ("store id", format!("{:032x}", stat.store_id)),
        ("page size of trees", show(u64::from(stat.page_bytes))),
        ("file", pages(stat.file_pages)),
        ("in use", pages(stat.used_pages)),
        ("free inside", pages(stat.free_pages)),
        ("trees", stat.trees.to_string()),
        ("pool", show(stat.pool_bytes)),
        ("pages are found by", reason(translation).to_owned()),
    ]
}

fn owner_fields(owner: &OwnerStat) -> Vec<(&'static str, String)> {
    let (stat, pool) = (&owner.store, &owner.pool);
    let process = match owner.process {
        0 => "one of another container".into(),
        number => number.to_string(),
    };
    let frames = |count: u64| show(bytes(count));
    let times = |latency: &Latency| match latency.count {
        0 => String::new(),
        _ => format!("; half in {:.1?}, 99 of 100 in {:.1?}", latency.p50, latency.p99),
    };
    let views = match stat.oldest_view {
        Some(age) => format!("{}, the oldest for {age:.1?}", stat.views),
        None => stat.views.to_string(),
    };
    let filled = format!(
        "{} of {}; the peak was {}",
        frames(pool.resident_frames),
        frames(pool.capacity_frames),
        frames(pool.resident_frames_peak)
    );
    let accesses = pool.hits.saturating_add(pool.misses);
    let read = pool.misses.saturating_add(pool.prefetches);
    vec![
        ("open in process", process),
        ("changed since a checkpoint", if stat.clean { "no" } else { "yes" }.into()),
        ("snapshots, transactions", views),
        ("old values for these", show(stat.version_bytes)),
        ("pool in use", filled),
        ("hits", format!("{:.1} % of {accesses} accesses", pool.hit_rate() * 100.0)),
        ("pages read", format!("{read}{}", times(&pool.read_latency))),
        ("pages written", format!("{}{}", pool.write_backs, times(&pool.write_latency))),
        ("pages evicted", pool.evictions.to_string()),
        ("waits for memory", pool.frame_waits.to_string()),
        ("pages repaired", pool.repairs.to_string()),
        ("damaged state words", pool.damaged_words.to_string()),
    ]
}

/// Why a store finds the memory of its pages in this way.
pub fn reason(translation: Translation) -> &'static str {
    match translation {
        Translation::Table => "a table, because the file has outgrown the pool, or as asked",
        _ => "the MMU, because the file fits the pool, or as asked, or on exmap",
    }
}

fn store_json(stat: &StoreStat, translation: Translation) -> Value {
    json!({
        "format_version": stat.format_version,
        "store_id": format!("{:032x}", stat.store_id),
        "tree_page_bytes": stat.page_bytes,
        "file_bytes": bytes(stat.file_pages),
        "used_bytes": bytes(stat.used_pages),
        "free_bytes": bytes(stat.free_pages),
        "pool_bytes": stat.pool_bytes,
        "translation": translation.name(),
        "tree_count": stat.trees,
    })
}

fn pool_json(pool: &PoolStats) -> Value {
    let latency = |latency: &Latency| {
        let seconds = |time: Duration| time.as_secs_f64();
        json!({
            "count": latency.count,
            "mean_seconds": seconds(latency.mean),
            "p50_seconds": seconds(latency.p50),
            "p99_seconds": seconds(latency.p99),
            "p999_seconds": seconds(latency.p999),
            "max_seconds": seconds(latency.max),
        })
    };
    json!({
        "resident_bytes": bytes(pool.resident_frames),
        "resident_bytes_peak": bytes(pool.resident_frames_peak),
        "hits": pool.hits,
        "misses": pool.misses,
        "prefetches": pool.prefetches,
        "evictions": pool.evictions,
        "evictions_inline": pool.evictions_inline,
        "write_backs": pool.write_backs,
        "restarts": pool.restarts,
        "starvations": pool.starvations,
        "lock_waits": pool.lock_waits,
        "frame_waits": pool.frame_waits,
        "allocations": pool.allocations,
        "frees": pool.frees,
        "repairs": pool.repairs,
        "damaged_words": pool.damaged_words,
        "read_latency": latency(&pool.read_latency),
        "write_latency": latency(&pool.write_latency),
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
