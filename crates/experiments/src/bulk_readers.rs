//! Readers during a bulk load: random lookups of one tree while another thread loads another tree
//! of the same store, and while it appends to theirs, against the readers alone.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::Result;

use super::{Context, Experiment, count};
use vellum_bench::engine::VELLUM;
use vellum_bench::measure::Samples;
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{Contest, Member, Setup, Team, Terms, limit_for, named, times};
use vellum_bench::workload::bulk_readers::COUNT;
use vellum_bench::workload::lookup::ENTRY;
use vellum_bench::workload::{Beside, BulkReaders, Plan, Workload};

/// The experiment.
pub const BULK_READERS: Experiment = Experiment {
    name: "bulk-readers",
    shows: "random lookups while another thread bulk-loads, against lookups alone",
    source: "whether readers keep 0.8 of their rate during a bulk load",
    run,
};

/// The engines that take part: those whose adapters append, and remove a range.
const ENGINES: [&str; 2] = ["vellum", "lmdb"];

/// What goes on beside the readers, by its name in rows. The first is the reference.
const BESIDE: [(&str, Beside); 4] = [
    ("alone", Beside::Nothing),
    ("beside a thread that stores nothing", Beside::Entries),
    ("beside a bulk load of another tree", Beside::OtherTable),
    ("beside sorted appends to the same tree", Beside::SameTable),
];

/// The part of their rate that readers should keep.
const TARGET: f64 = 0.8;

/// The size of the data in pools, if it does not fit.
const FACTOR: u64 = 4;

/// The assumed maximum of what a load stores in a second.
const LOADED: u64 = 1 << 30;

/// One size of the experiment.
struct Size {
    /// Its name in rows.
    name: &'static str,
    entries: u64,
    /// Bytes of the pool, if the data does not fit it.
    pool: Option<u64>,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let pool: u64 = context.pick(16 << 20, 128 << 20);
    let sizes = [
        Size { name: "in memory", entries: context.pick(200_000, 4_000_000), pool: None },
        Size { name: "data 4 x pool", entries: FACTOR * pool / ENTRY, pool: Some(pool) },
    ];
    let mut outcome = Outcome::default();
    for size in &sizes {
        one_size(context, size, &mut outcome)?;
    }
    outcome.notes.push(format!(
        "{}: a processor is left for the load where there are two. Entries of 8 + 120 bytes, \
         uniformly chosen keys, every value checked. The load goes on as long as the readers do; \
         before each sample the readers run as long without it. A thread that stores nothing makes \
         the same entries: ratios to that are what storing takes. A bulk load needs an empty tree; \
         the same tree gets appends of 1,000 sorted entries a call. LMDB loads in transactions \
         of 64 MiB, and appends in one for each call.",
        count(readers(), "reader")
    ));
    Ok(outcome)
}

/// Threads that look entries up.
fn readers() -> usize {
    std::thread::available_parallelism().map_or(1, |all| all.get().saturating_sub(1).max(1))
}

fn one_size(context: &Context<'_>, size: &Size, outcome: &mut Outcome) -> Result<()> {
    let seconds = context.pick(0.1, 1.0);
    let loaded = (LOADED as f64 * seconds) as u64;
    let data = size.entries * ENTRY;
    let mut members = Member::all(context.engines);
    members.retain(|member| ENGINES.contains(&member.engine.name));
    let setup = if size.pool.is_some() {
        let each = data * 3 / 2 + loaded * 2;
        Setup::fast(each * members.len() as u64, &context.directory)?
    } else {
        for member in &mut members {
            member.cache_bytes = Some(data * 2 + loaded);
        }
        Setup::disk(&context.directory)?
    };
    let workload = BulkReaders { entries: size.entries, beside: Beside::Nothing };
    let terms = Terms {
        setup: &setup,
        limit: size.pool.map(limit_for),
        workload: &Workload::BulkReaders(workload),
        warm_up: Plan { threads: readers(), seconds: context.pick(0.2, 3.0), seed: 77 },
        cold: false,
    };
    let team = Team::start(&members, &terms, &context.progress)?;
    let found = measure(context, size, &team, seconds)?;
    outcome.rows.extend(rows(&found));
    outcome.notes.push(format!(
        "{}: {} entries, {} MiB{}.",
        size.name,
        size.entries,
        data >> 20,
        size.pool.map_or(String::new(), |pool| format!(", pool {} MiB", pool >> 20))
    ));
    outcome.notes.extend(team.notes());
    outcome.notes.push(setup.about());
    Ok(())
}

