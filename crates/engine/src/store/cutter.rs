//! The thread that writes the checkpoints of a store with a log, so that changes do not wait for
//! them. A change that finds a checkpoint due asks for one, and goes on.
//!
//! If the thread cannot keep up, the log becomes full. Then the changes that need room wait for the
//! checkpoint, or write it themselves (`PageStore::change`).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::redo::log::RedoLog;
use crate::store::pages::PageStore;

/// How long the thread waits after a checkpoint that failed. Until then changes go on as long as
/// the log has room.
const PAUSE: Duration = Duration::from_secs(1);

/// See the module's documentation. Dropping it ends the thread, after the checkpoint that is under
/// way.
#[derive(Debug)]
pub(crate) struct Cutter {
    log: Arc<RedoLog>,
    thread: Option<JoinHandle<()>>,
}

impl Cutter {
    /// Starts the thread. Without it, changes write the checkpoints.
    pub(crate) fn start(pages: Arc<PageStore>, log: Arc<RedoLog>) -> Option<Cutter> {
        let signal = log.clone();
        let work = move || {
            while log.cut_signal.next() {
                cut(&pages, &log);
                log.cut_signal.end_cut();
            }
        };
        match Builder::new().name("vellum-cut".into()).spawn(work) {
            Ok(thread) => {
                signal.cut_signal.begin();
                Some(Cutter { log: signal, thread: Some(thread) })
            }
            Err(error) => {
                tracing::warn!("no thread for checkpoints could be started: {error}");
                None
            }
        }
    }
}

fn cut(pages: &PageStore, log: &RedoLog) {
    match catch_unwind(AssertUnwindSafe(|| pages.cut_log_in_background(log))) {
        Ok(Ok(())) => {}
        // Changes meet the error, too, if it stays: when the log is full, or at once if it has
        // poisoned the store.
        Ok(Err(error)) => {
            tracing::warn!("a checkpoint failed, and is tried again: {error}");
            log.cut_signal.pause(PAUSE);
        }
        Err(_) => pages.file.poison_for("a checkpoint panicked"),
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.log.cut_signal.end();
        if let Some(thread) = self.thread.take() {
            // Its panics were caught.
            drop(thread.join());
        }
    }
}
