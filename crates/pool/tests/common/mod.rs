//! Helpers of the pool's integration tests: storage of every kind, stamped pages, a small executor.

#![allow(dead_code, unused_imports)] // each test program uses a part

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vellum_pool::device::{
    Completion, Device, Direct, FaultPlan, FaultyDevice, FileDevice, FileOptions, IoEngineChoice,
    MemoryDevice,
};
use vellum_pool::{
    BackendChoice, BackendKind, PAGE_SIZE, PageFormat, PageReader, PageRef, Pool, PoolOptions,
    PoolSize, RawPages, Space, StatePlace,
};
pub use vellum_testing::patience::{PATIENCE, eventually};
pub use vellum_testing::random::Random;
use vellum_vm::{Surface, probe};

pub mod churn;
pub mod tasks;

/// Options for a pool of `frames` frames that soon reports exhaustion.
pub fn options(frames: u64) -> PoolOptions {
    options_on(BackendChoice::Auto, frames)
}

/// The same on one backend. The states are with the frames where that is possible, and in an array
/// elsewhere. The suite runs in guests with the module and on machines without it.
pub fn options_on(backend: BackendChoice, frames: u64) -> PoolOptions {
    let size = PoolSize::Bytes(frames * PAGE_SIZE as u64);
    let states = if shows_tables(backend) { StatePlace::Frames } else { StatePlace::Pages };
    PoolOptions { size, backend, states, patience: 2_000, ..PoolOptions::default() }
}

/// Whether surfaces of this backend show their page tables to the process.
pub fn shows_tables(backend: BackendChoice) -> bool {
    static EXMAP: OnceLock<bool> = OnceLock::new();
    let exmap = BackendChoice::Only(BackendKind::Exmap);
    let is_exmap = backend == exmap
        || backend == BackendChoice::Auto && probe::choice().backend == BackendKind::Exmap;
    let shows = || Surface::reserve(1, exmap).is_ok_and(|it| it.page_tables().is_ok());
    is_exmap && *EXMAP.get_or_init(shows)
}

/// A pool of raw pages over an empty device.
pub fn open(device: Arc<dyn Device>, options: PoolOptions) -> Pool {
    Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap()
}

/// A pool of raw pages on a device in memory, and the plan of the device's faults.
pub fn faulty(options: PoolOptions) -> (Pool, FaultPlan) {
    faulty_with(Arc::new(RawPages), options)
}

/// As [`faulty`], with the caller's format.
pub fn faulty_with(format: Arc<dyn PageFormat>, options: PoolOptions) -> (Pool, FaultPlan) {
    let memory = MemoryDevice::new().completing(Completion::Thread).unwrap();
    let device = FaultyDevice::new(memory, 1).unwrap();
    let plan = device.plan();
    (Pool::open(Arc::new(device), format, Space::new(0), options).unwrap(), plan)
}

/// The storage of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    Memory,
    MemoryWithThread,
    File(IoEngineChoice, Direct),
}

impl Storage {
    /// All that work on this machine.
    pub fn all() -> Vec<Storage> {
        let files = [
            Storage::File(IoEngineChoice::Threads, Direct::Auto),
            Storage::File(IoEngineChoice::Uring, Direct::Auto),
            Storage::File(IoEngineChoice::Uring, Direct::Never),
        ];
        let works = |storage: &Storage| {
            let dir = scratch_dir();
            storage.try_create(&dir).is_some()
        };
        let mut all = vec![Storage::Memory, Storage::MemoryWithThread];
        all.extend(files.into_iter().filter(works));
        all
    }

    fn try_create(self, dir: &TempDir) -> Option<Arc<dyn Device>> {
        Some(match self {
            Storage::Memory => Arc::new(MemoryDevice::new()),
            Storage::MemoryWithThread => {
                Arc::new(MemoryDevice::new().completing(Completion::Thread).unwrap())
            }
            Storage::File(engine, direct) => {
                let options = FileOptions { engine, direct, ..FileOptions::default() };
                Arc::new(FileDevice::create(dir.path().join("pages"), options).ok()?)
            }
        })
    }

