//! The io_uring engine: reads that the calling thread makes by itself, several by one call, on
//! prompt storage (`promptness.rs`).
//!
//! Of such a read a third is the copy, and the rest the kernel's work around it. A ring saves much
//! of that. One call is enough for many, and the kernel knows the file and the memory already.
//! For each `pread` it finds the file, finds the pages of the memory, and pins them. On ext4 over
//! zram, 32 reads by one call into registered memory take 0.72 of the time of 32 `pread`s
//! (docs/translation.md).
//!
//! Each ring has a table of the memory that the pool has registered, in chunks of 2 MiB. The kernel
//! pins the pages of a registered chunk: it reads into these pages, whatever is mapped at their
//! addresses by then. So memory that loses its pages must be unregistered first
//! ([`RegisteredMemory::remove`]), which waits for the reads under way. A ring learns what has
//! changed when a thread takes it.
//!
//! Invariants: nothing is in flight on a ring that no thread has taken. A thread that has taken a
//! ring calls nothing but the kernel until it has given the ring back. No code of others, such as a
//! subscriber of messages, runs while the rings are locked.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

use io_uring::squeue::{self, Flags};
use io_uring::{IoUring, opcode, types};
use vellum_vm::{BackendChoice, HUGE_PAGES, PAGE_SIZE, PageRange, Surface};

use super::transfer::{Finished, ReadRequest, Step, call, submit_and_wait};
use super::uring::{InFlight, new_ring};
use super::workers::{lock, wait};

/// Reads that one ring keeps in flight; more go through it in turns.
const ENTRIES: u32 = 64;

/// The most rings. Each has the memory pinned. If as many threads read, others read page by page.
const RINGS_MAX: usize = 16;

/// After the kernel refused a ring, so many calls read without a new one.
const PAUSE: u32 = 10_000;

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
    let mut ring = PromptRing::new(&File::open("/dev/null")?)?;
    let chunks = vec![false; CHUNKS_MAX.min((pages / HUGE_PAGES) as usize)];
    ring.memory = Memory { base: surface.base().as_ptr().addr(), chunks, ..Memory::default() };
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
pub(super) struct PromptRings {
    file: Arc<File>,
    most: usize,
    rings: Mutex<Rings>,
    given_back: Condvar,
}

#[derive(Debug, Default)]
struct Rings {
    idle: Vec<PromptRing>,
    /// How many rings threads have taken.
    taken: usize,
    /// How many threads unregister memory. No ring is taken meanwhile.
    unregistering: usize,
    /// How many more calls read without a new ring.
    pause: u32,
    memory: Memory,
}

/// The memory that is registered: that of one surface.
#[derive(Clone, Debug, Default)]
struct Memory {
    /// The registration, from 1 on: a later surface may have the same address.
    id: u64,
    /// The address of the first chunk.
    base: usize,
    /// Whether each chunk is registered, for all chunks of the surface.
    chunks: Vec<bool>,
    /// Rises with each change, also from one registration to the next.
    version: u64,
}

/// The memory of a surface that its owner has registered with a device, so that reads into it cost
/// less. None is registered at first. Dropping this unregisters all.
///
/// The owner keeps the pages of registered memory: it neither unmaps, releases nor moves them.
#[derive(Debug)]
pub struct RegisteredMemory {
    rings: Weak<PromptRings>,
    id: u64,
    base: usize,
    pages: u64,
}

impl RegisteredMemory {
    /// For a device that registers nothing.
    pub fn none() -> RegisteredMemory {
        RegisteredMemory { rings: Weak::new(), id: 0, base: 0, pages: 0 }
    }

    pub(super) fn new(rings: &Arc<PromptRings>, surface: &Surface) -> RegisteredMemory {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        RegisteredMemory {
            rings: Arc::downgrade(rings),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            base: surface.base().as_ptr().addr(),
            pages: surface.pages(),
        }
    }

