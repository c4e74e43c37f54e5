//! The buffer manager: accesses, misses, replacement, write-back.

#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::latch::{Latch, Swept};
use super::memory::{FrameMemory, Words};
use super::storage::Storage;
use super::table::{FRAMES_MAX, PAGES_MAX, Table};

/// No page.
const NONE: u64 = u64::MAX;

/// How long a miss looks for a frame that it can have.
const PATIENCE: Duration = Duration::from_secs(1);

/// Looks at a latch before the thread gives its processor away.
const SPINS: u32 = 64;

/// Why an access failed.
#[derive(Debug)]
pub enum Error {
    /// Threads hold all frames.
    AllPinned,
    /// The page could not be read.
    Read(u64, io::Error),
    /// A page could not be written, which has to leave.
    Write(u64, io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::AllPinned => f.write_str("all frames are pinned"),
            Error::Read(page, error) => write!(f, "reading page {page}: {error}"),
            Error::Write(page, error) => write!(f, "writing page {page}: {error}"),
        }
    }
}

impl std::error::Error for Error {}

/// What a frame's memory holds: two words. Four frames share a line of the cache.
#[derive(Clone, Copy, Debug)]
struct Frame<'a> {
    latch: Latch<'a>,
    /// The page, or [`NONE`]. Changes only under the exclusive latch.
    page: &'a AtomicU64,
}

impl Frame<'_> {
    /// Waits while a thread has the frame with this page for itself, and notes that it is in use.
    #[cold]
    #[inline(never)]
    fn wait_until_readable(self, page: u64) {
        let mut looks = 0;
        // A free frame stays latched, and its page is another one.
        while self.latch.seen().is_exclusive() && self.page.load(Ordering::Relaxed) == page {
            looks += 1;
            if looks < SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
        self.latch.unmark();
    }
}

/// What misses change, on lines of the cache that hits do not read.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Misses {
    /// Frames from here on were never used.
    fresh: AtomicUsize,
    /// Frames without a page, each exclusively latched.
    free: Mutex<Vec<u32>>,
    /// Whether there are some, so that a miss need not lock.
    has_free: AtomicBool,
    /// The hand of the clock.
    hand: AtomicUsize,
    /// Pages that were read.
    read: AtomicU64,
    /// Pages that were written.
    written: AtomicU64,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Textbook<S> {
    storage: S,
    memory: FrameMemory,
    /// Two words for each frame.
    headers: Words,
    frames: usize,
    table: Table,
    misses: Misses,
    patience: Duration,
}

impl<S: Storage> Textbook<S> {
    /// A manager with so many frames.
    ///
    /// # Errors
    /// No memory, no frames, too many frames.
    pub fn new(storage: S, frames: u64) -> Result<Textbook<S>> {
        ensure!((1..FRAMES_MAX).contains(&frames), "{frames} frames are not possible");
        let manager = Textbook {
            storage,
            memory: FrameMemory::new(frames)?,
            headers: Words::new(2 * frames)?,
            frames: frames as usize,
            table: Table::new(frames)?,
            misses: Misses::default(),
            patience: PATIENCE,
        };
        for number in 0..manager.frames {
            manager.frame(number).latch.take_new();
            manager.frame(number).page.store(NONE, Ordering::Relaxed);
        }
        Ok(manager)
    }

