//! Threads that populate pages and threads that free them, as in figure 4 of the second paper (IEEE
//! Access 2023).
//!
//! An allocator chooses a batch, populates it, touches its pages, and frees them itself or pushes
//! them to a queue, from which a free thread pops and frees them. A figure counts pages that were
//! allocated *and* freed, over the time until the last of them is freed.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::affinity::stay_on;
use super::memory::{PageMemory, Populator};
use super::pattern::{BATCH, Chooser, Claims, Pattern};
use super::queue::Queues;

/// Pages of a batch where batches make no difference.
const SMALL: usize = 32;

/// The threads that free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The thread that populated them, by the same interface.
    Local,
    /// The thread that populated them, by another interface.
    TwoInterfaces,
    /// Another thread.
    Remote,
    /// Half of them the allocator, half another thread.
    Mixed,
}

impl Strategy {
    /// Those of the second paper.
    pub const ALL: [Strategy; 3] = [Strategy::Local, Strategy::Remote, Strategy::Mixed];

    /// Its name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Local => "local free",
            Strategy::TwoInterfaces => "local free by a second interface",
            Strategy::Remote => "remote free",
            Strategy::Mixed => "mixed free",
        }
    }

    /// Whether there are free threads.
    pub fn is_remote(self) -> bool {
        matches!(self, Strategy::Remote | Strategy::Mixed)
    }
}

/// The task of the threads.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Threads that allocate pages.
    pub allocators: usize,
    /// Threads that free them, if the strategy has some.
    pub freers: usize,
    /// The order of allocation.
    pub pattern: Pattern,
    /// The threads that free them.
    pub strategy: Strategy,
    /// Pages that are chosen, allocated and freed at a time.
    pub batch: usize,
    /// Whether a cache line of each page is used.
    pub touch: bool,
    /// Queues between the threads.
    pub queues: usize,
    /// Pages that all queues hold together.
    pub queued: u64,
    /// For how long threads allocate pages.
    pub time: Duration,
}

impl Plan {
    /// As many free threads as allocators, each with a queue, and half of the pool in queues.
    pub fn new(threads: usize, pattern: Pattern, strategy: Strategy, frames: u64) -> Plan {
        Plan {
            allocators: threads,
            freers: threads,
            pattern,
            strategy,
            batch: BATCH,
            touch: true,
            queues: threads,
            queued: frames / 2,
            time: Duration::from_millis(50),
        }
    }

    /// Pages are not touched.
    pub fn untouched(self) -> Plan {
        Plan { touch: false, ..self }
    }

    /// With small batches and short queues, for ways that go page by page and would take long to
    /// finish.
    pub fn page_by_page(self) -> Plan {
        Plan { batch: SMALL, queued: (2 * SMALL * self.queues) as u64, ..self }
    }

    /// For so long.
    pub fn lasting(self, time: Duration) -> Plan {
        Plan { time, ..self }
    }

    /// Interfaces that this many threads need, for every plan.
    pub fn interfaces(threads: usize) -> usize {
        2 * threads
    }
}

/// The work that the threads have done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Pages that were allocated and freed.
    pub pages: u64,
    /// Pages that were asked for and not populated.
    pub refused: u64,
    /// How long it took.
    pub seconds: f64,
}

impl Tally {
    /// Pages a second.
    pub fn rate(&self) -> f64 {
        self.pages as f64 / self.seconds
    }
}

/// Lets threads work on a memory of so many pages.
///
/// # Errors
/// The first error of a thread.
pub fn run(
    memory: &dyn PageMemory,
    claims: &impl Claims,
    pages: u64,
    plan: &Plan,
) -> Result<Tally> {
    let freers = if plan.strategy.is_remote() { plan.freers } else { 0 };
    let site = Site {
        memory,
        claims,
        pages,
        plan,
        queues: Queues::new(plan.queues, plan.queued / plan.queues as u64),
        working: AtomicUsize::new(plan.allocators),
        begin: Barrier::new(plan.allocators + freers + 1),
    };
    let site = &site;
    thread::scope(|scope| {
        let allocators: Vec<_> = (0..plan.allocators)
            .map(|thread| scope.spawn(move || site.allocator(thread)))
            .collect();
        let freers: Vec<_> =
            (0..freers).map(|thread| scope.spawn(move || site.freer(thread))).collect();
        site.begin.wait();
        let start = Instant::now();
        let mut tally = Tally::default();
        for thread in allocators.into_iter().chain(freers) {
            let part = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            tally.pages += part.pages;
            tally.refused += part.refused;
        }
        tally.seconds = start.elapsed().as_secs_f64();
        Ok(tally)
    })
}

