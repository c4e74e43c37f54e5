//! Where threads of a cache ask others to write dirty pages (`writers.rs`).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

/// Why a page cannot be had or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageError {
    /// The file ends before the page.
    BeyondEnd,
    /// The system says so.
    System(Errno),
}

impl From<Errno> for PageError {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

/// Locks the mutex, even if a thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the threads have been asked for, and what has become of it. A *round* is one look of one
/// thread at all files.
#[derive(Debug, Default)]
struct Requests {
    is_wanted: bool,
    is_over: bool,
    /// Rounds that have begun.
    begun: u64,
    /// The last round in which everything was tried and nothing could be written, and why.
    failed: Option<(u64, PageError)>,
}

/// Threads of a cache that write: so many files less one may be locked without a delay for others.
pub(crate) const WRITERS: usize = 4;

/// How threads ask for pages to be written.
#[derive(Debug, Default)]
pub(crate) struct WriteRequests {
    requests: Mutex<Requests>,
    is_wanted: Condvar,
}

impl WriteRequests {
    /// Threads are about to begin. Earlier ones, if there were any, have ended.
    pub(crate) fn begin(&self) {
        lock(&self.requests).is_over = false;
    }

    /// Asks for a round. `asked` is zero at first, and names a round that begins after this then.
    ///
    /// # Errors
    /// That round, or a later one, could write nothing.
    pub(crate) fn ask(&self, asked: &mut u64) -> Result<(), PageError> {
        let mut requests = lock(&self.requests);
        if *asked == 0 {
            *asked = requests.begun + 1;
        }
        requests.is_wanted = true;
        self.is_wanted.notify_one();
        match requests.failed {
            Some((round, failure)) if round >= *asked => Err(failure),
            _ => Ok(()),
        }
    }

    /// Waits until a round is asked for. Returns its number; `None` if the threads are to end.
    pub(crate) fn next(&self) -> Option<u64> {
        let mut requests = lock(&self.requests);
        while !requests.is_wanted && !requests.is_over {
            requests = self.is_wanted.wait(requests).unwrap_or_else(PoisonError::into_inner);
        }
        if requests.is_over {
            return None;
        }
        requests.is_wanted = false;
        requests.begun += 1;
        Some(requests.begun)
    }

    pub(crate) fn end_round(&self, round: u64, done: &Round) {
        let mut requests = lock(&self.requests);
        if done.written > 0 {
            requests.failed = None;
        } else if let Some(failure) = done.failure.filter(|_| !done.has_left_out) {
            requests.failed = Some((round, failure));
        }
    }

    pub(crate) fn end(&self) {
        lock(&self.requests).is_over = true;
        self.is_wanted.notify_all();
    }
}

/// What a round has done.
#[derive(Default)]
pub(crate) struct Round {
    pub(crate) written: u64,
    /// The first error.
    pub(crate) failure: Option<PageError>,
    /// Whether another thread was writing to a file.
    pub(crate) has_left_out: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As after a start in which the system had no more threads.
    #[test]
    fn threads_that_begin_after_others_have_ended_get_rounds() {
        let requests = WriteRequests::default();
        requests.end();
        assert_eq!(requests.next(), None);
        requests.begin();
        assert_eq!(requests.ask(&mut 0), Ok(()));
        assert_eq!(requests.next(), Some(1));
    }
}
