//! The io_uring engine: batches of reads that the calling thread makes by itself, on storage that
//! answers at once.
//!
//! Of such a read a third is the copy, and the rest the kernel's work around it. A ring saves much
//! of that. One call is enough for a batch, and the kernel knows the file and the memory already.
//! For each `pread` it finds the file, finds the pages of the memory, and pins them. On ext4 over
//! zram, a batch of 32 reads into registered memory takes 0.72 of the time of 32 `pread`s
//! (docs/translation.md).
//!
//! Each ring has a table of the memory that the pool has registered, in chunks of 2 MiB. The kernel
//! pins the pages of a registered chunk: it reads into these pages, whatever is mapped at their
//! addresses by then. So memory that loses its pages must be unregistered first
//! ([`unregister`](BatchRings::unregister)), which waits for the batches under way. A ring learns
//! what has changed when a thread takes it.
//!
//! Invariants: nothing is in flight on a ring that no thread has taken. A thread that has taken a
//! ring calls nothing but the kernel until it has given the ring back.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use io_uring::squeue::{self, Flags};
use io_uring::{IoUring, opcode, types};
use vellum_vm::{BackendChoice, HUGE_PAGES, PAGE_SIZE, PageRange, Surface};

use super::transfer::{Finished, ReadRequest, SUBMIT_PATIENCE, Step, call, passes};
use super::uring::InFlight;
use super::workers::{lock, wait};

/// Reads that one ring keeps in flight; longer batches go through it in turns.
const ENTRIES: u32 = 64;

/// Idle rings that are kept. More exist while more threads than this read at a time.
const SPARE_RINGS: usize = 8;

/// The bytes of a chunk.
const CHUNK: usize = HUGE_PAGES as usize * PAGE_SIZE;

/// The most chunks that a ring knows: the kernel's limit of buffers. They are 32 GiB.
const CHUNKS_MAX: usize = 1 << 14;

