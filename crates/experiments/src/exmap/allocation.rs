//! Pages allocated and freed a second: figure 9 of the first paper, 5 and 6a of the second.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Result, anyhow};
use vellum_uapi::exmap::{ALLOC, FREE, STEALING};
use vellum_vm::BackendKind;

use super::contest::{Entrant, Found, add_point, add_rows, compete};
use super::device::Exmap;
use super::memory::{Nothing, OfExmap, OfKernel, PageMemory};
use super::pattern::{BATCH, Chooser, Claimed, Pattern};
use super::shootdowns::shootdowns;
use super::threads::{Plan, Strategy};
use super::{Size, device, without_module};
use crate::{Context, Experiment, count};
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};

/// The experiment.
pub const ALLOCATION: Experiment = Experiment {
    name: "exmap-allocation",
    shows: "pages that come and go a second, by pattern, free strategy and use of interfaces",
    source: "SIGMOD'23, figure 9; IEEE Access 2023, figures 5 and 6a",
    run,
};

/// Everything that is measured.
struct Grounds {
    madvise: OfKernel,
    process_madvise: Option<OfKernel>,
    exmap: OfExmap,
    states: Claimed,
}

/// Lines of the charts.
#[derive(Default)]
struct Lines {
    ways: Vec<Line>,
    exmap: Vec<Line>,
    benchmark: Vec<Line>,
    scenarios: Vec<Line>,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    if !device::is_there() {
        return Ok(without_module());
    }
    let size = Size::of(context);
    context.progress.doing("making surfaces");
    let process_madvise = size.kernel_ground(BackendKind::ProcessMadvise);
    let mut outcome = Outcome::default();
    outcome.notes.push(size.note());
    if process_madvise.is_err() {
        outcome.notes.push(
            "Without process_madvise: on this kernel it takes no pages of the own process."
                .to_owned(),
        );
    }
    let memories = Grounds {
        madvise: size.kernel_ground(BackendKind::Madvise)?,
        process_madvise: process_madvise.ok(),
        exmap: size.memory(0)?,
        states: Claimed::new(size.pages),
    };
    let mut lines = Lines::default();
    for threads in size.thread_counts() {
        for pattern in Pattern::ALL {
            for strategy in Strategy::ALL {
                let plan = Plan::new(threads, pattern, strategy, size.frames).lasting(size.time);
                by_ground(context, &size, &memories, plan, &mut outcome, &mut lines)?;
            }
        }
    }
    let stealing = size.memory(STEALING)?;
    for threads in size.thread_counts() {
        scenarios(context, &size, &memories, &stealing, threads, &mut outcome, &mut lines)?;
    }
    outcome.rows.extend(of_vectors(&memories.exmap, size.pages)?);
    outcome.charts.extend(charts(lines));
    outcome.notes.extend(NOTES.iter().map(|note| (*note).to_owned()));
    Ok(outcome)
}

const NOTES: &[&str] = &[
    "With remote and mixed free there are as many free threads as allocators, and the number of \
     threads is that of allocators. A page counts when it is freed.",
    "Threads touch one cache line of each page, except in rows that say otherwise; with madvise \
     the touch faults the page in, zeroed.",
    "'no device' is the benchmark alone: pattern, page states and queues.",
];

/// The same plan on every memory.
fn by_ground(
    context: &Context<'_>,
    size: &Size,
    memories: &Grounds,
    plan: Plan,
    outcome: &mut Outcome,
    lines: &mut Lines,
) -> Result<()> {
    let label = format!("{}, {}", plan.pattern.name(), plan.strategy.name());
    let threads = count(plan.allocators, "thread");
    let entrant = |way: &str, memory, plan| {
        let name = format!("{way}, {label}, {threads}");
        Entrant::new(name, memory, &memories.states, size.pages, plan)
    };
    let mut ways = vec!["madvise", "exmap", "exmap, not touched", "no device"];
    let exmap: &dyn PageMemory = &memories.exmap;
    let mut entrants = vec![
        entrant(ways[0], &memories.madvise, plan.page_by_page()),
        entrant(ways[1], exmap, plan),
        entrant(ways[2], exmap, plan.untouched()),
        entrant(ways[3], &Nothing, plan.untouched()),
    ];
    if let Some(memory) = &memories.process_madvise {
        ways.push("process_madvise");
        entrants.push(entrant("process_madvise", memory, plan));
    }
    let found = compete(context, &entrants)?;
    add_rows(outcome, &found);
    let at = |index: usize| (plan.allocators as f64, found[index].samples.median());
    add_point(&mut lines.exmap, &label, at(1));
    add_point(&mut lines.benchmark, &label, at(3));
    if (plan.pattern, plan.strategy) == (Pattern::Random, Strategy::Local) {
        for (index, way) in ways.iter().enumerate().filter(|(index, _)| *index != 3) {
            add_point(&mut lines.ways, way, at(index));
        }
        outcome.rows.extend(shootdown_rows(&found[..2]));
    }
    Ok(())
}

