//! The ways to pass a command to the module, and their cost: figure 8 of the second paper.
//!
//! Every thread goes through its own part of the surface in order, with its own interface. It
//! populates 512 pages, one by one or all at once, and frees them with one call, which is not part
//! of the figure.

use std::cell::RefCell;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use vellum_uapi::exmap::{ALLOC, FREE};
use vellum_vm::BackendKind;

use super::affinity::stay_on;
use super::contest::rounds;
use super::device::{Exmap, Interface};
use super::memory::{OfKernel, PageMemory, Populator};
use super::pattern::{BATCH, Chooser, Claimed, Pattern};
use super::ring::CommandRing;
use super::{Size, device, without_module};
use crate::{Context, Experiment, count};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Axis, Chart, Line, Outcome, Row};

/// The experiment.
pub const INTERFACES: Experiment = Experiment {
    name: "exmap-interfaces",
    shows: "the cost of a page by page fault, iovec, mapped vector, io_uring, private descriptors",
    source: "IEEE Access 2023, figure 8",
    run,
};

/// A way to ask for pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Fault,
    Iovec { private: bool },
    Vector { private: bool },
    Uring,
}

/// The reference, then as the paper has them.
const WAYS: [(Way, &str); 6] = [
    (Way::Fault, "page fault (madvise)"),
    (Way::Iovec { private: false }, "iovec"),
    (Way::Vector { private: false }, "mapped vector"),
    (Way::Uring, "io_uring command"),
    (Way::Iovec { private: true }, "iovec, private descriptor"),
    (Way::Vector { private: true }, "mapped vector, private descriptor"),
];

/// Pairs whose ratio is of interest: the better one first.
const PAIRS: [(Way, Way); 2] = [
    (Way::Vector { private: true }, Way::Iovec { private: false }),
    (Way::Vector { private: true }, Way::Uring),
];

struct Grounds {
    exmap: Exmap,
    kernel: OfKernel,
    states: Claimed,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    if !device::is_there() {
        return Ok(without_module());
    }
    let size = Size::of(context);
    context.progress.doing("making surfaces");
    let memories = Grounds {
        exmap: size.memory(0)?.into_exmap(),
        kernel: size.kernel_ground(BackendKind::Madvise)?,
        states: Claimed::new(size.pages),
    };
    let mut outcome = Outcome::default();
    outcome.notes.push(size.note());
    outcome.notes.push(
        "Sequential pages, local free in batches. The time is that of the allocation alone; 'with \
         the free' is the paper's figure. A page fault brings a zeroed page, and always one."
            .to_owned(),
    );
    for (pages, title) in [(1, "Allocation page by page"), (BATCH, "Allocation in batches")] {
        let mut lines: Vec<Line> = Vec::new();
        for threads in size.thread_counts() {
            let label = format!("{}, {}", count(pages, "page"), count(threads, "thread"));
            let found = measure(context, &size, &memories, pages, threads)?;
            rows(&mut outcome, &found, &label);
            for one in &found {
                let point = (threads as f64, one.alone.median());
                super::contest::add_point(&mut lines, one.name, point);
            }
        }
        outcome.charts.push(Chart {
            title: title.to_owned(),
            x: Axis::linear("threads"),
            y: Axis::logarithmic("ns/page"),
            lines,
        });
    }
    Ok(outcome)
}

/// Nanoseconds of a page.
struct Found {
    way: Way,
    name: &'static str,
    /// To populate it.
    alone: Samples,
    /// To populate and free it.
    both: Samples,
}

fn measure(
    context: &Context<'_>,
    size: &Size,
    memories: &Grounds,
    pages: usize,
    threads: usize,
) -> Result<Vec<Found>> {
    let label = format!("{}, {}", count(pages, "page"), count(threads, "thread"));
    let both = RefCell::new(vec![Vec::new(); WAYS.len()]);
    let both_of = &both;
    let contestants = WAYS.iter().enumerate().map(|(index, (way, name))| {
        Contestant::new(format!("{name}, {label}"), move || {
            let spent = turn(memories, *way, pages, threads, size.time)?;
            both_of.borrow_mut()[index].push(spent.both);
            Ok(spent.alone)
        })
    });
    let samples = alternate(rounds(context), &context.progress, contestants.collect())?;
    let both = both.into_inner();
    let found = WAYS.into_iter().zip(samples).zip(both);
    Ok(found
        .map(|(((way, name), alone), values)| {
            // The first round does not count.
            let both = Samples {
                name: format!("{}, with the free", alone.name),
                values: values[1..].to_vec(),
            };
            Found { way, name, alone, both }
        })
        .collect())
}

