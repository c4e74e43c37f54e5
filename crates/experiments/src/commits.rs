//! Small durable transactions: one put, or a thousand, and the wait until they survive a loss of
//! power.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use anyhow::Result;

use super::durable::{self, Commit, rates_and_latencies};
use super::{Context, Experiment, count};
use vellum_bench::engine::{
    Access, Conflict, DURABILITY, Engine, Factory, Session, Setting, TRANSACTIONS, VELLUM,
};
use vellum_bench::report::Outcome;
use vellum_bench::workload::values::{fill, key};

/// The experiment.
pub const COMMITS: Experiment = Experiment {
    name: "commits",
    shows: "small synced transactions and batches, and their latency, against write and fdatasync",
    source: "how many syncs of the device a commit takes, and whether writers share them",
    run,
};

const WRITERS: [u64; 3] = [1, 8, 32];
/// Peers that can make each commit durable by itself.
const PEERS: [&str; 4] = ["lmdb", "redb", "fjall", "rocksdb"];
const VALUE: usize = 120;
const CACHE: u64 = 256 << 20;
/// The puts of a batch, and how many threads make batches.
const PUTS: u64 = 1000;
const BATCH_WRITERS: [u64; 2] = [1, 8];
/// The name of the way with a short log, which has more checkpoints, and the bytes of that log.
const SHORT: &str = "vellum, log of 128 MiB";
const SHORT_LOG: &str = "134217728";

/// A way to make puts durable.
struct Way {
    name: &'static str,
    how: How,
}

enum How {
    /// A write of 4 KiB to the thread's own file, and its fdatasync.
    Plain(Vec<File>),
    /// A put on its own, and what the engine then needs.
    Single(Box<dyn Engine>, Acknowledged),
    /// A transaction.
    Transaction(Box<dyn Engine>),
}

/// When a put on its own is durable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Acknowledged {
    AtOnce,
    /// After the engine has written everything.
    Settled,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let entries: u64 = context.pick(20_000, 500_000);
    let duration = Duration::from_secs_f64(context.pick(0.3, 2.0));
    let ways = ways(context, entries)?;
    let mut outcome = Outcome::default();
    for writers in WRITERS {
        let of = ways.iter().filter(|way| way.is_for(1));
        let contestants = of.map(|way| durable::Way {
            name: format!("{}, {}", way.name, count(writers as usize, "writer")),
            threads: writers,
            commit: Box::new(move |thread| way.commit(thread, entries, 1)),
        });
        let contestants: Vec<_> = contestants.collect();
        outcome.rows.extend(rates_and_latencies(context, &contestants, "commits/s", duration)?);
    }
    for writers in BATCH_WRITERS {
        let of = ways.iter().filter(|way| way.is_for(PUTS));
        let contestants = of.map(|way| durable::Way {
            name: format!("{}, {PUTS} puts, {}", way.name, count(writers as usize, "writer")),
            threads: writers,
            commit: Box::new(move |thread| way.commit(thread, entries, PUTS)),
        });
        let contestants: Vec<_> = contestants.collect();
        outcome.rows.extend(rates_and_latencies(context, &contestants, "batches/s", duration)?);
    }
    outcome.notes.push(format!(
        "Each thread replaces one of {entries} values of {VALUE} bytes at random, or {PUTS} of \
         them, and waits until that is durable; all data is in memory. Ratios are to the first row \
         of each group. 'plain' writes 4 KiB to a file of the thread's own and calls fdatasync. \
         'vellum' and 'vellum, single put' have a log: a serializable transaction, and a put with \
         Store::sync. '{SHORT}': as 'vellum', whose log has 1 GiB. \
         'vellum, no log': a put, and a checkpoint by Store::sync. LMDB: its \
         defaults. redb: Durability::Immediate. fjall: PersistMode::SyncData after each commit. \
         RocksDB: a put or an optimistic transaction with a synced log."
    ));
    Ok(outcome)
}

