//! Helpers of the tests of devices: aligned memory, known contents, counting callbacks, mounts.
#![allow(unsafe_code, dead_code, unused_imports, clippy::unwrap_used)]

use std::ffi::CString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};

use vellum_pool::device::{
    Device, Direct, FileDevice, FileOptions, IoEngineChoice, ReadDone, Write,
};
pub use vellum_testing::patience::PATIENCE;
use vellum_vm::{BackendChoice, PAGE_SIZE, PageRange, Surface};

#[repr(align(4096))]
#[derive(Clone)]
struct Page([u8; PAGE_SIZE]);

/// Aligned memory.
pub struct Buffer(Vec<Page>);

impl Buffer {
    pub fn zeroed(pages: u64) -> Self {
        Self(vec![Page([0; PAGE_SIZE]); pages as usize])
    }

    /// The known contents of a range in a generation.
    pub fn of(range: PageRange, generation: u64) -> Self {
        let mut buffer = Self::zeroed(range.count);
        for (page, memory) in (range.start..).zip(&mut buffer.0) {
            let seed = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ generation.rotate_left(40);
            for (word, place) in (0_u64..).zip(memory.0.chunks_exact_mut(8)) {
                place.copy_from_slice(&(seed ^ word << 50).to_le_bytes());
            }
        }
        buffer
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: pages are plain bytes without gaps.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * PAGE_SIZE) }
    }
}

pub fn range(start: u64, count: u64) -> PageRange {
    PageRange { start, count }
}

/// A surface such as a pool has, with a frame for each page.
pub fn surface(pages: u64) -> Surface {
    surface_with_frames(pages, pages)
}

/// As [`surface`], with `frames` frames.
pub fn surface_with_frames(pages: u64, frames: u64) -> Surface {
    Surface::reserve_with_frames(pages, frames, BackendChoice::Auto).unwrap()
}

/// A surface of ordinary memory, whose pages can be protected.
pub fn ordinary_surface(pages: u64) -> Surface {
    Surface::reserve(pages, BackendChoice::Auto).unwrap()
}

/// The bytes of a surface at a range for which no read is in flight.
pub fn bytes(surface: &Surface, range: PageRange) -> Vec<u8> {
    let address = surface.address(range.start).as_ptr();
    // SAFETY: on the surface, and the tests do not change it meanwhile.
    unsafe { std::slice::from_raw_parts(address, range.count as usize * PAGE_SIZE) }.to_vec()
}

/// Releases a range of a surface.
pub fn release(surface: &Surface, range: PageRange) {
    let mut entry = [vellum_vm::Entry::new(range)];
    // SAFETY: nothing uses the range.
    assert_eq!(unsafe { surface.release(&mut entry) }, 0, "{entry:?}");
}

#[track_caller]
pub fn assert_holds(surface: &Surface, range: PageRange, generation: u64) {
    let (got, wanted) = (bytes(surface, range), Buffer::of(range, generation));
    let differs = got.iter().zip(wanted.bytes()).position(|(got, wanted)| got != wanted);
    assert_eq!(differs, None, "first byte of {range:?} that is wrong, generation {generation}");
}

/// Writes known contents to ranges by one call, each in two parts, split at varying places.
pub fn write_all(device: &dyn Device, ranges: &[PageRange], generation: u64) {
    let buffers: Vec<_> = ranges.iter().map(|&range| Buffer::of(range, generation)).collect();
    let mut writes: Vec<_> = ranges
        .iter()
        .zip(&buffers)
        .map(|(range, buffer)| {
            let split = (range.start % (range.count + 1)) as usize * PAGE_SIZE;
            let (head, body) = buffer.bytes().split_at(split);
            Write::new(range.start, [head, body])
        })
        .collect();
    device.write(&mut writes);
    for write in writes {
        write.result.unwrap_or_else(|error| panic!("writing page {}: {error}", write.page));
    }
}

/// Reads in flight, and their results.
pub struct Reads {
    sender: Sender<(usize, io::Result<()>)>,
    receiver: Receiver<(usize, io::Result<()>)>,
    started: usize,
}

impl Reads {
    pub fn new() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver, started: 0 }
    }

    pub fn start(&mut self, device: &dyn Device, surface: &Surface, ranges: &[PageRange]) {
        let reads = ranges.iter().map(|&range| {
            let (sender, number) = (self.sender.clone(), self.started);
            self.started += 1;
            (range.into(), ReadDone::new(move |result| sender.send((number, result)).unwrap()))
        });
        device.start_reads(surface, reads.collect());
    }

    /// Waits for all reads, and returns their results in the order of starting. Each callback must
    /// have been called exactly once.
    pub fn wait(self) -> Vec<io::Result<()>> {
        let mut results: Vec<_> = (0..self.started).map(|_| None).collect();
        for _ in 0..self.started {
            let (number, result) = self.receiver.recv_timeout(PATIENCE).expect("a read is missing");
            assert!(results[number].replace(result).is_none(), "read {number} was done twice");
        }
        drop(self.sender);
        assert!(self.receiver.try_recv().is_err(), "a read was done twice");
        results.into_iter().flatten().collect()
    }

    /// The number of reads that are done.
    pub fn done(&self) -> usize {
        self.receiver.try_iter().count()
    }
}

/// A small mounted file system, for tests that run as root.
pub struct Mounted(tempfile::TempDir);

impl Mounted {
    /// `None`, and a printed line, where mounting is not allowed.
    pub fn new(kind: &str, options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let [kind_c, options_c] = [kind, options].map(|text| CString::new(text).unwrap());
        let target = CString::new(directory.path().to_str().unwrap()).unwrap();
        // SAFETY: all strings are terminated and live through the call.
        let refused = unsafe {
            libc::mount(
                kind_c.as_ptr(),
                target.as_ptr(),
                kind_c.as_ptr(),
                0,
                options_c.as_ptr().cast(),
            )
        };
        if refused != 0 {
            println!("skipped: mounting {kind} failed: {}", io::Error::last_os_error());
            return None;
        }
        Some(Self(directory))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let target = CString::new(self.0.path().to_str().unwrap()).unwrap();
        // SAFETY: a terminated string.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

/// A temporary directory on a real disk and one on tmpfs.
pub fn directories() -> Vec<tempfile::TempDir> {
    let parents = [PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from("/dev/shm")];
    parents.iter().filter_map(|parent| tempfile::tempdir_in(parent).ok()).collect()
}

/// Runs a test on files of all kinds and with all engines.
pub fn on_all_files(test: impl Fn(FileDevice)) {
    for directory in directories() {
        for engine in [IoEngineChoice::Uring, IoEngineChoice::Threads] {
            for direct in [Direct::Auto, Direct::Never] {
                let path = directory.path().join(format!("{engine:?}{direct:?}"));
                let options = FileOptions { engine, direct, ..FileOptions::default() };
                match FileDevice::create(&path, options) {
                    Ok(device) => {
                        println!("{:?}", device.info());
                        test(device);
                    }
                    Err(error) => println!("skipped: {error}"),
                }
            }
        }
    }
}