/// The state that the threads share.
struct Site<'a, C> {
    memory: &'a dyn PageMemory,
    claims: &'a C,
    pages: u64,
    plan: &'a Plan,
    queues: Queues,
    /// Allocators that have not ended.
    working: AtomicUsize,
    begin: Barrier,
}

/// Closes the queues when the last allocator ends, or a free thread, however that happens.
struct Ending<'a> {
    queues: &'a Queues,
    working: Option<&'a AtomicUsize>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if self.working.is_none_or(|working| working.fetch_sub(1, Ordering::AcqRel) == 1) {
            self.queues.close();
        }
    }
}

impl<C: Claims> Site<'_, C> {
    /// Takes an interface and a processor, and waits until all other threads have theirs.
    fn begin(&self, interface: usize) -> Result<Box<dyn Populator + '_>> {
        stay_on(interface);
        let hand = self.memory.populator(interface);
        self.begin.wait();
        hand
    }

    fn allocator(&self, thread: usize) -> Result<Tally> {
        let _ending = Ending { queues: &self.queues, working: Some(&self.working) };
        let plan = self.plan;
        let second = match plan.strategy {
            Strategy::TwoInterfaces => Some(self.memory.populator(plan.allocators + thread)),
            _ => None,
        };
        let mut hand = self.begin(thread)?;
        let mut second = second.transpose()?;
        let mut chooser = Chooser::new(plan.pattern, thread, plan.allocators, self.pages);
        let (mut batch, mut refused) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        let (mut tally, mut turn) = (Tally::default(), thread);
        let end = Instant::now() + plan.time;
        while Instant::now() < end {
            chooser.choose(self.claims, plan.batch, &mut batch);
            refused.clear();
            hand.bring(&mut batch, &mut refused)?;
            refused.iter().for_each(|page| self.claims.release(*page));
            tally.refused += refused.len() as u64;
            if batch.is_empty() {
                // Other threads have all pages, or all memory.
                thread::yield_now();
                continue;
            }
            if plan.touch {
                batch.iter().for_each(|page| self.memory.touch(*page));
            }
            let remote = self.split(&mut batch);
            if !batch.is_empty() {
                self.take(second.as_mut().unwrap_or(&mut hand), &batch, &mut tally)?;
            }
            if !remote.is_empty() {
                if self.queues.push(turn, remote).is_err() {
                    // A free thread has ended; it says why.
                    break;
                }
                turn += 1;
            }
        }
        Ok(tally)
    }

    /// The part of a batch that goes to free threads.
    fn split(&self, batch: &mut Vec<u64>) -> Vec<u64> {
        match self.plan.strategy {
            Strategy::Local | Strategy::TwoInterfaces => Vec::new(),
            Strategy::Remote => std::mem::replace(batch, Vec::with_capacity(BATCH)),
            Strategy::Mixed => batch.split_off(batch.len() / 2),
        }
    }

    fn take(
        &self,
        hand: &mut Box<dyn Populator + '_>,
        batch: &[u64],
        tally: &mut Tally,
    ) -> Result<()> {
        hand.take(batch)?;
        batch.iter().for_each(|page| self.claims.release(*page));
        tally.pages += batch.len() as u64;
        Ok(())
    }

    fn freer(&self, thread: usize) -> Result<Tally> {
        let _ending = Ending { queues: &self.queues, working: None };
        let mut hand = self.begin(self.plan.allocators + thread)?;
        let mut tally = Tally::default();
        while let Some(batch) = self.queues.pop(thread) {
            self.take(&mut hand, &batch, &mut tally)?;
        }
        Ok(tally)
    }
}

#[cfg(test)]
#[path = "threads_tests.rs"]
mod tests;
