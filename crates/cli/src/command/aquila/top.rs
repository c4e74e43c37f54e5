//! `vellum aquila top`: what the caches of running processes do.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use vellum_aquila::{LiveCache, PAGE_SIZE, Statistics, live_caches};

use crate::error::{Failure, Outcome};
use crate::output::{Output, columns};
use crate::size::show;

const HELP: &str = "\
Examples:
  vellum aquila top                    all processes, each second, until Ctrl-C
  vellum aquila top --interval 10 4711 one process, each ten seconds, until it ends
  vellum aquila top --count 1 --json   one line for each cache, for programs

A row is a cache, and what it did in a second: faults; requests for a page that was there (hits) and
that had to be read (misses); pages that were read ahead, that left, and that were written to their
files. Processes that other users run are shown to root only. Caches of the backend 'kernel' count
nothing and are not shown.";

/// Show what caches of running processes do: faults, hits, evictions, write-back
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// Processes, by number [default: all that have a cache]
    #[arg(value_name = "PID")]
    processes: Vec<u32>,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    interval: f64,
    /// How often to show figures [default: until no process is left]
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Machine-readable output: an object for each cache and look
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0.01 to 86400 is needed".to_owned()),
    }
}

/// A cache at a moment.
struct Look {
    process: u32,
    name: String,
    when: Instant,
    statistics: Statistics,
}

/// Runs the command.
///
/// # Errors
/// When there is no such process, or it cannot be looked at, or no process has a cache.
pub fn run(arguments: &Arguments) -> Outcome {
    let mut before = look(arguments)?;
    if before.is_empty() {
        return Err(Failure::message(
            "no process has a cache now (of those that this user may look at)",
        ));
    }
    let mut shown = 0;
    while arguments.count.is_none_or(|count| shown < count) {
        thread::sleep(Duration::from_secs_f64(arguments.interval));
        let now = match look(arguments) {
            // The process has ended.
            Err(_) if shown > 0 => return Ok(()),
            looked => looked?,
        };
        if now.is_empty() {
            return Ok(());
        }
        print(arguments, &before, &now)?;
        before = now;
        shown += 1;
    }
    Ok(())
}

/// All caches that are asked for, by their numbers.
fn look(arguments: &Arguments) -> Outcome<BTreeMap<u64, Look>> {
    let all = arguments.processes.is_empty();
    let processes = if all { processes() } else { arguments.processes.clone() };
    let (mut caches, mut seen) = (BTreeMap::new(), HashSet::new());
    for process in processes {
        let found = match live_caches(process) {
            Ok(found) => found,
            // It has ended, or is another user's.
            Err(_) if all => continue,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Failure::message(format!("there is no process {process}")));
            }
            Err(error) => {
                return Err(Failure::message(format!("process {process}: {error}")));
            }
        };
        for cache in found {
            // A child that was forked has its parent's descriptors.
            if seen.insert(cache.number())
                && let Some(look) = look_at(process, &cache, all)?
            {
                caches.insert(cache.number(), look);
            }
        }
    }
    Ok(caches)
}

fn look_at(process: u32, cache: &LiveCache, all: bool) -> Outcome<Option<Look>> {
    let when = Instant::now();
    match cache.statistics() {
        Ok(statistics) => {
            let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            // A process may call itself anything.
            let name = name.trim_end().replace(char::is_control, "?");
            Ok(Some(Look { process, name, when, statistics }))
        }
        Err(_) if all => Ok(None),
        Err(error) => Err(Failure::message(format!("process {process}: {error}"))),
    }
}

/// The numbers of all processes, the lowest first.
fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let mut processes: Vec<u32> = entries.filter_map(number).collect();
    processes.sort_unstable();
    processes
}

/// What is shown of each cache, for a second.
type Column = (&'static str, &'static str, fn(&Statistics) -> u64);

const COLUMNS: [Column; 6] = [
    ("faults/s", "faults_per_second", |statistics| statistics.faults),
    ("hits/s", "hits_per_second", |statistics| statistics.hits),
    ("misses/s", "misses_per_second", |statistics| statistics.misses),
    ("ahead/s", "read_ahead_per_second", |statistics| statistics.read_ahead),
    ("evicted/s", "evictions_per_second", |statistics| statistics.evictions),
    ("written/s", "written_back_per_second", |statistics| statistics.written_back),
];

fn print(
    arguments: &Arguments,
    before: &BTreeMap<u64, Look>,
    now: &BTreeMap<u64, Look>,
) -> Outcome {
    let mut output = Output::new();
    let headings = COLUMNS.iter().map(|(heading, ..)| *heading);
    let headings = ["process", "pid", "cache"].into_iter().chain(headings).map(str::to_owned);
    let mut rows = vec![headings.collect()];
    for (number, look) in now {
        let Look { process, name, statistics, .. } = look;
        let rate = |of: fn(&Statistics) -> u64| match before.get(number) {
            Some(before) => {
                let events = of(statistics).saturating_sub(of(&before.statistics));
                events as f64 / look.when.duration_since(before.when).as_secs_f64()
            }
            // Its first second.
            None => of(statistics) as f64 / arguments.interval,
        };
        let bytes = u64::from(statistics.frames) * PAGE_SIZE as u64;
        if arguments.json {
            let mut said = json!({ "pid": process, "process": name, "cache_bytes": bytes });
            for (_, key, of) in COLUMNS {
                said[key] = json!(rate(of));
            }
            for (_, key, of) in COLUMNS {
                said[key.trim_end_matches("_per_second")] = json!(of(statistics));
            }
            output.line(&said.to_string())?;
        }
        let rates = COLUMNS.iter().map(|(.., of)| format!("{:.0}", rate(*of)));
        rows.push(
            [name.clone(), process.to_string(), show(bytes)].into_iter().chain(rates).collect(),
        );
    }
    if !arguments.json {
        for line in columns(&rows) {
            output.line(&line)?;
        }
    }
    output.finish()
}
