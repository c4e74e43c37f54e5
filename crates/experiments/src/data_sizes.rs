//! The whole range from data that fits to data that is ten times the memory: throughput and tail
//! latency of all engines within one memory limit.

use anyhow::Result;

use super::out_of_memory::ROOM;
use super::{Context, Experiment};
use vellum_bench::engine::VELLUM;
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};
use vellum_bench::worker::{Contest, Member, Series, Setup, Team, Terms, named};
use vellum_bench::workload::lookup::ENTRY;
use vellum_bench::workload::{Lookup, Plan, Workload};

/// The experiment.
pub const DATA_SIZES: Experiment = Experiment {
    name: "data-sizes",
    shows: "throughput, p99 and p99.9 latency against data / memory from 0.5 to 10, all engines",
    source: "SIGMOD'23, section 5.3, for the whole range",
    run,
};

/// How many times the rate of the best other engine Vellum's should be.
const TARGET: f64 = 1.2;

/// Threads of each run.
const THREADS: usize = 2;

/// An engine's points of the charts.
#[derive(Debug, Default)]
struct Curve {
    engine: &'static str,
    rates: Vec<(f64, f64)>,
    latencies: Vec<(f64, f64)>,
    /// The 99.9th percentiles.
    tails: Vec<(f64, f64)>,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let ratios: &[f64] = context.pick(&[0.5, 2.0, 8.0], &[0.5, 1.0, 2.0, 4.0, 10.0]);
    let limit: u64 = context.pick(48 << 20, 128 << 20);
    let mut curves: Vec<Curve> = context
        .engines
        .all()
        .iter()
        .map(|engine| Curve { engine: engine.name, ..Curve::default() })
        .collect();
    let mut outcome = Outcome::default();
    for &ratio in ratios {
        one_ratio(context, ratio, limit, &mut curves, &mut outcome)?;
    }
    outcome.charts.push(chart("Throughput", "lookups/s", &curves, |curve| &curve.rates));
    outcome.charts.push(chart("p99 latency", "microseconds", &curves, |curve| &curve.latencies));
    outcome.charts.push(chart("p99.9 latency", "microseconds", &curves, |curve| &curve.tails));
    outcome.notes.push(format!(
        "A row's first word is data / memory. {THREADS} threads; entries of 8 + 120 bytes, \
         uniformly chosen keys, every value checked. Memory is the limit of {} MiB that each \
         engine's process has.",
        limit >> 20
    ));
    Ok(outcome)
}

fn one_ratio(
    context: &Context<'_>,
    ratio: f64,
    limit: u64,
    curves: &mut [Curve],
    outcome: &mut Outcome,
) -> Result<()> {
    let data = (limit as f64 * ratio) as u64;
    let entries = data / ENTRY;
    let mut members = Member::all(context.engines);
    Member::fill_limit(&mut members, limit, data);
    let setup = Setup::fast(data * members.len() as u64 * ROOM / 4, &context.directory)?;
    let workload = Workload::Lookup(Lookup { entries, batch: 1 });
    let terms = Terms {
        setup: &setup,
        limit: Some(limit),
        workload: &workload,
        warm_up: Plan { threads: THREADS, seconds: context.pick(0.3, 3.0), seed: 77 },
        cold: true,
    };
    let team = Team::start(&members, &terms, &context.progress)?;
    let mut contest = Contest::of(&team);
    for name in team.names() {
        let plan = Plan { threads: THREADS, seconds: context.pick(0.2, 1.0), seed: 1 };
        contest.add(label(ratio, name), name, workload.clone(), plan);
    }
    let series = contest.hold(context.rounds(), &context.progress)?;
    for series in &series {
        outcome.rows.push(series.row("lookups/s"));
        outcome.rows.push(Row::of(&series.p99, "us"));
        outcome.rows.push(Row::of(&series.p999, "us"));
    }
    for curve in curves {
        if let Some(series) = named(&series, &label(ratio, curve.engine)) {
            curve.rates.push((ratio, series.rate.median()));
            curve.latencies.push((ratio, series.p99.median()));
            curve.tails.push((ratio, series.p999.median()));
        }
    }
    outcome.rows.extend(over_others(ratio, &series));
    outcome.notes.extend(team.notes().into_iter().map(|note| format!("{ratio} x: {note}")));
    outcome.notes.push(format!("{ratio} x: {}", setup.about()));
    Ok(())
}

fn label(ratio: f64, engine: &str) -> String {
    format!("{ratio}x {engine}")
}

/// How many times the others' rates Vellum's is. The target holds where there is as much data as
/// memory, or more.
fn over_others(ratio: f64, series: &[Series]) -> Vec<Row> {
    let Some(vellum) = named(series, &label(ratio, VELLUM.name)) else { return Vec::new() };
    let others = series.iter().filter(|series| series.rate.name != vellum.rate.name);
    let row = |other| match vellum.times(other) {
        row if ratio >= 1.0 => row.with_target(TARGET),
        row => row,
    };
    others.map(row).collect()
}

fn chart(
    title: &str,
    unit: &str,
    curves: &[Curve],
    points: fn(&Curve) -> &Vec<(f64, f64)>,
) -> Chart {
    let line =
        |curve: &Curve| Line { name: curve.engine.to_owned(), points: points(curve).clone() };
    Chart {
        title: format!("{title}: random lookups with {THREADS} threads"),
        x: Axis::logarithmic("data / memory"),
        y: Axis::logarithmic(unit),
        lines: curves.iter().map(line).filter(|line| !line.points.is_empty()).collect(),
    }
}
