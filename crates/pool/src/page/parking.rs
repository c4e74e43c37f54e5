//! The parking lot: where threads and tasks wait for a page's lock.
//!
//! A page has one bit for its waiters; the queues are here, in a fixed number of buckets shared by
//! all pages (SIGMOD'23, section 3.3, after Boehm et al., DaMoN'20). A wake-up reaches all waiters
//! in the bucket, so every wait is a loop that checks the page again.

use std::task::Waker;

use crate::page::PageId;
use crate::sync::{Condvar, Mutex, lock, wait, wait_briefly};

const BUCKETS: usize = if cfg!(feature = "model") { 2 } else { 256 };

#[repr(align(128))]
#[derive(Debug, Default)]
struct Bucket {
    queue: Mutex<Queue>,
    wake_up: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    tasks: Vec<(PageId, Waker)>,
    /// How many threads are parked. With none, a wake-up needs no system call.
    threads: usize,
}

/// Queues of waiting threads and tasks, by page.
#[derive(Debug)]
pub(crate) struct ParkingLot {
    buckets: Box<[Bucket]>,
}

impl ParkingLot {
    pub(crate) fn new() -> ParkingLot {
        ParkingLot { buckets: (0..BUCKETS).map(|_| Bucket::default()).collect() }
    }

    fn bucket(&self, page: PageId) -> &Bucket {
        let hash = page.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.buckets[hash as usize % BUCKETS]
    }

    /// Parks the thread until `page` is woken, unless `blocked` no longer holds.
    ///
    /// `blocked` is asked under the bucket's lock, and a waker takes that lock after it changed
    /// the page: so either `blocked` sees the change, or the wake-up finds the thread parked.
    pub(crate) fn park(&self, page: PageId, blocked: impl FnOnce() -> bool) {
        let bucket = self.bucket(page);
        let mut queue = lock(&bucket.queue);
        if blocked() {
            queue.threads += 1;
            queue = wait(&bucket.wake_up, queue);
            queue.threads -= 1;
        }
    }

    /// As [`park`](ParkingLot::park), for about a millisecond at most.
    pub(crate) fn park_briefly(&self, page: PageId, blocked: impl FnOnce() -> bool) {
        let bucket = self.bucket(page);
        let mut queue = lock(&bucket.queue);
        if blocked() {
            queue.threads += 1;
            wait_briefly(&bucket.wake_up, queue);
            lock(&bucket.queue).threads -= 1;
        }
    }

    /// Queues `waker` until `page` is woken. False, and not queued, if `blocked` no longer holds.
    pub(crate) fn park_task(
        &self,
        page: PageId,
        waker: &Waker,
        blocked: impl FnOnce() -> bool,
    ) -> bool {
        let mut queue = lock(&self.bucket(page).queue);
        if !blocked() {
            return false;
        }
        let tasks = &mut queue.tasks;
        if !tasks.iter().any(|(queued, task)| *queued == page && task.will_wake(waker)) {
            tasks.push((page, waker.clone()));
        }
        true
    }

    /// Wakes all waiters of `page`.
    pub(crate) fn wake(&self, page: PageId) {
        let bucket = self.bucket(page);
        let mut queue = lock(&bucket.queue);
        let waits = |(queued, _): &mut (PageId, Waker)| *queued == page;
        let woken: Vec<Waker> = queue.tasks.extract_if(.., waits).map(|(_, task)| task).collect();
        let parked = queue.threads > 0;
        drop(queue);
        if parked {
            bucket.wake_up.notify_all();
        }
        for task in woken {
            task.wake();
        }
    }
}
