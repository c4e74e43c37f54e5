//! Values of 4 KiB to 64 MiB, read and written whole, compared with the peers, out of memory.

use anyhow::Result;

use super::{Context, Experiment};
use vellum_bench::engine::VELLUM;
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};
use vellum_bench::worker::{Contest, Member, Setup, Team, Terms, cache_bytes, named};
use vellum_bench::workload::{Blob, Plan, Work, Workload};

/// The experiment.
pub const BLOB: Experiment = Experiment {
    name: "blob",
    shows: "values of 4 KiB to 64 MiB, read and written, with data twice the memory",
    source: "variable-size pages: SIGMOD'23, section 3.5",
    run,
};

/// Threads that read or write.
const THREADS: usize = 2;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let limit: u64 = context.pick(64 << 20, 512 << 20);
    let sizes: &[usize] =
        context.pick(&[4 << 10, 1 << 20], &[4 << 10, 64 << 10, 1 << 20, 64 << 20]);
    let mut members = Member::all(context.engines);
    for member in &mut members {
        member.cache_bytes = Some(cache_bytes(&member.engine, limit));
    }
    let mut outcome = Outcome::default();
    let mut lines: Vec<Line> = members
        .iter()
        .map(|member| Line { name: member.name.clone(), points: Vec::new() })
        .collect();
    for &bytes_each in sizes {
        let blob = Blob { values: limit * 2 / bytes_each as u64, bytes_each, write: false };
        let setup = Setup::fast(blob.bytes() * 3 * members.len() as u64, &context.directory)?;
        let workload = Workload::Blob(blob.clone());
        let seconds = context.pick(0.3, 2.0);
        let terms = Terms {
            setup: &setup,
            // Each thread that writes has a value of its own, for every engine.
            limit: Some(limit + THREADS as u64 * bytes_each as u64),
            workload: &workload,
            warm_up: Plan { threads: THREADS, seconds, seed: 1 },
            cold: false,
        };
        let team = Team::start(&members, &terms, &context.progress)?;
        for write in [false, true] {
            let does = if write { "written" } else { "read" };
            let name = |member: &str| format!("{} {does}, {member}", size(bytes_each));
            let mut contest = Contest::of(&team);
            for member in team.names() {
                let workload = Workload::Blob(Blob { write, ..blob.clone() });
                let plan = Plan { threads: THREADS, seconds, seed: 10 };
                contest.add(name(member), member, workload, plan);
            }
            let all = contest.hold(context.rounds(), &context.progress)?;
            let vellum = named(&all, &name(VELLUM.name));
            for series in &all {
                let row = in_mib(series.row("values/s"), bytes_each);
                outcome.rows.push(match vellum {
                    Some(vellum) => row.against(&series.rate, &vellum.rate),
                    None => row,
                });
            }
            if !write {
                for line in &mut lines {
                    if let Some(series) = named(&all, &name(&line.name)) {
                        let mib = series.rate.median() * bytes_each as f64 / f64::from(1 << 20);
                        line.points.push((bytes_each as f64 / 1024.0, mib));
                    }
                }
            }
        }
        outcome.notes.push(format!(
            "{}: {} values; two threads. {}",
            size(bytes_each),
            blob.values,
            setup.about()
        ));
        outcome.notes.extend(team.notes());
    }
    outcome.charts.push(Chart {
        title: "Values read, data twice the memory".to_owned(),
        x: Axis::logarithmic("KiB of a value"),
        y: Axis::linear("MiB/s"),
        lines,
    });
    Ok(outcome)
}

/// The same row in MiB a second.
fn in_mib(row: Row, bytes_each: usize) -> Row {
    let factor = bytes_each as f64 / f64::from(1 << 20);
    Row {
        value: row.value * factor,
        low: row.low * factor,
        high: row.high * factor,
        unit: "MiB/s".to_owned(),
        ..row
    }
}

fn size(bytes: usize) -> String {
    match bytes >> 20 {
        0 => format!("{} KiB", bytes >> 10),
        mib => format!("{mib} MiB"),
    }
}
