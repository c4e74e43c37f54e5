//! The machine's disk: the share of its rate that the program gets, for random and sequential
//! reads.

use std::time::Duration;

use anyhow::Result;

use super::{Context, Experiment};
use vellum_bench::engine::VELLUM;
use vellum_bench::machine::device_rate::{DeviceRate, PAGE, ReadMethod};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{Contest, Member, Setup, Team, Terms, limit_for_data, scaled, times};
use vellum_bench::workload::lookup::ENTRY;
use vellum_bench::workload::{Lookup, Plan, Scan, Workload};

/// The experiment.
pub const DISK: Experiment = Experiment {
    name: "disk",
    shows: "random reads and scans against the rate of the disk itself",
    source: "SIGMOD'23, section 5.3: I/O bound",
    run,
};

/// Keys of one multi_get, and reads that each thread keeps under way.
const DEPTHS: [u32; 4] = [32, 128, 512, 1024];

/// Threads of the random reads.
const THREADS: usize = 2;

/// Entries of one scan: 122 MiB, some tenths of a second.
const SCAN: u64 = 1_000_000;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let pool: u64 = context.pick(16 << 20, 64 << 20);
    let data: u64 = context.pick(384 << 20, 4 << 30);
    let setup = Setup::disk(&context.directory)?;
    let entries = data / ENTRY;
    let terms = Terms {
        setup: &setup,
        limit: Some(limit_for_data(pool, data)),
        workload: &Workload::Lookup(Lookup { entries, batch: 1 }),
        warm_up: Plan { threads: THREADS, seconds: 0.5, seed: 77 },
        cold: true,
    };
    let member = Member { cache_bytes: Some(pool), ..Member::plain(&VELLUM) };
    let team = Team::start(&[member], &terms, &context.progress)?;
    let device = DeviceRate::open(&team.store(VELLUM.name)?)?;
    let mut outcome = Outcome::default();
    random(context, &team, &device, entries, &mut outcome.rows)?;
    scans(context, &team, &device, entries, &mut outcome.rows)?;
    outcome.notes.push(format!(
        "{entries} entries of 8 + 120 bytes, {} MiB, {} times the pool; opened again with nothing \
         cached before. Reads of the device are direct and of Vellum's own file, {PAGE} bytes at \
         random places and 1 MiB in order, 8 of them at a time.",
        data >> 20,
        data / pool
    ));
    outcome.notes.push(
        "'read' counts the kernel's reads from the device for the process: without lookups that \
         found their page in the pool, with read-ahead."
            .to_owned(),
    );
    outcome.notes.push(
        "In addition to the pool the memory limit leaves room for memory that grows with the file: \
         a state word and a page table entry, 16 bytes in all, for each page of 4 KiB."
            .to_owned(),
    );
    outcome.notes.extend(team.notes());
    outcome.notes.push(setup.about());
    Ok(outcome)
}

fn random(
    context: &Context<'_>,
    team: &Team,
    device: &DeviceRate,
    entries: u64,
    rows: &mut Vec<Row>,
) -> Result<()> {
    let seconds = context.pick(0.3, 2.0);
    let time = Duration::from_secs_f64(seconds);
    let mut contest = Contest::of(team);
    for depth in DEPTHS {
        let workload = Workload::Lookup(Lookup { entries, batch: depth as usize });
        let plan = Plan { threads: THREADS, seconds, seed: 1 };
        contest.add(format!("vellum multi_get({depth})"), VELLUM.name, workload, plan);
        let mut seeds = 1..;
        contest.add_other(format!("device, queue of {depth}"), move || {
            device.random(THREADS, ReadMethod::Queue(depth), time, seeds.next().unwrap_or_default())
        });
    }
    let series = contest.hold(context.rounds(), &context.progress)?;
    for pair in series.chunks_exact(2) {
        let [vellum, device] = pair else { continue };
        rows.push(device.row("reads/s"));
        rows.push(vellum.row("lookups/s"));
        let read = scaled(&vellum.read, 1.0 / PAGE as f64, " pages");
        rows.push(Row::of(&read, "reads/s").against(&read, &device.rate));
    }
    // The device's best rate counts, at any depth.
    let best = |at: usize| {
        let each = series.iter().skip(at).step_by(2);
        each.max_by(|a, b| a.rate.median().total_cmp(&b.rate.median()))
    };
    if let (Some(vellum), Some(device)) = (best(0), best(1)) {
        let read = scaled(&vellum.read, 1.0 / PAGE as f64, " pages (best)");
        rows.push(times(&read, &device.rate));
    }
    Ok(())
}

fn scans(
    context: &Context<'_>,
    team: &Team,
    device: &DeviceRate,
    entries: u64,
    rows: &mut Vec<Row>,
) -> Result<()> {
    let seconds = context.pick(0.5, 3.0);
    let mut contest = Contest::of(team);
    let mib = |samples| scaled(samples, ENTRY as f64 / f64::from(1 << 20), "");
    for backward in [false, true] {
        let name = if backward { "vellum scan backward" } else { "vellum scan" };
        let scan = Workload::Scan(Scan { entries, length: SCAN.min(entries), backward });
        contest.add(name, VELLUM.name, scan, Plan { threads: 1, seconds, seed: 1 });
    }
    let time = Duration::from_secs_f64(seconds);
    contest.add_other("device, in order", move || device.sequential(time));
    let series = contest.hold(context.rounds(), &context.progress)?;
    let [forward, backward, device] = &series[..] else { return Ok(()) };
    rows.push(device.row("MiB/s"));
    for scan in [forward, backward] {
        let entries = mib(&scan.rate);
        rows.push(Row::of(&entries, "MiB/s").against(&entries, &device.rate));
        let read = scaled(&scan.read, 1.0 / f64::from(1 << 20), "");
        rows.push(Row::of(&read, "MiB/s").against(&read, &device.rate));
    }
    Ok(())
}
