//! The redo of pages that recovery has left pending (`redo/pending.rs`).
//!
//! A thread redoes them after the opening, a part at a time, with a pause after each, so that it
//! leaves most of the device to others. A checkpoint redoes those that are left before it lets the
//! log give up their records.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use vellum_pool::{PageRef, PoolError};

use crate::error::{Error, Result};
use crate::redo::log::RedoLog;
use crate::store::pages::PageStore;

/// How long a thread waits for another one that frees a page.
const PAUSE: Duration = Duration::from_millis(1);

/// How often it looks at the page.
const TRIES: u32 = 10_000;

impl PageStore {
    /// Redoes all pages that are pending. The caller is about to write a checkpoint.
    ///
    /// # Errors
    /// What the log or the pool said; a record that does not fit its page.
    pub(crate) fn redo_pending(&self, log: &RedoLog) -> Result<()> {
        while log.pending.left() > 0 {
            self.redo_some(log)?;
        }
        Ok(())
    }

    /// Redoes some of the pages that are pending.
    fn redo_some(&self, log: &RedoLog) -> Result<()> {
        let turn = log.pending.turn();
        log.make_some(&turn)?.into_iter().try_for_each(|page| self.bring_in(log, page))
    }

    /// Has the pool read a page, unless it was freed or is not pending any more.
    fn bring_in(&self, log: &RedoLog, page: PageRef) -> Result<()> {
        let mut tries = 0..TRIES;
        while log.pending.has(page) {
            match self.pool.fix_shared(page) {
                Ok(_) if !log.pending.has(page) => {}
                // A pool that writes no pages reads them, but the file will not have them.
                Ok(_) => {
                    self.check_writable()?;
                    return Err(Error::damaged(page, "it was read, and was not redone"));
                }
                // A thread frees it just now.
                Err(PoolError::PageFree(_)) if tries.next().is_some() => thread::sleep(PAUSE),
                Err(error) if log.pending.has(page) => return Err(error.into()),
                Err(_) => {}
            }
        }
        Ok(())
    }
}

/// The thread that redoes pages. Dropping it ends the thread, after the part that is under way.
#[derive(Debug)]
pub(crate) struct LateRedo {
    ends: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LateRedo {
    /// Starts the thread. Without it, readers and checkpoints redo the pages.
    pub(crate) fn start(pages: Arc<PageStore>, log: Arc<RedoLog>) -> Option<LateRedo> {
        let (ends, ended) = channel::<()>();
        let work = move || {
            let mut pause = PAUSE;
            while log.pending.left() > 0 {
                if ended.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let began = Instant::now();
                match catch_unwind(AssertUnwindSafe(|| pages.redo_some(&log))) {
                    Ok(Ok(())) => pause = PAUSE.max(began.elapsed()),
                    // Readers and checkpoints meet the error, too, if it stays.
                    Ok(Err(error)) => return tracing::warn!("pages are not redone: {error}"),
                    Err(_) => return pages.file.poison_for("the redo of pages panicked"),
                }
            }
            tracing::info!("all pages are redone");
        };
        match Builder::new().name("vellum-redo".into()).spawn(work) {
            Ok(thread) => Some(LateRedo { ends: Some(ends), thread: Some(thread) }),
            Err(error) => {
                tracing::warn!("no thread for the redo of pages could be started: {error}");
                None
            }
        }
    }
}

impl Drop for LateRedo {
    fn drop(&mut self) {
        drop(self.ends.take());
        if let Some(thread) = self.thread.take() {
            // Its panics were caught.
            drop(thread.join());
        }
    }
}
