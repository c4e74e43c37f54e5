//! Random lookups in a store on exmap and on madvise, in memory and out of it, with the page states
//! in an array or with the frames: figure 12 of the second paper.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use vellum::StatePlace;
use vellum_pool::device::{Device as _, FileDevice, FileOptions};
use vellum_pool::{
    BackendChoice, BackendKind, PAGE_SIZE, PageRef, Pool, PoolOptions, PoolSize, RawPages, Space,
};

use super::{device, without_module};
use crate::fig10::read_pages;
use crate::page_access::Chain;
use crate::page_access::pattern_device::PatternDevice;
use crate::{Context, Experiment, count};
use vellum_bench::engine::vellum as engine;
use vellum_bench::engine::{Engine, Setting, VELLUM};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::workload::{Lookup, Plan, Work};

/// The experiment.
pub const LOOKUP: Experiment = Experiment {
    name: "exmap-lookup",
    shows: "random lookups in a store: madvise, exmap, exmap with states by frame; their memory",
    source: "IEEE Access 2023, figure 12",
    run,
};

/// A way to keep pages and their states.
struct Way {
    name: &'static str,
    backend: &'static str,
    states: &'static str,
}

/// The last two are compared with each other, both with the first.
const WAYS: [Way; 3] = [
    Way { name: "madvise", backend: "madvise", states: "pages" },
    Way { name: "exmap, states in an array", backend: "exmap", states: "pages" },
    Way { name: "exmap, states with the frames", backend: "exmap", states: "frames" },
];

/// The block device that is taken unless one is named; all of it is read.
const DEVICE: &str = "/dev/ram0";

/// How many times smaller than the data the pool is if the data does not fit.
const SMALLER: u64 = 8;

fn run(context: &Context<'_>) -> Result<Outcome> {
    if !device::is_there() {
        return Ok(without_module());
    }
    let lookup = Lookup { entries: context.pick(150_000, 2_000_000), batch: 1 };
    for way in &WAYS {
        context.progress.doing(&format!("loading {} entries, {}", lookup.entries, way.name));
        let engine = open(context, way, lookup.bytes())?;
        lookup.load(&*engine)?;
        engine.settle()?;
    }
    let mut outcome = Outcome::default();
    let in_memory = 2 * lookup.bytes() + (32 << 20);
    for (label, bytes) in [("in memory", in_memory), ("out of memory", lookup.bytes() / SMALLER)] {
        compare(context, &lookup, label, bytes, &mut outcome)?;
    }
    misses(context, &mut outcome)?;
    outcome.rows.extend(memory_rows(context.pick(18, 22))?);
    outcome.notes.push(format!(
        "{} entries of 8 + 120 bytes, every value checked; in memory a pool that holds all, out of \
         memory one of an {SMALLER}th of the data.",
        lookup.entries
    ));
    Ok(outcome)
}

fn open(context: &Context<'_>, way: &Way, bytes: u64) -> Result<Box<dyn Engine>> {
    let directory = context.make_directory(&way.name.replace([' ', ','], "-"))?;
    let mut setting = Setting::new(&directory, bytes);
    setting.options.insert("backend".to_owned(), way.backend.to_owned());
    setting.options.insert("states".to_owned(), way.states.to_owned());
    (VELLUM.open)(&setting)
}

fn compare(
    context: &Context<'_>,
    lookup: &Lookup,
    label: &str,
    bytes: u64,
    outcome: &mut Outcome,
) -> Result<()> {
    let engines = WAYS.iter().map(|way| open(context, way, bytes)).collect::<Result<Vec<_>>>()?;
    // The measurement neither loads data that fits, nor fills an empty pool.
    for (engine, way) in engines.iter().zip(&WAYS) {
        context.progress.doing(&format!("warming up {}, {label}", way.name));
        lookup.visit_all(&**engine)?;
    }
    for threads in [1, 2] {
        let what = format!("{label}, {}", count(threads, "thread"));
        let plan = Plan { threads, seconds: context.pick(0.5, 2.0), seed: 1 };
        let run = |way: usize| Ok(lookup.run(&*engines[way], &plan)?.rate());
        let samples = race(context, &what, "lookups/s", run, outcome)?;
        let ratio = samples[2].median() / samples[1].median();
        outcome.rows.push(Row::count(format!("frames to array, {what}"), ratio, "times"));
    }
    Ok(())
}

/// Measures the ways, known to `run` by their numbers, in turn; a row for each, compared with the
/// first.
fn race(
    context: &Context<'_>,
    what: &str,
    unit: &str,
    run: impl Fn(usize) -> Result<f64>,
    outcome: &mut Outcome,
) -> Result<Vec<Samples>> {
    let run = &run;
    let contestants = WAYS
        .iter()
        .enumerate()
        .map(|(index, way)| Contestant::new(format!("{}, {what}", way.name), move || run(index)));
    let samples = alternate(context.rounds(), &context.progress, contestants.collect())?;
    let rows = samples.iter().map(|of| Row::of(of, unit).against(of, &samples[0]));
    outcome.rows.extend(rows);
    Ok(samples)
}

/// The pool alone, out of memory, on a fast block device: the cost of a miss.
fn misses(context: &Context<'_>, outcome: &mut Outcome) -> Result<()> {
    let path = context.device.clone().unwrap_or_else(|| PathBuf::from(DEVICE));
    if !path.exists() {
        outcome.notes.push(format!("No {DEVICE} for the pool alone: name a device by --device."));
        return Ok(());
    }
    let pools = WAYS.iter().map(|way| pool(&path, way)).collect::<Result<Vec<_>>>()?;
    let time = Duration::from_millis(context.pick(300, 1000));
    for threads in [1, 2] {
        let what = format!("pool on {}, {}", path.display(), count(threads, "thread"));
        let run = |way: usize| read_pages(&pools[way], threads, time, 1);
        race(context, &what, "reads/s", run, outcome)?;
    }
    Ok(())
}

/// A pool of an eighth of the device.
fn pool(path: &Path, way: &Way) -> Result<Pool> {
    let device = FileDevice::open(path, FileOptions { read_only: true, ..Default::default() })?;
    let pages = device.pages()?;
    let options = PoolOptions {
        size: PoolSize::Bytes(pages * PAGE_SIZE as u64 / SMALLER),
        backend: engine::backend(way.backend)?,
        states: engine::states(way.states)?,
        read_only: true,
        ..PoolOptions::default()
    };
    Ok(Pool::open(Arc::new(device), Arc::new(RawPages), Space::new(pages), options)?)
}

/// The memory of page states, in a pool that has seen many more pages than it holds.
fn memory_rows(bits: u32) -> Result<Vec<Row>> {
    let frames: u64 = 4096;
    let mut rows = Vec::new();
    for (name, states) in [("array", StatePlace::Pages), ("frames", StatePlace::Frames)] {
        let device = Arc::new(PatternDevice(Chain::new(bits, 0)));
        let options = PoolOptions {
            size: PoolSize::Bytes(frames << 12),
            backend: BackendChoice::Only(BackendKind::Exmap),
            states,
            read_only: true,
            ..PoolOptions::default()
        };
        let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options)?;
        for page in (0..1 << bits).step_by(64) {
            drop(pool.fix_shared(PageRef::new(page, 1))?);
        }
        let what = format!("memory of states, {name}, {frames} frames, file of 2^{bits} pages");
        rows.push(Row::count(what, pool.state_bytes()? as f64 / frames as f64, "bytes per frame"));
    }
    Ok(rows)
}
