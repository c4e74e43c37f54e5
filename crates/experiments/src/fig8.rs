//! Figure 8 of SIGMOD'23: throughput and I/O over time with data ten times the pool, from the end
//! of the load on.

use std::time::Duration;

use anyhow::Result;

use super::out_of_memory::ROOM;
use super::{Context, Experiment};
use vellum_bench::engine::VELLUM;
use vellum_bench::machine::device_rate::{DeviceRate, PAGE, ReadMethod};
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};
use vellum_bench::worker::{Member, Moment, Setup, Team, Terms, Usage, limit_for};
use vellum_bench::workload::lookup::ENTRY;
use vellum_bench::workload::tpcc::Tpcc;
use vellum_bench::workload::{Lookup, Measured, Plan, Work as _, Workload};

/// The experiment.
pub const FIG8: Experiment = Experiment {
    name: "fig8",
    shows: "throughput and I/O over time, data ten times the pool, from the end of the load on",
    source: "SIGMOD'23, figure 8",
    run,
};

/// The size of the data, in pools.
const FACTOR: u64 = 10;

/// Threads of each run.
const THREADS: usize = 2;

/// Reads that each thread keeps in flight to measure the device's rate.
const DEPTH: u32 = 32;

/// The interval of [`Measured::over_time`], in seconds.
const TICK: f64 = 0.1;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let pool: u64 = context.pick(32 << 20, 128 << 20);
    let lookups = Workload::Lookup(Lookup { entries: FACTOR * pool / ENTRY, batch: 1 });
    let mut outcome = one_workload(context, pool, "lookups", "lookups/s", &lookups)?;
    if context.quick {
        outcome
            .notes
            .push("TPC-C is left out of the short form: its load takes longer.".to_owned());
    } else {
        let one = Tpcc::specified(1).bytes();
        let warehouses = u32::try_from(FACTOR * pool / one).unwrap_or(u32::MAX);
        let tpcc = Workload::Tpcc(Tpcc::specified(warehouses));
        let second = one_workload(context, pool, "TPC-C", "transactions/s", &tpcc)?;
        outcome.rows.extend(second.rows);
        outcome.charts.extend(second.charts);
        outcome.notes.extend(second.notes);
    }
    outcome.notes.push(
        "One run of each engine, one after the other: this shows how they get to their steady \
         state. For rates that alternate see 'out-of-memory'."
            .to_owned(),
    );
    Ok(outcome)
}

fn one_workload(
    context: &Context<'_>,
    pool: u64,
    what: &'static str,
    unit: &'static str,
    workload: &Workload,
) -> Result<Outcome> {
    let members = Member::all(context.engines);
    let room = workload.work().bytes() * members.len() as u64 * ROOM / 4;
    let setup = Setup::fast(room, &context.directory)?;
    let terms = Terms {
        setup: &setup,
        limit: Some(limit_for(pool)),
        workload,
        warm_up: Plan { threads: THREADS, seconds: 0.0, seed: 77 },
        cold: false,
    };
    let team = Team::start(&members, &terms, &context.progress)?;
    let plan = Plan { threads: THREADS, seconds: context.pick(3.0, 20.0), seed: 1 };
    let every = Duration::from_secs_f64(context.pick(0.25, 1.0));
    let mut figure = Figure { what, unit, ..Figure::default() };
    let device = DeviceRate::open(&team.store(VELLUM.name)?)?;
    let bound = device.random(THREADS, ReadMethod::Queue(DEPTH), every * 2, 1)?;
    figure.bound(bound, plan.seconds);
    for (at, name) in team.names().into_iter().enumerate() {
        context.progress.at(at, team.names().len(), name);
        let run = team.with(name, |worker| worker.run_watched(workload, &plan, every))?;
        if let Some((measured, moments)) = run {
            figure.add(name, &measured, &moments, every);
        }
    }
    let mut outcome = figure.outcome(workload);
    outcome.notes.extend(team.notes());
    outcome.notes.push(setup.about());
    Ok(outcome)
}

/// The rows and lines so far.
#[derive(Debug, Default)]
struct Figure {
    what: &'static str,
    unit: &'static str,
    rows: Vec<Row>,
    rates: Vec<Line>,
    reads: Vec<Line>,
    writes: Vec<Line>,
}

