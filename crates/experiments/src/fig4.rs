//! Figure 4: pages that the kernel allocates and releases a second, by number of threads and by
//! way.
//!
//! Every thread has its own stretch of one surface. It populates all of its pages by touching them,
//! as the paper does, and releases them one by one, or in batches with one call. If the kernel
//! module is loaded, there is a line for exmap, as in the paper, which also populates in batches.
#![allow(unsafe_code)]

use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use vellum_vm::{BackendChoice, BackendKind, Entry, PageRange, Surface, probe};

use super::{Context, Experiment, count};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};

/// The experiment.
pub const FIG4: Experiment = Experiment {
    name: "fig4",
    shows: "pages allocated and released a second, page by page and in batches",
    source: "SIGMOD'23, figure 4",
    run,
};

/// Pages of a thread's stretch: 32 MiB.
const STRETCH: u64 = 8192;

/// A way to allocate and release.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    backend: BackendKind,
    /// Pages that one call releases.
    pages_per_call: u64,
}

/// The paper's line comes first: the others are compared with it. Exmap's pool is as large as its
/// surface, so that it never runs out of frames.
const WAYS: [Way; 5] = [
    Way { name: "madvise", backend: BackendKind::Madvise, pages_per_call: 1 },
    Way {
        name: "process_madvise, batches of 16",
        backend: BackendKind::ProcessMadvise,
        pages_per_call: 16,
    },
    Way {
        name: "process_madvise, batches of 64",
        backend: BackendKind::ProcessMadvise,
        pages_per_call: 64,
    },
    Way {
        name: "process_madvise, batches of 512",
        backend: BackendKind::ProcessMadvise,
        pages_per_call: 512,
    },
    Way { name: "exmap, batches of 512", backend: BackendKind::Exmap, pages_per_call: 512 },
];

/// The ways that this kernel has.
fn ways() -> Vec<Way> {
    WAYS.into_iter().filter(|way| probe::works(way.backend).is_ok()).collect()
}

impl Way {
    fn surface(self, pages: u64) -> Result<Surface> {
        let backend = BackendChoice::Only(self.backend);
        Ok(Surface::reserve_with_frames(pages, pages, backend)?)
    }
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let ways = ways();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let rounds = context.pick(1, 4);
    let mut outcome = Outcome::default();
    let mut lines: Vec<Line> =
        ways.iter().map(|way| Line { name: way.name.to_owned(), points: Vec::new() }).collect();
    for threads in thread_counts(cores) {
        let surfaces = ways
            .iter()
            .map(|way| way.surface(STRETCH * threads as u64))
            .collect::<Result<Vec<Surface>>>()?;
        let contestants = ways.iter().zip(&surfaces).map(|(way, surface)| {
            let name = format!("{}, {}", way.name, count(threads, "thread"));
            Contestant::new(name, move || turn_over(surface, *way, threads, rounds))
        });
        let samples = alternate(context.rounds(), &context.progress, contestants.collect())?;
        for (line, of_way) in lines.iter_mut().zip(&samples) {
            line.points.push((threads as f64, of_way.median()));
            outcome.rows.push(Row::of(of_way, "pages/s").against(of_way, &samples[0]));
        }
    }
    outcome.charts.push(Chart {
        title: "Pages allocated and released a second".to_owned(),
        x: Axis::linear("threads"),
        y: Axis::linear("pages/s"),
        lines,
    });
    outcome.notes.push(
        "A page is allocated by touching it: the kernel finds and zeroes it. Batches only cover \
         the release."
            .to_owned(),
    );
    if ways.iter().any(|way| way.backend == BackendKind::Exmap) {
        outcome.notes.push(
            "With exmap batches cover both, and a page is touched when its batch has come; its \
             frame is not zeroed."
                .to_owned(),
        );
    }
    if let Err(reason) = probe::works(BackendKind::ProcessMadvise) {
        outcome.notes.push(format!("process_madvise does not work here: {reason}."));
    }
    Ok(outcome)
}

/// 1, 2, 4, ... and all cores.
pub(super) fn thread_counts(cores: usize) -> Vec<usize> {
    let doubled = std::iter::successors(Some(1), |threads| Some(threads * 2));
    doubled.take_while(|threads| *threads < cores).chain([cores]).collect()
}

/// Every thread touches and releases its stretch `rounds` times; pages a second of all.
fn turn_over(surface: &Surface, way: Way, threads: usize, rounds: usize) -> Result<f64> {
    let begin = Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads as u64)
            .map(|thread| {
                let begin = &begin;
                scope.spawn(move || {
                    begin.wait();
                    (0..rounds).try_for_each(|_| turn_over_stretch(surface, way, thread * STRETCH))
                })
            })
            .collect();
        begin.wait();
        let start = Instant::now();
        for thread in started {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        let pages = STRETCH as usize * threads * rounds;
        Ok(pages as f64 / start.elapsed().as_secs_f64())
    })
}

fn turn_over_stretch(surface: &Surface, way: Way, first: u64) -> Result<()> {
    let firsts = || (first..first + STRETCH).step_by(way.pages_per_call as usize);
    let touching_brings = surface.fault_behaviour().writing_populates();
    let mut entries = Vec::with_capacity(way.pages_per_call as usize);
    let fill = |entries: &mut Vec<Entry>, first: u64| {
        entries.clear();
        let pages = first..first + way.pages_per_call;
        entries.extend(pages.map(|start| Entry::new(PageRange { start, count: 1 })));
    };
    for first in firsts() {
        if !touching_brings {
            fill(&mut entries, first);
            let failed = surface.populate(&mut entries);
            ensure!(failed == 0, "allocating {failed} of {} pages failed", entries.len());
        }
        for page in first..first + way.pages_per_call {
            // SAFETY: the page lies on the surface, and on this thread's stretch of it.
            unsafe { surface.address(page).as_ptr().write_volatile(1) };
        }
    }
    for first in firsts() {
        fill(&mut entries, first);
        // SAFETY: no other code knows these pages, and no reference into them exists.
        let failed = unsafe { surface.release(&mut entries) };
        ensure!(failed == 0, "releasing {failed} of {} pages failed", entries.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_leaves_nothing_resident() {
        for way in ways() {
            let surface = way.surface(2 * STRETCH).unwrap();
            assert!(turn_over(&surface, way, 2, 1).unwrap() > 0.0);
            let all = PageRange { start: 0, count: surface.pages() };
            assert_eq!(surface.resident_pages(all).unwrap(), 0, "{}", way.name);
        }
    }

    #[test]
    fn madvise_is_always_first_and_exmap_last_where_the_module_is_loaded() {
        let ways = ways();
        assert_eq!(ways[0].name, "madvise");
        let loaded = std::path::Path::new("/dev/exmap").exists();
        assert_eq!(ways[ways.len() - 1].backend == BackendKind::Exmap, loaded);
    }

    #[test]
    fn thread_counts_end_with_all_cores() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(6), [1, 2, 4, 6]);
    }
}
