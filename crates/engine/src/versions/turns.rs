//! Turns: a transaction that lost several times gets what it has read for itself.
//!
//! It *reserves* these entries, and runs again. Commits of other threads that change one of them
//! wait until the reservation ends. They hold no page while they wait, and wait for a tenth of a
//! second at most: the caller's function may run for long. There is one reservation at a time, in
//! the order in which threads ask for them. Changes outside of transactions wait for none.

use std::collections::BTreeSet;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::key::Key;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, lock, wait_briefly};
use crate::versions::reads::{KeyBounds, ReadSet, contains};

/// Other threads wait so long for a reservation to end.
const LONGEST: Duration = Duration::from_millis(100);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// Whether there is a reservation.
    is_reserved: AtomicBool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// The threads that have, or want, a reservation.
#[derive(Debug, Default)]
struct Queue {
    /// The number of the last one.
    last: u64,
    /// How many have ended.
    ended: u64,
    reserved: Option<Reserved>,
}

#[derive(Debug)]
struct Reserved {
    keys: BTreeSet<(u32, Key)>,
    ranges: Vec<(u32, KeyBounds)>,
    thread: ThreadId,
    until: Instant,
}

impl Reserved {
    fn has(&self, tree: u32, key: &Key) -> bool {
        let is_in = |(of, bounds): &(u32, KeyBounds)| *of == tree && contains(bounds, key);
        self.keys.contains(&(tree, key.clone())) || self.ranges.iter().any(is_in)
    }
}

/// While this lives, commits of other threads do not change what is reserved.
#[derive(Debug)]
pub(crate) struct Reservation<'t> {
    turns: &'t Turns,
    number: u64,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.turns.end(&mut lock(&self.turns.queue), self.number);
    }
}

impl Turns {
    /// Reserves entries for this thread, after all threads that have asked before.
    pub(crate) fn reserve(&self, reads: &ReadSet) -> Reservation<'_> {
        let keys = reads.keys().map(|(tree, key)| (tree, Key::from(key))).collect();
        let ranges = reads.ranges().to_vec();
        let mut queue = lock(&self.queue);
        queue.last += 1;
        let number = queue.last;
        while queue.ended + 1 != number {
            let is_overdue = |reserved: &Reserved| Instant::now() >= reserved.until;
            if queue.reserved.as_ref().is_some_and(is_overdue) {
                let overdue = queue.ended + 1;
                self.end(&mut queue, overdue);
            } else {
                queue = wait_briefly(&self.changed, &self.queue, queue);
            }
        }
        let (thread, until) = (thread::current().id(), Instant::now() + LONGEST);
        queue.reserved = Some(Reserved { keys, ranges, thread, until });
        self.is_reserved.store(true, Ordering::Release);
        Reservation { turns: self, number }
    }

    /// Ends a reservation, unless another thread has done so because it was overdue.
    fn end(&self, queue: &mut Queue, number: u64) {
        if queue.ended + 1 == number {
            queue.ended = number;
            queue.reserved = None;
            self.is_reserved.store(false, Ordering::Release);
            self.changed.notify_all();
        }
    }

    /// Waits while another thread has reserved one of these entries. The caller holds no page.
    pub(crate) fn wait<'k>(&self, entries: impl Iterator<Item = (u32, &'k Key)> + Clone) {
        if !self.is_reserved.load(Ordering::Acquire) {
            return;
        }
        let mut queue = lock(&self.queue);
        while let Some(reserved) = &queue.reserved
            && reserved.thread != thread::current().id()
            && Instant::now() < reserved.until
            && entries.clone().any(|(tree, key)| reserved.has(tree, key))
        {
            queue = wait_briefly(&self.changed, &self.queue, queue);
        }
    }
}
