//! TPC-C with all engines: data in memory, and data eight times the pool under one memory limit.
//! Once with single operations where an engine has no cheap transactions, once with the
//! transactions of all.
//!
//! After the runs the experiment checks the specification's consistency conditions in each engine.
//! If they do not hold in Vellum, the experiment fails; if they do not hold in a peer, a note says
//! so.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::{Context as _, Result};

use super::{Context, Experiment};
use vellum_bench::engine::{DURABILITY, TRANSACTIONS, VELLUM};
use vellum_bench::measure::Samples;
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{Contest, Member, Setup, Team, Terms, limit_for, named, times};
use vellum_bench::workload::{Measured, Plan, Tpcc, Work, Workload};

/// The experiment.
pub const TPCC: Experiment = Experiment {
    name: "tpcc",
    shows: "TPC-C, standard mix, all engines, in memory and with data 8 times the pool; checked",
    source: "TPC-C 5.11; SIGMOD'23, sections 5.2 and 5.3",
    run: |context| {
        let lineup = Lineup { members: Member::all(context.engines), ours: VELLUM.name };
        run(context, &lineup, SINGLE)
    },
};

/// The experiment with transactions.
pub const TPCC_TRANSACTIONS: Experiment = Experiment {
    name: "tpcc-transactions",
    shows: "TPC-C with the transactions of all engines, and Vellum with a log and without",
    source: "what isolation and a log cost; TPC-C 5.11",
    run: |context| run(context, &with_transactions(context), TRANSACTIONAL),
};

const SINGLE: &str =
    "Durability class: nothing is logged that can be left out, nothing is flushed at a commit.";

const TRANSACTIONAL: &str = "'buffered': Vellum with a log that it writes all the time; no commit \
     waits. The others log nothing that can be left out, and flush nothing at a commit. 'vellum' \
     without 'transactions' is single operations. A transaction that loses against another one \
     runs again; only the one that commits counts.";

const BUFFERED: &str = "vellum transactions, buffered";

/// The engines of a run.
struct Lineup {
    members: Vec<Member>,
    /// The member whose ratios to the others are of interest.
    ours: &'static str,
}

fn with_transactions(context: &Context<'_>) -> Lineup {
    let (transactions, buffered) = ((TRANSACTIONS, "serializable"), (DURABILITY, "buffered"));
    let mut members = vec![
        Member::with_options(&VELLUM, BUFFERED, &[transactions, buffered]),
        Member::with_options(&VELLUM, "vellum transactions", &[transactions]),
        Member::with_options(&VELLUM, "vellum, buffered", &[buffered]),
    ];
    for factory in context.engines.all() {
        members.push(match factory.name {
            "rocksdb" => Member::with_options(factory, "rocksdb transactions", &[transactions]),
            _ => Member::plain(factory),
        });
    }
    Lineup { members, ours: BUFFERED }
}

/// The size of the data in pools, if it does not fit.
const FACTOR: u64 = 8;

/// The assumed maximum growth of an engine's data in a second with two threads, in memory; beyond
/// memory it is a fourth. New orders and payments add data.
const GROWTH: u64 = 128 << 20;

/// One size of the experiment.
struct Size {
    /// Its name in rows.
    name: &'static str,
    tpcc: Tpcc,
    /// Bytes of the pool, if data does not fit it.
    pool: Option<u64>,
    /// Numbers of threads, ascending.
    threads: &'static [usize],
    seconds: f64,
    warm_up: f64,
}

impl Size {
    fn in_memory(context: &Context<'_>) -> Size {
        Size {
            name: "in memory",
            tpcc: Tpcc::specified(context.pick(1, 4)),
            pool: None,
            threads: context.pick(&[2], &[1, 2]),
            seconds: context.pick(0.2, 1.5),
            warm_up: context.pick(0.2, 2.0),
        }
    }

    fn out_of_memory(context: &Context<'_>) -> Size {
        let tpcc = Tpcc::specified(context.pick(2, 8));
        Size {
            name: "data 8 x pool",
            pool: Some(tpcc.bytes() / FACTOR),
            tpcc,
            threads: context.pick(&[2], &[1, 2]),
            seconds: context.pick(0.2, 2.0),
            warm_up: context.pick(0.2, 4.0),
        }
    }

    /// Bytes that the data may grow by.
    fn growth(&self, rounds: usize) -> u64 {
        let runs = (rounds + 1) * self.threads.len();
        let seconds = self.seconds * runs as f64 + self.warm_up;
        let rate = if self.pool.is_some() { GROWTH / 4 } else { GROWTH };
        (seconds * rate as f64) as u64
    }

    fn label(&self, engine: &str, threads: usize) -> String {
        format!("{engine}, {}, {}", plural(threads as u64, "thread"), self.name)
    }
}

