//! Threads of a cache that write dirty pages, where threads of the cache handle faults
//! (`monitor.rs`).
//!
//! A call that writes to a file has the lock of the file's inode while the kernel reads its buffer.
//! If the buffer is in a mapping of the cache and a page of it is not mapped, the call waits for a
//! thread that handles faults, with the lock. So these threads must not wait for that lock, and
//! every write to the file does. So they write nothing: the threads here do, and the dirty pages of
//! a cache are bounded, so that there are always frames for reads. docs/aquila.md says who waits
//! for whom.
//!
//! A thread here writes pages of one file at a time, and no other thread here writes to that file
//! then: so a file whose lock is taken for long keeps one thread, and the others go on.

use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::generation::{self, Generation};
use crate::shared::{Shared, Threads};
use crate::sys;
use crate::write_requests::{Round, WRITERS, WriteRequests};

/// The threads. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Writers {
    threads: Vec<JoinHandle<()>>,
    requests: Arc<WriteRequests>,
    /// The process that has the threads: a forked child does not.
    generation: Generation,
}

impl Writers {
    fn try_start(shared: &Arc<Shared>, requests: &Arc<WriteRequests>) -> Result<Self, Errno> {
        let generation = generation::begin()?;
        // An earlier start may have failed, and ended the threads that it had started.
        requests.begin();
        let mut writers = Self { threads: Vec::new(), requests: Arc::clone(requests), generation };
        // The program's handlers do not run on these threads.
        let _blocked = sys::BlockedSignals::for_changes();
        for _ in 0..WRITERS {
            let (shared, requests) = (Arc::downgrade(shared), Arc::clone(requests));
            let thread = thread::Builder::new().name("vellum-writes".to_owned());
            let thread = thread.spawn(move || run(&shared, &requests));
            let failed = |error: std::io::Error| Errno::from_io_error(&error);
            writers.threads.push(thread.map_err(|error| failed(error).unwrap_or(Errno::NOMEM))?);
        }
        Ok(writers)
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if generation::current() != self.generation {
            // A child has none of the threads, and would wait for ever.
            return std::mem::forget(threads);
        }
        self.requests.end();
        let own = thread::current().id();
        // A thread that had the cache for a moment may be the one that drops it.
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != own) {
            let _ = thread.join();
        }
    }
}

impl Threads for Writers {}

/// Starts the threads of a cache, if it is to have some and has none.
///
/// # Errors
/// What the system said.
pub(crate) fn start(shared: &Arc<Shared>) -> Result<()> {
    let started = shared.need_writers(|requests| {
        Writers::try_start(shared, requests).map(|writers| Box::new(writers) as Box<dyn Threads>)
    });
    started.map_err(|errno| Error::of("starting threads of a cache", errno))
}

/// One of the threads.
fn run(shared: &Weak<Shared>, requests: &WriteRequests) {
    while let Some(round) = requests.next() {
        let Some(shared) = shared.upgrade() else { return };
        let mut done = Round::default();
        let mut from = 0;
        while let Some(file) = shared.next_dirty_file(from) {
            from = file + 1;
            write_file(&shared, file, &mut done);
            if done.written > 0 && shared.has_room() {
                break;
            }
        }
        requests.end_round(round, &done);
    }
}

/// Writes pages of a file, until there is room enough in the cache.
fn write_file(shared: &Shared, file: u32, done: &mut Round) {
    let Some(turn) = shared.begin_writing(file) else {
        done.has_left_out = true;
        return;
    };
    // Where the last thread stopped, and then from the beginning.
    let mut next = Some(turn.next());
    let mut is_first = next != Some(0);
    while let Some(from) = next {
        let (written, failure) = shared.write_some(file, &mut next);
        done.written += written;
        done.failure = done.failure.or(failure);
        if done.written > 0 && shared.has_room() {
            return turn.end_at(next.unwrap_or(0));
        }
        if next.is_none() && is_first {
            (next, is_first) = (Some(0), false);
        } else if next == Some(from) {
            break;
        }
    }
    turn.end_at(0);
}
