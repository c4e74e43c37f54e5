//! Replacement policies: hit ratios on traces, and their cost for a miss.
//!
//! The hit ratios are simulated ([`trace`](crate::trace)) and the same on every machine: the pool's
//! policies, driven as the pool drives them, FIFO and exact LRU, and Belady's optimum as the bound.
//! The cost is measured.

use anyhow::Result;
use vellum_pool::{Clock, ReplacementPolicy, S3Fifo};

use super::{Context, Experiment};
use crate::trace::cost::per_miss;
use crate::trace::simulate::{self, Counts};
use crate::trace::{Kind, Trace, reference};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};

/// The experiment.
pub const POLICY: Experiment = Experiment {
    name: "policy",
    shows: "hit ratios of replacement policies on Zipf, scan-mixed and looping traces",
    source: "SIGMOD'23, section 3.4: arbitrary replacement strategies",
    run,
};

/// Sizes of the cache in percent of the pages.
const SIZES: [u32; 5] = [1, 5, 10, 20, 50];
/// The size at which looks and marks are shown.
const SHOWN_SIZE: u32 = 10;
const POLICIES: [&str; 5] = ["fifo", "lru", "clock", "s3-fifo", "optimum"];
const CLOCK: usize = 2;
const S3_FIFO: usize = 3;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let (pages, accesses) = context.pick((50_000, 500_000), (200_000, 4_000_000));
    let mut outcome = Outcome::default();
    let mut sums = [0.0; POLICIES.len()];
    for (at, kind) in Kind::ALL.into_iter().enumerate() {
        context.progress.at(at, Kind::ALL.len(), &kind.name());
        let lines = compare(kind, pages, accesses, &mut outcome);
        for (sum, line) in sums.iter_mut().zip(&lines) {
            *sum += line.points.iter().map(|point| point.1).sum::<f64>();
        }
        outcome.charts.push(Chart {
            title: kind.name(),
            x: Axis::logarithmic("cache, % of the pages"),
            y: Axis::linear("% hits"),
            lines,
        });
    }
    let means = sums.map(|sum| sum / (SIZES.len() * Kind::ALL.len()) as f64);
    outcome.rows.extend(hit_rows("mean of all", means));
    outcome.notes.push(format!(
        "{pages} pages of one frame, {accesses} accesses, hits counted after the first quarter; \
         the cache evicts batches of at most 64, as the pool does"
    ));
    outcome.notes.push("loops: as many pages as the cache holds, times a factor".to_owned());
    costs(context, &mut outcome)?;
    Ok(outcome)
}

/// Runs every policy with every size; adds the rows, returns the lines.
fn compare(kind: Kind, pages: u32, accesses: usize, outcome: &mut Outcome) -> Vec<Line> {
    let mut lines = POLICIES.map(|name| Line { name: name.to_owned(), points: Vec::new() });
    let mut trace = kind.make(pages, pages / 100 * SIZES[0], accesses);
    for percent in SIZES {
        let cache = pages / 100 * percent;
        if kind.depends_on_cache() {
            trace = kind.make(pages, cache, accesses);
        }
        let clock = simulated(&trace, cache, &Clock::new(u64::from(cache)));
        let s3_fifo = simulated(&trace, cache, &S3Fifo::new(u64::from(cache)));
        let share = |hits: usize| 100.0 * trace.share(hits);
        let hits = [
            reference::fifo(&trace, cache),
            reference::lru(&trace, cache),
            clock.hits,
            s3_fifo.hits,
            reference::min(&trace, cache),
        ]
        .map(share);
        let what = format!("{}, {percent} %", trace.name);
        outcome.rows.extend(hit_rows(&what, hits));
        if percent == SHOWN_SIZE && kind == Kind::Zipf(0.99) {
            outcome.rows.extend(look_rows(&what, clock, s3_fifo));
        }
        for (line, hits) in lines.iter_mut().zip(hits) {
            line.points.push((f64::from(percent), hits));
        }
    }
    lines.into()
}

fn simulated(trace: &Trace, cache: u32, policy: &dyn ReplacementPolicy) -> Counts {
    simulate::run(trace, cache, policy)
}

/// A row per policy, with the ratio to the clock.
fn hit_rows(what: &str, hits: [f64; POLICIES.len()]) -> impl Iterator<Item = Row> {
    let against = format!("{what}, {}", POLICIES[CLOCK]);
    let clock = hits[CLOCK];
    let rows = POLICIES.iter().zip(hits).enumerate().map(move |(at, (policy, hits))| {
        let row = Row::count(format!("{what}, {policy}"), hits, "% hits");
        // If the clock hits nothing, there is no ratio.
        if at == CLOCK || clock == 0.0 { row } else { row.with_ratio(hits / clock, &against) }
    });
    rows.collect::<Vec<_>>().into_iter()
}