fn rows(outcome: &mut Outcome, found: &[Found], label: &str) {
    let first = &found[0];
    for samples in [|one: &Found| &one.alone, |one: &Found| &one.both] as [fn(&_) -> &_; 2] {
        let reference = samples(first);
        let row = |one| Row::of(samples(one), "ns/page").against(samples(one), reference);
        outcome.rows.extend(found.iter().map(row));
    }
    let of = |way| found.iter().find(|one: &&Found| one.way == way);
    for (better, worse) in PAIRS {
        if let (Some(better), Some(worse)) = (of(better), of(worse)) {
            let mut ratio = better.alone.ratio_to(&worse.alone);
            ratio.name = format!("{} by {}, {label}", better.name, worse.name);
            outcome.rows.push(Row::of(&ratio, "x the time"));
        }
    }
}

/// Nanoseconds of a page.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    alone: f64,
    both: f64,
}

/// All threads populate and free pages for a while; returns their mean cost.
fn turn(
    memories: &Grounds,
    way: Way,
    pages: usize,
    threads: usize,
    time: Duration,
) -> Result<Spent> {
    let begin = Barrier::new(threads);
    let begin = &begin;
    thread::scope(|scope| {
        let started: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    stay_on(thread);
                    let pages_of = memories.exmap.pages();
                    let chooser = Chooser::new(Pattern::Sequential, thread, threads, pages_of);
                    let caller = Caller::new(memories, way, thread);
                    begin.wait();
                    caller?.work(&memories.states, chooser, pages, time)
                })
            })
            .collect();
        let mut spent = Spent::default();
        for thread in started {
            let one = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            spent.alone += one.alone / threads as f64;
            spent.both += one.both / threads as f64;
        }
        Ok(spent)
    })
}

/// A thread's way to ask for pages.
enum Caller<'a> {
    Fault(Box<dyn Populator + 'a>, Vec<u64>),
    Iovec(Interface<'a>, Vec<libc::iovec>),
    Vector(Interface<'a>),
    Uring(Box<CommandRing<'a>>),
}

impl<'a> Caller<'a> {
    fn new(memories: &'a Grounds, way: Way, thread: usize) -> Result<Caller<'a>> {
        if way == Way::Fault {
            return Ok(Caller::Fault(memories.kernel.populator(thread)?, Vec::new()));
        }
        let interface = memories.exmap.interface(thread)?;
        let is_private =
            matches!(way, Way::Iovec { private: true } | Way::Vector { private: true });
        let interface = if is_private { interface.private()? } else { interface };
        Ok(match way {
            Way::Uring => Caller::Uring(Box::new(CommandRing::new(interface)?)),
            Way::Iovec { .. } => Caller::Iovec(interface, Vec::with_capacity(BATCH)),
            _ => Caller::Vector(interface),
        })
    }

    #[inline]
    fn bring(&mut self, pages: &[u64]) -> Result<()> {
        match self {
            Caller::Fault(hand, batch) => {
                batch.clear();
                batch.extend_from_slice(pages);
                hand.bring(batch, &mut Vec::new())
            }
            Caller::Iovec(interface, parts) => {
                parts.clear();
                parts.extend(pages.iter().map(|page| interface.part(*page)));
                interface.alloc_by_iovec(parts)
            }
            Caller::Vector(interface) => interface.run_all(ALLOC, pages),
            Caller::Uring(ring) => ring.alloc(pages),
        }
    }

    fn take(&mut self, pages: &[u64]) -> Result<()> {
        match self {
            Caller::Fault(hand, _) => hand.take(pages),
            Caller::Iovec(interface, _) | Caller::Vector(interface) => {
                interface.run_all(FREE, pages)
            }
            Caller::Uring(ring) => ring.interface().run_all(FREE, pages),
        }
    }

    /// Populates this many pages a call, and frees them in batches.
    fn work(
        mut self,
        states: &Claimed,
        mut chooser: Chooser,
        pages: usize,
        time: Duration,
    ) -> Result<Spent> {
        use super::pattern::Claims as _;

        let start = Instant::now();
        let (mut batch, mut alone, mut done) = (Vec::new(), Duration::ZERO, 0);
        while start.elapsed() < time {
            chooser.choose(states, BATCH, &mut batch);
            let before = Instant::now();
            for part in batch.chunks(pages) {
                self.bring(part)?;
            }
            alone += before.elapsed();
            done += batch.len();
            self.take(&batch)?;
            batch.iter().for_each(|page| states.release(*page));
        }
        let per_page = |time: Duration| time.as_nanos() as f64 / done as f64;
        Ok(Spent { alone: per_page(alone), both: per_page(start.elapsed()) })
    }
}
