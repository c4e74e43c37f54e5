//! Groups of threads that are measured in turn, with their rates and other counts.

use std::cell::RefCell;

use anyhow::Result;

use super::memory::PageMemory;
use super::pattern::Claims;
use super::shootdowns::shootdowns;
use super::threads::{self, Tally};
use crate::Context;
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Line, Outcome, Row};

/// A contestant.
pub struct Entrant<'a> {
    name: String,
    work: Box<dyn Fn() -> Result<Tally> + 'a>,
}

impl<'a> Entrant<'a> {
    /// Threads on a memory of `pages` pages.
    pub fn new<C: Claims>(
        name: impl Into<String>,
        memory: &'a dyn PageMemory,
        claims: &'a C,
        pages: u64,
        plan: threads::Plan,
    ) -> Entrant<'a> {
        Entrant::with(name, move || threads::run(memory, claims, pages, &plan))
    }

    /// Anything that counts pages.
    pub fn with(name: impl Into<String>, work: impl Fn() -> Result<Tally> + 'a) -> Entrant<'a> {
        Entrant { name: name.into(), work: Box::new(work) }
    }
}

/// The results of one contestant.
#[derive(Debug)]
pub struct Found {
    /// Pages a second.
    pub samples: Samples,
    /// All rounds together, the one that does not count for the samples, too.
    pub total: Tally,
    /// TLB shootdowns in these rounds.
    pub shootdowns: u64,
}

impl Found {
    /// TLB shootdowns for each page that was allocated and freed.
    pub fn shootdowns_per_page(&self) -> f64 {
        self.shootdowns as f64 / self.total.pages as f64
    }
}

/// Measures all of them in turn.
///
/// # Errors
/// The first of one of them.
pub fn compete(context: &Context<'_>, entrants: &[Entrant<'_>]) -> Result<Vec<Found>> {
    let counts = RefCell::new(vec![(Tally::default(), 0); entrants.len()]);
    let measured = |index: usize| -> Result<f64> {
        let before = shootdowns()?;
        let tally = (entrants[index].work)()?;
        let (total, shot) = &mut counts.borrow_mut()[index];
        total.pages += tally.pages;
        total.refused += tally.refused;
        total.seconds += tally.seconds;
        *shot += shootdowns()? - before;
        Ok(tally.rate())
    };
    let measured = &measured;
    let contestants = entrants.iter().enumerate();
    let contestants =
        contestants.map(|(index, entrant)| Contestant::new(&entrant.name, move || measured(index)));
    let samples = alternate(rounds(context), &context.progress, contestants.collect())?;
    let counts = counts.borrow();
    let found = samples.into_iter().zip(counts.iter());
    Ok(found
        .map(|(samples, (total, shootdowns))| Found {
            samples,
            total: *total,
            shootdowns: *shootdowns,
        })
        .collect())
}

/// Rounds that count.
pub fn rounds(context: &Context<'_>) -> usize {
    context.pick(3, 5)
}

/// A row for each, with the ratio to the first.
pub fn add_rows(outcome: &mut Outcome, found: &[Found]) {
    outcome.rows.extend(
        found
            .iter()
            .map(|one| Row::of(&one.samples, "pages/s").against(&one.samples, &found[0].samples)),
    );
}

/// A row for the rate of one contestant divided by that of another, each with its name; returns the
/// median.
pub fn add_ratio(
    outcome: &mut Outcome,
    (one, found): (&str, &Found),
    (other, reference): (&str, &Found),
    label: &str,
) -> f64 {
    let mut ratio = found.samples.ratio_to(&reference.samples);
    ratio.name = format!("{one} by {other}, {label}");
    outcome.rows.push(Row::of(&ratio, "x the rate"));
    ratio.median()
}

/// Adds a point to the line with this name. Adds the line if there is none.
pub fn add_point(lines: &mut Vec<Line>, name: &str, point: (f64, f64)) {
    match lines.iter_mut().find(|line| line.name == name) {
        Some(line) => line.points.push(point),
        None => lines.push(Line { name: name.to_owned(), points: vec![point] }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_bench::engine::Engines;
    use vellum_bench::progress::Progress;

    #[test]
    fn rates_and_counts_are_those_of_the_rounds() {
        let engines = Engines::new(&[]);
        let context = Context {
            quick: true,
            directory: std::env::temp_dir(),
            engines: &engines,
            device: None,
            model: None,
            progress: Progress::hidden(),
        };
        let entrant = |name, pages| {
            Entrant::with(name, move || Ok(Tally { pages, refused: 1, seconds: 2.0 }))
        };
        let found = compete(&context, &[entrant("a", 10), entrant("b", 40)]).unwrap();
        assert_eq!(found[1].samples.values, [20.0; 3]);
        assert_eq!((found[1].total.pages, found[1].total.refused), (160, 4));
        let mut outcome = Outcome::default();
        add_rows(&mut outcome, &found);
        assert_eq!(outcome.rows[1].ratio, Some(4.0));
        assert_eq!(add_ratio(&mut outcome, ("a", &found[0]), ("b", &found[1]), "x"), 0.25);
        assert_eq!(outcome.rows[2].name, "a by b, x");
    }

    #[test]
    fn points_of_a_name_are_a_line() {
        let mut lines = Vec::new();
        for (name, x) in [("a", 1.0), ("b", 1.0), ("a", 2.0)] {
            add_point(&mut lines, name, (x, 5.0));
        }
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].points, [(1.0, 5.0), (2.0, 5.0)]);
    }
}
