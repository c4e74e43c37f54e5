//! Random lookups of data that is in memory: every engine, one thread and two.

use anyhow::Result;

use super::{Context, Experiment};
use vellum_bench::engine::VELLUM;
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{Contest, Member, Series, Setup, Team, Terms, named};
use vellum_bench::workload::lookup::ENTRY;
use vellum_bench::workload::{Lookup, Plan, Scan, Workload};

/// The experiment.
pub const IN_MEMORY: Experiment = Experiment {
    name: "in-memory",
    shows: "random lookups of data that is in memory, all engines; multi_get against single ones",
    source: "SIGMOD'23, section 5.2",
    run,
};

/// How many times LMDB's rate Vellum's should be.
const TO_LMDB: f64 = 1.9;

/// Keys of one multi_get.
const MULTI_GET_KEYS: usize = 32;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let entries = context.pick(1_000_000, 10_000_000);
    let setup = Setup::disk(&context.directory)?;
    let team = team(context, &setup, &single(entries))?;
    read_everything(context, &team, entries)?;
    let mut contest = Contest::of(&team);
    for threads in [1, 2] {
        let plan = Plan { threads, seconds: context.pick(0.3, 1.0), seed: 1 };
        for name in team.names() {
            contest.add(label(name, threads), name, single(entries), plan.clone());
        }
        let multi_gets = Workload::Lookup(Lookup { entries, batch: MULTI_GET_KEYS });
        contest.add(multi_get_label(threads), VELLUM.name, multi_gets, plan);
    }
    let series = contest.hold(context.rounds(), &context.progress)?;
    let mut outcome = Outcome::default();
    outcome.rows.extend(series.iter().map(|series| series.row("lookups/s")));
    outcome.rows.extend(ratios(&team, &series));
    outcome.notes = vec![data(entries)];
    outcome.notes.extend(notes(&setup, &team));
    Ok(outcome)
}

/// All engines, filled, with caches that hold all data. They run for some time before the
/// measurement.
pub(super) fn team(context: &Context<'_>, setup: &Setup, workload: &Workload) -> Result<Team> {
    let mut members = Member::all(context.engines);
    for member in &mut members {
        // Pages are not full, have headers, and some workloads add data.
        member.cache_bytes = Some(workload.work().bytes() * 2 + (128 << 20));
    }
    let terms = Terms {
        setup,
        limit: None,
        workload,
        warm_up: Plan { threads: 2, seconds: context.pick(1.0, 6.0), seed: 77 },
        cold: false,
    };
    Team::start(&members, &terms, &context.progress)
}

/// All engines scan all data once, because not every engine caches the data that it loads.
pub(super) fn read_everything(context: &Context<'_>, team: &Team, entries: u64) -> Result<()> {
    let scan = Workload::Scan(Scan { entries, length: entries, backward: false });
    for name in team.names() {
        context.progress.doing(&format!("{name} reads everything"));
        team.worker(name)?.run(&scan, &Plan { threads: 1, seconds: 0.0, seed: 1 })?;
    }
    Ok(())
}

/// Notes for the reader about a team that has everything in memory.
pub(super) fn notes(setup: &Setup, team: &Team) -> Vec<String> {
    let mut notes = team.notes();
    notes.push(
        "Each engine in a process of its own without a memory limit, its cache larger than the \
         data."
            .to_owned(),
    );
    notes.push(setup.about());
    notes
}

/// A description of the data of lookups.
pub(super) fn data(entries: u64) -> String {
    format!(
        "{entries} entries of 8 + 120 bytes ({} MiB), uniformly chosen keys, every value checked.",
        (entries * ENTRY) >> 20
    )
}

pub(super) fn single(entries: u64) -> Workload {
    Workload::Lookup(Lookup { entries, batch: 1 })
}

fn label(engine: &str, threads: usize) -> String {
    format!("{engine}, {threads} thread{}", if threads == 1 { "" } else { "s" })
}

fn multi_get_label(threads: usize) -> String {
    label(&format!("{} multi_get({MULTI_GET_KEYS})", VELLUM.name), threads)
}

fn ratios(team: &Team, series: &[Series]) -> Vec<Row> {
    let mut rows = Vec::new();
    for threads in [1, 2] {
        let Some(vellum) = named(series, &label(VELLUM.name, threads)) else { continue };
        let others = team.names().into_iter().filter(|name| *name != VELLUM.name);
        let others = others.filter_map(|name| named(series, &label(name, threads)));
        rows.extend(others.map(|other| match vellum.times(other) {
            row if other.rate.name == label("lmdb", threads) => row.with_target(TO_LMDB),
            row => row,
        }));
        rows.extend(
            named(series, &multi_get_label(threads)).map(|multi_gets| multi_gets.times(vellum)),
        );
    }
    rows
}
