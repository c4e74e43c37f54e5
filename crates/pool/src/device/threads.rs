//! The I/O engine for kernels and sandboxes without io_uring: a few threads that read and write.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use super::Write;
use super::transfer::{IoEngine, ReadRequest, write_blocking, write_runs};
use super::workers::{Job, Workers, lock, wait};

/// Threads per device. Each keeps one read or write in flight; writers help themselves too.
const THREADS: usize = 4;

/// Reads and writes by threads.
#[derive(Debug)]
pub(super) struct ThreadEngine {
    file: Arc<File>,
    workers: Workers,
}

impl ThreadEngine {
    /// Starts the threads.
    pub(super) fn new(file: Arc<File>) -> io::Result<Self> {
        Ok(Self { file, workers: Workers::start(THREADS)? })
    }
}

impl IoEngine for ThreadEngine {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn start_reads(&self, reads: Vec<ReadRequest>) {
        self.workers.run(reads.into_iter().map(|read| {
            let file = Arc::clone(&self.file);
            Box::new(move || read.run(&file)) as Job
        }));
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        let shared = Arc::new(SharedWrites::new(Arc::clone(&self.file), writes));
        let helpers = self.workers.count().min(shared.runs.len().saturating_sub(1));
        self.workers.run((0..helpers).map(|_| {
            let shared = Arc::clone(&shared);
            Box::new(move || shared.help()) as Job
        }));
        shared.help();
        for (write, result) in writes.iter_mut().zip(shared.finish()) {
            write.result = result;
        }
    }
}

/// The writes of one call, which several threads share, run by run. Their lifetime is erased: a
/// thread looks at an entry only after it claims and before it finishes the entry, and the owner
/// waits until all are finished.
struct SharedWrites {
    file: Arc<File>,
    entries: *const Write<'static>,
    len: usize,
    runs: Vec<Range<usize>>,
    next: AtomicUsize,
    results: Mutex<Results>,
    all_done: Condvar,
}

struct Results {
    results: Vec<io::Result<()>>,
    done: usize,
}

#[allow(unsafe_code)]
// SAFETY: the entries are only read, and only while the owner of the borrow waits in `finish`.
unsafe impl Send for SharedWrites {}
#[allow(unsafe_code)]
// SAFETY: as above; everything else is Sync by itself.
unsafe impl Sync for SharedWrites {}

impl SharedWrites {
    fn new(file: Arc<File>, writes: &[Write<'_>]) -> Self {
        let results = writes.iter().map(|_| Ok(())).collect();
        Self {
            file,
            entries: writes.as_ptr().cast(),
            len: writes.len(),
            runs: write_runs(writes),
            next: AtomicUsize::new(0),
            results: Mutex::new(Results { results, done: 0 }),
            all_done: Condvar::new(),
        }
    }

    /// Claims and writes runs until none is left. A helper that starts late finds none.
    fn help(&self) {
        while let Some(run) = self.runs.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            #[allow(unsafe_code)]
            // SAFETY: the run is within the entries and was claimed by this thread alone, and the
            // owner keeps the entries in place until these count as done, below.
            let entries =
                unsafe { std::slice::from_raw_parts(self.entries.add(run.start), run.len()) };
            let whole = write_blocking(&self.file, entries);
            // Writes the entries of a failed run one by one, so that each gets its own result.
            let written: Vec<_> = match whole {
                Err(_) if entries.len() > 1 => {
                    entries.chunks(1).map(|entry| write_blocking(&self.file, entry)).collect()
                }
                Err(error) => vec![Err(error)],
                Ok(()) => entries.iter().map(|_| Ok(())).collect(),
            };
            let mut results = lock(&self.results);
            results.done += written.len();
            results.results.splice(run.clone(), written);
            if results.done == self.len {
                self.all_done.notify_all();
            }
        }
    }

    /// Waits until all entries are finished.
    fn finish(&self) -> Vec<io::Result<()>> {
        let mut results = lock(&self.results);
        while results.done < self.len {
            results = wait(&self.all_done, results);
        }
        std::mem::take(&mut results.results)
    }
}