/// Accesses of the policies to page states: loads for each eviction, each a cache miss in a large
/// pool, and marks that hits have to clear.
fn look_rows(what: &str, clock: Counts, s3_fifo: Counts) -> Vec<Row> {
    let each = |counts: Counts, number: usize| number as f64 / counts.evicted.max(1) as f64;
    let rows = |name: &str, number: fn(Counts) -> usize| {
        let (of_clock, of_s3) = (each(clock, number(clock)), each(s3_fifo, number(s3_fifo)));
        let against = format!("{what}, {name}, {}", POLICIES[CLOCK]);
        let row = Row::count(format!("{what}, {name}, {}", POLICIES[S3_FIFO]), of_s3, "");
        [Row::count(against.clone(), of_clock, ""), row.with_ratio(of_s3 / of_clock, against)]
    };
    let looks = rows("looks per eviction", |counts| counts.looks);
    let marks = rows("marks cleared by hits per eviction", |counts| counts.unmarked);
    looks.into_iter().chain(marks).collect()
}

/// Measures the policy's cost for a miss, with one thread and with two.
fn costs(context: &Context<'_>, outcome: &mut Outcome) -> Result<()> {
    let frames: u64 = context.pick(1 << 16, 1 << 18);
    let misses = context.pick(200_000, 1_000_000);
    let mib = frames * 4 / 1024;
    for threads in [1, 2] {
        let measured = |policy: fn(u64) -> Box<dyn ReplacementPolicy>| {
            move || {
                let policy = policy(frames);
                let time = per_miss(&*policy, frames, 8 * frames, 64, threads, misses);
                Ok(time.as_secs_f64() * 1e9)
            }
        };
        let name = |policy: usize| {
            format!("a miss in the policy, {mib} MiB pool, {threads} threads, {}", POLICIES[policy])
        };
        let contestants = vec![
            Contestant::new(name(CLOCK), measured(|frames| Box::new(Clock::new(frames)))),
            Contestant::new(name(S3_FIFO), measured(|frames| Box::new(S3Fifo::new(frames)))),
        ];
        let samples = alternate(context.rounds(), &context.progress, contestants)?;
        outcome.rows.push(Row::of(&samples[0], "ns"));
        outcome.rows.push(Row::of(&samples[1], "ns").against(&samples[1], &samples[0]));
    }
    outcome.notes.push(
        "a miss in the policy: admit, forget, contains and a share of candidates, with the page \
         states they touch, for uniform accesses to 8 times the pool, batches of 64; reading the \
         page and changing the page table not included"
            .to_owned(),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_has_a_row_and_the_clock_is_the_reference() {
        let rows: Vec<Row> = hit_rows("zipf, 10 %", [10.0, 20.0, 40.0, 50.0, 60.0]).collect();
        assert_eq!(rows.len(), POLICIES.len());
        assert_eq!(rows[S3_FIFO].name, "zipf, 10 %, s3-fifo");
        assert_eq!(rows[S3_FIFO].ratio, Some(1.25));
        assert_eq!((rows[CLOCK].ratio, &rows[CLOCK].against), (None, &None));
        assert!(hit_rows("loop", [0.0; 5]).all(|row| row.ratio.is_none()));
    }

    #[test]
    fn a_trace_gives_rows_and_lines() {
        let mut outcome = Outcome::default();
        let lines = compare(Kind::Zipf(0.99), 2_000, 20_000, &mut outcome);
        assert_eq!(outcome.rows.len(), SIZES.len() * POLICIES.len() + 4);
        assert!(lines.iter().all(|line| line.points.len() == SIZES.len()));
        let optimum = &lines[4].points;
        for line in &lines {
            let pairs = line.points.iter().zip(optimum);
            assert!(pairs.into_iter().all(|(hits, best)| hits.1 <= best.1), "{}", line.name);
        }
    }

    /// How much better S3-FIFO is than the clock on each trace: at least so much.
    #[test]
    fn s3_fifo_resists_loops_and_scans() {
        let cache = 2_000;
        let hits = |kind: Kind, policy: &dyn ReplacementPolicy| {
            let trace = kind.make(20_000, cache, 200_000);
            trace.share(simulated(&trace, cache, policy).hits)
        };
        for (kind, least) in [
            (Kind::Zipf(0.99), 0.015),
            (Kind::Scanned(0.2), 0.025),
            (Kind::Scanned(0.5), 0.04),
            (Kind::Loop(1.1), -0.06),
            (Kind::Loop(2.0), 0.1),
            (Kind::Uniform, -0.01),
            (Kind::TreeUniform, -0.01),
            (Kind::Shifting, -0.015),
        ] {
            let (clock, s3_fifo) = (Clock::new(u64::from(cache)), S3Fifo::new(u64::from(cache)));
            let (clock, s3_fifo) = (hits(kind, &clock), hits(kind, &s3_fifo));
            assert!(s3_fifo >= clock + least, "{kind:?}: {s3_fifo} against {clock}");
        }
    }
}