    /// Registers the chunks of 2 MiB that lie wholly within these pages of the surface. A hint:
    /// only one surface at a time has registered memory.
    pub fn add(&self, pages: PageRange) {
        let Some(rings) = self.rings.upgrade() else { return };
        let mut rings = lock(&rings.rings);
        let memory = &mut rings.memory;
        if !memory.chunks.contains(&true) {
            memory.id = self.id;
            memory.base = self.base;
            memory.chunks = vec![false; CHUNKS_MAX.min((self.pages / HUGE_PAGES) as usize)];
        }
        if memory.id == self.id {
            let chunks = memory.chunks_within(pages);
            memory.chunks[chunks].fill(true);
            memory.version += 1;
        }
    }

    /// Unregisters all chunks of which a part lies within these pages. When this returns, the
    /// memory may go. It waits for reads into registered memory that are under way, but for no
    /// [`ReadDone`](super::ReadDone).
    pub fn remove(&self, pages: PageRange) {
        if let Some(rings) = self.rings.upgrade() {
            rings.unregister(self.id, pages);
        }
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        self.remove(PageRange::new(0, self.pages));
    }
}

impl Memory {
    /// The chunks that lie within these pages.
    fn chunks_within(&self, pages: PageRange) -> Range<usize> {
        let end = (((pages.start + pages.count) / HUGE_PAGES) as usize).min(self.chunks.len());
        (pages.start.div_ceil(HUGE_PAGES) as usize).min(end)..end
    }

    /// The chunks of which a part lies within these pages.
    fn chunks_at(&self, pages: PageRange) -> Range<usize> {
        let end = (pages.start + pages.count).div_ceil(HUGE_PAGES) as usize;
        let end = end.min(self.chunks.len());
        ((pages.start / HUGE_PAGES) as usize).min(end)..end
    }

    /// The chunk that has all of these bytes, if it is registered.
    fn chunk_of(&self, bytes: &libc::iovec) -> Option<u16> {
        let from = bytes.iov_base.addr().checked_sub(self.base)?;
        let chunk = from / CHUNK;
        let is_within = from % CHUNK + bytes.iov_len <= CHUNK;
        (is_within && *self.chunks.get(chunk)?).then_some(chunk as u16)
    }
}

impl PromptRings {
    pub(super) fn new(file: Arc<File>) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let most = (2 * processors).min(RINGS_MAX);
        Self { file, most, rings: Mutex::default(), given_back: Condvar::new() }
    }

    fn unregister(&self, id: u64, pages: PageRange) {
        let mut rings = lock(&self.rings);
        let memory = &mut rings.memory;
        let chunks = memory.chunks_at(pages);
        if memory.id != id || chunks.is_empty() {
            return;
        }
        if memory.chunks[chunks.clone()].contains(&true) {
            memory.chunks[chunks].fill(false);
            memory.version += 1;
        } else if rings.unregistering == 0 {
            return;
        }
        rings.unregistering += 1;
        while rings.taken > 0 {
            rings = wait(&self.given_back, rings);
        }
        rings.unregistering -= 1;
        let Rings { idle, memory, .. } = &mut *rings;
        // A ring that does not forget the memory is closed, which forgets all.
        idle.retain_mut(|ring| ring.forget(memory).is_ok());
    }

    /// Makes the reads, waits until all have ended, and calls the owners' `done`s.
    pub(super) fn read(&self, mut reads: Vec<ReadRequest>) {
        let mut finished = Finished::new();
        let outcome = match self.take() {
            Some(mut taken) => taken.read(&mut reads, &mut finished),
            None => Ok(()),
        };
        if let Err(error) = outcome {
            tracing::warn!(%error, "reading page by page: io_uring did not make the reads");
        }
        call(finished);
        // What no ring has done.
        reads.into_iter().for_each(|read| read.run(&self.file));
    }

    /// Takes an idle ring, or the place of a new one.
    fn take(&self) -> Option<TakenRing<'_>> {
        let mut rings = lock(&self.rings);
        if rings.unregistering > 0 {
            return None;
        }
        let ring = rings.idle.pop();
        if ring.is_none() {
            if rings.pause > 0 {
                rings.pause -= 1;
                return None;
            }
            if rings.taken >= self.most {
                return None;
            }
        }
        let is_behind =
            ring.as_ref().is_none_or(|ring| ring.memory.version != rings.memory.version);
        let memory = is_behind.then(|| rings.memory.clone());
        rings.taken += 1;
        Some(TakenRing { rings: self, ring, memory })
    }
}