fn plural(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn run(context: &Context<'_>, lineup: &Lineup, durability: &str) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for size in [Size::in_memory(context), Size::out_of_memory(context)] {
        measure(context, &size, lineup, &mut outcome)?;
    }
    outcome.notes.extend([
        "Nine tables and two indexes, all five transactions in the standard mix of 45, 43, 4, 4 \
         and 4 of 100, terminals without think times; each thread has its home warehouses. A new \
         order looks up its items first, so that the 1 % with an unknown one end before anything \
         was written."
            .to_owned(),
        durability.to_owned(),
        "Data grows while it is measured, that of faster engines more.".to_owned(),
    ]);
    Ok(outcome)
}

fn measure(
    context: &Context<'_>,
    size: &Size,
    lineup: &Lineup,
    outcome: &mut Outcome,
) -> Result<()> {
    let growth = size.growth(context.rounds());
    let mut members = lineup.members.clone();
    if size.pool.is_none() {
        // Pages are not full, and have headers.
        members.iter_mut().for_each(|m| m.cache_bytes = Some(size.tpcc.bytes() * 3 / 2 + growth));
    }
    // Engines that rewrite data need room for both copies.
    let room = (size.tpcc.bytes() * 5 / 2 + growth) * members.len() as u64;
    let setup = Setup::fast(room, &context.directory)?;
    let workload = Workload::Tpcc(size.tpcc.clone());
    let terms = Terms {
        setup: &setup,
        limit: size.pool.map(limit_for),
        workload: &workload,
        warm_up: Plan { threads: 2, seconds: size.warm_up, seed: 77 },
        cold: size.pool.is_some(),
    };
    let team = Team::start(&members, &terms, &context.progress)?;
    let entries = hold(context, size, &team, &workload)?;
    outcome.rows.extend(rows(&entries, lineup.ours));
    outcome.notes.push(format!(
        "{}: {}, {} MiB of keys and values{}.",
        size.name,
        plural(size.tpcc.warehouses.into(), "warehouse"),
        size.tpcc.bytes() >> 20,
        size.pool.map_or(String::new(), |pool| format!(", pool {} MiB", pool >> 20))
    ));
    outcome.notes.extend(team.notes());
    outcome.notes.push(setup.about());
    for name in team.names() {
        context.progress.doing(&format!("checking {name}"));
        let member = lineup.members.iter().find(|member| member.name == name);
        let member = member.context("a member of the team is not in the lineup")?;
        outcome.notes.push(checked(&team, member, &workload)?);
    }
    Ok(())
}

/// The results of an engine with some number of threads, round by round.
struct Entry {
    engine: String,
    threads: usize,
    rate: Samples,
    /// Of the rounds that count.
    runs: Vec<Measured>,
}

impl Entry {
    fn samples(&self, what: &str, value: impl Fn(&Measured) -> f64) -> Samples {
        Samples {
            name: format!("{}, {what}", self.rate.name),
            values: self.runs.iter().map(value).collect(),
        }
    }
}

fn hold(
    context: &Context<'_>,
    size: &Size,
    team: &Team,
    workload: &Workload,
) -> Result<Vec<Entry>> {
    let mut contest = Contest::of(team);
    let mut noted = Vec::new();
    for &threads in size.threads {
        for name in team.names() {
            let runs = Rc::new(RefCell::new(Vec::new()));
            noted.push((name.to_owned(), threads, Rc::clone(&runs)));
            let (name, workload) = (name.to_owned(), workload.clone());
            let (mut seeds, seconds) = (1.., size.seconds);
            contest.add_other(size.label(&name, threads), move || {
                let seed = seeds.next().unwrap_or_default();
                let plan = Plan { threads, seconds, seed };
                let run = team.with(&name, |worker| worker.run(&workload, &plan))?;
                // A peer that has failed gets no series.
                let Some(measured) = run else { return Ok(f64::NAN) };
                let rate = measured.rate();
                runs.borrow_mut().push(measured);
                Ok(rate)
            });
        }
    }
    let series = contest.hold(context.rounds(), &context.progress)?;
    let entries = noted.into_iter().filter_map(|(engine, threads, runs)| {
        let rate = named(&series, &size.label(&engine, threads))?.rate.clone();
        // The first round does not count.
        let runs = runs.borrow().iter().skip(1).cloned().collect();
        Some(Entry { engine, threads, rate, runs })
    });
    Ok(entries.collect())
}