    /// An empty device, and the directory of its file, if it has one.
    pub fn create(self, dir: &TempDir) -> Arc<dyn Device> {
        self.try_create(dir).unwrap_or_else(|| panic!("{self:?} does not work here"))
    }
}

/// A directory on a disk (not on tmpfs, as /tmp may be), removed when dropped.
pub fn scratch_dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The backends that work on this kernel.
pub fn backends() -> Vec<BackendChoice> {
    BackendKind::ALL
        .into_iter()
        .map(BackendChoice::Only)
        .filter(|backend| Surface::reserve(1, *backend).is_ok())
        .collect()
}

/// Writes page and generation into both ends of every frame.
pub fn stamp(bytes: &mut [u8], page: PageRef, generation: u64) {
    for (index, frame) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
        let place = page.id.0 + index as u64;
        frame[..8].copy_from_slice(&place.to_le_bytes());
        frame[8..16].copy_from_slice(&generation.to_le_bytes());
        frame[PAGE_SIZE - 8..].copy_from_slice(&generation.to_le_bytes());
    }
}

/// The generation that a page is stamped with, if all of its frames have the same one and the right
/// place.
pub fn stamped(bytes: impl PageReader, page: PageRef) -> Option<u64> {
    if bytes.len() != page.bytes() {
        return None;
    }
    let generation = bytes.u64(8)?;
    for index in 0..page.frames as usize {
        let start = index * PAGE_SIZE;
        let whole = bytes.u64(start)? == page.id.0 + index as u64
            && bytes.u64(start + 8)? == generation
            && bytes.u64(start + PAGE_SIZE - 8)? == generation;
        if !whole {
            return None;
        }
    }
    Some(generation)
}

/// Allocates a page and stamps it.
pub fn new_page(pool: &Pool, frames: u32, generation: u64) -> PageRef {
    let mut guard = pool.allocate(frames).unwrap();
    let page = guard.page();
    stamp(&mut guard, page, generation);
    page
}

/// Allocates `count` pages of one frame, stamped with generation 1, and makes them durable.
pub fn filled(pool: &Pool, count: usize) -> Vec<PageRef> {
    let pages = (0..count).map(|_| new_page(pool, 1, 1)).collect();
    pool.sync().unwrap();
    pages
}

/// The generation of a page, read under the shared lock.
pub fn generation(pool: &Pool, page: PageRef) -> Option<u64> {
    stamped(&*pool.fix_shared(page).unwrap(), page)
}

/// Fixes `others` until `page` is evicted.
pub fn push_out(pool: &Pool, page: PageRef, others: &[PageRef]) {
    let deadline = Instant::now() + PATIENCE;
    while pool.is_resident(page) {
        assert!(Instant::now() < deadline, "{page} is not evicted");
        for other in others.iter().filter(|other| **other != page) {
            drop(pool.fix_shared(*other).unwrap());
        }
    }
}

/// Runs the body of a test on its own thread. If it does not end, the test fails instead of
/// hanging.
pub fn within(patience: Duration, body: impl FnOnce() + Send + 'static) {
    let running = std::thread::spawn(body);
    let deadline = Instant::now() + patience;
    while !running.is_finished() {
        assert!(Instant::now() < deadline, "not done within {patience:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    if let Err(panic) = running.join() {
        std::panic::resume_unwind(panic);
    }
}

/// References that no pool of these tests can have, with extreme numbers.
pub fn hostile_references(pool: &Pool) -> Vec<PageRef> {
    let end = pool.file_pages().max(pool.end());
    [
        (0, 0),
        (0, u32::MAX),
        (1, u32::MAX),
        (0, PageRef::MAX_FRAMES),
        (0, PageRef::MAX_FRAMES + 1),
        (end, 1),
        (end - 1, 2),
        (end + 1_000_000, 1),
        (PageRef::MAX_ID, 1),
        (1 << 52, 1),
        (u64::MAX, 1),
        (u64::MAX, 0),
        (u64::MAX, u32::MAX),
        (u64::MAX - 1, 2),
    ]
    .map(|(id, frames)| PageRef::new(id, frames))
    .to_vec()
}