/// A ring that a thread has taken. Dropping this gives the ring back, if it works.
struct TakenRing<'a> {
    rings: &'a PromptRings,
    /// None: it is not made yet, or does not work.
    ring: Option<PromptRing>,
    /// What the ring has to follow first.
    memory: Option<Memory>,
}

impl TakenRing<'_> {
    /// Makes reads, and waits for them. Those that remain in `reads` are not done, or not wholly.
    fn read(&mut self, reads: &mut Vec<ReadRequest>, finished: &mut Finished) -> io::Result<()> {
        let file = &self.rings.file;
        let mut ring = self.ring.take().map_or_else(|| PromptRing::new(file), Ok)?;
        if let Some(memory) = self.memory.take() {
            ring.forget(&memory)?;
            ring.learn(&memory);
        }
        ring.read(file, reads, finished)?;
        self.ring = Some(ring);
        Ok(())
    }
}

impl Drop for TakenRing<'_> {
    fn drop(&mut self) {
        let mut rings = lock(&self.rings.rings);
        rings.taken -= 1;
        match self.ring.take() {
            Some(ring) => rings.idle.push(ring),
            None => rings.pause = PAUSE,
        }
        if rings.taken == 0 && rings.unregistering > 0 {
            self.rings.given_back.notify_all();
        }
    }
}

/// A ring, and what it knows.
struct PromptRing {
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

impl std::fmt::Debug for PromptRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptRing").field("has_file", &self.has_file).finish_non_exhaustive()
    }
}

impl PromptRing {
    fn new(file: &File) -> io::Result<Self> {
        let ring = new_ring(ENTRIES)?;
        let has_file = ring.submitter().register_files(&[file.as_raw_fd()]).is_ok();
        let memory = Memory::default();
        Ok(Self { ring, has_file, is_refused: false, has_table: false, memory })
    }

    /// Unregisters what is registered no more.
    fn forget(&mut self, all: &Memory) -> io::Result<()> {
        if self.memory.id != all.id {
            if self.has_table {
                self.ring.submitter().unregister_buffers()?;
            }
            (self.has_table, self.is_refused) = (false, false);
            self.memory = Memory { version: 0, ..all.clone() };
            self.memory.chunks.fill(false);
        }
        for chunk in 0..all.chunks.len() {
            if self.memory.chunks[chunk] && !all.chunks[chunk] {
                self.update(chunk, 0, 0)?;
                self.memory.chunks[chunk] = false;
            }
        }
        Ok(())
    }

