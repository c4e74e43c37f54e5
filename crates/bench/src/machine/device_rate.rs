//! The rate of a device, measured in the same run as the engines on it: random reads of 4 KiB by
//! threads that wait for each read or keep a queue, and large sequential reads.
//!
//! All reads bypass the page cache. The file has data that does not compress. Only the part before
//! its first hole is read, because the kernel does not read holes from the device.

mod ring;

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::fs::SeekFrom;

pub use ring::PAGE;
use ring::Page;

use super::page_cache;
use crate::workload::values::{Random, fill};

/// Bytes of a sequential read.
const BLOCK: u64 = 1 << 20;

/// Sequential reads under way at a time.
const BLOCKS: u32 = 8;

/// How a thread reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMethod {
    /// One read after the other, waiting for each.
    Wait,
    /// This many reads in flight at a time, through `io_uring`.
    Queue(u32),
}

/// A file whose device is measured.
#[derive(Debug)]
pub struct DeviceRate {
    file: File,
    bytes: u64,
}

impl DeviceRate {
    /// Opens a file for direct reads.
    ///
    /// # Errors
    /// If it is too short, mostly holes, or on a file system that cannot read directly.
    pub fn open(path: &Path) -> Result<DeviceRate> {
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap_or(0);
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(direct)
            .open(path)
            .with_context(|| format!("cannot open {} for direct reads", path.display()))?;
        let length = file.metadata()?.len();
        // If the file system has no holes, this is the end of the file.
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(0)).unwrap_or(length);
        let bytes = hole.min(length) / PAGE * PAGE;
        if bytes < length / 4 * 3 {
            bail!("{} has a hole at {hole} of {length} bytes", path.display());
        }
        if bytes < BLOCK * u64::from(BLOCKS) {
            bail!("{} has only {bytes} bytes: too short to measure its device", path.display());
        }
        Ok(DeviceRate { file, bytes })
    }

    /// Writes a file of `bytes` that do not compress and opens it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn fill(path: &Path, bytes: u64) -> Result<DeviceRate> {
        let write = || -> std::io::Result<()> {
            let mut file = BufWriter::with_capacity(BLOCK as usize, File::create(path)?);
            let mut page = [0; PAGE as usize];
            for number in 0..bytes / PAGE {
                fill(number, &mut page);
                file.write_all(&page)?;
            }
            file.into_inner().map_err(|error| error.into_error())?.sync_all()
        };
        write().with_context(|| format!("cannot fill {} with {bytes} bytes", path.display()))?;
        page_cache::drop_cached(path)?;
        DeviceRate::open(path)
    }

    /// Random reads of a page a second, by `threads` threads together.
    ///
    /// # Errors
    /// If a read fails or is short, or there is no `io_uring`.
    pub fn random(
        &self,
        threads: usize,
        method: ReadMethod,
        time: Duration,
        seed: u64,
    ) -> Result<f64> {
        let pages = self.bytes / PAGE;
        let place = |thread: usize| {
            let mut random = Random::new(seed.wrapping_mul(1009).wrapping_add(thread as u64));
            move || random.below(pages) * PAGE
        };
        together(threads, time, |thread, stop, count| match method {
            ReadMethod::Wait => self.read_waiting(place(thread), stop, count),
            ReadMethod::Queue(depth) => {
                ring::read(&self.file, PAGE, depth, &mut place(thread), stop, count)
            }
        })
    }

    /// MiB a second of large sequential reads, a few of them in flight at a time. After the end
    /// they start again at the beginning.
    ///
    /// # Errors
    /// If a read fails or is short, or there is no `io_uring`.
    pub fn sequential(&self, time: Duration) -> Result<f64> {
        let blocks = self.bytes / BLOCK;
        let rate = together(1, time, |_, stop, count| {
            let mut places = (0..).map(|number| number % blocks * BLOCK);
            let mut place = || places.next().unwrap_or_default();
            ring::read(&self.file, BLOCK, BLOCKS, &mut place, stop, count)
        })?;
        Ok(rate * (BLOCK >> 20) as f64)
    }

    fn read_waiting(
        &self,
        mut place: impl FnMut() -> u64,
        stop: &AtomicBool,
        count: &AtomicU64,
    ) -> Result<()> {
        let mut page = Box::new(Page([0; PAGE as usize]));
        while !stop.load(Ordering::Relaxed) {
            let place = place();
            let read = rustix::io::pread(&self.file, &mut page.0[..], place)
                .with_context(|| format!("reading at {place}"))?;
            if read as u64 != PAGE {
                bail!("a read at {place} gave only {read} bytes");
            }
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Runs `work` in `threads` threads for a while; returns their count a second.
fn together(
    threads: usize,
    time: Duration,
    work: impl Fn(usize, &AtomicBool, &AtomicU64) -> Result<()> + Sync,
) -> Result<f64> {
    let (begin, stop) = (Barrier::new(threads + 1), AtomicBool::new(false));
    let counts: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(0)).collect();
    let sum = || counts.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>();
    let run = |thread: usize| {
        begin.wait();
        work(thread, &stop, &counts[thread])
    };
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        begin.wait();
        let start = Instant::now();
        thread::sleep(time);
        let (done, seconds) = (sum(), start.elapsed().as_secs_f64());
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a reading thread panicked"))??;
        }
        Ok(done as f64 / seconds)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_of_reading_reads() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        let rate = DeviceRate::fill(&path, 16 << 20).unwrap();
        let time = Duration::from_millis(100);
        // On a busy machine a thread or its device may need longer to begin.
        let first = |least: f64, rate_of: &dyn Fn(u64) -> f64| {
            (1..=300).map(rate_of).find(|rate| *rate >= least).unwrap()
        };
        for method in [ReadMethod::Wait, ReadMethod::Queue(1), ReadMethod::Queue(32)] {
            for threads in [1, 2] {
                let reads = first(10.0, &|seed| rate.random(threads, method, time, seed).unwrap());
                assert!(reads < 50e6, "{method:?}, {threads}: {reads}");
            }
        }
        let sequential = first(1.0, &|_| rate.sequential(time).unwrap());
        assert!(sequential < 1e6, "{sequential}");
    }

    #[test]
    fn a_file_that_shrinks_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        let rate = DeviceRate::fill(&path, 16 << 20).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(4 << 20).unwrap();
        for method in [ReadMethod::Wait, ReadMethod::Queue(8)] {
            // In so short a time a busy machine may not reach the missing part.
            let read = |seed| rate.random(1, method, Duration::from_millis(50), seed);
            let error = (1..=600).find_map(|seed| read(seed).err()).unwrap();
            assert!(format!("{error:#}").contains("only"), "{error:#}");
        }
    }

    #[test]
    fn holes_are_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        DeviceRate::fill(&path, 16 << 20).unwrap();
        let lengthen = |bytes| {
            OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
            DeviceRate::open(&path)
        };
        assert_eq!(lengthen(20 << 20).unwrap().bytes, 16 << 20);
        let error = lengthen(32 << 20).unwrap_err().to_string();
        assert!(error.contains("has a hole"), "{error}");
    }

    #[test]
    fn a_short_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data");
        let error = DeviceRate::fill(&path, 1 << 20).unwrap_err();
        assert!(error.to_string().contains("too short"), "{error}");
    }
}