fn ways(context: &Context<'_>, entries: u64) -> Result<Vec<Way>> {
    let (synced, transactions) = ((DURABILITY, "synced"), (TRANSACTIONS, "serializable"));
    let open = |name, factory: &Factory, options: &[(&str, &str)]| {
        open(context, name, factory, options, entries)
    };
    let vellum = open("vellum", &VELLUM, &[synced, transactions])?;
    let single = open("vellum, single put", &VELLUM, &[synced])?;
    let no_log = open("vellum, no log", &VELLUM, &[])?;
    let short = open(SHORT, &VELLUM, &[synced, transactions, ("log_bytes", SHORT_LOG)])?;
    let mut ways = vec![
        Way { name: "vellum", how: How::Transaction(vellum) },
        Way { name: "plain write + fdatasync", how: How::Plain(plain(context)?) },
        Way { name: "vellum, single put", how: How::Single(single, Acknowledged::AtOnce) },
        Way { name: "vellum, no log", how: How::Single(no_log, Acknowledged::Settled) },
        Way { name: SHORT, how: How::Transaction(short) },
    ];
    for factory in context.engines.all() {
        if !PEERS.contains(&factory.name) {
            continue;
        }
        if factory.name == "rocksdb" {
            let name = "rocksdb, transaction";
            let how = How::Transaction(open(name, factory, &[synced, transactions])?);
            ways.push(Way { name, how });
        }
        let engine = open(factory.name, factory, &[synced])?;
        let how = match factory.name {
            "rocksdb" => How::Single(engine, Acknowledged::AtOnce),
            _ => How::Transaction(engine),
        };
        ways.push(Way { name: factory.name, how });
    }
    Ok(ways)
}

fn plain(context: &Context<'_>) -> Result<Vec<File>> {
    let directory = context.make_directory("plain")?;
    let most = WRITERS.into_iter().max().unwrap_or(1);
    let files = (0..most).map(|number| {
        let path = directory.join(number.to_string());
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(path)?;
        file.write_all_at(&[1; 1 << 16], 0)?;
        file.sync_all()?;
        anyhow::Ok(file)
    });
    files.collect()
}

fn open(
    context: &Context<'_>,
    name: &str,
    factory: &Factory,
    options: &[(&str, &str)],
    entries: u64,
) -> Result<Box<dyn Engine>> {
    let mut setting = Setting::new(&context.make_directory(name)?, CACHE);
    let options = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    setting.options.extend(options);
    let engine = (factory.open)(&setting)?;
    engine.load(0, &mut (0..entries).map(|number| (key(number).to_vec(), value(number))))?;
    engine.settle()?;
    Ok(engine)
}

fn value(number: u64) -> Vec<u8> {
    let mut value = vec![0; VALUE];
    fill(number, &mut value);
    value
}

impl Way {
    /// Whether the way has commits of so many puts.
    fn is_for(&self, puts: u64) -> bool {
        puts == 1 || matches!(self.how, How::Transaction(_))
    }

    /// The operation that the thread of this number repeats.
    fn commit(&self, thread: u64, entries: u64, puts: u64) -> Result<Commit<'_>> {
        let mut number = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = move || {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (number >> 20) % entries
        };
        match &self.how {
            How::Plain(files) => {
                let (file, mut number) = (&files[thread as usize], 0_u64);
                Ok(Box::new(move || {
                    number += 1;
                    file.write_all_at(&[number as u8; 4096], number % 16 * 4096)?;
                    Ok(file.sync_data()?)
                }))
            }
            How::Single(engine, acknowledged) => {
                let mut session = engine.session()?;
                Ok(Box::new(move || {
                    let place = next();
                    session.put(0, &key(place), &value(place))?;
                    match acknowledged {
                        Acknowledged::AtOnce => Ok(()),
                        Acknowledged::Settled => engine.settle(),
                    }
                }))
            }
            How::Transaction(engine) => {
                let mut session = engine.session()?;
                Ok(Box::new(move || {
                    let places: Vec<u64> = (0..puts).map(|_| next()).collect();
                    until_it_wins(&mut *session, &places)
                }))
            }
        }
    }
}

/// Puts values in one transaction.
fn until_it_wins(session: &mut dyn Session, places: &[u64]) -> Result<()> {
    loop {
        session.begin(Access::Write)?;
        for &place in places {
            session.put(0, &key(place), &value(place))?;
        }
        match session.commit() {
            Err(error) if error.is::<Conflict>() => {}
            other => return other,
        }
    }
}
