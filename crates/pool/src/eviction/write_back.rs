//! Writing dirty pages to the device, many by one call.
//!
//! The writer of a page holds it shared: readers go on, and threads that change it wait. It copies
//! the first 4 KiB, where formats keep their checksum, and seals the copy, so that no byte changes
//! under readers. The device takes the rest from the surface.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use vellum_vm::PAGE_SIZE;

use crate::core::Core;
use crate::device::{Device, Write};
use crate::error::PoolError;
use crate::page::PageRef;
use crate::statistics::counters::Event;
use crate::sync::{Condvar, Mutex, lock, wait};

/// Pages that this thread holds shared to write them. Dropping it unlocks them, also when a panic
/// of the device or the format unwinds the thread.
#[derive(Debug)]
pub(crate) struct HeldPages<'a> {
    core: &'a Core,
    pages: Vec<PageRef>,
    /// Those that had the clock's mark.
    marked: Vec<PageRef>,
}

impl<'a> HeldPages<'a> {
    pub(crate) fn none(core: &'a Core) -> HeldPages<'a> {
        HeldPages { core, pages: Vec::new(), marked: Vec::new() }
    }

    /// Takes over a page that the caller holds shared. A page that had the clock's mark gets it
    /// again.
    pub(crate) fn push(&mut self, page: PageRef, was_marked: bool) {
        self.pages.push(page);
        if was_marked {
            self.marked.push(page);
        }
    }

    /// Unlocks the pages whose bytes are not wanted. One whose word is damaged stays: its write
    /// says so.
    pub(crate) fn keep(&mut self, is_wanted: &dyn Fn(&[u8]) -> bool) {
        let core = self.core;
        self.marked.sort_unstable();
        let marked = &self.marked;
        self.pages.retain(|&page| {
            // SAFETY: this thread holds the page shared, and it is resident because it is held.
            let keeps = unsafe { core.bytes(page) }.map_or(true, is_wanted);
            if !keeps {
                unlock(core, page, marked);
            }
            keeps
        });
    }

    /// Puts the pages into the order of the file.
    pub(crate) fn sort(&mut self) {
        self.pages.sort_unstable();
    }

    /// Hands the pages over to the caller, which holds them from now on.
    pub(crate) fn take(mut self) -> Vec<PageRef> {
        std::mem::take(&mut self.pages)
    }
}

impl Drop for HeldPages<'_> {
    fn drop(&mut self) {
        self.marked.sort_unstable();
        self.pages.iter().for_each(|page| unlock(self.core, *page, &self.marked));
    }
}

/// Ends a shared hold. The marked pages are in order.
fn unlock(core: &Core, page: PageRef, marked: &[PageRef]) {
    match marked.binary_search(&page) {
        Ok(_) => core.unlock_shared_marked(page),
        Err(_) => core.unlock_shared(page),
    }
}

/// A write that has not returned. Dropping it poisons the pool: a panic of the device has ended the
/// write, and the outcome is unknown.
struct Unfinished<'a>(&'a Core);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.poison_for("the device panicked while pages were written");
    }
}

