//! Figure 7 of SIGMOD'23: how throughput grows with threads while everything is in memory.
//!
//! A panel is a workload; each has a line per engine.

use anyhow::Result;

use super::in_memory::{data, notes, read_everything, single, team};
use super::{Context, Experiment};
use vellum_bench::engine::VELLUM;
use vellum_bench::machine::processors;
use vellum_bench::report::{Axis, Chart, Line, Outcome};
use vellum_bench::worker::{Contest, Series, Setup, named};
use vellum_bench::workload::tpcc::{Scale, Tpcc};
use vellum_bench::workload::{Plan, Workload};

/// The experiment.
pub const FIG7: Experiment = Experiment {
    name: "fig7",
    shows: "throughput in memory with 1 to all processors' threads: lookups and TPC-C, all engines",
    source: "SIGMOD'23, figure 7",
    run,
};

/// A workload with a chart of its own.
struct Panel {
    title: &'static str,
    unit: &'static str,
    workload: Workload,
    note: String,
}

fn panels(context: &Context<'_>) -> Vec<Panel> {
    let entries = context.pick(1_000_000, 10_000_000);
    let tpcc = context.pick(
        Tpcc { scale: Scale::off_spec(10_000, 300), ..Tpcc::specified(4) },
        Tpcc::specified(8),
    );
    vec![
        Panel {
            title: "lookups",
            unit: "lookups/s",
            workload: single(entries),
            note: data(entries),
        },
        Panel {
            title: "TPC-C",
            unit: "transactions/s",
            note: tpcc_data(&tpcc),
            workload: Workload::Tpcc(tpcc),
        },
    ]
}

/// A description of the data of TPC-C.
pub(super) fn tpcc_data(tpcc: &Tpcc) -> String {
    let scale = if tpcc.scale == Scale::SPECIFIED {
        ""
    } else {
        ", each a tenth as large as the specification says"
    };
    format!("TPC-C: {} warehouses{scale}, standard mix, no think times.", tpcc.warehouses)
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for panel in panels(context) {
        one_panel(context, panel, &mut outcome)?;
    }
    if processors() <= 2 {
        outcome.notes.push(format!(
            "Only {} processors here: the curve says little of how {} scales.",
            processors(),
            VELLUM.name
        ));
    }
    Ok(outcome)
}

fn one_panel(context: &Context<'_>, panel: Panel, outcome: &mut Outcome) -> Result<()> {
    let setup = Setup::disk(&context.directory)?;
    let team = team(context, &setup, &panel.workload)?;
    if let Workload::Lookup(lookups) = &panel.workload {
        read_everything(context, &team, lookups.entries)?;
    }
    let counts = thread_counts(processors());
    let label = |name: &str, threads| format!("{}: {name}, threads {threads}", panel.title);
    let mut contest = Contest::of(&team);
    for &threads in &counts {
        let plan = Plan { threads, seconds: context.pick(0.2, 1.0), seed: 1 };
        for name in team.names() {
            contest.add(label(name, threads), name, panel.workload.clone(), plan.clone());
        }
    }
    let series = contest.hold(context.rounds(), &context.progress)?;
    outcome.rows.extend(series.iter().map(|series| series.row(panel.unit)));
    let most = counts.last().copied().unwrap_or(1);
    for name in team.names() {
        let ends = (named(&series, &label(name, most)), named(&series, &label(name, 1)));
        if let (true, (Some(most), Some(one))) = (most > 1, ends) {
            outcome.rows.push(most.times(one));
        }
    }
    let vellum = named(&series, &label(VELLUM.name, most));
    let others = team.names().into_iter().filter(|name| *name != VELLUM.name);
    let others = others.filter_map(|name| Some(vellum?.times(named(&series, &label(name, most))?)));
    outcome.rows.extend(others);
    outcome.charts.push(chart(&panel, &team.names(), &counts, |name, threads| {
        named(&series, &label(name, threads))
    }));
    outcome.notes.push(panel.note.clone());
    outcome.notes.extend(notes(&setup, &team));
    Ok(())
}

/// Powers of two, and all of them.
fn thread_counts(processors: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |count| Some(count * 2));
    powers.take_while(|count| *count < processors).chain([processors.max(1)]).collect()
}

fn chart<'a>(
    panel: &Panel,
    engines: &[&str],
    counts: &[usize],
    find: impl Fn(&str, usize) -> Option<&'a Series>,
) -> Chart {
    let line = |engine: &&str| {
        let point =
            |threads: &usize| Some((*threads as f64, find(engine, *threads)?.rate.median()));
        Line { name: (*engine).to_owned(), points: counts.iter().filter_map(point).collect() }
    };
    Chart {
        title: format!("In memory: {}", panel.title),
        x: Axis::linear("threads"),
        y: Axis::linear(panel.unit),
        lines: engines.iter().map(line).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_counts_end_with_all_processors() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(16), [1, 2, 4, 8, 16]);
        assert_eq!(thread_counts(6), [1, 2, 4, 6]);
    }
}
