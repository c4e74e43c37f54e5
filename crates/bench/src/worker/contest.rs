//! Alternating runs of the members of a team.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::Result;

use super::Team;
use crate::measure::{Contestant, Samples, alternate};
use crate::progress::Progress;
use crate::report::Row;
use crate::workload::{Plan, Workload};

/// The results of one contestant, round by round.
#[derive(Clone, Debug)]
pub struct Series {
    /// Operations a second.
    pub rate: Samples,
    /// The 99th percentile of the latency in microseconds; empty for contestants that are no
    /// workers.
    pub p99: Samples,
    /// The 99.9th percentile, as `p99`.
    pub p999: Samples,
    /// Bytes a second that the worker read from devices; empty for contestants that are no workers.
    pub read: Samples,
}

impl Series {
    /// The rate as a row.
    pub fn row(&self, unit: &str) -> Row {
        Row::of(&self.rate, unit)
    }

    /// This rate divided by the other's, as a row.
    pub fn times(&self, other: &Series) -> Row {
        times(&self.rate, &other.rate)
    }
}

/// These samples divided by the other's, round by round, as a row.
pub fn times(samples: &Samples, reference: &Samples) -> Row {
    Row::of(&samples.ratio_to(reference), "x").against(samples, reference)
}

/// The same samples in another unit, with a suffix to the name.
pub fn scaled(samples: &Samples, factor: f64, what: &str) -> Samples {
    let values = samples.values.iter().map(|value| value * factor).collect();
    Samples { name: format!("{}{what}", samples.name), values }
}

/// A list of contestants, measured in rounds.
#[derive(Debug)]
pub struct Contest<'a> {
    team: &'a Team,
    contestants: Vec<Contestant<'a>>,
    /// Latencies and reads of each contestant in all rounds, with the one that does not count.
    noted: Vec<Rc<RefCell<Noted>>>,
}

#[derive(Debug, Default)]
struct Noted {
    p99: Vec<f64>,
    p999: Vec<f64>,
    read: Vec<f64>,
}

impl<'a> Contest<'a> {
    /// A contest without contestants.
    pub fn of(team: &'a Team) -> Contest<'a> {
        Contest { team, contestants: Vec::new(), noted: Vec::new() }
    }

    /// Adds runs of a workload by a member. Each round has its own seed, the same for all. A peer
    /// that fails in one of them gets no series.
    pub fn add(&mut self, label: impl Into<String>, member: &str, workload: Workload, plan: Plan) {
        let (team, member) = (self.team, member.to_owned());
        let noted = Rc::new(RefCell::new(Noted::default()));
        self.noted.push(Rc::clone(&noted));
        let mut seeds = plan.seed..;
        let measure = move || {
            let plan = Plan { seed: seeds.next().unwrap_or_default(), ..plan };
            let run = team.with(&member, |worker| {
                let before = worker.seen().read;
                let measured = worker.run(&workload, &plan)?;
                Ok((measured, worker.seen().read.saturating_sub(before)))
            });
            let Some((measured, read)) = run? else { return Ok(f64::NAN) };
            let mut noted = noted.borrow_mut();
            noted.p99.push(measured.latency.p99 as f64 / 1000.0);
            noted.p999.push(measured.latency.p999 as f64 / 1000.0);
            noted.read.push(read as f64 / measured.seconds);
            Ok(measured.rate())
        };
        self.contestants.push(Contestant::new(label, measure));
    }

    /// Adds another measurement in the same rounds.
    pub fn add_other(
        &mut self,
        label: impl Into<String>,
        measure: impl FnMut() -> Result<f64> + 'a,
    ) {
        self.contestants.push(Contestant::new(label, measure));
        self.noted.push(Rc::default());
    }

    /// Measures all of them. Returns a series for each, in the order of adding, without those that
    /// have failed.
    ///
    /// # Errors
    /// The first that a contestant returns.
    pub fn hold(self, rounds: usize, progress: &Progress) -> Result<Vec<Series>> {
        let rates = alternate(rounds, progress, self.contestants)?;
        let series = rates.into_iter().zip(self.noted).map(|(rate, noted)| {
            let counted = |values: &[f64], what: &str| Samples {
                name: format!("{}, {what}", rate.name),
                values: values.iter().skip(1).copied().collect(),
            };
            let noted = noted.borrow();
            let (p99, p999) = (counted(&noted.p99, "p99"), counted(&noted.p999, "p99.9"));
            let read = counted(&noted.read, "read");
            Series { p99, p999, read, rate }
        });
        Ok(series.filter(|series| !series.rate.values.iter().any(|rate| rate.is_nan())).collect())
    }
}

/// The series of that name.
pub fn named<'a>(all: &'a [Series], name: &str) -> Option<&'a Series> {
    all.iter().find(|series| series.rate.name == name)
}
