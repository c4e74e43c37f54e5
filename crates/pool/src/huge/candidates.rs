//! The chunks that wait to be collapsed, and the time at which the collapser looks at each.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A queue of chunks, earliest first. A bit of the chunk's word keeps it from being queued twice.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: BinaryHeap<Reverse<(Instant, u64)>>,
    ended: bool,
}

impl Candidates {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a chunk that the collapser looks at now.
    pub(super) fn add(&self, chunk: u64) {
        self.add_at(chunk, Instant::now());
        self.changed.notify_one();
    }

    /// Adds a chunk that the collapser looks at later. Only the collapser calls this.
    pub(super) fn add_at(&self, chunk: u64, time: Instant) {
        let mut queue = self.lock();
        if !queue.ended {
            queue.waiting.push(Reverse((time, chunk)));
        }
    }

    /// Waits for a chunk whose time has come; `None` after the end.
    pub(super) fn next(&self) -> Option<u64> {
        let mut queue = self.lock();
        loop {
            if queue.ended {
                return None;
            }
            let now = Instant::now();
            let first = queue.waiting.peek().map(|Reverse((time, _))| *time);
            queue = match first {
                Some(time) if time <= now => {
                    return queue.waiting.pop().map(|Reverse((_, chunk))| chunk);
                }
                Some(time) => {
                    let waited = self.changed.wait_timeout(queue, time - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Rests. Returns early after the end.
    pub(super) fn rest(&self, time: Duration) {
        let deadline = Instant::now() + time;
        let mut queue = self.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if queue.ended || left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Drops all chunks, also those that are added later, and ends the collapser's wait.
    pub(crate) fn end(&self) {
        let mut queue = self.lock();
        *queue = Queue { ended: true, ..Queue::default() };
        drop(queue);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_come_when_their_time_has_come() {
        let candidates = Candidates::default();
        // Before the others' times are chosen: it is the first however long this takes.
        candidates.add(3);
        let start = Instant::now();
        candidates.add_at(1, start + Duration::from_millis(20));
        candidates.add_at(2, start + Duration::from_millis(10));
        assert_eq!(
            [candidates.next(), candidates.next(), candidates.next()].map(Option::unwrap),
            [3, 2, 1]
        );
        assert!(start.elapsed() >= Duration::from_millis(20));
        std::thread::scope(|scope| {
            scope.spawn(|| candidates.add(4));
            assert_eq!(candidates.next(), Some(4));
        });
    }

    #[test]
    fn the_end_wakes_who_waits_or_rests() {
        let waits: [fn(&Candidates); 2] =
            [|it| _ = it.next(), |it| it.rest(Duration::from_secs(1_000))];
        for wait in waits {
            let candidates = Candidates::default();
            std::thread::scope(|scope| {
                scope.spawn(|| wait(&candidates));
                candidates.end();
            });
            candidates.add(1);
            assert_eq!(candidates.next(), None);
        }
    }
}