fn shootdown_rows(found: &[Found]) -> Vec<Row> {
    let row = |one: &Found| {
        let name = format!("TLB shootdowns, {}", one.samples.name);
        Row::count(name, one.shootdowns_per_page(), "per page")
    };
    found.iter().map(row).collect()
}

/// The first paper's ways to use interfaces, with both designs of the pool.
fn scenarios(
    context: &Context<'_>,
    size: &Size,
    memories: &Grounds,
    stealing: &OfExmap,
    threads: usize,
    outcome: &mut Outcome,
    lines: &mut Lines,
) -> Result<()> {
    let plan =
        |strategy| Plan::new(threads, Pattern::Random, strategy, size.frames).lasting(size.time);
    let mut plans = vec![("1 IF", plan(Strategy::Local)), ("2 IF", plan(Strategy::TwoInterfaces))];
    if threads > 1 {
        let half = threads / 2;
        let remote = plan(Strategy::Remote);
        let all = Plan { allocators: threads - half, freers: half, queues: half, ..remote };
        plans.push(("pool", Plan { queued: size.frames, ..all }));
    }
    let entrant = |name: String, memory, plan| {
        let name = format!("{name}, {}", count(threads, "thread"));
        Entrant::new(name, memory, &memories.states, size.pages, plan)
    };
    let mut names = vec!["madvise".to_owned()];
    let mut entrants =
        vec![entrant(names[0].clone(), &memories.madvise, plan(Strategy::Local).page_by_page())];
    let designs: [(&str, &OfExmap); 2] = [("bundles", &memories.exmap), ("stealing", stealing)];
    for (design, memory) in designs {
        for (scenario, plan) in &plans {
            let name = format!("exmap ({scenario}), {design}");
            entrants.push(entrant(name.clone(), memory, *plan));
            names.push(name);
        }
    }
    let found = compete(context, &entrants)?;
    add_rows(outcome, &found);
    for (name, one) in names.iter().zip(&found) {
        add_point(&mut lines.scenarios, name, (threads as f64, one.samples.median()));
    }
    Ok(())
}

/// Vectors of 512 random pages, while another thread runs on another processor: shootdowns.
fn of_vectors(memory: &OfExmap, pages: u64) -> Result<Vec<Row>> {
    const VECTORS: u64 = 32;
    let others = vellum_bench::machine::processors() as u64 - 1;
    let stop = AtomicBool::new(false);
    let counted = thread::scope(|scope| {
        let spinning = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let counted = count_shootdowns(memory.exmap(), pages, VECTORS);
        stop.store(true, Ordering::Relaxed);
        spinning.join().map_err(|_| anyhow!("a thread panicked"))?;
        counted
    })?;
    let row = |command: &str, shot: u64| {
        let name = format!("TLB shootdowns, exmap, {command} vectors, {others} other processors");
        Row::count(name, shot as f64 / VECTORS as f64, "per vector")
    };
    Ok(vec![row("ALLOC", counted.0), row("FREE", counted.1)])
}

/// Those of so many ALLOC vectors, and of as many FREE vectors.
fn count_shootdowns(exmap: &Exmap, pages: u64, vectors: u64) -> Result<(u64, u64)> {
    let interface = exmap.interface(0)?.private()?;
    let states = Claimed::new(pages);
    let mut chooser = Chooser::new(Pattern::Random, 0, 1, pages);
    let (mut batch, mut counted) = (Vec::new(), (0, 0));
    for _ in 0..vectors {
        chooser.choose(&states, BATCH, &mut batch);
        let before = shootdowns()?;
        interface.run_all(ALLOC, &batch)?;
        batch.iter().for_each(|page| exmap.touch(*page));
        let between = shootdowns()?;
        interface.run_all(FREE, &batch)?;
        counted.0 += between - before;
        counted.1 += shootdowns()? - between;
    }
    Ok(counted)
}

fn charts(lines: Lines) -> Vec<Chart> {
    let chart = |title: &str, lines| Chart {
        title: title.to_owned(),
        x: Axis::linear("threads that allocate"),
        y: Axis::logarithmic("pages/s"),
        lines,
    };
    vec![
        chart("Random pages, local free", lines.ways),
        chart("Use of interfaces, random pages", lines.scenarios),
        chart("exmap by pattern and free strategy", lines.exmap),
        chart("The benchmark without a device", lines.benchmark),
    ]
}