/// How much memory this process can register for reads, by a trial with up to `most` bytes: a
/// multiple of 2 MiB. An ordinary user can register as much as the limit of locked memory says
/// (`RLIMIT_MEMLOCK`).
///
/// # Errors
/// The kernel's: it registers nothing before Linux 5.19, or where io_uring is switched off.
pub fn registrable_memory(most: u64) -> io::Result<u64> {
    let pages = most / PAGE_SIZE as u64 / HUGE_PAGES * HUGE_PAGES;
    let surface = Surface::reserve(pages, BackendChoice::Auto).map_err(io::Error::other)?;
    let mut ring = BatchRing::new(&File::open("/dev/null")?)?;
    let chunks = vec![false; CHUNKS_MAX.min((pages / HUGE_PAGES) as usize)];
    ring.memory = Memory { base: surface.base().as_ptr().addr(), chunks, version: 0 };
    ring.make_table()?;
    for chunk in 0..ring.memory.chunks.len() {
        match ring.update(chunk, ring.memory.base + chunk * CHUNK, CHUNK) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                return Ok((chunk * CHUNK) as u64);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(pages * PAGE_SIZE as u64)
}

/// The rings, and the memory that they may know.
#[derive(Debug)]
pub(super) struct BatchRings {
    file: Arc<File>,
    rings: Mutex<Rings>,
    given_back: Condvar,
}

#[derive(Debug, Default)]
struct Rings {
    idle: Vec<BatchRing>,
    /// How many rings threads have taken.
    taken: usize,
    /// How many threads unregister memory. No ring is taken meanwhile.
    unregistering: usize,
    /// The kernel gives no more rings.
    no_more: bool,
    memory: Memory,
}

/// The memory that is registered: that of one surface.
#[derive(Clone, Debug, Default)]
struct Memory {
    /// The address of the first chunk.
    base: usize,
    /// Whether each chunk is registered, for all chunks of the surface.
    chunks: Vec<bool>,
    /// Rises with each change.
    version: u64,
}

impl Memory {
    /// The chunks that lie within these pages.
    fn chunks_within(&self, pages: PageRange) -> Range<usize> {
        let end = (((pages.start + pages.count) / HUGE_PAGES) as usize).min(self.chunks.len());
        (pages.start.div_ceil(HUGE_PAGES) as usize).min(end)..end
    }

    /// The chunk that has all of these bytes, if it is registered.
    fn chunk_of(&self, bytes: &libc::iovec) -> Option<u16> {
        let from = bytes.iov_base.addr().checked_sub(self.base)?;
        let chunk = from / CHUNK;
        let is_within = from % CHUNK + bytes.iov_len <= CHUNK;
        (is_within && *self.chunks.get(chunk)?).then_some(chunk as u16)
    }
}

impl BatchRings {
    pub(super) fn new(file: Arc<File>) -> Self {
        Self { file, rings: Mutex::default(), given_back: Condvar::new() }
    }

    /// Registers the chunks that lie wholly within these pages. Only one surface at a time has
    /// registered memory.
    pub(super) fn register(&self, surface: &Surface, pages: PageRange) {
        let mut rings = lock(&self.rings);
        let memory = &mut rings.memory;
        if !memory.chunks.contains(&true) {
            memory.base = surface.base().as_ptr().addr();
            memory.chunks = vec![false; CHUNKS_MAX.min((surface.pages() / HUGE_PAGES) as usize)];
        }
        if memory.base == surface.base().as_ptr().addr() {
            let chunks = memory.chunks_within(pages);
            memory.chunks[chunks].fill(true);
            memory.version += 1;
        }
    }

    /// Unregisters memory. When this returns, no ring knows it, and no read that uses the
    /// registration is under way.
    pub(super) fn unregister(&self, surface: &Surface, pages: PageRange) {
        let mut rings = lock(&self.rings);
        let memory = &mut rings.memory;
        let chunks = memory.chunks_within(pages);
        let registered = &mut memory.chunks[chunks];
        if memory.base != surface.base().as_ptr().addr() || !registered.contains(&true) {
            return;
        }
        registered.fill(false);
        memory.version += 1;
        rings.unregistering += 1;
        while rings.taken > 0 {
            rings = wait(&self.given_back, rings);
        }
        rings.unregistering -= 1;
        let Rings { idle, memory, .. } = &mut *rings;
        // A ring that does not forget the memory is closed, which forgets all.
        idle.retain_mut(|ring| ring.follow(memory));
    }

    /// Makes the reads, waits until all have ended, and calls the owners' `done`s.
    pub(super) fn read(&self, mut reads: Vec<ReadRequest>) {
        let mut finished = Finished::new();
        if let Some(mut ring) = self.take() {
            let works = ring.read(&self.file, &mut reads, &mut finished);
            self.give_back(ring, works);
        }
        call(finished);
        // What no ring has done.
        reads.into_iter().for_each(|read| read.run(&self.file));
    }

    /// Takes a ring that knows the present memory.
    fn take(&self) -> Option<BatchRing> {
        let mut rings = lock(&self.rings);
        if rings.unregistering > 0 {
            return None;
        }
        let mut ring = match rings.idle.pop() {
            Some(ring) => ring,
            None if rings.no_more => return None,
            None => match BatchRing::new(&self.file) {
                Ok(ring) => ring,
                Err(error) => {
                    tracing::warn!(%error, "no more io_uring instances: reading page by page");
                    rings.no_more = true;
                    return None;
                }
            },
        };
        if !ring.follow(&rings.memory) {
            return None;
        }
        rings.taken += 1;
        Some(ring)
    }

    /// Takes a ring back, which is closed unless it works.
    fn give_back(&self, ring: BatchRing, works: bool) {
        let mut rings = lock(&self.rings);
        rings.taken -= 1;
        if works && rings.idle.len() < SPARE_RINGS {
            rings.idle.push(ring);
        }
        if rings.taken == 0 && rings.unregistering > 0 {
            self.given_back.notify_all();
        }
    }
}

/// A ring, and what it knows.
struct BatchRing {
    ring: IoUring,
    /// Whether the ring knows the file, as its number 0.
    has_file: bool,
    /// The kernel registers no memory, or not as much.
    is_refused: bool,
    /// Whether the ring has a table for the memory.
    has_table: bool,
    /// The memory that the ring knows; the version is that which it has followed.
    memory: Memory,
}

impl std::fmt::Debug for BatchRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchRing").field("has_file", &self.has_file).finish_non_exhaustive()
    }
}

