//! How far a backup or a restore is, how fast it may go, and whether it shall end.

use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// The longest time between two calls of the caller's function while a backup waits for its turn.
const PAUSE: Duration = Duration::from_millis(20);

/// The progress of a backup or a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackupProgress {
    /// Bytes that were read, to copy or to check them.
    pub bytes_done: u64,
    /// Bytes to read in all. An estimate: a store changes while it is copied.
    pub bytes_total: u64,
}

/// A function that is told the progress, and may end the work.
type Tell<'f> = dyn FnMut(BackupProgress) -> ControlFlow<()> + 'f;

/// See the module's documentation.
pub(super) struct BackupPace<'f> {
    tell: &'f mut Tell<'f>,
    done: u64,
    total: u64,
    bytes_per_second: Option<u64>,
    /// The limit counts from here on.
    began: Instant,
    limited: u64,
}

impl<'f> BackupPace<'f> {
    pub(super) fn new(tell: &'f mut Tell<'f>, bytes_per_second: Option<u64>) -> BackupPace<'f> {
        let began = Instant::now();
        BackupPace { tell, done: 0, total: 0, bytes_per_second, began, limited: 0 }
    }

    /// There are so many more bytes to read.
    pub(super) fn expect(&mut self, bytes: u64) {
        self.total += bytes;
    }

    /// Bytes were read.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub(super) fn advance(&mut self, bytes: u64) -> Result<()> {
        self.done += bytes;
        self.total = self.total.max(self.done);
        let progress = BackupProgress { bytes_done: self.done, bytes_total: self.total };
        match (self.tell)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Cancelled),
        }
    }

    /// Bytes were read from the store: waits if that was faster than the limit. Calls `meanwhile`
    /// from time to time.
    ///
    /// # Errors
    /// [`Error::Cancelled`], the error of `meanwhile`.
    pub(super) fn advance_within_limit(
        &mut self,
        bytes: u64,
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        self.advance(bytes)?;
        meanwhile()?;
        let Some(limit) = self.bytes_per_second else { return Ok(()) };
        self.limited += bytes;
        let due = Duration::from_secs_f64(self.limited as f64 / limit.max(1) as f64);
        loop {
            let left = due.saturating_sub(self.began.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(PAUSE));
            self.advance(0)?;
            meanwhile()?;
        }
    }
}