impl Figure {
    /// The rate of the device itself, which bounds the reads of all engines.
    fn bound(&mut self, reads: f64, seconds: f64) {
        let row = format!("{}: device, {THREADS} threads with queues", self.what);
        self.rows.push(Row::count(row, reads, "reads/s"));
        let mib = reads * PAGE as f64 / f64::from(1 << 20);
        self.reads
            .push(Line { name: "device".to_owned(), points: vec![(0.0, mib), (seconds, mib)] });
    }

    fn add(&mut self, name: &str, measured: &Measured, moments: &[Moment], every: Duration) {
        let rates = rates(&measured.over_time, every);
        let reads = transferred(moments, |usage| usage.read);
        let writes = transferred(moments, |usage| usage.written);
        let steady = |points: &[(f64, f64)]| {
            let half = &points[points.len() / 2..];
            half.iter().map(|point| point.1).sum::<f64>() / half.len().max(1) as f64
        };
        let row = format!("{}: {name}, second half", self.what);
        self.rows.push(Row::count(&row, steady(&rates), self.unit));
        self.rows.push(Row::count(format!("{row}, read"), steady(&reads), "MiB/s"));
        self.rates.push(Line { name: name.to_owned(), points: rates });
        self.reads.push(Line { name: name.to_owned(), points: reads });
        // Lookups write nothing.
        if writes.iter().any(|point| point.1 > 0.0) {
            self.writes.push(Line { name: name.to_owned(), points: writes });
        }
    }

    fn outcome(self, workload: &Workload) -> Outcome {
        let chart = |title: &str, unit: &str, lines| Chart {
            title: format!("{} out of memory: {title}", self.what),
            x: Axis::linear("seconds"),
            y: Axis::linear(unit),
            lines,
        };
        let note = format!(
            "{}: {} MiB of data, {FACTOR} times the pool; {THREADS} threads.",
            self.what,
            workload.work().bytes() >> 20
        );
        let mut charts = vec![
            chart("throughput over time", self.unit, self.rates),
            chart("reads from the device over time", "MiB/s", self.reads),
        ];
        if !self.writes.is_empty() {
            charts.push(chart("writes to the device over time", "MiB/s", self.writes));
        }
        Outcome { rows: self.rows, charts, notes: vec![note] }
    }
}

/// Operations a second in each interval; x is its end, in seconds.
fn rates(over_time: &[u64], every: Duration) -> Vec<(f64, f64)> {
    let ticks = ((every.as_secs_f64() / TICK).round() as usize).max(1);
    let of_interval = |(at, counts): (usize, &[u64])| {
        let seconds = ticks as f64 * TICK;
        ((at + 1) as f64 * seconds, counts.iter().sum::<u64>() as f64 / seconds)
    };
    over_time.chunks_exact(ticks).enumerate().map(of_interval).collect()
}

/// MiB a second between moments; x is the later one.
fn transferred(moments: &[Moment], bytes: fn(&Usage) -> u64) -> Vec<(f64, f64)> {
    let between = |pair: &[Moment]| {
        let bytes = bytes(&pair[1].usage).saturating_sub(bytes(&pair[0].usage));
        let seconds = pair[1].seconds - pair[0].seconds;
        (pair[1].seconds, bytes as f64 / f64::from(1 << 20) / seconds)
    };
    moments.windows(2).map(between).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_gathered_to_intervals() {
        let over_time = [1, 2, 3, 4, 5];
        assert_eq!(rates(&over_time, Duration::from_millis(200)), [(0.2, 15.0), (0.4, 35.0)]);
        assert_eq!(rates(&over_time, Duration::from_millis(1)).len(), 5);
    }

    #[test]
    fn reads_are_differences() {
        let moment = |seconds, mib: u64| Moment {
            seconds,
            usage: Usage { read: mib << 20, ..Usage::default() },
        };
        let moments = [moment(0.0, 5), moment(0.5, 10), moment(1.0, 10)];
        assert_eq!(transferred(&moments, |usage| usage.read), [(0.5, 10.0), (1.0, 0.0)]);
    }
}