impl BatchRing {
    fn new(file: &File) -> io::Result<Self> {
        let ring = IoUring::builder().setup_clamp().build(ENTRIES)?;
        let has_file = ring.submitter().register_files(&[file.as_raw_fd()]).is_ok();
        let memory = Memory::default();
        Ok(Self { ring, has_file, is_refused: false, has_table: false, memory })
    }

    /// Registers and unregisters what has changed. False if the ring may know memory that it should
    /// not.
    fn follow(&mut self, all: &Memory) -> bool {
        if self.memory.version == all.version {
            return true;
        }
        if self.memory.base != all.base {
            // It has forgotten the memory of the surface before.
            if self.has_table && self.ring.submitter().unregister_buffers().is_err() {
                return false;
            }
            self.has_table = false;
            self.memory =
                Memory { base: all.base, chunks: vec![false; all.chunks.len()], version: 0 };
        }
        for chunk in 0..all.chunks.len() {
            match (self.memory.chunks[chunk], all.chunks[chunk]) {
                (false, true) if !self.is_refused => self.learn(chunk),
                (true, false) => {
                    if let Err(error) = self.update(chunk, 0, 0) {
                        tracing::warn!(%error, "an io_uring keeps memory: it is closed");
                        return false;
                    }
                    self.memory.chunks[chunk] = false;
                }
                _ => {}
            }
        }
        self.memory.version = all.version;
        true
    }

    /// Registers a chunk. If the kernel refuses (before Linux 5.19, or beyond the limit of locked
    /// memory), the ring gives back what it has of that limit, and the kernel finds the pages for
    /// each read.
    fn learn(&mut self, chunk: usize) {
        let registered = self
            .make_table()
            .and_then(|()| self.update(chunk, self.memory.base + chunk * CHUNK, CHUNK));
        if let Err(error) = registered {
            tracing::info!(%error, "the kernel registers no memory for reads, or not all");
            self.is_refused = true;
            self.memory.chunks.fill(false);
            if self.has_table && self.ring.submitter().unregister_buffers().is_ok() {
                self.has_table = false;
            }
        } else {
            self.memory.chunks[chunk] = true;
        }
    }

    fn make_table(&mut self) -> io::Result<()> {
        if !self.has_table {
            self.ring.submitter().register_buffers_sparse(self.memory.chunks.len() as u32)?;
            self.has_table = true;
        }
        Ok(())
    }

    /// Sets an entry of the table. Nothing is in flight.
    fn update(&self, chunk: usize, address: usize, len: usize) -> io::Result<()> {
        let buffer =
            libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: len };
        // SAFETY: the pool keeps the memory mapped while it is registered. Only reads that own
        // their part of it use the table.
        unsafe { self.ring.submitter().register_buffers_update(chunk as u32, &[buffer], None) }
    }

    /// Makes reads, and waits for them. Those that remain in `reads` are not done, or not wholly.
    /// False if the ring does not work.
    fn read(&mut self, file: &File, reads: &mut Vec<ReadRequest>, finished: &mut Finished) -> bool {
        let mut left = Vec::new();
        let mut works = true;
        let limit = self.ring.params().sq_entries() as usize;
        while works && !reads.is_empty() {
            let group = reads.split_off(reads.len().saturating_sub(limit));
            let mut group = Group {
                reads: group.into_iter().map(Some).collect(),
                in_flight: InFlight(0),
                left: &mut left,
                finished,
            };
            works = group.run(self, file);
        }
        reads.append(&mut left);
        works
    }

    /// The operation that makes a read.
    fn operation(&self, read: &mut ReadRequest, file: &File) -> squeue::Entry {
        let file = types::Fd(if self.has_file { 0 } else { file.as_raw_fd() });
        let flags = if self.has_file { Flags::FIXED_FILE } else { Flags::empty() };
        let offset = read.next_offset();
        let entry = match read.next_vectors() {
            [only] => {
                let (address, len) = (only.iov_base.cast(), only.iov_len as u32);
                match self.memory.chunk_of(only) {
                    Some(chunk) => {
                        opcode::ReadFixed::new(file, address, len, chunk).offset(offset).build()
                    }
                    None => opcode::Read::new(file, address, len).offset(offset).build(),
                }
            }
            many => {
                let count = many.len() as u32;
                opcode::Readv::new(file, many.as_ptr(), count).offset(offset).build()
            }
        };
        entry.flags(flags)
    }
}

