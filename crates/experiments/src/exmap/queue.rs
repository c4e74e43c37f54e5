//! Bounded queues of batches, from threads that populate pages to threads that free them.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Queues that a push tries before it waits.
const TRIES: usize = 4;

/// A queue that holds a limited number of pages.
#[derive(Debug)]
struct Queue {
    state: Mutex<State>,
    capacity: usize,
    /// Signalled when there is room, or the queue is closed.
    room: Condvar,
    /// Signalled when there is a batch, or the queue is closed.
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    batches: VecDeque<Vec<u64>>,
    pages: usize,
    closed: bool,
}

impl State {
    /// A batch always fits into an empty queue.
    fn fits(&self, batch: &[u64], capacity: usize) -> bool {
        self.batches.is_empty() || self.pages + batch.len() <= capacity
    }
}

impl Queue {
    fn new(capacity: usize) -> Queue {
        let (state, room, work) = (Mutex::default(), Condvar::new(), Condvar::new());
        Queue { state, capacity, room, work }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No thread panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, mut state: MutexGuard<'_, State>, batch: Vec<u64>) {
        state.pages += batch.len();
        state.batches.push_back(batch);
        drop(state);
        self.work.notify_one();
    }

    fn try_push(&self, batch: Vec<u64>) -> Result<(), Vec<u64>> {
        let state = self.lock();
        if state.closed || !state.fits(&batch, self.capacity) {
            return Err(batch);
        }
        self.add(state, batch);
        Ok(())
    }

    /// Waits for room; gives the batch back if the queue is closed.
    fn push(&self, batch: Vec<u64>) -> Result<(), Vec<u64>> {
        let mut state = self.lock();
        while !state.closed && !state.fits(&batch, self.capacity) {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return Err(batch);
        }
        self.add(state, batch);
        Ok(())
    }

    /// Waits for a batch; none if the queue is empty and closed.
    fn pop(&self) -> Option<Vec<u64>> {
        let mut state = self.lock();
        while state.batches.is_empty() && !state.closed {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let batch = state.batches.pop_front()?;
        state.pages -= batch.len();
        drop(state);
        self.room.notify_one();
        Some(batch)
    }

    fn close(&self) {
        self.lock().closed = true;
        self.room.notify_all();
        self.work.notify_all();
    }
}

/// Several queues: a thread that pushes takes them in turn, a thread that pops has one.
#[derive(Debug)]
pub struct Queues(Vec<Queue>);

impl Queues {
    /// `count` queues, each with room for `capacity` pages.
    pub fn new(count: usize, capacity: u64) -> Queues {
        Queues((0..count).map(|_| Queue::new(capacity as usize)).collect())
    }

    /// Pushes to the first of a few queues from `turn` on that has room, or waits for the first.
    /// Returns the batch if they are closed.
    pub fn push(&self, turn: usize, mut batch: Vec<u64>) -> Result<(), Vec<u64>> {
        for queue in 0..TRIES.min(self.0.len()) {
            match self.0[(turn + queue) % self.0.len()].try_push(batch) {
                Ok(()) => return Ok(()),
                Err(back) => batch = back,
            }
        }
        self.0[turn % self.0.len()].push(batch)
    }

    /// Waits for a batch of one of the queues; none at the end.
    pub fn pop(&self, queue: usize) -> Option<Vec<u64>> {
        self.0[queue % self.0.len()].pop()
    }

    /// Closes all queues.
    pub fn close(&self) {
        self.0.iter().for_each(Queue::close);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn batches_come_out_in_order_until_the_end() {
        let queues = Queues::new(1, 10);
        queues.push(0, vec![1, 2]).unwrap();
        queues.push(5, vec![3]).unwrap();
        queues.close();
        assert_eq!(queues.pop(0), Some(vec![1, 2]));
        assert_eq!(queues.pop(3), Some(vec![3]));
        assert_eq!(queues.pop(0), None);
        assert_eq!(queues.push(0, vec![4]), Err(vec![4]));
    }

    #[test]
    fn a_push_looks_for_room_elsewhere() {
        let queues = Queues::new(2, 2);
        for _ in 0..2 {
            queues.push(0, vec![1, 2]).unwrap();
        }
        assert_eq!((queues.pop(0), queues.pop(1)), (Some(vec![1, 2]), Some(vec![1, 2])));
    }

    #[test]
    fn a_push_waits_for_room() {
        let queues = Queues::new(1, 3);
        // A batch larger than the queue fits if the queue is empty.
        queues.push(0, vec![1; 5]).unwrap();
        let pushed = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                queues.push(0, vec![7]).unwrap();
                pushed.store(1, Ordering::SeqCst);
                queues.close();
            });
            thread::sleep(Duration::from_millis(50));
            assert_eq!(pushed.load(Ordering::SeqCst), 0);
            assert_eq!(queues.pop(0).map(|batch| batch.len()), Some(5));
            assert_eq!(queues.pop(0), Some(vec![7]));
            assert_eq!(queues.pop(0), None);
        });
        assert_eq!(pushed.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn closing_ends_who_waits_for_room() {
        let queues = Queues::new(1, 1);
        queues.push(0, vec![1]).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| queues.push(0, vec![2]));
            thread::sleep(Duration::from_millis(20));
            queues.close();
            assert_eq!(waiting.join().unwrap(), Err(vec![2]));
        });
    }
}