    /// Registers what is new. The ring has forgotten what is registered no more.
    ///
    /// If the kernel refuses (before Linux 5.19, or beyond the limit of locked memory), the ring
    /// gives back what it has of that limit, and the kernel finds the pages for each read.
    fn learn(&mut self, all: &Memory) {
        for chunk in 0..all.chunks.len() {
            if self.is_refused || !all.chunks[chunk] || self.memory.chunks[chunk] {
                continue;
            }
            let address = all.base + chunk * CHUNK;
            let registered = self.make_table().and_then(|()| self.update(chunk, address, CHUNK));
            self.memory.chunks[chunk] = registered.is_ok();
            self.is_refused = registered.is_err();
        }
        if self.is_refused {
            self.memory.chunks.fill(false);
            let is_gone = self.has_table && self.ring.submitter().unregister_buffers().is_ok();
            self.has_table &= !is_gone;
        }
        self.memory.version = all.version;
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

    /// See [`TakenRing::read`]. After an error the ring is of no use any more.
    fn read(
        &mut self,
        file: &File,
        reads: &mut Vec<ReadRequest>,
        finished: &mut Finished,
    ) -> io::Result<()> {
        let mut left = Vec::new();
        let mut outcome = Ok(());
        let limit = self.ring.params().sq_entries() as usize;
        while outcome.is_ok() && !reads.is_empty() {
            let next = reads.split_off(reads.len().saturating_sub(limit));
            let mut submitted = SubmittedReads {
                reads: next.into_iter().map(Some).collect(),
                in_flight: InFlight(0),
                left: &mut left,
                finished,
            };
            outcome = submitted.run(self, file);
        }
        reads.append(&mut left);
        outcome
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

impl Drop for PromptRing {
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

/// Reads that one call submits, and that are in flight together.
struct SubmittedReads<'a> {
    /// A read is taken out when it has ended.
    reads: Vec<Option<ReadRequest>>,
    in_flight: InFlight,
    left: &'a mut Vec<ReadRequest>,
    finished: &'a mut Finished,
}

impl SubmittedReads<'_> {
    /// Makes all reads.
    fn run(&mut self, ring: &mut PromptRing, file: &File) -> io::Result<()> {
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
        let outcome = self.wait(&mut ring.ring);
        self.left.extend(self.reads.drain(..).flatten());
        outcome
    }

    fn wait(&mut self, ring: &mut IoUring) -> io::Result<()> {
        let mut failures = 0;
        while self.in_flight.0 > 0 {
            if let Err(error) = submit_and_wait(ring, self.in_flight.0, &mut failures) {
                self.drain(ring);
                return Err(error);
            }
            self.reap(ring);
        }
        Ok(())
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
    use std::sync::atomic::AtomicBool;

    use vellum_vm::{Advice, Entry};

    use super::super::ReadDone;
    use super::*;

    const PAGES: u64 = 2000;

    /// A file each of whose pages has its number in each word, with rings.
    fn rings() -> Option<Arc<PromptRings>> {
        let file = tempfile::tempfile().unwrap();
        for page in 0..PAGES {
            let bytes: Vec<u8> = page.to_le_bytes().repeat(PAGE_SIZE / 8);
            file.write_all_at(&bytes, page * PAGE_SIZE as u64).unwrap();
        }
        let rings = PromptRings::new(Arc::new(file));
        match PromptRing::new(&rings.file) {
            Ok(_) => Some(Arc::new(rings)),
            Err(error) => {
                println!("skipped: {error}");
                None
            }
        }
    }

    /// Memory of some chunks and a rest.
    fn surface(chunks: u64) -> Surface {
        let surface = Surface::reserve(chunks * HUGE_PAGES + 100, BackendChoice::Auto).unwrap();
        surface.claimed_by_owner();
        surface
    }

    fn chunk(number: u64) -> PageRange {
        PageRange::new(number * HUGE_PAGES, HUGE_PAGES)
    }

    /// Reads pages of the file into places, by one call; the number of reads that failed.
    fn read(rings: &PromptRings, surface: &Surface, reads: &[(PageRange, u64)]) -> u64 {
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
    fn known_chunks(rings: &PromptRings) -> usize {
        lock(&rings.rings)
            .idle
            .iter()
            .map(|ring| ring.memory.chunks.iter().filter(|known| **known).count())
            .sum()
    }

    #[test]
    fn reads_go_to_registered_memory_and_to_any_other() {
        let (Some(rings), surface) = (rings(), surface(2)) else { return };
        let memory = RegisteredMemory::new(&rings, &surface);
        for round in 0..4 {
            match round {
                1 => memory.add(PageRange::new(1, 2 * HUGE_PAGES - 1)),
                2 => memory.add(chunk(0)),
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
        let (Some(rings), surface) = (rings(), surface(2)) else { return };
        let memory = RegisteredMemory::new(&rings, &surface);
        memory.add(chunk(0));
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
        let (Some(rings), surface) = (rings(), surface(2)) else { return };
        let memory = RegisteredMemory::new(&rings, &surface);
        surface.advise(chunk(0), Advice::HugePage).unwrap();
        memory.add(PageRange::new(0, 2 * HUGE_PAGES));
        let reads: Vec<_> = (0..60).map(|at| (PageRange::new(3 * at, 1), at * 9)).collect();
        assert_eq!(read(&rings, &surface, &reads), 0);
        let known = known_chunks(&rings);
        memory.remove(chunk(0));
        assert_eq!(known_chunks(&rings), known.saturating_sub(1));
        release(&surface, chunk(0));
        assert_eq!(number_at(&surface, 9), 0, "released");
        assert_eq!(read(&rings, &surface, &reads), 0);
        reads.iter().for_each(|(page, at)| assert_eq!(number_at(&surface, *at), page.start));
    }

    /// A later surface may have the address of an earlier one, and another length.
    #[test]
    fn each_registration_is_for_its_own_memory() {
        let (Some(rings), surface) = (rings(), surface(4)) else { return };
        for chunks in [1, 1, 4, 2, 3, 3] {
            let pages = chunks * HUGE_PAGES;
            let new = || {
                let mut memory = RegisteredMemory::new(&rings, &surface);
                memory.pages = pages;
                memory
            };
            let (memory, other) = (new(), new());
            memory.add(PageRange::new(0, pages));
            other.add(PageRange::new(0, pages));
            let reads: Vec<_> =
                (0..60).map(|at| (PageRange::new(3 * at + chunks, 1), at * 31)).collect();
            assert_eq!(read(&rings, &surface, &reads), 0);
            reads.iter().for_each(|(page, at)| assert_eq!(number_at(&surface, *at), page.start));
            drop(other);
            let is_refused = lock(&rings.rings).idle[0].is_refused;
            assert_eq!(known_chunks(&rings), if is_refused { 0 } else { chunks as usize });
            drop(memory);
            assert_eq!(known_chunks(&rings), 0);
            release(&surface, PageRange::new(0, pages));
        }
    }

    /// As many threads as wish read at a time, by a few rings.
    #[test]
    fn there_are_no_more_rings_than_are_allowed() {
        let Some(rings) = rings() else { return };
        let threads = rings.most as u64 + 8;
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let rings = &rings;
                scope.spawn(move || {
                    let surface = surface(0);
                    for round in 0..50 {
                        let reads: Vec<_> = (0..40)
                            .map(|at| (PageRange::new(at * 3 + thread + round, 1), at))
                            .collect();
                        assert_eq!(read(rings, &surface, &reads), 0);
                        reads.iter().for_each(|(page, at)| {
                            assert_eq!(number_at(&surface, *at), page.start);
                        });
                    }
                });
            }
        });
        let idle = lock(&rings.rings).idle.len();
        assert!((1..=rings.most).contains(&idle), "{idle}");
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
        let (Some(rings), surface) = (rings(), surface(2)) else { return };
        let memory = RegisteredMemory::new(&rings, &surface);
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
                memory.add(PageRange::new(0, 2 * HUGE_PAGES));
                let reads: Vec<_> = (0..20)
                    .map(|at| (PageRange::new(at * 7 + round, 1), HUGE_PAGES + at))
                    .collect();
                assert_eq!(read(&rings, &surface, &reads), 0);
                reads
                    .iter()
                    .for_each(|(page, at)| assert_eq!(number_at(&surface, *at), page.start));
                memory.remove(chunk(round % 2));
                memory.remove(chunk(1));
                release(&surface, chunk(1));
            }
        });
    }
}
