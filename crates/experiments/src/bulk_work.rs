//! Bulk work: the operations of redb's own benchmark that concern more than one entry, and inserts
//! into the middle.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::{Context, Experiment};
use vellum_bench::engine::{BulkWork, Factory, Pair, Setting, VELLUM};
use vellum_bench::measure::Samples;
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const BULK_WORK: Experiment = Experiment {
    name: "bulk-work",
    shows: "inserts in the middle, appends, retain, extract_if, pop_first, ranges, len: entries/s",
    source: "redb's benchmark, its operations on many entries",
    run,
};

/// Tenants, each of which has as many entries as the others.
const TENANTS: u64 = 100;

/// Tenants that get further entries after their own, in turn.
const BUSY: std::ops::Range<u64> = 40..60;

/// One key in so many is chosen for removal.
const ONE_IN: u8 = 4;

/// An engine's samples of each work, in the order of [`works`].
struct Figures {
    engine: Factory,
    samples: Vec<Samples>,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let entries: u64 = context.pick(200_000, 1_000_000);
    let input = Input::new(entries);
    let mut all: Vec<Figures> = context
        .engines
        .all()
        .iter()
        .map(|engine| Figures { engine: *engine, samples: Vec::new() })
        .collect();
    let rounds = context.rounds();
    for round in 0..=rounds {
        let steps = (rounds + 1) * all.len();
        let step = round * all.len();
        let mut order: Vec<&mut Figures> = all.iter_mut().collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for (at, figures) in order.into_iter().enumerate() {
            context.progress.at(step + at, steps, figures.engine.name);
            let directory = context.make_directory(&format!("{}-{round}", figures.engine.name))?;
            let rates = input.measure(&figures.engine, &Setting::new(&directory, 2 << 30))?;
            std::fs::remove_dir_all(&directory)?;
            // The first round does not count.
            for (index, (name, rate)) in rates.into_iter().enumerate().filter(|_| round > 0) {
                if round == 1 {
                    let name = format!("{name}, {}", figures.engine.name);
                    figures.samples.push(Samples::new(name));
                }
                figures.samples[index].values.push(rate);
            }
        }
    }
    let mut outcome = Outcome::default();
    let Some(vellum) = all.iter().position(|figures| figures.engine.name == VELLUM.name) else {
        return Ok(outcome);
    };
    for (index, own) in all[vellum].samples.iter().enumerate() {
        outcome.rows.push(Row::of(own, "entries/s"));
        let others = all.iter().filter(|figures| figures.engine.name != VELLUM.name);
        for of in others.filter_map(|figures| figures.samples.get(index)) {
            let ratio = own.ratio_to(of);
            let row = Row::of(of, "entries/s");
            let (median, low, high) = (ratio.median(), ratio.lowest(), ratio.highest());
            let against = format!("vellum is to it, {low:.2} to {high:.2}");
            outcome.rows.push(row.with_ratio(median, against));
        }
    }
    let left_out: Vec<&str> = all
        .iter()
        .filter(|figures| figures.samples.is_empty())
        .map(|figures| figures.engine.name)
        .collect();
    if !left_out.is_empty() {
        outcome.notes.push(format!("Left out: {}.", left_out.join(", ")));
    }
    outcome.notes.push(format!(
        "One thread; {entries} entries of 12 + 100 bytes, keys (tenant, time), {TENANTS} tenants, \
         all in memory, no sync within the time. Peers do each work in one \
         transaction; Vellum, which has none, one operation after the other."
    ));
    Ok(outcome)
}

/// The data and options that all engines get.
struct Input {
    loaded: Vec<Pair>,
    /// After the entries of some tenants in the middle.
    inserted: Vec<Pair>,
    /// After all entries.
    appended: Vec<Pair>,
}

impl Input {
    fn new(entries: u64) -> Input {
        let each = entries / TENANTS;
        let of_tenants = |tenants: std::ops::Range<u64>| {
            tenants.flat_map(move |tenant| (0..each).map(move |time| pair(tenant, time)))
        };
        let times = each..each * 2;
        let in_turn = times.flat_map(|time| BUSY.map(move |tenant| pair(tenant, time)));
        Input {
            loaded: of_tenants(0..TENANTS).collect(),
            inserted: in_turn.collect(),
            appended: of_tenants(TENANTS..TENANTS * 6 / 5).collect(),
        }
    }

    /// All kinds of work, one after the other, each on the data that the one before has left.
    fn works<'a>(&'a self, middle: &'a [Vec<u8>; 2]) -> [(&'static str, BulkWork<'a>); 8] {
        let [from, to] = middle;
        [
            ("len", BulkWork::Count),
            ("iterate over all", BulkWork::Read(b"\0", b"\xff")),
            ("ascending inserts in the middle", BulkWork::Insert(&self.inserted)),
            ("sorted appends", BulkWork::Append(&self.appended)),
            ("pop_first", BulkWork::PopFirst(self.loaded.len() as u64 / 10)),
            ("extract_if, 1 of 4 goes", BulkWork::Extract(is_chosen)),
            ("retain, 1 of 3 goes", BulkWork::Retain(is_chosen_next)),
            ("remove_range", BulkWork::RemoveRange(from, to)),
        ]
    }

    /// Entries a second of each work, by an engine that is new.
    fn measure(&self, engine: &Factory, setting: &Setting) -> Result<Vec<(&'static str, f64)>> {
        let open = (engine.open)(setting)?;
        open.load(0, &mut self.loaded.iter().cloned())?;
        open.settle()?;
        let middle = [30, 90].map(|tenant| key(tenant, 0));
        let mut rates = Vec::new();
        let mut there = self.loaded.len() as u64;
        for (name, work) in self.works(&middle) {
            let start = Instant::now();
            let Some(count) = open.bulk(0, &work)? else { return Ok(Vec::new()) };
            let seconds = start.elapsed().as_secs_f64();
            let expected = match work {
                BulkWork::Count | BulkWork::Read(..) => there,
                BulkWork::Insert(pairs) | BulkWork::Append(pairs) => {
                    there += pairs.len() as u64;
                    pairs.len() as u64
                }
                _ => {
                    there -= count;
                    count
                }
            };
            ensure!(count == expected && count > 0, "{name}: {count} of {expected} entries");
            // The number of examined entries decides how long it takes, not the number of removed
            // ones.
            let of = if let BulkWork::Retain(_) | BulkWork::Extract(_) = work {
                there + count
            } else {
                count
            };
            rates.push((name, of as f64 / seconds));
        }
        ensure!(open.bulk(0, &BulkWork::Count)? == Some(there), "entries were lost");
        Ok(rates)
    }
}

fn key(tenant: u64, time: u64) -> Vec<u8> {
    let tenant = u32::try_from(tenant).unwrap_or(u32::MAX);
    [&tenant.to_be_bytes()[..], &time.to_be_bytes()].concat()
}

fn pair(tenant: u64, time: u64) -> Pair {
    (key(tenant, time), vec![time as u8; 100])
}

fn is_chosen(key: &[u8]) -> bool {
    key.last().is_some_and(|byte| byte % ONE_IN == 0)
}

fn is_chosen_next(key: &[u8]) -> bool {
    key.last().is_some_and(|byte| byte % ONE_IN == 1)
}
