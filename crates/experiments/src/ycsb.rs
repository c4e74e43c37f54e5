//! YCSB A to F, each engine in its own process under the same limit, with data of half the limit
//! and of four times the limit.

use anyhow::Result;

use super::{Context, Experiment};
use vellum_bench::engine::{DURABILITY, TRANSACTIONS, VELLUM};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{Contest, Member, Series, Setup, Team, Terms, named};
use vellum_bench::workload::ycsb::Kind;
use vellum_bench::workload::{Plan, Work, Workload, Ycsb};

/// The experiment.
pub const YCSB: Experiment = Experiment {
    name: "ycsb",
    shows: "YCSB A to F against the peers, in memory and with data four times the memory",
    source: "Cooper et al., SoCC'10, with its constants",
    run,
};

/// Room for the inserts of D and E and for compactions, in bytes for each engine.
const INSERTED: u64 = 3 << 29;

/// The workloads, in groups with data of their own, as YCSB itself recommends. D inserts, and a
/// faster engine inserts more: E begins with the same data for all.
const GROUPS: [&[Kind]; 2] = [&[Kind::A, Kind::B, Kind::C, Kind::F, Kind::D], &[Kind::E]];

/// Data for each byte of memory.
const RATIOS: [(&str, f64); 2] = [("in memory", 0.5), ("4 x memory", 4.0)];

/// The experiment with a log.
pub const YCSB_BUFFERED: Experiment = Experiment {
    name: "ycsb-buffered",
    shows: "YCSB A, Vellum alone: with a log that no commit waits for, transactions, and no log",
    source: "what a log costs that bounds a crash's loss to some milliseconds",
    run: run_buffered,
};

fn run(context: &Context<'_>) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut members = Member::all(context.engines);
    members.insert(1, Member::with_option(&VELLUM, "policy", "s3-fifo"));
    for (name, ratio) in RATIOS {
        compare(context, &mut outcome, &members, &GROUPS, (name, ratio))?;
    }
    outcome.notes.push(
        "D and E insert, and a faster engine inserts more: data that fitted into memory before may \
         not fit any more. E begins with data of its own."
            .to_owned(),
    );
    Ok(outcome)
}

fn run_buffered(context: &Context<'_>) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let (transactions, buffered) = ((TRANSACTIONS, "serializable"), (DURABILITY, "buffered"));
    let vellum = |name, options: &[_]| Member::with_options(&VELLUM, name, options);
    let members = [
        Member::plain(&VELLUM),
        vellum("vellum, buffered", &[buffered]),
        vellum("vellum transactions", &[transactions]),
        vellum("vellum transactions, buffered", &[transactions, buffered]),
    ];
    for (name, ratio) in [("in memory", 0.5), ("8 x memory", 8.0)] {
        compare(context, &mut outcome, &members, &[&[Kind::A]], (name, ratio))?;
    }
    outcome.notes.push(
        "'buffered': with a log, and each update asks the log to write it soon; no update waits. \
         'transactions': each update is a serializable transaction; a read is on its own."
            .to_owned(),
    );
    Ok(outcome)
}

fn compare(
    context: &Context<'_>,
    outcome: &mut Outcome,
    members: &[Member],
    groups: &[&[Kind]],
    (name, ratio): (&str, f64),
) -> Result<()> {
    let limit: u64 = context.pick(64 << 20, 256 << 20);
    let records = (limit as f64 * ratio) as u64 / 1008;
    let ycsb = |kind| Ycsb { kind, records };
    let workload = Workload::Ycsb(ycsb(Kind::C));
    let bytes = ycsb(Kind::C).bytes();
    let mut members = members.to_vec();
    Member::fill_limit(&mut members, limit, bytes);
    let each = bytes * 5 / 2 + INSERTED;
    let setup = Setup::fast(each * members.len() as u64, &context.directory)?;
    let seconds = context.pick(0.1, 1.0);
    let terms = Terms {
        setup: &setup,
        limit: Some(limit),
        workload: &workload,
        warm_up: Plan { threads: 2, seconds: seconds * 2.0, seed: 1 },
        cold: false,
    };
    outcome.notes.push(format!(
        "{name}: {records} records of 1,000 bytes, {} MiB; two threads. {}",
        bytes >> 20,
        setup.about()
    ));
    for (number, kinds) in groups.iter().enumerate() {
        let team = Team::start(&members, &terms, &context.progress)?;
        for &kind in *kinds {
            let mut contest = Contest::of(&team);
            for member in team.names() {
                let plan = Plan { threads: 2, seconds, seed: 10 };
                let label = format!("{kind:?}, {name}, {member}");
                contest.add(label, member, Workload::Ycsb(ycsb(kind)), plan);
            }
            let series = contest.hold(context.rounds(), &context.progress)?;
            let vellum = named(&series, &format!("{kind:?}, {name}, {}", VELLUM.name));
            outcome.rows.extend(series.iter().map(|other| row(other, vellum)));
        }
        if number == 0 {
            outcome.notes.extend(team.notes());
        }
    }
    Ok(())
}

/// A row of an engine, compared with Vellum's.
fn row(series: &Series, vellum: Option<&Series>) -> Row {
    let row = series.row("operations/s");
    match vellum {
        Some(vellum) => row.against(&series.rate, &vellum.rate),
        None => row,
    }
}
