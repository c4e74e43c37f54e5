//! Bundles against stealing: figures 10 and 11 of the second paper.

use anyhow::Result;
use vellum_uapi::exmap::STEALING;
use vellum_vm::BackendKind;

use super::contest::{Entrant, add_point, add_ratio, add_rows, compete};
use super::memory::{OfExmap, OfKernel, PageMemory};
use super::pattern::{Claimed, Pattern};
use super::threads::{Plan, Strategy};
use super::{Size, device, without_module};
use crate::{Context, Experiment, count};
use vellum_bench::report::{Axis, Chart, Line, Outcome};

/// The experiment.
pub const POOL: Experiment = Experiment {
    name: "exmap-pool",
    shows: "frames from a shared list of bundles or by stealing, with and without memory pressure",
    source: "IEEE Access 2023, figures 10 and 11",
    run,
};

/// Allocators for each free thread under memory pressure.
const PRESSURE: usize = 4;

struct Grounds {
    stealing: OfExmap,
    bundles: OfExmap,
    madvise: OfKernel,
    states: Claimed,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    if !device::is_there() {
        return Ok(without_module());
    }
    // Under pressure there are that many allocators at least.
    let size = Size::of(context);
    let size = Size { threads: size.threads.max(PRESSURE), ..size };
    context.progress.doing("making surfaces");
    let memories = Grounds {
        stealing: size.memory(STEALING)?,
        bundles: size.memory(0)?,
        madvise: size.kernel_ground(BackendKind::Madvise)?,
        states: Claimed::new(size.pages),
    };
    let mut outcome = Outcome::default();
    outcome.notes.push(size.note());
    outcome.notes.push(format!(
        "Under pressure there is a free thread for {PRESSURE} allocators, and one queue, which \
         holds a part of the pool."
    ));
    let threads = Size::of(context).thread_counts();
    let without = without_pressure(context, &size, &memories, &threads, &mut outcome)?;
    outcome.charts.push(chart("Without memory pressure", "threads that allocate", without));
    let under = under_pressure(context, &size, &memories, &mut outcome)?;
    outcome.charts.push(chart("Under memory pressure", "% of the pool in the queue", under));
    Ok(outcome)
}

fn chart(title: &str, x: &str, lines: Vec<Line>) -> Chart {
    let (x, y) = (Axis::linear(x), Axis::linear("pages/s with bundles, by those with stealing"));
    Chart { title: title.to_owned(), x, y, lines }
}

/// Both designs and madvise with one plan; the ratio of the designs.
fn compare(
    context: &Context<'_>,
    size: &Size,
    memories: &Grounds,
    label: &str,
    plan: Plan,
    outcome: &mut Outcome,
) -> Result<f64> {
    let name = |design: &str| format!("{design}, {label}");
    let (states, pages) = (&memories.states, size.pages);
    let entrant =
        |design: &str, memory, plan| Entrant::new(name(design), memory, states, pages, plan);
    let entrants = [
        entrant("madvise", &memories.madvise as &dyn PageMemory, plan.page_by_page()),
        entrant("stealing", &memories.stealing, plan),
        entrant("bundles", &memories.bundles, plan),
    ];
    let found = compete(context, &entrants)?;
    add_rows(outcome, &found);
    Ok(add_ratio(outcome, ("bundles", &found[2]), ("stealing", &found[1]), label))
}

fn without_pressure(
    context: &Context<'_>,
    size: &Size,
    memories: &Grounds,
    threads: &[usize],
    outcome: &mut Outcome,
) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for threads in threads.iter().copied() {
        for pattern in Pattern::ALL {
            for strategy in Strategy::ALL {
                let line = format!("{}, {}", pattern.name(), strategy.name());
                let label = format!("{line}, {}", count(threads, "thread"));
                let plan = Plan::new(threads, pattern, strategy, size.frames).lasting(size.time);
                let ratio = compare(context, size, memories, &label, plan, outcome)?;
                add_point(&mut lines, &line, (threads as f64, ratio));
            }
        }
    }
    Ok(lines)
}

fn under_pressure(
    context: &Context<'_>,
    size: &Size,
    memories: &Grounds,
    outcome: &mut Outcome,
) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    let parts: &[u64] = context.pick(&[10, 50, 100], &[10, 25, 50, 75, 90, 100]);
    for pattern in Pattern::ALL {
        for percent in parts {
            let plan = pressing(size, pattern, *percent);
            let label = format!("{}, queue of {percent} %", pattern.name());
            let ratio = compare(context, size, memories, &label, plan, outcome)?;
            add_point(&mut lines, pattern.name(), (*percent as f64, ratio));
        }
    }
    Ok(lines)
}

/// Few free threads, one queue for all that holds a part of the pool.
fn pressing(size: &Size, pattern: Pattern, percent: u64) -> Plan {
    Plan {
        freers: (size.threads / PRESSURE).max(1),
        queues: 1,
        queued: size.frames * percent / 100,
        time: size.time * 2,
        ..Plan::new(size.threads, pattern, Strategy::Remote, size.frames)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn pressure_is_few_free_threads_and_one_queue() {
        let time = Duration::from_millis(10);
        let size = Size { pages: 1 << 20, frames: 10_000, threads: 8, time };
        let plan = pressing(&size, Pattern::Random, 25);
        assert_eq!((plan.allocators, plan.freers, plan.queues, plan.queued), (8, 2, 1, 2500));
    }
}