/// The samples of an engine, in the order of [`BESIDE`].
struct Found {
    engine: String,
    /// Lookups a second.
    rates: Vec<Samples>,
    /// Entries that the load took a second.
    loads: Vec<Samples>,
}

fn measure(context: &Context<'_>, size: &Size, team: &Team, seconds: f64) -> Result<Vec<Found>> {
    let label = |name: &str, what: &str| format!("{}, {name} {what}", size.name);
    let mut contest = Contest::of(team);
    let mut noted = Vec::new();
    for name in team.names() {
        for (what, beside) in BESIDE {
            let loads = Rc::new(RefCell::new(Vec::new()));
            noted.push((label(name, what), Rc::clone(&loads)));
            let workload = BulkReaders { entries: size.entries, beside };
            let (workload, name) = (Workload::BulkReaders(workload), name.to_owned());
            let mut seeds = 1..;
            contest.add_other(label(&name, what), move || {
                let seed = seeds.next().unwrap_or_default();
                let plan = Plan { threads: readers(), seconds, seed };
                let run = team.with(&name, |worker| worker.run(&workload, &plan))?;
                // A peer that has failed gets no series.
                let Some(measured) = run else { return Ok(f64::NAN) };
                let loaded = measured.counts.get(COUNT).copied().unwrap_or(0);
                loads.borrow_mut().push(loaded as f64 / measured.seconds);
                Ok(measured.rate())
            });
        }
    }
    let names: Vec<String> = team.names().into_iter().map(str::to_owned).collect();
    let series = contest.hold(context.rounds(), &context.progress)?;
    let found = names.into_iter().filter_map(|engine| {
        let labels = BESIDE.map(|(what, _)| label(&engine, what));
        let rate = |label: &String| Some(named(&series, label)?.rate.clone());
        let rates = labels.iter().map(rate).collect::<Option<Vec<Samples>>>()?;
        let load = |label: &String| {
            let (_, loads) = noted.iter().find(|(name, _)| name == label)?;
            // The first round does not count.
            let values = loads.borrow().iter().skip(1).copied().collect();
            Some(Samples { name: format!("{label}, the load"), values })
        };
        let loads = labels.iter().map(load).collect::<Option<Vec<Samples>>>()?;
        Some(Found { engine, rates, loads })
    });
    Ok(found.collect())
}

fn rows(all: &[Found]) -> Vec<Row> {
    let mut rows = Vec::new();
    for Found { engine, rates, loads } in all {
        rows.extend(rates.iter().map(|rate| Row::of(rate, "lookups/s")));
        let stores = |at: usize| matches!(BESIDE[at].1, Beside::OtherTable | Beside::SameTable);
        let stored = loads.iter().enumerate().filter(|(at, _)| stores(*at));
        rows.extend(stored.map(|(_, load)| Row::of(load, "entries/s")));
        for (at, rate) in rates.iter().enumerate().skip(1) {
            let row = times(rate, &rates[0]);
            let is_aimed_at = stores(at) && engine == VELLUM.name;
            rows.push(if is_aimed_at { row.with_target(TARGET) } else { row });
        }
        let busy = BESIDE.iter().position(|(_, beside)| *beside == Beside::Entries);
        let to_busy = |at: usize| Some(times(&rates[at], &rates[busy?]));
        rows.extend((0..rates.len()).filter(|at| stores(*at)).filter_map(to_busy));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_have_ratios_to_readers_alone_and_vellum_has_the_target() {
        let found = |engine: &str| Found {
            engine: engine.to_owned(),
            rates: [4.0, 3.0, 2.0, 1.0]
                .iter()
                .zip(BESIDE)
                .map(|(rate, (what, _))| Samples {
                    name: format!("{engine} {what}"),
                    values: vec![*rate; 3],
                })
                .collect(),
            loads: BESIDE.map(|(what, _)| Samples::new(format!("{engine} {what}, load"))).into(),
        };
        let rows = rows(&[found("vellum"), found("lmdb")]);
        let row = |what: &str| rows.iter().find(|row| row.name == what).unwrap();
        let other = "beside a bulk load of another tree";
        let ours = row(&format!("vellum {other} / vellum alone"));
        assert_eq!((ours.value, ours.target), (0.5, Some(TARGET)));
        let peer = row(&format!("lmdb {other} / lmdb alone"));
        assert_eq!((peer.value, peer.target), (0.5, None));
        let nothing = "vellum beside a thread that stores nothing / vellum alone";
        assert_eq!((row(nothing).value, row(nothing).target), (0.75, None));
    }
}
