//! Random lookups of data larger than memory, on a device in memory: Vellum with pages found by a
//! table, and by the MMU with two ways of releasing pages; the other engines under the same limit;
//! and the rate of the device.

use std::time::Duration;

use anyhow::Result;

use super::{Context, Experiment};
use vellum_bench::engine::{Engines, VELLUM};
use vellum_bench::machine::device_rate::{DeviceRate, PAGE, ReadMethod};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{
    Contest, Member, Series, Setup, Team, Terms, limit_for, named, scaled, times,
};
use vellum_bench::workload::lookup::ENTRY;
use vellum_bench::workload::{Lookup, Plan, Workload};

/// The experiment.
pub const OUT_OF_MEMORY: Experiment = Experiment {
    name: "out-of-memory",
    shows: "random lookups of data 2 and 8 times the pool, all engines within one memory limit",
    source: "SIGMOD'23, sections 4.1 and 5.3",
    run,
};

/// The size of the data, in pools.
const FACTORS: [u64; 2] = [2, 8];

/// Keys of one multi_get.
const MULTI_GET_KEYS: usize = 32;

/// Reads that each thread keeps in flight to measure the device's rate.
const DEPTH: u32 = 32;

/// How many times the rate of a peer Vellum's should be.
const PEERS: [(&str, f64); 2] = [("lmdb", 2.0), ("rocksdb", 1.5)];

/// How many times the rate of one thread that of two should be.
const SCALING: f64 = 1.9;

/// The parts of the device's own rate that single lookups should reach, and those of `multi_get`.
const SINGLE: f64 = 0.6;
const MULTI_GETS: f64 = 0.75;

/// Room for a member's files, in quarters of the data: pages are not full, and engines that rewrite
/// data need room for both copies.
pub(super) const ROOM: u64 = 6;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for factor in FACTORS {
        one_size(context, factor, &mut outcome)?;
    }
    outcome.notes.push(format!(
        "A row's first word is how many times the pool the data is. The device's own rate is that \
         of direct reads of {PAGE} bytes at random places of Vellum's file: pread, or {DEPTH} at a \
         time with io_uring, measured in the same rounds. What single lookups and multi_get read \
         from the device is compared with both."
    ));
    Ok(outcome)
}

fn one_size(context: &Context<'_>, factor: u64, outcome: &mut Outcome) -> Result<()> {
    let pool: u64 = context.pick(32 << 20, 128 << 20);
    let data = factor * pool;
    let members = members(context.engines);
    let room = data * members.len() as u64 * ROOM / 4;
    let setup = Setup::fast(room, &context.directory)?;
    let entries = data / ENTRY;
    let terms = Terms {
        setup: &setup,
        limit: Some(limit_for(pool)),
        workload: &Workload::Lookup(Lookup { entries, batch: 1 }),
        warm_up: Plan { threads: 2, seconds: context.pick(0.3, 3.0), seed: 77 },
        cold: true,
    };
    let team = Team::start(&members, &terms, &context.progress)?;
    let names = Names { factor };
    let series = measure(context, &team, entries, &names)?;
    let units = |series: &Series| {
        let unit = if series.rate.name.contains("device") { "reads/s" } else { "lookups/s" };
        series.row(unit)
    };
    outcome.rows.extend(series.iter().map(units));
    outcome.rows.extend(names.ratios(&team, &series));
    outcome.notes.push(format!(
        "Data {factor} times the pool: {entries} entries of 8 + 120 bytes, {} MiB.",
        data >> 20
    ));
    outcome.notes.extend(team.notes());
    outcome.notes.push(setup.about());
    Ok(())
}

/// Vellum as it chooses, by the MMU with both ways of releasing pages and without a thread that
/// evicts ahead of need, and with the other replacement policy; and all other engines.
fn members(engines: &Engines) -> Vec<Member> {
    let mut members = Member::all(engines);
    let no_evictor = [("translation", "mmu"), ("evictors", "0")];
    let madvise = [("translation", "mmu"), ("backend", "madvise")];
    members.insert(1, Member::with_option(&VELLUM, "translation", "mmu"));
    members.insert(2, Member::with_options(&VELLUM, "vellum madvise", &madvise));
    members.insert(3, Member::with_options(&VELLUM, "vellum mmu, no evictor", &no_evictor));
    members.insert(4, Member::with_option(&VELLUM, "policy", "s3-fifo"));
    members
}

fn measure(context: &Context<'_>, team: &Team, entries: u64, names: &Names) -> Result<Vec<Series>> {
    let seconds = context.pick(0.15, 1.0);
    let device = DeviceRate::open(&team.store(VELLUM.name)?)?;
    let device = &device;
    let time = Duration::from_secs_f64(seconds);
    let mut contest = Contest::of(team);
    for threads in [1, 2] {
        let plan = Plan { threads, seconds, seed: 1 };
        for name in team.names() {
            let single = Workload::Lookup(Lookup { entries, batch: 1 });
            contest.add(names.of(name, threads), name, single, plan.clone());
        }
        let multi_gets = Workload::Lookup(Lookup { entries, batch: MULTI_GET_KEYS });
        contest.add(names.multi_gets(threads), VELLUM.name, multi_gets, plan);
        for (what, method) in [("pread", ReadMethod::Wait), ("queue", ReadMethod::Queue(DEPTH))] {
            let mut seeds = 1..;
            contest.add_other(names.of(&format!("device {what}"), threads), move || {
                device.random(threads, method, time, seeds.next().unwrap_or_default())
            });
        }
    }
    contest.hold(context.rounds(), &context.progress)
}

/// The pages that lookups read from the device, to those that the device reads by itself.
fn to_device(lookups: &Series, device: &Series) -> Row {
    let reads = scaled(&lookups.read, 1.0 / PAGE as f64, " from the device");
    times(&reads, &device.rate)
}

/// The names of contestants.
struct Names {
    factor: u64,
}

impl Names {
    fn of(&self, who: &str, threads: usize) -> String {
        let s = if threads == 1 { "" } else { "s" };
        format!("{}x {who}, {threads} thread{s}", self.factor)
    }

    fn multi_gets(&self, threads: usize) -> String {
        self.of(&format!("{} multi_get({MULTI_GET_KEYS})", VELLUM.name), threads)
    }

    fn ratios(&self, team: &Team, all: &[Series]) -> Vec<Row> {
        let find = |who: &str, threads| named(all, &self.of(who, threads));
        let mut rows = Vec::new();
        let Some(vellum) = find(VELLUM.name, 2) else { return rows };
        let others = team.names().into_iter().filter(|name| *name != VELLUM.name);
        rows.extend(others.filter_map(|name| {
            let row = vellum.times(find(name, 2)?);
            let target = PEERS.iter().find(|(peer, _)| *peer == name);
            Some(target.map_or(row.clone(), |(_, target)| row.with_target(*target)))
        }));
        for name in team.names() {
            if let (Some(two), Some(one)) = (find(name, 2), find(name, 1)) {
                let row = two.times(one);
                let is_ours = name == VELLUM.name;
                rows.push(if is_ours { row.with_target(SCALING) } else { row });
            }
        }
        let multi_gets = named(all, &self.multi_gets(2));
        rows.extend(multi_gets.map(|multi_gets| multi_gets.times(vellum)));
        let lookups = [(Some(vellum), SINGLE), (multi_gets, MULTI_GETS)];
        for (lookups, target) in lookups {
            let devices = ["device pread", "device queue"].map(|device| find(device, 2));
            for device in devices.into_iter().flatten() {
                rows.extend(lookups.map(|lookups| to_device(lookups, device).with_target(target)));
            }
        }
        rows
    }
}
