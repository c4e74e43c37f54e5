//! Small durable commits: one put and the wait until it survives a loss of power.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use anyhow::Result;

use super::durable::{self, Commit, rates_and_latencies};
use super::{Context, Experiment, count};
use vellum_bench::engine::{Engine, Factory, Setting, VELLUM};
use vellum_bench::report::Outcome;
use vellum_bench::workload::values::{fill, key};

/// The experiment.
pub const COMMITS: Experiment = Experiment {
    name: "commits",
    shows: "small durable commits, and their latency, against a plain write and fdatasync",
    source: "how many syncs of the device a commit takes, and whether writers share them",
    run,
};

const WRITERS: [u64; 3] = [1, 8, 32];
/// Peers that can make each commit durable by itself.
const PEERS: [&str; 2] = ["lmdb", "redb"];
const VALUE: usize = 120;
const CACHE: u64 = 256 << 20;
/// The measured operation.
enum Way {
    /// A write of 4 KiB to the thread's own file, and its fdatasync.
    Plain(Vec<File>),
    Engine(&'static str, Box<dyn Engine>),
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let entries: u64 = context.pick(20_000, 500_000);
    let duration = Duration::from_secs_f64(context.pick(0.3, 2.0));
    let mut ways = vec![plain(context)?, open(context, &VELLUM, entries)?];
    for factory in context.engines.all() {
        if PEERS.contains(&factory.name) {
            ways.push(open(context, factory, entries)?);
        }
    }
    let mut outcome = Outcome::default();
    for writers in WRITERS {
        let contestants = ways.iter().map(|way| durable::Way {
            name: format!("{}, {}", way.name(), count(writers as usize, "writer")),
            threads: writers,
            commit: Box::new(move |thread| way.commit(thread, entries)),
        });
        let contestants: Vec<_> = contestants.collect();
        outcome.rows.extend(rates_and_latencies(context, &contestants, "commits/s", duration)?);
    }
    outcome.notes.push(format!(
        "Each thread replaces one of {entries} values of {VALUE} bytes at random and waits until \
         that is durable; all data is in memory. 'plain' writes 4 KiB to a file of the thread's \
         own and calls fdatasync. Vellum: put and Store::sync. Peers: a transaction of one put, \
         committed with LMDB's own defaults and redb's Durability::Immediate. A file of Vellum's \
         opens again after a crash if nothing was written since the last commit; the peers' always \
         does."
    ));
    Ok(outcome)
}

fn plain(context: &Context<'_>) -> Result<Way> {
    let directory = context.make_directory("plain")?;
    let most = WRITERS.into_iter().max().unwrap_or(1);
    let files = (0..most).map(|number| {
        let path = directory.join(number.to_string());
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(path)?;
        file.write_all_at(&[1; 1 << 16], 0)?;
        file.sync_all()?;
        anyhow::Ok(file)
    });
    Ok(Way::Plain(files.collect::<Result<_>>()?))
}

fn open(context: &Context<'_>, factory: &Factory, entries: u64) -> Result<Way> {
    let mut setting = Setting::new(&context.make_directory(factory.name)?, CACHE);
    if factory.name != VELLUM.name {
        setting.options.insert("durable".into(), "yes".into());
    }
    let engine = (factory.open)(&setting)?;
    engine.load(0, &mut (0..entries).map(|number| (key(number).to_vec(), value(number))))?;
    engine.settle()?;
    Ok(Way::Engine(factory.name, engine))
}

fn value(number: u64) -> Vec<u8> {
    let mut value = vec![0; VALUE];
    fill(number, &mut value);
    value
}

impl Way {
    fn name(&self) -> &str {
        match self {
            Way::Plain(_) => "plain write + fdatasync",
            Way::Engine(name, _) => name,
        }
    }

    /// The operation that the thread of this number repeats.
    fn commit(&self, thread: u64, entries: u64) -> Result<Commit<'_>> {
        let mut number = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        match self {
            Way::Plain(files) => {
                let file = &files[thread as usize];
                Ok(Box::new(move || {
                    number += 1;
                    file.write_all_at(&[number as u8; 4096], number % 16 * 4096)?;
                    Ok(file.sync_data()?)
                }))
            }
            Way::Engine(name, engine) => {
                let mut session = engine.session()?;
                let settles = *name == VELLUM.name;
                Ok(Box::new(move || {
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let place = (number >> 20) % entries;
                    session.put(0, &key(place), &value(place))?;
                    if settles { engine.settle() } else { Ok(()) }
                }))
            }
        }
    }
}
