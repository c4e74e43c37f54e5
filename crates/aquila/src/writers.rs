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

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vellum_aquila_core::Taken;

use crate::generation::{self, Generation};
use crate::host::Failure;
use crate::shared::Shared;
use crate::sys;

/// Threads of a cache: so many files less one may be locked without a delay for another one.
const THREADS: usize = 4;

/// Frames are counted at most so often by those who wait for room.
const PAUSE: Duration = Duration::from_millis(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
    failed: Option<(u64, Failure)>,
}

/// How threads ask for pages to be written.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    requests: Mutex<Requests>,
    is_wanted: Condvar,
}

impl Desk {
    /// Asks for a round. `asked` is zero at first, and names a round that begins after this then.
    ///
    /// # Errors
    /// That round, or a later one, could write nothing.
    pub(crate) fn ask(&self, asked: &mut u64) -> Result<(), Failure> {
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
    fn next(&self) -> Option<u64> {
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

    fn end_round(&self, round: u64, done: &Round) {
        let mut requests = lock(&self.requests);
        if done.written > 0 {
            requests.failed = None;
        } else if let Some(failure) = done.failure.filter(|_| !done.has_left_out) {
            requests.failed = Some((round, failure));
        }
    }

    fn end(&self) {
        lock(&self.requests).is_over = true;
        self.is_wanted.notify_all();
    }
}

/// What a round has done.
#[derive(Default)]
struct Round {
    written: u64,
    /// The first error.
    failure: Option<Failure>,
    /// Whether another thread was writing to a file.
    has_left_out: bool,
}

/// How many pages may become dirty.
#[derive(Debug)]
pub(crate) struct Room {
    places: Mutex<Places>,
    /// Places that were taken by threads that have not used them yet.
    promised: AtomicU32,
    /// Frames that the cache may be about to have.
    size: AtomicU32,
}

#[derive(Debug)]
struct Places {
    /// Never more than there are.
    left: i64,
    /// Those of a cache without dirty pages.
    all: i64,
    counted: Option<Instant>,
}

/// A place for one dirty page, which the thread is about to use.
pub(crate) struct Promise<'r> {
    room: &'r Room,
    is_used: bool,
}

impl Promise<'_> {
    /// The page may be dirty now.
    pub(crate) fn used(mut self) {
        self.is_used = true;
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        if self.is_used {
            // What the thread has done is seen by one that counts without this promise.
            self.room.promised.fetch_sub(1, Ordering::AcqRel);
        } else {
            let mut places = lock(&self.room.places);
            self.room.promised.fetch_sub(1, Ordering::AcqRel);
            places.left += 1;
        }
    }
}

/// How many of so many frames may be dirty: three quarters, and in a small cache all but one. Of a
/// single frame no part can be kept for reads.
fn most_dirty(frames: u32) -> u32 {
    if frames <= 1 { frames } else { frames - (frames / 4).max(1) }
}

impl Room {
    pub(crate) fn new(size: u32) -> Self {
        Self {
            places: Mutex::new(Places { left: 0, all: 0, counted: None }),
            promised: AtomicU32::new(0),
            size: AtomicU32::new(size),
        }
    }

    /// From now on for a cache of so many frames. [`Room::count`] does the rest.
    pub(crate) fn set_size(&self, frames: u32) {
        self.size.store(frames, Ordering::Release);
    }

    /// Counts the places that are left. Returns whether half of them are.
    pub(crate) fn count(&self, taken: impl FnOnce() -> (u32, Taken)) -> bool {
        self.count_in(&mut lock(&self.places), taken)
    }

    fn count_in(&self, places: &mut Places, taken: impl FnOnce() -> (u32, Taken)) -> bool {
        // First, so that what is promised and used meanwhile counts twice and not never. No more is
        // promised while the places are locked.
        let promised = self.promised.load(Ordering::Acquire);
        let (size, taken) = taken();
        let size = size.min(self.size.load(Ordering::Acquire));
        places.all = most_dirty(size.saturating_sub(taken.held)).into();
        let used = i64::from(taken.dirty) + i64::from(promised);
        // If there is nothing to write, there is nothing to wait for.
        places.left = if used == 0 { places.all.max(1) } else { places.all - used };
        places.counted = Some(Instant::now());
        2 * places.left >= places.all
    }

    /// Counts, and returns whether no more places are taken than there are.
    pub(crate) fn is_kept(&self, taken: impl FnOnce() -> (u32, Taken)) -> bool {
        let mut places = lock(&self.places);
        self.count_in(&mut places, taken);
        places.left >= 0
    }

    /// Takes a place, if there is one. Returns also whether few are left.
    pub(crate) fn take(&self, taken: impl FnOnce() -> (u32, Taken)) -> (Option<Promise<'_>>, bool) {
        let mut places = lock(&self.places);
        let is_old = |counted: Instant| counted.elapsed() >= PAUSE;
        if places.left <= 0 && places.counted.is_none_or(is_old) {
            self.count_in(&mut places, taken);
        }
        if places.left <= 0 {
            return (None, true);
        }
        places.left -= 1;
        self.promised.fetch_add(1, Ordering::AcqRel);
        (Some(Promise { room: self, is_used: false }), 4 * places.left < places.all)
    }
}

/// The threads. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Writers {
    threads: Vec<JoinHandle<()>>,
    desk: Arc<Desk>,
    /// The process that has the threads: a forked child does not.
    generation: Generation,
}

impl Writers {
    /// Starts the threads of a cache.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn start(shared: &Arc<Shared>, desk: &Arc<Desk>) -> Result<Self, Errno> {
        let generation = generation::begin()?;
        let mut writers = Self { threads: Vec::new(), desk: Arc::clone(desk), generation };
        // The program's handlers do not run on these threads.
        let _blocked = sys::BlockedSignals::for_changes();
        for _ in 0..THREADS {
            let (shared, desk) = (Arc::downgrade(shared), Arc::clone(desk));
            let thread = thread::Builder::new().name("vellum-writes".to_owned());
            let thread = thread.spawn(move || run(&shared, &desk));
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
        self.desk.end();
        let own = thread::current().id();
        // A thread that had the cache for a moment may be the one that drops it.
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != own) {
            let _ = thread.join();
        }
    }
}

/// One of the threads.
fn run(shared: &Weak<Shared>, desk: &Desk) {
    while let Some(round) = desk.next() {
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
        desk.end_round(round, &done);
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
