//! Watches how much memory the demonstration uses, by the pool's count and by the kernel's.
//!
//! The kernel's count of the surface's pages comes from the page table. It takes a moment, so it is
//! exact only while no page is populated or released: between the phases. During the phases a
//! thread samples the memory of the whole process, which the kernel keeps as one number.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use vellum::Store;
use vellum_vm::PAGE_SIZE;

use crate::error::{Failure, Outcome};
use crate::size;

/// Time between two samples.
const SAMPLE_EVERY: Duration = Duration::from_millis(20);

/// The peaks so far, in bytes.
#[derive(Debug, Default)]
pub struct MemoryWatch {
    /// By the pool's count.
    pub pool_peak: u64,
    /// By the kernel's count of the surface, between phases; `None` if the kernel has no count.
    pub surface_peak: Option<u64>,
    /// Private memory of the whole process.
    pub process_peak: AtomicU64,
    /// The same before the store was opened.
    pub process_before: u64,
}

impl MemoryWatch {
    /// Starts before the store is opened.
    pub fn new() -> Self {
        Self { process_before: process_memory().unwrap_or(0), ..Self::default() }
    }

    /// Runs `work`, and samples the memory of the process meanwhile.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sampler = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let bytes = process_memory().unwrap_or(0);
                    self.process_peak.fetch_max(bytes, Ordering::Relaxed);
                    std::thread::park_timeout(SAMPLE_EVERY);
                }
            });
            let result = work();
            done.store(true, Ordering::Relaxed);
            sampler.thread().unpark();
            result
        })
    }

    /// Takes the exact counts. The caller runs no operation meanwhile.
    ///
    /// # Errors
    /// When the pool holds, or has held, more memory than it may.
    pub fn at_rest(&mut self, store: &Store) -> Outcome {
        let stats = store.pool_stats();
        let bytes = |frames: u64| frames * PAGE_SIZE as u64;
        let capacity = bytes(stats.capacity_frames);
        self.pool_peak = self.pool_peak.max(bytes(stats.resident_frames_peak));
        if let Ok(pages) = store.pool().kernel_resident_pages() {
            self.surface_peak = self.surface_peak.max(Some(bytes(pages)));
        }
        let most = self.pool_peak.max(self.surface_peak.unwrap_or(0));
        if most <= capacity {
            return Ok(());
        }
        let (most, capacity) = (size::show(most), size::show(capacity));
        Err(Failure::message(format!("the pool of {capacity} held {most}: this is a bug")))
    }
}

/// Private memory of this process in bytes: `RssAnon` of `/proc/self/status`.
fn process_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_comes_and_goes_is_seen() {
        let watch = MemoryWatch::new();
        assert!(watch.process_before > 0);
        watch.during(|| {
            let block = std::hint::black_box(vec![1_u8; 64 << 20]);
            std::thread::sleep(3 * SAMPLE_EVERY);
            drop(block);
        });
        assert!(watch.process_peak.into_inner() >= watch.process_before + (60 << 20));
    }
}
