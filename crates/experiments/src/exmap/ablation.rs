//! The gain from each of exmap's techniques: figure 11, left, of the first paper.

use anyhow::Result;
use vellum_uapi::exmap::{FLUSH_EACH, LOCK_TABLES, NO_POOL};
use vellum_vm::BackendKind;

use super::contest::{Entrant, add_point, add_rows, compete};
use super::memory::{OfExmap, PageMemory};
use super::pattern::{Claimed, Pattern};
use super::threads::{Plan, Strategy};
use super::{Size, device, without_module};
use crate::{Context, Experiment, count};
use vellum_bench::report::{Axis, Chart, Outcome};

/// The experiment.
pub const ABLATION: Experiment = Experiment {
    name: "exmap-ablation",
    shows: "the gain from batches, from the private pool and from lock-free entries",
    source: "SIGMOD'23, figure 11, left",
    run,
};

/// The first step with batches.
const BATCHED: usize = 2;

fn run(context: &Context<'_>) -> Result<Outcome> {
    if !device::is_there() {
        return Ok(without_module());
    }
    let size = Size::of(context);
    context.progress.doing("making surfaces");
    let madvise = size.kernel_ground(BackendKind::Madvise)?;
    let single = size.memory(NO_POOL | LOCK_TABLES | FLUSH_EACH)?;
    let single = OfExmap::page_by_page(single.into_exmap());
    let batched = size.memory(NO_POOL | LOCK_TABLES)?;
    let private = size.memory(LOCK_TABLES)?;
    let free = size.memory(0)?;
    let steps: [(&str, &dyn PageMemory); 5] = [
        ("madvise", &madvise),
        ("exmap, a call and a flush for each page", &single),
        ("+ batches with one flush", &batched),
        ("+ private pool", &private),
        ("+ lock-free entries", &free),
    ];
    let states = Claimed::new(size.pages);
    let mut outcome = Outcome::default();
    outcome.notes.push(size.note());
    outcome.notes.push("Random pages, local free.".to_owned());
    let mut lines = Vec::new();
    for threads in size.thread_counts() {
        let plan = Plan::new(threads, Pattern::Random, Strategy::Local, size.frames);
        let plan = plan.lasting(size.time * 2);
        let mut step = 0;
        let entrants = steps.map(|(name, memory)| {
            let name = format!("{name}, {}", count(threads, "thread"));
            let plan = if step < BATCHED { plan.page_by_page() } else { plan };
            step += 1;
            Entrant::new(name, memory, &states, size.pages, plan)
        });
        let found = compete(context, &entrants)?;
        add_rows(&mut outcome, &found);
        for (step, one) in found.iter().enumerate() {
            let line = count(threads, "thread");
            add_point(&mut lines, &line, (step as f64, one.samples.median()));
        }
    }
    outcome.charts.push(Chart {
        title: "exmap's techniques, one after the other".to_owned(),
        x: Axis::linear("0 madvise, 1 page by page, 2 batches, 3 private pool, 4 lock-free"),
        y: Axis::logarithmic("pages/s"),
        lines,
    });
    Ok(outcome)
}