/// Writes to the device by one call. A panic of the device poisons the pool.
pub(crate) fn write_to(device: &dyn Device, core: &Core, writes: &mut [Write<'_>]) {
    let started = Instant::now();
    let unfinished = Unfinished(core);
    device.write(writes);
    std::mem::forget(unfinished);
    core.write_latency.record(started.elapsed(), writes.len() as u64);
}

/// Writes dirty pages, up to a batch by one call, and keeps the buffers for the copies of their
/// first 4 KiB.
#[derive(Debug)]
pub(crate) struct Writer {
    /// The most pages of one batch, whatever the size of the pool.
    most: usize,
    batch: AtomicUsize,
    idle: Mutex<Vec<Heads>>,
    under_way: Mutex<UnderWay>,
    /// Signals that a call has ended.
    ended: Condvar,
}

/// The writes that the device is making.
#[derive(Debug, Default)]
struct UnderWay {
    /// The number of the next call.
    next: u64,
    numbers: Vec<u64>,
}

impl Writer {
    /// For batches of up to `most` pages, in a pool of `capacity` frames.
    pub(crate) fn new(most: usize, capacity: u64) -> Writer {
        Writer {
            most,
            batch: AtomicUsize::new(batch_of(most, capacity)),
            idle: Mutex::default(),
            under_way: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// The pool has so many frames from now on.
    pub(crate) fn note_capacity(&self, capacity: u64) {
        self.batch.store(batch_of(self.most, capacity), Ordering::Relaxed);
    }

    /// The pages of one batch, at most.
    pub(crate) fn batch(&self) -> usize {
        self.batch.load(Ordering::Relaxed)
    }

    /// Writes pages, at most a batch of them, and calls those clean that the device has written.
    /// The results are in the order of the pages.
    pub(crate) fn write(
        &self,
        device: &dyn Device,
        held: &HeldPages<'_>,
    ) -> Vec<Result<(), PoolError>> {
        let HeldPages { core, pages, .. } = held;
        assert!(pages.len() <= self.most);
        if pages.is_empty() {
            return Vec::new();
        }
        let idle = lock(&self.idle).pop();
        let mut heads = idle.unwrap_or_else(|| Heads::new(self.most));
        let results = self.write_sealed(core, device, pages, &mut heads);
        lock(&self.idle).push(heads);
        results
    }

    fn write_sealed(
        &self,
        core: &Core,
        device: &dyn Device,
        pages: &[PageRef],
        heads: &mut Heads,
    ) -> Vec<Result<(), PoolError>> {
        let mut newest_lsn = 0;
        let mut writes = Vec::with_capacity(pages.len());
        let mut results: Vec<_> = pages.iter().map(|_| Ok(())).collect();
        for ((at, page), head) in pages.iter().enumerate().zip(heads.iter_mut()) {
            // SAFETY: the caller holds the page shared, and it is resident because it is held.
            let (in_memory, body) = match unsafe { core.bytes(*page) } {
                Ok(bytes) => bytes.split_at(PAGE_SIZE),
                Err(damaged) => {
                    // The file keeps what it has, and the page stays dirty.
                    results[at] = Err(damaged);
                    continue;
                }
            };
            head.copy_from_slice(in_memory);
            newest_lsn = newest_lsn.max(core.format.seal(*page, head, body));
            writes.push((at, Write { page: page.id.0, parts: [head, body], result: Ok(()) }));
        }
        // A checkpoint may have written pages while the caller held them. If it has written all,
        // there is nothing to ask the format.
        let is_dirty = |page: &PageRef| core.held(*page).load().is_dirty();
        let still_dirty = || pages.iter().any(is_dirty);
        if still_dirty()
            && let Err(error) = core.format.write_ahead(newest_lsn, &still_dirty)
        {
            let refuse = |_| {
                let again = std::io::Error::new(error.kind(), error.to_string());
                let error = PoolError::WriteAhead(again);
                core.poison(&error);
                Err(error)
            };
            return pages.iter().map(refuse).collect();
        }
        // From here on `wait` waits for these writes. So a checkpoint that finds a page clean, or
        // makes it clean, and then waits, knows that nothing writes the page any more.
        let under_way = self.begin();
        let of_dirty = writes.into_iter().filter(|(at, _)| is_dirty(&pages[*at]));
        let (places, mut writes): (Vec<usize>, Vec<_>) = of_dirty.unzip();
        if !writes.is_empty() {
            write_to(device, core, &mut writes);
        }
        for (at, write) in places.into_iter().zip(writes) {
            let page = pages[at];
            match write.result {
                Ok(()) => {
                    core.clear_dirty(page);
                    core.counters.count(Event::WriteBack);
                }
                Err(source) => {
                    let error = PoolError::Write { page, source };
                    core.poison(&error);
                    results[at] = Err(error);
                }
            }
        }
        // Last: a thread that waits for the writes finds their failure then.
        drop(under_way);
        results
    }

    fn begin(&self) -> WritesUnderWay<'_> {
        let mut under_way = lock(&self.under_way);
        let number = under_way.next;
        under_way.next += 1;
        under_way.numbers.push(number);
        WritesUnderWay { writer: self, number }
    }

    /// Waits until the device has made the writes that are under way.
    pub(crate) fn wait(&self) {
        let mut under_way = lock(&self.under_way);
        let end = under_way.next;
        while under_way.numbers.iter().any(|number| *number < end) {
            under_way = wait(&self.ended, under_way);
        }
    }
}

/// The most pages that a pool of `capacity` frames writes and evicts together, if the caller asked
/// for batches of `most`.
pub(crate) fn batch_of(most: usize, capacity: u64) -> usize {
    most.clamp(1, usize::try_from(capacity / 16).unwrap_or(usize::MAX).max(1))
}

/// The writes of one call, under way. A panic of the device ends them, too.
struct WritesUnderWay<'a> {
    writer: &'a Writer,
    number: u64,
}

impl Drop for WritesUnderWay<'_> {
    fn drop(&mut self) {
        let mut under_way = lock(&self.writer.under_way);
        under_way.numbers.retain(|number| *number != self.number);
        self.writer.ended.notify_all();
    }
}

/// Aligned buffers of 4 KiB each.
#[derive(Debug)]
struct Heads {
    base: NonNull<u8>,
    count: usize,
}

// SAFETY: it owns its memory as a boxed slice does.
unsafe impl Send for Heads {}

impl Heads {
    fn layout(count: usize) -> Layout {
        Layout::from_size_align(count * PAGE_SIZE, PAGE_SIZE).expect("a batch is far below 2^63")
    }

    fn new(count: usize) -> Heads {
        let layout = Self::layout(count.max(1));
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        Heads { base, count: count.max(1) }
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let bytes = self.count * PAGE_SIZE;
        // SAFETY: this memory is ours, `bytes` long, and was zeroed when it was allocated.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), bytes) }
            .chunks_exact_mut(PAGE_SIZE)
    }
}

impl Drop for Heads {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.base.as_ptr(), Self::layout(self.count)) };
    }
}
