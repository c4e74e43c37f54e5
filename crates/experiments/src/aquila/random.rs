//! Random accesses to a mapped file of four times the memory: Aquila by userfaultfd against `mmap`,
//! each in a process of its own under the same memory limit.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::context::count;
use crate::{Context, Experiment};
use vellum_bench::machine::Storage;
use vellum_bench::machine::device_rate::{DeviceRate, ReadMethod};
use vellum_bench::machine::page_cache;
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{Cleaner, Launcher, LoadMethod, Worker, make_file};
use vellum_bench::workload::Plan;

/// The experiment.
pub const AQUILA_RANDOM: Experiment = Experiment {
    name: "aquila-random",
    shows: "random accesses to a mapped file of 4 times the memory: Aquila by userfaultfd and mmap",
    source: "EuroSys'21, section 6.4: microbenchmarks out of memory",
    run,
};

/// The length of the file, in caches.
const FACTOR: u64 = 4;

const THREADS: [usize; 2] = [1, 2];

/// A cache takes one byte for its structures for so many bytes of pages.
const STRUCTURES: u64 = 32;

/// The memory of a process besides: program, stacks, buffers.
const FIXED: u64 = 12 << 20;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let cache = context.pick(32 << 20, 128 << 20);
    let (bytes, limit) = (FACTOR * cache, cache + cache / STRUCTURES + FIXED);
    let launcher = Launcher::this_program()?;
    let _cleaner = Cleaner::start(&launcher)?;
    let aquila = |direct, monitor| LoadMethod::Aquila { cache, direct, monitor };
    let ways = [
        ("mmap", LoadMethod::MapAtRandom),
        ("Aquila", aquila(true, false)),
        ("Aquila, monitored", aquila(true, true)),
        ("Aquila through the page cache", aquila(false, false)),
    ];
    let storage = Storage::fast(ways.len() as u64 * bytes, &context.directory);
    let mut outcome = Outcome::default();
    let mut workers = BTreeMap::new();
    for (number, (name, method)) in ways.iter().enumerate() {
        // Each has a file of its own: the kernel charges a page of its cache to the process that
        // was the first to access it, and the others would have it for nothing.
        let path = storage.directory().join(number.to_string());
        let sum = make_file(&path, bytes)?;
        page_cache::drop_cached(&path)?;
        let mut worker = Worker::start(&launcher, name, Some(limit))?;
        // It accesses all pages once.
        worker.begin_hold(method, &path)?;
        match worker.held() {
            Ok(held) => ensure!(held == sum, "{name}: the bytes are not those of the file"),
            Err(error) => {
                outcome.notes.push(format!("Without {name}: {error:#}."));
                continue;
            }
        }
        workers.insert(*name, RefCell::new(worker));
    }
    let seconds = context.pick(0.3, 2.0);
    let device = DeviceRate::open(&storage.directory().join("0"))?;
    let mut contestants = Vec::new();
    for threads in THREADS {
        for (name, worker) in ways.iter().filter_map(|(name, _)| workers.get_key_value(name)) {
            let mut seeds = 1..;
            contestants.push(Contestant::new(label(name, threads), move || {
                let plan = Plan { threads, seconds, seed: seeds.next().unwrap_or_default() };
                let measured = worker.borrow_mut().access(&plan)?;
                Ok(measured.operations as f64 / measured.seconds)
            }));
        }
        let (device, mut seeds) = (&device, 1..);
        contestants.push(Contestant::new(label("device pread", threads), move || {
            let time = Duration::from_secs_f64(seconds);
            device.random(threads, ReadMethod::Wait, time, seeds.next().unwrap_or_default())
        }));
    }
    let samples = alternate(context.rounds(), &context.progress, contestants)?;
    for threads in THREADS {
        let find = |name: &str| samples.iter().find(|samples| samples.name == label(name, threads));
        let reference = find("mmap").context("mmap was measured")?;
        for (name, _) in &ways {
            let row = |of_way| Row::of(of_way, "accesses/s").against(of_way, reference);
            outcome.rows.extend(find(name).map(row));
        }
        outcome.rows.extend(find("device pread").map(|of_way| Row::of(of_way, "reads/s")));
    }
    outcome.notes.push(format!(
        "A file of {} MiB, mapped for random accesses, in processes limited to {} MiB. Aquila's \
         cache has {} MiB of these. Each access loads and checks the first word of a page.",
        bytes >> 20,
        limit >> 20,
        cache >> 20
    ));
    for (name, worker) in &workers {
        let (usage, group) = worker.borrow_mut().usage()?;
        let peak = group.map_or(0, |group| group.peak);
        outcome.notes.push(format!(
            "{name}: {} MiB read from the device, at most {} MiB of memory.",
            usage.read >> 20,
            peak >> 20
        ));
    }
    outcome.notes.push(format!("Storage: {}.", storage.about()));
    Ok(outcome)
}

fn label(name: &str, threads: usize) -> String {
    format!("{name}, {}", count(threads, "thread"))
}