    #[inline(always)]
    fn frame(&self, number: usize) -> Frame<'_> {
        let words = &self.headers.all()[2 * number..][..2];
        Frame { latch: Latch(&words[0]), page: &words[1] }
    }

    /// As it is, but a miss looks for a frame no longer than this.
    #[cfg(test)]
    pub fn with_patience(self, patience: Duration) -> Textbook<S> {
        Textbook { patience, ..self }
    }

    /// Where its pages come from.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// Bytes of memory beside the frames.
    pub fn overhead(&self) -> u64 {
        self.table.bytes() + size_of_val(self.headers.all()) as u64
    }

    /// Pages that were read from storage so far.
    pub fn pages_read(&self) -> u64 {
        self.misses.read.load(Ordering::Relaxed)
    }

    /// Pages that were written to storage so far.
    pub fn pages_written(&self) -> u64 {
        self.misses.written.load(Ordering::Relaxed)
    }

    /// Eight bytes of a page, without a latch: the version of the frame's latch says whether they
    /// are those of the page, and of one state of it.
    ///
    /// # Errors
    /// [`Error`].
    #[inline(always)]
    pub fn word(&self, page: u64, offset: usize) -> Result<u64, Error> {
        loop {
            let number = match self.table.find(page) {
                Some(number) => number as usize,
                None => self.miss(page)?,
            };
            let frame = self.frame(number);
            let seen = frame.latch.seen();
            if seen.is_readable() {
                if frame.page.load(Ordering::Relaxed) == page {
                    let word = self.memory.racy_word(number, offset);
                    if frame.latch.validate(seen) {
                        return Ok(word);
                    }
                }
            } else {
                frame.wait_until_readable(page);
            }
        }
    }

    /// Pins a page, to read it.
    ///
    /// # Errors
    /// [`Error`].
    #[inline(always)]
    pub fn pin(&self, page: u64) -> Result<Pinned<'_, S>, Error> {
        loop {
            let number = match self.table.find(page) {
                Some(number) => number as usize,
                None => self.miss(page)?,
            };
            let frame = self.frame(number);
            if !frame.latch.try_pin() {
                frame.wait_until_readable(page);
                continue;
            }
            if frame.page.load(Ordering::Relaxed) == page {
                return Ok(Pinned { manager: self, number });
            }
            frame.latch.unpin();
        }
    }

    /// Takes a page for this thread alone. It is dirty afterwards.
    ///
    /// # Errors
    /// [`Error`].
    pub fn change(&self, page: u64) -> Result<Exclusive<'_, S>, Error> {
        loop {
            let number = match self.table.find(page) {
                Some(number) => number as usize,
                None => self.miss(page)?,
            };
            let latch = self.frame(number).latch;
            if !latch.try_exclusive() {
                thread::yield_now();
                continue;
            }
            if self.page_of(number) == page {
                return Ok(Exclusive { manager: self, number });
            }
            latch.release(latch.seen().is_dirty());
        }
    }

    fn page_of(&self, number: usize) -> u64 {
        self.frame(number).page.load(Ordering::Relaxed)
    }

    /// Looks for the page again, and reads it if it is not there. Returns its frame, which may have
    /// lost it again.
    #[cold]
    #[inline(never)]
    fn miss(&self, page: u64) -> Result<usize, Error> {
        if page >= PAGES_MAX {
            return Err(Error::Read(page, io::ErrorKind::InvalidInput.into()));
        }
        if let Some(number) = self.table.latch(page).find() {
            return Ok(number as usize);
        }
        let number = self.take_frame()?;
        {
            let mut bucket = self.table.latch(page);
            if let Some(other) = bucket.find() {
                drop(bucket);
                self.give_back(number);
                return Ok(other as usize);
            }
            // Threads that find the page wait for the latch, which this thread has.
            self.frame(number).page.store(page, Ordering::Relaxed);
            bucket.insert(number as u32);
        }
        // SAFETY: this thread has the frame for itself.
        match self.storage.read(page, unsafe { self.memory.bytes_mut(number) }) {
            Ok(()) => {
                self.misses.read.fetch_add(1, Ordering::Relaxed);
                self.frame(number).latch.release(false);
                Ok(number)
            }
            Err(error) => {
                self.forget(number);
                self.give_back(number);
                Err(Error::Read(page, error))
            }
        }
    }

    /// The page of a frame, which this thread has for itself, is no longer in memory.
    fn forget(&self, number: usize) {
        self.table.latch(self.page_of(number)).remove();
        self.frame(number).page.store(NONE, Ordering::Relaxed);
    }

    fn lock_free(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.misses.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A frame without a page, which this thread has for itself, becomes free. It stays latched.
    fn give_back(&self, number: usize) {
        self.lock_free().push(number as u32);
        self.misses.has_free.store(true, Ordering::Release);
    }

    /// A frame without a page, for this thread alone.
    fn take_frame(&self) -> Result<usize, Error> {
        if self.misses.fresh.load(Ordering::Relaxed) < self.frames {
            let number = self.misses.fresh.fetch_add(1, Ordering::Relaxed);
            if number < self.frames {
                return Ok(number);
            }
        }
        let mut since = None;
        loop {
            if self.misses.has_free.load(Ordering::Acquire) {
                let mut free = self.lock_free();
                let number = free.pop();
                self.misses.has_free.store(!free.is_empty(), Ordering::Release);
                if let Some(number) = number {
                    return Ok(number as usize);
                }
            }
            if let Some(number) = self.evict()? {
                return Ok(number);
            }
            if since.get_or_insert_with(Instant::now).elapsed() > self.patience {
                return Err(Error::AllPinned);
            }
            thread::yield_now();
        }
    }

    /// The hand of the clock goes on until it finds a page that no thread uses, and evicts that.
    /// Returns the frame, for this thread alone; none if the hand went round three times.
    fn evict(&self) -> Result<Option<usize>, Error> {
        for _ in 0..3 * self.frames {
            let number = self.misses.hand.fetch_add(1, Ordering::Relaxed) % self.frames;
            if self.frame(number).latch.sweep() == Swept::Claimed {
                self.write_back(number)?;
                self.forget(number);
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Writes a frame's page if it is dirty. This thread has the frame for itself, and no longer
    /// after an error.
    fn write_back(&self, number: usize) -> Result<(), Error> {
        let latch = self.frame(number).latch;
        if !latch.seen().is_dirty() {
            return Ok(());
        }
        let page = self.page_of(number);
        // SAFETY: this thread has the frame for itself.
        let written = self.storage.write(page, unsafe { self.memory.bytes(number) });
        if let Err(error) = written {
            latch.release(true);
            return Err(Error::Write(page, error));
        }
        latch.clean();
        self.misses.written.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Writes all dirty pages, and waits until they are durable.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn flush(&self) -> Result<(), Error> {
        for number in 0..self.frames {
            let frame = self.frame(number);
            while frame.latch.seen().is_dirty() {
                if frame.latch.try_exclusive() {
                    self.write_back(number)?;
                    frame.latch.release(false);
                } else {
                    thread::yield_now();
                }
            }
        }
        self.storage.sync().map_err(|error| Error::Write(NONE, error))
    }
}

/// A page that stays in memory, and does not change, as long as this lives.
#[derive(Debug)]
pub struct Pinned<'a, S: Storage> {
    manager: &'a Textbook<S>,
    number: usize,
}

impl<S: Storage> Deref for Pinned<'_, S> {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        // SAFETY: the pin keeps others from taking the frame for themselves.
        unsafe { self.manager.memory.bytes(self.number) }
    }
}

impl<S: Storage> Drop for Pinned<'_, S> {
    #[inline(always)]
    fn drop(&mut self) {
        self.manager.frame(self.number).latch.unpin();
    }
}

/// A page that one thread has for itself.
#[derive(Debug)]
pub struct Exclusive<'a, S: Storage> {
    manager: &'a Textbook<S>,
    number: usize,
}

impl<S: Storage> Deref for Exclusive<'_, S> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: this thread has the frame for itself.
        unsafe { self.manager.memory.bytes(self.number) }
    }
}

impl<S: Storage> DerefMut for Exclusive<'_, S> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the slice borrows the guard.
        unsafe { self.manager.memory.bytes_mut(self.number) }
    }
}

impl<S: Storage> Drop for Exclusive<'_, S> {
    fn drop(&mut self) {
        self.manager.frame(self.number).latch.release(true);
    }
}
