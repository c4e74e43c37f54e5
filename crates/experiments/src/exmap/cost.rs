//! The cost of a page, by the size of the batch. In a lab that counts instructions a nanosecond is
//! an instruction.
//!
//! A figure is the smallest of many calls: timer interrupts only ever add. The cost of reading the
//! clock is subtracted.

use std::time::Instant;

use anyhow::Result;
use vellum_uapi::exmap::{ALLOC, Entry, FREE};

use super::device::Interface;
use super::pattern::{BATCH, Chooser, Claimed, Pattern};
use super::{Size, device, without_module};
use crate::{Context, Experiment};
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const COST: Experiment = Experiment {
    name: "exmap-cost",
    shows: "what ALLOC and FREE cost for a page, by the size of the batch",
    source: "instructions under lab --count-instructions",
    run,
};

/// Entries of a vector.
const SIZES: [usize; 4] = [1, 8, 64, BATCH];

fn run(context: &Context<'_>) -> Result<Outcome> {
    if !device::is_there() {
        return Ok(without_module());
    }
    let size = Size::of(context);
    context.progress.doing("making surfaces");
    let memory = size.memory(0)?;
    let interface = memory.exmap().interface(0)?.private()?;
    let clock = clock_cost();
    let rounds = context.pick(8, 40);
    let mut outcome = Outcome::default();
    for pattern in Pattern::ALL {
        for entries in SIZES {
            let [alloc, free] = of_pages(&interface, pattern, entries, rounds, clock)?;
            let label = format!("batches of {entries}, {}", pattern.name());
            outcome.rows.push(Row::count(format!("ALLOC, {label}"), alloc, "ns/page"));
            outcome.rows.push(Row::count(format!("FREE, {label}"), free, "ns/page"));
        }
    }
    let [alloc, free] = of_range(&interface, rounds, clock)?;
    let label = format!("one entry of {BATCH} pages");
    outcome.rows.push(Row::count(format!("ALLOC, {label}"), alloc, "ns/page"));
    outcome.rows.push(Row::count(format!("FREE, {label}"), free, "ns/page"));
    outcome.notes.push(format!(
        "Smallest of {rounds} rounds, from the call to its return, system call included; reading \
         the clock, {clock} ns, is subtracted. Entries were filled in before."
    ));
    Ok(outcome)
}

/// The lowest cost of reading the clock.
fn clock_cost() -> u64 {
    let once = |_| {
        let start = Instant::now();
        start.elapsed().as_nanos() as u64
    };
    (0..1000).map(once).min().unwrap_or(0)
}

/// The smallest time for a page, of calls with so many entries.
#[derive(Clone, Copy, Debug)]
struct Smallest {
    nanoseconds: u64,
    clock: u64,
}

impl Smallest {
    fn new(clock: u64) -> Smallest {
        Smallest { nanoseconds: u64::MAX, clock }
    }

    fn see(&mut self, nanoseconds: u64) {
        self.nanoseconds = self.nanoseconds.min(nanoseconds);
    }

    fn per_page(self, pages: usize) -> f64 {
        self.nanoseconds.saturating_sub(self.clock) as f64 / pages as f64
    }
}

/// ALLOC and FREE of single pages, so many in a vector.
fn of_pages(
    interface: &Interface<'_>,
    pattern: Pattern,
    entries: usize,
    rounds: usize,
    clock: u64,
) -> Result<[f64; 2]> {
    let pages = interface.exmap().pages();
    let states = Claimed::new(pages);
    let mut chooser = Chooser::new(pattern, 0, 1, pages);
    let mut batch = Vec::with_capacity(BATCH);
    let mut smallest = [Smallest::new(clock); 2];
    for _ in 0..rounds {
        chooser.choose(&states, BATCH, &mut batch);
        for (command, smallest) in [ALLOC, FREE].into_iter().zip(&mut smallest) {
            for part in batch.chunks_exact(entries) {
                for (index, page) in part.iter().enumerate() {
                    interface.set(index, Entry::new(*page, 1));
                }
                smallest.see(timed(interface, command, part.len(), part.len())?);
            }
        }
    }
    Ok(smallest.map(|smallest| smallest.per_page(entries)))
}

/// ALLOC and FREE of a batch as one range.
fn of_range(interface: &Interface<'_>, rounds: usize, clock: u64) -> Result<[f64; 2]> {
    let mut smallest = [Smallest::new(clock); 2];
    for _ in 0..rounds {
        for (command, smallest) in [ALLOC, FREE].into_iter().zip(&mut smallest) {
            interface.set(0, Entry::new(1024, BATCH as u64));
            smallest.see(timed(interface, command, 1, BATCH)?);
        }
    }
    Ok(smallest.map(|smallest| smallest.per_page(BATCH)))
}

/// Has the entries carried out, for so many pages together; nanoseconds.
fn timed(interface: &Interface<'_>, command: u32, entries: usize, pages: usize) -> Result<u64> {
    let start = Instant::now();
    interface.run(command, entries)?;
    let time = start.elapsed().as_nanos() as u64;
    let done: usize = (0..entries).map(|index| usize::from(interface.get(index).pages())).sum();
    anyhow::ensure!(done == pages, "command {command:#x}: {done} of {pages} pages");
    Ok(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_counts_without_the_clock() {
        let mut smallest = Smallest::new(20);
        [700, 532, 900].into_iter().for_each(|time| smallest.see(time));
        assert_eq!(smallest.per_page(512), 1.0);
        smallest.see(10);
        assert_eq!(smallest.per_page(512), 0.0);
    }

    #[test]
    fn the_clock_costs_little() {
        assert!(clock_cost() < 100_000);
    }
}
