//! Figure 10: random reads by threads that wait for each read, and by threads that keep a queue.
//! They read into fixed buffers, which is the most that the kernel can do, and into the pool, which
//! evicts meanwhile.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use vellum_pool::device::{FileDevice, FileOptions};
use vellum_pool::{
    PAGE_SIZE, PageId, PageReader, PageRef, Pool, PoolOptions, PoolSize, RawPages, Space,
};

use super::{Context, Experiment, count};
use vellum_bench::machine::device_rate::{DeviceRate, ReadMethod};
use vellum_bench::machine::{Storage, processors};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};
use vellum_bench::workload::values::Random;

/// The experiment.
pub const FIG10: Experiment = Experiment {
    name: "fig10",
    shows: "random reads a second, waiting and with a queue, into fixed buffers and into the pool",
    source: "SIGMOD'23, figure 10",
    run,
};

/// Reads that a thread keeps under way.
const DEPTH: usize = 256;

/// Pages of the file for each frame of the pool.
const PAGES_PER_FRAME: u64 = 8;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let bytes: u64 = context.pick(256 << 20, 2 << 30);
    let time = Duration::from_secs_f64(context.pick(0.2, 1.0));
    let storage = Storage::fast(bytes, &context.directory);
    let path = storage.directory().join("pages");
    context.progress.doing("filling the device");
    let device = DeviceRate::fill(&path, bytes)?;
    let pool = pool(&path, bytes)?;
    let mut outcome = Outcome::default();
    let names = ["fixed buffers, waiting", "fixed buffers, queue", "pool, waiting", "pool, queue"];
    let mut lines: Vec<Line> =
        names.iter().map(|name| Line { name: (*name).to_owned(), points: Vec::new() }).collect();
    for threads in 1..=processors().min(16) {
        let seed = threads as u64;
        let (device, pool) = (&device, &pool);
        let depth = DEPTH as u32;
        let label = |way: usize| format!("{}, {}", names[way], count(threads, "thread"));
        let contestants = vec![
            Contestant::new(label(0), move || device.random(threads, ReadMethod::Wait, time, seed)),
            Contestant::new(label(1), move || {
                device.random(threads, ReadMethod::Queue(depth), time, seed)
            }),
            Contestant::new(label(2), move || read_pages(pool, threads, time, 1)),
            Contestant::new(label(3), move || read_pages(pool, threads, time, DEPTH)),
        ];
        let samples = alternate(context.rounds(), &context.progress, contestants)?;
        for (way, of_way) in samples.iter().enumerate() {
            lines[way].points.push((threads as f64, of_way.median()));
            let row = Row::of(of_way, "reads/s");
            // The pool is compared with reads into fixed buffers.
            outcome.rows.push(if way < 2 { row } else { row.against(of_way, &samples[way - 2]) });
        }
    }
    outcome.charts.push(Chart {
        title: "Random reads of 4 KiB".to_owned(),
        x: Axis::linear("threads"),
        y: Axis::linear("reads/s"),
        lines,
    });
    outcome.notes.push(format!(
        "File of {} MiB, pool of an eighth; a queue is {DEPTH} reads a thread; storage: {}.",
        bytes >> 20,
        storage.about()
    ));
    drop(pool);
    Ok(outcome)
}

fn pool(path: &Path, bytes: u64) -> Result<Pool> {
    let device = FileDevice::open(path, FileOptions::default())?;
    let size = PoolSize::Bytes(bytes / PAGES_PER_FRAME);
    let options = PoolOptions { size, read_only: true, ..PoolOptions::default() };
    let space = Space::new(bytes / PAGE_SIZE as u64);
    Ok(Pool::open(Arc::new(device), Arc::new(RawPages), space, options)?)
}

/// Pages that threads read from the device a second. The threads access random pages, `together` at
/// a time. Pages that are in the pool cost no read and do not count.
pub(super) fn read_pages(
    pool: &Pool,
    threads: usize,
    time: Duration,
    together: usize,
) -> Result<f64> {
    let before = pool.stats();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads as u64)
            .map(|thread| scope.spawn(move || look_at_pages(pool, thread, start + time, together)))
            .collect();
        for thread in started {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        anyhow::Ok(())
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let after = pool.stats();
    let reads = (after.misses + after.prefetches) - (before.misses + before.prefetches);
    ensure!(reads > 0, "nothing was read: is the pool as large as the file?");
    Ok(reads as f64 / seconds)
}

fn look_at_pages(pool: &Pool, thread: u64, end: Instant, together: usize) -> Result<()> {
    let mut random = Random::new(thread);
    let pages = pool.file_pages();
    let mut wanted = Vec::with_capacity(together);
    while Instant::now() < end {
        for _ in 0..(64 / together).max(1) {
            wanted.clear();
            wanted.extend(
                (0..together).map(|_| PageRef { id: PageId(random.below(pages)), frames: 1 }),
            );
            if together > 1 {
                pool.prefetch(&wanted);
            }
            for page in &wanted {
                let first = pool.read(*page, |bytes| Ok(bytes.u64(0)))?;
                ensure!(matches!(first, Ok(Some(_))), "{page} could not be read");
            }
        }
    }
    Ok(())
}