impl Drop for BatchRing {
    /// The kernel frees a ring some time after it is closed. Until then it would keep the file open
    /// and the memory pinned.
    fn drop(&mut self) {
        let submitter = self.ring.submitter();
        if self.has_file {
            drop(submitter.unregister_files());
        }
        if self.has_table {
            drop(submitter.unregister_buffers());
        }
    }
}

/// Reads that are in flight together.
struct Group<'a> {
    /// A read is taken out when it has ended.
    reads: Vec<Option<ReadRequest>>,
    in_flight: InFlight,
    left: &'a mut Vec<ReadRequest>,
    finished: &'a mut Finished,
}

impl Group<'_> {
    /// Makes all reads. False if the ring does not work.
    fn run(&mut self, ring: &mut BatchRing, file: &File) -> bool {
        for (index, read) in self.reads.iter_mut().enumerate() {
            let Some(read) = read else { continue };
            let operation = ring.operation(read, file).user_data(index as u64);
            // SAFETY: the request owns its memory and its vectors, and `self` keeps it until the
            // operation has ended: this returns only when nothing is in flight, and `InFlight`
            // aborts a panic before that.
            if unsafe { ring.ring.submission().push(&operation) }.is_ok() {
                self.in_flight.0 += 1;
            }
        }
        let works = self.wait(&mut ring.ring);
        self.left.extend(self.reads.drain(..).flatten());
        works
    }

    fn wait(&mut self, ring: &mut IoUring) -> bool {
        let mut failures = 0;
        while self.in_flight.0 > 0 {
            match ring.submit_and_wait(self.in_flight.0) {
                Ok(_) => failures = 0,
                Err(error) if passes(&error) && failures < SUBMIT_PATIENCE => {
                    if error.raw_os_error() != Some(libc::EINTR) {
                        failures += 1;
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "io_uring stopped working: reading page by page");
                    self.drain(ring);
                    return false;
                }
            }
            self.reap(ring);
        }
        true
    }

    /// Handles the completions that are there. A read that has failed, or of which a part is
    /// missing, is left: a blocking read goes on with it, or finds the error.
    fn reap(&mut self, ring: &mut IoUring) {
        for completion in ring.completion() {
            self.in_flight.0 -= 1;
            let index = completion.user_data() as usize;
            let Some(mut read) = self.reads[index].take() else { continue };
            match read.transfer.advance(completion.result()) {
                Step::Done => drop(read.end(Ok(()), self.finished)),
                Step::Again | Step::Failed(_) => self.left.push(read),
            }
        }
    }

    /// Polls for completions until the kernel works on nothing. It takes no operation that it has
    /// not taken before.
    fn drain(&mut self, ring: &mut IoUring) {
        loop {
            self.reap(ring);
            if self.in_flight.0 <= ring.submission().len() {
                self.in_flight.0 = 0;
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // helpers of tests may, as tests may
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use vellum_vm::{Advice, Entry};

    use super::super::ReadDone;
    use super::*;

    const PAGES: u64 = 2000;

    /// A file each of whose pages has its number in each word, with rings.
    fn rings() -> Option<BatchRings> {
        let file = tempfile::tempfile().unwrap();
        for page in 0..PAGES {
            let bytes: Vec<u8> = page.to_le_bytes().repeat(PAGE_SIZE / 8);
            file.write_all_at(&bytes, page * PAGE_SIZE as u64).unwrap();
        }
        let rings = BatchRings::new(Arc::new(file));
        match BatchRing::new(&rings.file) {
            Ok(_) => Some(rings),
            Err(error) => {
                println!("skipped: {error}");
                None
            }
        }
    }

    /// Memory of two chunks and a rest.
    fn surface() -> Surface {
        let surface = Surface::reserve(2 * HUGE_PAGES + 100, BackendChoice::Auto).unwrap();
        surface.claimed_by_owner();
        surface
    }

    fn chunk(number: u64) -> PageRange {
        PageRange::new(number * HUGE_PAGES, HUGE_PAGES)
    }

    /// Reads pages of the file into places, by one batch; the number of reads that failed.
    fn read(rings: &BatchRings, surface: &Surface, reads: &[(PageRange, u64)]) -> u64 {
        let (calls, errors) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let request = |(pages, place): &(PageRange, u64)| {
            let (calls, errors) = (calls.clone(), errors.clone());
            let done = ReadDone::new(move |result| {
                calls.fetch_add(1, Ordering::Relaxed);
                errors.fetch_add(u64::from(result.is_err()), Ordering::Relaxed);
            });
            let address = surface.address(*place).as_ptr();
            // SAFETY: the surface outlives the reads, which end below.
            unsafe {
                ReadRequest::new(address, pages.bytes(), pages.start * PAGE_SIZE as u64, done)
            }
        };
        rings.read(ReadRequest::merge(reads.iter().map(request).collect()));
        assert_eq!(calls.load(Ordering::Relaxed), reads.len() as u64);
        errors.load(Ordering::Relaxed)
    }

    /// The number in a place, which must be in all of its words.
    fn number_at(surface: &Surface, place: u64) -> u64 {
        let address = surface.address(place).as_ptr().cast::<[u64; PAGE_SIZE / 8]>();
        // SAFETY: on the surface; no read is in flight.
        let words = unsafe { *address };
        assert!(words.iter().all(|word| *word == words[0]), "{place}");
        words[0]
    }

    fn release(surface: &Surface, pages: PageRange) {
        // SAFETY: no reference leads to the pages.
        assert_eq!(unsafe { surface.release(&mut [Entry::new(pages)]) }, 0);
    }

    /// How many chunks idle rings know, all together.
    fn known_chunks(rings: &BatchRings) -> usize {
        lock(&rings.rings)
            .idle
            .iter()
            .map(|ring| ring.memory.chunks.iter().filter(|known| **known).count())
            .sum()
    }

    #[test]
    fn reads_go_to_registered_memory_and_to_any_other() {
        let (Some(rings), surface) = (rings(), surface()) else { return };
        for round in 0..4 {
            match round {
                1 => rings.register(&surface, PageRange::new(1, 2 * HUGE_PAGES - 1)),
                2 => rings.register(&surface, chunk(0)),
                _ => {}
            }
            // All over the surface, 150 at once; 7 has no factor in common with its length.
            let place = |page: u64| (page * 7 + round) % surface.pages();
            let pages = (0..150).map(|number| number * 13);
            let reads: Vec<_> = pages.map(|page| (PageRange::new(page, 1), place(page))).collect();
            assert_eq!(read(&rings, &surface, &reads), 0);
            reads.iter().for_each(|(page, place)| {
                assert_eq!(number_at(&surface, *place), page.start, "{round}");
            });
            // Several pages, one read of which crosses the border of a chunk.
            let reads = [(PageRange::new(10, 9), 30), (PageRange::new(19, 40), HUGE_PAGES - 20)];
            assert_eq!(read(&rings, &surface, &reads), 0);
            assert!((0..40).all(|at| number_at(&surface, HUGE_PAGES - 20 + at) == 19 + at));
            assert!((0..9).all(|at| number_at(&surface, 30 + at) == 10 + at));
        }
        // The first registration names only the second chunk wholly.
        // An ordinary user may have no memory left to lock.
        let is_refused = lock(&rings.rings).idle[0].is_refused;
        assert_eq!(known_chunks(&rings), if is_refused { 0 } else { 2 });
    }

    #[test]
    fn registrable_memory_is_found_by_a_trial() {
        match registrable_memory((5 << 20) + 4096) {
            Ok(bytes) => assert!([0, 2 << 20, 4 << 20].contains(&bytes), "{bytes}"),
            Err(error) => println!("skipped: {error}"),
        }
    }

    #[test]
    fn each_read_beyond_the_end_fails_alone() {
        let (Some(rings), surface) = (rings(), surface()) else { return };
        rings.register(&surface, chunk(0));
        let pages = [1, 2, 3, PAGES - 1, PAGES, PAGES + 7, 9];
        let reads = pages.map(|page| (PageRange::new(page, 1), page % 97));
        assert_eq!(read(&rings, &surface, &reads), 2);
        for page in pages.into_iter().filter(|page| *page < PAGES) {
            assert_eq!(number_at(&surface, page % 97), page);
        }
    }

    /// The kernel reads into the pages that it has pinned, not to what is mapped now.
    #[test]
    fn memory_may_go_once_it_is_unregistered() {
        let (Some(rings), surface) = (rings(), surface()) else { return };
        surface.advise(chunk(0), Advice::HugePage).unwrap();
        rings.register(&surface, PageRange::new(0, 2 * HUGE_PAGES));
        let reads: Vec<_> = (0..60).map(|at| (PageRange::new(3 * at, 1), at * 9)).collect();
        assert_eq!(read(&rings, &surface, &reads), 0);
        let known = known_chunks(&rings);
        rings.unregister(&surface, chunk(0));
        assert_eq!(known_chunks(&rings), known.saturating_sub(1));
        release(&surface, chunk(0));
        assert_eq!(number_at(&surface, 9), 0, "released");
        assert_eq!(read(&rings, &surface, &reads), 0);
        reads.iter().for_each(|(page, at)| assert_eq!(number_at(&surface, *at), page.start));
        // Another surface has its turn when nothing of this one is registered.
        rings.unregister(&surface, PageRange::new(0, surface.pages()));
        drop(surface);
        let other = self::surface();
        rings.register(&other, chunk(1));
        let reads: Vec<_> = reads.into_iter().map(|(page, at)| (page, at + HUGE_PAGES)).collect();
        assert_eq!(read(&rings, &other, &reads), 0);
        reads.iter().for_each(|(page, at)| assert_eq!(number_at(&other, *at), page.start));
        assert_eq!(known_chunks(&rings), known.min(1));
    }

    /// Ends the other threads, also when an assertion fails.
    struct Ending<'a>(&'a AtomicBool);

    impl Drop for Ending<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Two threads read into the first chunk, another one registers and unregisters it and the
    /// second one, whose memory it releases.
    #[test]
    fn memory_comes_and_goes_while_threads_read() {
        let (Some(rings), surface) = (rings(), surface()) else { return };
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _ending = Ending(&ended);
            for thread in 0..2 {
                let (rings, surface, ended) = (&rings, &surface, &ended);
                scope.spawn(move || {
                    let mut round = 0;
                    while !ended.load(Ordering::Relaxed) {
                        round += 1;
                        let page = |at: u64| (at * 31 + round * 17 + thread) % PAGES;
                        let places = thread * 250..thread * 250 + 40;
                        let reads: Vec<_> =
                            places.map(|at| (PageRange::new(page(at), 1), at)).collect();
                        assert_eq!(read(rings, surface, &reads), 0);
                        reads.iter().for_each(|(page, at)| {
                            assert_eq!(number_at(surface, *at), page.start);
                        });
                    }
                });
            }
            for round in 0..1000 {
                rings.register(&surface, PageRange::new(0, 2 * HUGE_PAGES));
                let reads: Vec<_> = (0..20)
                    .map(|at| (PageRange::new(at * 7 + round, 1), HUGE_PAGES + at))
                    .collect();
                assert_eq!(read(&rings, &surface, &reads), 0);
                reads
                    .iter()
                    .for_each(|(page, at)| assert_eq!(number_at(&surface, *at), page.start));
                rings.unregister(&surface, chunk(round % 2));
                rings.unregister(&surface, chunk(1));
                release(&surface, chunk(1));
            }
        });
    }
}