/// Transactions of all kinds, ratios of `ours` to the others, and more of the largest number of
/// threads.
fn rows(entries: &[Entry], ours: &str) -> Vec<Row> {
    let mut rows: Vec<Row> =
        entries.iter().map(|entry| Row::of(&entry.rate, "transactions/s")).collect();
    let is_ours = |entry: &&Entry| entry.engine == ours;
    for entry in entries.iter().filter(is_ours) {
        let others = entries.iter().filter(|other| other.threads == entry.threads);
        let others = others.filter(|other| !is_ours(other));
        rows.extend(others.map(|other| times(&entry.rate, &other.rate)));
    }
    let most = entries.iter().map(|entry| entry.threads).max();
    for entry in entries.iter().filter(|entry| Some(entry.threads) == most) {
        let new_orders = entry.samples("new orders", |run| {
            run.counts.get("new_order").copied().unwrap_or(0) as f64 / run.seconds
        });
        rows.push(Row::of(&new_orders, "new orders/s"));
        let p50 = entry.samples("p50", |run| run.latency.p50 as f64 / 1000.0);
        let p99 = entry.samples("p99", |run| run.latency.p99 as f64 / 1000.0);
        rows.extend([Row::of(&p50, "us"), Row::of(&p99, "us")]);
    }
    rows.extend(entries.iter().filter_map(aborts));
    rows
}

/// The abort rate: attempts that lost against other transactions, of all attempts. Only members
/// whose transactions can lose have one, but for a member that lost where this does not expect it.
fn aborts(entry: &Entry) -> Option<Row> {
    let rate = entry.samples("abort rate", |run| {
        let lost = run.counts.get("conflicts").copied().unwrap_or(0);
        lost as f64 * 100.0 / (run.operations + lost).max(1) as f64
    });
    let can_lose = entry.engine.contains(TRANSACTIONS);
    let has_lost = rate.values.iter().any(|value| *value > 0.0);
    (can_lose || has_lost).then(|| Row::of(&rate, "% of attempts"))
}

/// Whether the conditions hold in a member's store, and the isolation of its transactions.
fn checked(team: &Team, member: &Member, workload: &Workload) -> Result<String> {
    let (name, about) = (&member.name, isolation(member));
    let result = team.worker(name)?.check(workload);
    match result {
        Ok(_) => Ok(format!(
            "{name}: consistency conditions 1 to 10 and 12 (clause 3.3.2) hold after the runs. \
             Isolation: {about}."
        )),
        Err(error) if member.engine.name == VELLUM.name => {
            Err(error).context("Vellum's data is not shown to be consistent after the runs")
        }
        Err(error) => Ok(format!("{name}: NOT SHOWN to be consistent after the runs: {error:#}.")),
    }
}

/// The isolation of a member's transactions, as they are used here.
fn isolation(member: &Member) -> &'static str {
    match (member.engine.name, member.options.contains_key(TRANSACTIONS)) {
        ("vellum", true) => "serializable, any number of transactions that write at a time",
        ("rocksdb", true) => "keys that were read are validated at the commit, ranges are not",
        ("vellum" | "rocksdb", false) => {
            "single operations are atomic, transactions are not isolated"
        }
        ("lmdb" | "redb" | "fjall" | "sqlite", _) => {
            "serializable, one transaction that writes at a time"
        }
        _ => "what its adapter says",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(engine: &str, threads: usize, rates: &[f64]) -> Entry {
        let run = |rate: &f64| Measured {
            operations: *rate as u64,
            seconds: 2.0,
            counts: [("new_order".to_owned(), 10)].into(),
            ..Measured::default()
        };
        Entry {
            engine: engine.to_owned(),
            threads,
            rate: Samples { name: format!("{engine}, {threads}"), values: rates.to_vec() },
            runs: rates.iter().map(run).collect(),
        }
    }

    #[test]
    fn transactions_that_can_lose_have_an_abort_rate() {
        let mut some = entry("vellum transactions", 1, &[30.0]);
        some.runs[0].counts.insert("conflicts".to_owned(), 10);
        let entries = [some, entry("vellum transactions", 2, &[30.0]), entry("lmdb", 2, &[10.0])];
        let rows = rows(&entries, "vellum transactions");
        let rate = |name: &str| rows.iter().find(|row| row.name == name).map(|row| row.value);
        assert_eq!(rate("vellum transactions, 1, abort rate"), Some(25.0));
        assert_eq!(rate("vellum transactions, 2, abort rate"), Some(0.0));
        assert_eq!(rate("lmdb, 2, abort rate"), None);
    }

    #[test]
    fn ratios_are_of_the_same_number_of_threads() {
        let entries = [
            entry("vellum", 1, &[30.0, 40.0]),
            entry("lmdb", 1, &[10.0, 10.0]),
            entry("vellum", 2, &[90.0]),
            entry("lmdb", 2, &[10.0]),
        ];
        let rows = rows(&entries, "vellum");
        let ratio = |name: &str| rows.iter().find(|row| row.name == name).map(|row| row.value);
        assert_eq!(ratio("vellum, 1 / lmdb, 1"), Some(3.5));
        assert_eq!(ratio("vellum, 2 / lmdb, 2"), Some(9.0));
        assert_eq!(ratio("vellum, 2 / lmdb, 1"), None);
        assert_eq!(ratio("vellum, 2, new orders"), Some(5.0));
        assert_eq!(ratio("vellum, 1, new orders"), None);
    }
}
