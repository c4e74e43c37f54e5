//! Small durable appends to the log, compared with threads that each write and sync their own file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use vellum_log::{FileLog, FileLogOptions, Log, LogError, LogOptions, Lsn};

use super::durable::{Way, rates_and_latencies};
use super::{Context, Experiment, count};
use vellum_bench::report::Outcome;

/// The experiment.
pub const LOG: Experiment = Experiment {
    name: "log",
    shows: "small durable appends, and their latency, against a write and fdatasync by each thread",
    source: "how far group commit makes up for what a flush costs (arXiv 2606.18187)",
    run,
};

const THREADS: [u64; 3] = [1, 8, 32];
const RECORDS: [usize; 2] = [100, 1000];

/// Bytes of a plain file, which is written anew from its beginning.
const PLAIN: u64 = 8 << 20;

/// Bytes of the log that are kept while it is measured.
const KEPT: u64 = 64 << 20;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let duration = Duration::from_secs_f64(context.pick(0.4, 2.0));
    let most = THREADS.into_iter().max().unwrap_or(1);
    let directory = context.make_directory("plain")?;
    let files = (0..most).map(|thread| plain(&directory.join(thread.to_string())));
    let files = files.collect::<Result<Vec<_>>>()?;
    let mut options = FileLogOptions::default();
    options.most_bytes = 4 * KEPT;
    let device = Arc::new(FileLog::open(context.directory.join("log"), &options)?);
    let method = device.sync_method();
    let (log, _) = Log::open(device, &LogOptions::default(), None, |_| Ok::<_, LogError>(()))?;
    let mut outcome = Outcome::default();
    for bytes in RECORDS {
        for threads in THREADS {
            let ways = [plain_way(&files, bytes, threads), log_way(&log, bytes, threads)];
            let rows = rates_and_latencies(context, &ways, "appends/s", duration)?;
            outcome.rows.extend(rows);
        }
    }
    log.close()?;
    outcome.notes.push(format!(
        "Each thread appends a record and waits until it is durable. 'plain' is a write at the \
         next place of a file of the thread's own, which was written before, and fdatasync. The \
         log makes blocks durable by {method}, which it found fastest here."
    ));
    Ok(outcome)
}

fn plain(path: &Path) -> Result<File> {
    let file = OpenOptions::new().create(true).truncate(true).write(true).open(path)?;
    file.write_all_at(&vec![1; PLAIN as usize], 0)?;
    file.sync_all()?;
    Ok(file)
}

fn name(way: &str, bytes: usize, threads: u64) -> String {
    format!("{way}, {bytes} bytes, {}", count(threads as usize, "thread"))
}

fn plain_way(files: &[File], bytes: usize, threads: u64) -> Way<'_> {
    let commit = move |thread: u64| {
        let (file, record) = (&files[thread as usize], vec![thread as u8; bytes]);
        let mut place = 0;
        let commit = move || {
            place = (place + bytes as u64) % (PLAIN - bytes as u64);
            file.write_all_at(&record, place)?;
            Ok(file.sync_data()?)
        };
        Ok(Box::new(commit) as _)
    };
    let name = name("plain write + fdatasync", bytes, threads);
    Way { name, threads, commit: Box::new(commit) }
}

fn log_way(log: &Log, bytes: usize, threads: u64) -> Way<'_> {
    let commit = move |thread: u64| {
        let (record, mut appended) = (vec![thread as u8; bytes], 0_u64);
        let commit = move || {
            let lsn = log.append(&record)?;
            log.wait_durable(lsn)?;
            appended += 1;
            if appended.is_multiple_of(256) {
                log.trim(Lsn(lsn.0.saturating_sub(KEPT)))?;
            }
            Ok(())
        };
        Ok(Box::new(commit) as _)
    };
    Way { name: name("log", bytes, threads), threads, commit: Box::new(commit) }
}
