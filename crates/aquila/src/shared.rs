//! A cache that handles its own faults: the core on Linux, and the files that it has numbers for.
//!
//! Threads come here in two ways. A faulting thread comes from the signal handler. A thread that
//! calls the interface blocks signals first ([`Shared::enter`]), so that no handler interrupts it
//! in the middle of the core and waits for it.

use std::collections::HashMap;
use std::fs::File;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU64 as StdAtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{
    FileType, MemfdFlags, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstat, fstatfs, ftruncate,
    memfd_create,
};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use self_cell::self_cell;
use vellum_aquila_core::{
    Access, Advice, AtomicU64, Cache as CoreCache, Clock, Environment as _, Error as CoreError,
    Evictor, Fault, Frame, Key, Layout, Lru, MOST_PAGES, Policy, S3Fifo, Statistics, Taken, Tried,
};

use crate::anonymous::drop_translations;
use crate::dirty_room::{DirtyRoom, Promise};
use crate::error::{Error, Result};
use crate::generation::{self, Generation};
use crate::host::{Copies, Home, Host, HostFile, MOST_FILES, Turn, pages_of};
use crate::live_counters::LiveCounters;
use crate::mapped_places::{self, MappedPlace};
use crate::probe::{Frames, USERFAULTFD, Userfaultfd};
use crate::sys::BlockedSignals;
use crate::write_requests::{PageError, WriteRequests};
use crate::{PAGE_SIZE, sys};

/// Which pages leave the cache first.
#[derive(Clone, Default)]
pub enum PolicyChoice {
    /// S3-FIFO: a scan does not drive other pages out.
    #[default]
    S3Fifo,
    /// CLOCK.
    Clock,
    /// The least recently faulted pages, roughly: the paper's policy.
    Lru,
    /// The user's own. It runs in a signal handler, in the middle of anything that a thread does:
    /// it must not allocate and not wait for a lock. If it panics, the process ends.
    Custom(Arc<dyn Policy + Send + Sync>),
}

impl std::fmt::Debug for PolicyChoice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::S3Fifo => "S3Fifo",
            Self::Clock => "Clock",
            Self::Lru => "Lru",
            Self::Custom(_) => "Custom",
        })
    }
}

/// The policy of a cache.
enum AnyPolicy<'a> {
    S3Fifo(S3Fifo<'a>),
    Clock(Clock<'a>),
    Lru(Lru<'a>),
    Custom(Arc<dyn Policy + Send + Sync>),
}

impl AnyPolicy<'_> {
    fn get(&self) -> &dyn Policy {
        match self {
            Self::S3Fifo(policy) => policy,
            Self::Clock(policy) => policy,
            Self::Lru(policy) => policy,
            Self::Custom(policy) => &**policy,
        }
    }

    /// Calls the policy. A panic would leave pages that are neither in the cache nor out of it, and
    /// cannot leave a signal handler anyway.
    fn call<T>(&self, f: impl FnOnce(&dyn Policy) -> T) -> T {
        let end = EndOfProcess;
        let result = f(self.get());
        std::mem::forget(end);
        result
    }
}

/// Ends the process when it is dropped.
struct EndOfProcess;

impl Drop for EndOfProcess {
    fn drop(&mut self) {
        eprintln!("a replacement policy of vellum-aquila panicked: the process ends");
        std::process::abort();
    }
}

impl Policy for AnyPolicy<'_> {
    fn admit(&self, frame: Frame, key: Key) {
        self.call(|policy| policy.admit(frame, key));
    }

    fn touch(&self, frame: Frame) {
        self.call(|policy| policy.touch(frame));
    }

    fn remove(&self, frame: Frame, key: Key) {
        self.call(|policy| policy.remove(frame, key));
    }

    fn propose(&self, evictor: &mut dyn Evictor) {
        self.call(|policy| policy.propose(evictor));
    }
}

/// The memory of a core.
struct Memory {
    words: Vec<AtomicU64>,
    policy: Vec<AtomicU64>,
    counters: LiveCounters,
}

type Core<'a> = CoreCache<'a, Host, AnyPolicy<'a>>;

self_cell!(
    struct Cell {
        owner: Memory,
        #[covariant]
        dependent: Core,
    }
);

/// A file that has a number.
struct Opened {
    number: u32,
    mappings: usize,
}

/// What an error of [`Cache::set_length`](crate::Cache::set_length) says.
pub(crate) const DOING_LENGTH: &str = "changing a file's length";

/// File systems that make contents when they are read: the lengths of their files say nothing.
/// They are proc, sysfs, debugfs, tracefs, securityfs, and the two of cgroups.
const WITHOUT_LENGTHS: [u64; 7] =
    [0x9fa0, 0x6265_6572, 0x6462_6720, 0x7472_6163, 0x7363_6673, 0x0027_e0eb, 0x6367_7270];

/// The device and the inode of a file.
type Inode = (u64, u64);

/// Threads that end when this is dropped.
pub(crate) trait Threads: Send + Sync {}

/// What became of a fault that a thread of the cache handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The access can be repeated.
    Handled,
    /// The page cannot be had, and is poisoned.
    Poisoned,
    /// The mapping is going, or memory is short: the access is to be repeated later.
    NotNow,
    /// Another thread is in the way: the fault is to be handled later.
    Later,
}

/// A cache that handles its own faults.
pub(crate) struct Shared {
    /// What lives as long as the cache: the threads that handle faults.
    threads: Option<Box<dyn Threads>>,
    /// And those that write, once there is a file that can be written.
    writers: Mutex<Option<Box<dyn Threads>>>,
    /// How many pages may be dirty with them.
    room: DirtyRoom,
    cell: Cell,
    /// The number of the cache in this process.
    number: u64,
    /// Whether files are read and written past the kernel's page cache.
    direct_io: bool,
    files: Mutex<HashMap<Inode, Opened>>,
    /// The process that made it: a forked child has no part in it.
    generation: Generation,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Shared").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Shared {
    /// A cache of `size` pages, which can grow to `capacity` pages.
    pub(crate) fn new(
        size: u32,
        capacity: u32,
        policy: PolicyChoice,
        (frames, direct_io): (Frames, bool),
        uffd: Userfaultfd,
        threads: Option<Box<dyn Threads>>,
    ) -> Result<Arc<Self>> {
        static NEXT: StdAtomicU64 = StdAtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let generation = generation::begin().map_err(|errno| Error::of("making a cache", errno))?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let bytes = u64::from(capacity) * PAGE_SIZE as u64;
        let layout = Layout::new(capacity, processors, 1).ok_or(Error::BadSize { bytes })?;
        let policy_words = match &policy {
            PolicyChoice::S3Fifo => S3Fifo::words(capacity),
            PolicyChoice::Clock => Clock::WORDS,
            PolicyChoice::Lru => Lru::words(capacity),
            PolicyChoice::Custom(_) => 0,
        };
        let words = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        let memory = Memory {
            words: words(layout.words()),
            policy: words(policy_words),
            counters: LiveCounters::new(processors, size)
                .map_err(|errno| Error::of("making a cache", errno))?,
        };
        let requests = threads.is_some().then(Arc::<WriteRequests>::default);
        let host = Host::new(number, uffd, frames, processors, capacity, requests);
        let cell = Cell::new(memory, |memory| {
            let policy = match policy {
                PolicyChoice::S3Fifo => AnyPolicy::S3Fifo(S3Fifo::new(&memory.policy, capacity)),
                PolicyChoice::Clock => AnyPolicy::Clock(Clock::new(&memory.policy, capacity)),
                PolicyChoice::Lru => AnyPolicy::Lru(Lru::new(&memory.policy, capacity)),
                PolicyChoice::Custom(policy) => AnyPolicy::Custom(policy),
            };
            CoreCache::new(layout, &memory.words, memory.counters.get(), policy, host, size)
        });
        let (files, writers, room) = (Mutex::default(), Mutex::default(), DirtyRoom::new(size));
        Ok(Arc::new(Self { threads, writers, room, cell, number, direct_io, files, generation }))
    }

    fn core(&self) -> &Core<'_> {
        self.cell.borrow_dependent()
    }

    fn host(&self) -> &Host {
        self.core().environment()
    }

    fn file(&self, number: u32) -> &HostFile {
        &self.host().files[number as usize]
    }

    /// Whether stores to clean pages fault, however a file is mapped.
    pub(crate) fn write_protects(&self) -> bool {
        self.host().write_protect
    }

    /// Whether threads of the cache handle its faults.
    pub(crate) fn has_threads(&self) -> bool {
        self.threads.is_some()
    }

    pub(crate) fn is_forked(&self) -> bool {
        generation::current() != self.generation
    }

    /// Blocks signals while a thread is in the core, unless the process is a forked child.
    pub(crate) fn enter(&self) -> Result<BlockedSignals> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        Ok(BlockedSignals::new())
    }

    // A fault.

    /// Handles a fault at a place that the thread uses, in the signal handler.
    pub(crate) fn fault(
        &self,
        place: &MappedPlace,
        page: u64,
        is_store: bool,
    ) -> Result<(), CoreError<PageError>> {
        let file = self.file(place.mapped().file);
        let _stays = file.stay();
        let fault = self.plan(place, page, is_store)?;
        let pages = self.core().fault(&fault)?;
        file.pattern.advance(page, pages);
        Ok(())
    }

    /// What the core is told of a fault.
    fn plan<'p>(
        &self,
        place: &'p MappedPlace,
        page: u64,
        is_store: bool,
    ) -> Result<Fault<'p, MappedPlace>, CoreError<PageError>> {
        let mapped = place.mapped();
        let key =
            Key::new(mapped.file, page).ok_or(CoreError::Environment(PageError::BeyondEnd))?;
        let file = self.file(mapped.file);
        let plan = file.pattern.plan(page, advice_of(place.advice()));
        let end = file.pages().min(mapped.first + mapped.pages);
        let ahead = plan.ahead.min(end.saturating_sub(page + 1).min(u64::from(MOST_PAGES)) as u32);
        let access = self.access(place, is_store);
        Ok(Fault { key, access, ahead, used: plan.used, place })
    }

    /// Handles a fault on a thread of the cache: waits for no other thread for long, and writes
    /// nothing. Returns false if the fault must be handled later, with the same `asked`.
    ///
    /// With threads a file does not move, so the home stays without a lock: one that has it may
    /// wait for the lock of the file's inode, and a call to the file has that while its fault
    /// waits.
    fn try_fault(
        &self,
        place: &MappedPlace,
        page: u64,
        is_store: bool,
        asked: &mut u64,
    ) -> Result<bool, CoreError<PageError>> {
        let fault = self.plan(place, page, is_store)?;
        let room = match fault.access {
            Access::Read => None,
            Access::Write => match self.take_room() {
                Some(promise) => Some(promise),
                None if self.host().ask_to_write(asked).is_ok() => return Ok(false),
                // Nothing can be written: as long as there are frames, the store may have one.
                None => None,
            },
        };
        match self.core().try_fault(&fault)? {
            Tried::Mapped(pages) => {
                if let Some(promise) = room {
                    promise.used();
                }
                self.file(fault.key.file()).pattern.advance(page, pages);
                Ok(true)
            }
            Tried::Busy => Ok(false),
            Tried::FramesBusy => {
                // The write that has these frames may wait for the call whose fault this is.
                let _ = self.host().ask_to_write(asked);
                Ok(false)
            }
            Tried::NoFrame => {
                self.host().ask_to_write(asked).map_err(CoreError::Environment)?;
                Ok(false)
            }
        }
    }

    /// The access for which a page must be mapped at a place. Without write protection every page
    /// in a writable mapping counts as dirty.
    fn access(&self, place: &MappedPlace, is_store: bool) -> Access {
        let mapped = place.mapped();
        let protects = self.host().protects(self.file(mapped.file));
        let counts = is_store || (!protects && mapped.writable);
        if counts { Access::Write } else { Access::Read }
    }

    /// Handles a fault of another thread, on a thread of the cache. A page that cannot be had is
    /// poisoned. `asked` is zero at first, and the same each time for the same fault.
    pub(crate) fn fault_of_another(
        &self,
        place: &MappedPlace,
        page: u64,
        is_store: bool,
        asked: &mut u64,
    ) -> Outcome {
        // A fault that was handled late may be of an older mapping at the address.
        let is_store = is_store && place.mapped().writable;
        let failed = match self.try_fault(place, page, is_store, asked) {
            Ok(true) => return Outcome::Handled,
            Ok(false) => return Outcome::Later,
            Err(failed) => failed,
        };
        let beyond_end = matches!(failed, CoreError::Environment(PageError::BeyondEnd));
        match self.poison(place, page, beyond_end) {
            Some(true) => Outcome::Poisoned,
            _ => Outcome::NotNow,
        }
    }

    /// Poisons a page that is not in the cache. Returns whether it did; `None` if the page may be
    /// there. Takes no lock that a thread may have that waits for a call to the file: the access
    /// that waits for this may be that call's.
    fn poison(&self, place: &MappedPlace, page: u64, beyond_end: bool) -> Option<bool> {
        let mapped = place.mapped();
        let (address, key) = (mapped.address(page)?, Key::new(mapped.file, page)?);
        let file = self.file(mapped.file);
        file.poisoning(|| {
            if self.core().has(key) {
                return None;
            }
            // The file may have become longer since, and `end_poison_from` may be over.
            let is_there = beyond_end && file.look().is_ok_and(|end| page < pages_of(end));
            Some(!is_there && self.host().poison(address).is_ok())
        })
    }

    /// Takes the poison of a page away, if it has any: the next access faults. The page may be in
    /// the cache by now. With threads all frames are in memory files, so that it loses no bytes.
    /// Another cache, without threads, may have a mapping there by now, where no page has poison.
    pub(crate) fn end_poison(&self, place: &MappedPlace, page: u64) {
        if let Some(address) = place.mapped().address(page).filter(|_| self.has_threads()) {
            drop_translations(address, PAGE_SIZE);
        }
    }

    /// The same for all pages of a mapping that was detached. If poison falls due meanwhile, the
    /// thread of the cache finds no mapping at its address, and forgets it.
    pub(crate) fn end_all_poison(&self, place: &MappedPlace) {
        let mapped = place.mapped();
        drop_translations(mapped.start, mapped.pages as usize * PAGE_SIZE);
    }

    /// Takes the poison of all pages of a file from this one on away: the file may have them now.
    /// With threads all frames are in memory files, so that pages that are there lose no bytes.
    fn end_poison_from(&self, number: u32, first: u64) {
        let _alone = self.file(number).begin_poisoning();
        for used in mapped_places::of_file(self.number, number) {
            let mapped = used.place().mapped();
            let first = first.max(mapped.first);
            if let Some(start) = mapped.address(first) {
                let end = mapped.first + mapped.pages;
                drop_translations(start, (end - first) as usize * PAGE_SIZE);
            }
        }
    }

    // Dirty pages, and the threads that write them.

    /// The frames of the cache, and those that are taken.
    fn taken(&self) -> (u32, Taken) {
        (self.core().size(), self.core().taken())
    }

    /// Whether half of the pages that may be dirty are not.
    pub(crate) fn has_room(&self) -> bool {
        self.room.count(|| self.taken())
    }

    /// A place for one more dirty page, or pin, if there is one.
    fn take_room(&self) -> Option<Promise<'_>> {
        let (promise, is_scarce) = self.room.take(|| self.taken());
        if is_scarce {
            // So that the next one need not wait. What became of it is for those who wait.
            let _ = self.host().ask_to_write(&mut 0);
        }
        promise
    }

    /// The same for a thread of the program's, which waits for one. `None` if the cache has no
    /// threads, so that a fault writes by itself, and if nothing can be written.
    fn wait_for_room(&self) -> Option<Promise<'_>> {
        if !self.has_threads() {
            return None;
        }
        let mut asked = 0;
        for attempt in 0.. {
            let promise = self.take_room();
            if promise.is_some() || self.host().ask_to_write(&mut asked).is_err() {
                return promise;
            }
            self.host().wait(attempt);
        }
        None
    }

    pub(crate) fn next_dirty_file(&self, from: u32) -> Option<u32> {
        self.core().next_dirty_file(from)
    }

    pub(crate) fn begin_writing(&self, number: u32) -> Option<Turn<'_>> {
        self.file(number).begin_writing()
    }

    pub(crate) fn write_some(
        &self,
        number: u32,
        next: &mut Option<Frame>,
    ) -> (u64, Option<PageError>) {
        self.core().write_some(number, next)
    }

    /// Has threads that write started, if the cache is to have some and has none.
    pub(crate) fn need_writers(
        &self,
        start: impl FnOnce(&Arc<WriteRequests>) -> Result<Box<dyn Threads>, Errno>,
    ) -> Result<(), Errno> {
        let Some(requests) = &self.host().requests else { return Ok(()) };
        let mut writers = self.writers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if writers.is_none() {
            *writers = Some(start(requests)?);
        }
        Ok(())
    }

    // Files.

    fn files(&self) -> MutexGuard<'_, HashMap<Inode, Opened>> {
        self.files.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Gives a number to a file, or finds the one that it has: one more mapping uses it.
    pub(crate) fn open(&self, file: &File, writes: bool) -> Result<u32> {
        let doing = "mapping a file";
        let failed = |errno| Error::of(doing, errno);
        let _blocked = self.enter()?;
        let stat = fstat(file).map_err(failed)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let system = fstatfs(file).map_err(failed)?.f_type;
        if kind != FileType::RegularFile || WITHOUT_LENGTHS.contains(&(system as u64)) {
            return Err(Error::NotAFile);
        }
        let flags = fcntl_getfl(file).map_err(failed)?;
        let mode = flags & OFlags::RWMODE;
        if mode == OFlags::WRONLY || (writes && mode != OFlags::RDWR) {
            return Err(Error::Access { doing });
        }
        let copy = || copies_of(file, flags, self.direct_io).map_err(failed);
        let mut files = self.files();
        let inode = (stat.st_dev, stat.st_ino);
        let number = match files.get(&inode) {
            Some(opened) => opened.number,
            None => {
                let is_free = |number: &u32| files.values().all(|other| other.number != *number);
                let number = (0..MOST_FILES as u32).find(is_free);
                let number = number.ok_or(Error::TooMany { doing, most: MOST_FILES })?;
                self.host().files[number as usize].open(copy()?);
                files.insert(inode, Opened { number, mappings: 0 });
                number
            }
        };
        let host = self.file(number);
        let prepared = (|| {
            // No superfluous copy: closing it would end the process' `fcntl` locks of the file.
            if writes && host.writer().is_err() {
                host.open_for_writing(copy()?);
            }
            host.look().map_err(failed)?;
            Ok(())
        })();
        if let Some(opened) = files.get_mut(&inode) {
            opened.mappings += 1;
        }
        drop(files);
        if prepared.is_err() {
            self.close(number);
        }
        prepared.map(|()| number)
    }

    /// One mapping of a file less. With the last one its pages leave.
    pub(crate) fn close(&self, number: u32) {
        let Ok(_blocked) = self.enter() else { return };
        // The lock keeps a new mapping of the file from reading it before it is written.
        let mut files = self.files();
        let Some((inode, opened)) = files.iter_mut().find(|(_, opened)| opened.number == number)
        else {
            return;
        };
        opened.mappings -= 1;
        if opened.mappings > 0 {
            return;
        }
        let inode = *inode;
        // A pin borrows its mapping: those that are left were forgotten (`std::mem::forget`).
        self.core().end_pins(every_page(number));
        let (evicted, _) = self.core().evict_range(every_page(number), false);
        if evicted.stay > 0 {
            // They could not be written: `Mapping::close` has said so, if it was called.
            let _ = self.core().evict_range(every_page(number), true);
        }
        self.host().files[number as usize].close();
        files.remove(&inode);
    }

    // Mappings, and where frames are.

    /// Maps a part of a file, and enters the mapping in the table: the cache handles its faults
    /// from now on.
    pub(crate) fn map(
        self: &Arc<Self>,
        number: u32,
        (first, bytes): (u64, usize),
        writable: bool,
    ) -> Result<(sys::OwnedMapping, &'static MappedPlace)> {
        let _blocked = self.enter()?;
        let (host, file) = (self.host(), self.file(number));
        let _alone = file.stop();
        let entry = mapped_places::Mapped {
            start: 0,
            pages: (bytes / PAGE_SIZE) as u64,
            first,
            cache: self.number,
            owner: Arc::as_ptr(self).expose_provenance(),
            file: number,
            writable,
        };
        // Without write protection a page is accessible only when it is dirty: it comes too early.
        let may_be_anonymous = host.protects_anonymous || !writable;
        match (file.home(), host.choice) {
            (Home::None, Frames::Anonymous) if !may_be_anonymous => {
                let reason = "anonymous memory cannot be write-protected here".to_owned();
                return Err(Error::NoBackend { backend: USERFAULTFD, reason });
            }
            (Home::None, Frames::Auto | Frames::Anonymous) if may_be_anonymous => {
                match self.map_at_once(None, bytes, &entry) {
                    // Private memory counts for limits that shared memory does not count for.
                    Err(Error::NoMemory { .. }) if host.choice == Frames::Auto => {}
                    mapped => {
                        let (mapped, place) = mapped?;
                        file.live_at(place);
                        return Ok((mapped, place));
                    }
                }
            }
            _ => {}
        }
        let end = (first + entry.pages) * PAGE_SIZE as u64;
        self.need_memory_file(number, end, "mapping a file")?;
        let memory = file.memory().map_err(|errno| Error::of("mapping a file", errno))?;
        self.map_at_once(Some((memory, first * PAGE_SIZE as u64)), bytes, &entry)
    }

    /// Maps memory, and enters it in the table.
    fn map_at_once(
        &self,
        memory: Option<(BorrowedFd<'_>, u64)>,
        bytes: usize,
        entry: &mapped_places::Mapped,
    ) -> Result<(sys::OwnedMapping, &'static MappedPlace)> {
        let doing = "mapping a file";
        let faults = (&self.host().uffd, self.faults(memory.is_some()));
        let mapped = sys::OwnedMapping::registered(memory, bytes, entry.writable, faults);
        let mapped = mapped.map_err(|errno| Error::of(doing, errno))?;
        let entry = mapped_places::Mapped { start: mapped.start(), ..*entry };
        let place = mapped_places::enter(&entry);
        let place = place.ok_or(Error::TooMany { doing, most: mapped_places::MOST })?;
        Ok((mapped, place))
    }

    /// The faults that mappings are registered for.
    fn faults(&self, of_memory_file: bool) -> u64 {
        let host = self.host();
        let (protects, kinds) = match of_memory_file {
            true => (host.write_protect, sys::MISSING | sys::MINOR),
            false => (host.protects_anonymous, sys::MISSING),
        };
        kinds | if protects { sys::WRITE_PROTECT } else { 0 }
    }

    /// Has the frames of a file in a memory file from now on, of which pages up to `end` can be
    /// mapped. The caller has stopped the file.
    fn need_memory_file(&self, number: u32, end: u64, doing: &'static str) -> Result<()> {
        let failed = |errno| Error::of(doing, errno);
        let (host, file) = (self.host(), self.file(number));
        let from = match file.home() {
            Home::Anonymous(place) => Some(place.mapped()),
            Home::None | Home::MemoryFile => None,
        };
        let page = PAGE_SIZE as u64;
        let end = end.max(from.map_or(0, |from| (from.first + from.pages) * page));
        // Beyond the limit the call would end the process by SIGXFSZ.
        let check_limit = || match getrlimit(Resource::Fsize).current {
            Some(limit) if limit < end => Err(Error::FileSizeLimit { doing, limit }),
            _ => Ok(()),
        };
        if matches!(file.home(), Home::MemoryFile) {
            let memory = file.memory().map_err(failed)?;
            if fstat(memory).map_err(failed)?.st_size.cast_unsigned() < end {
                check_limit()?;
                ftruncate(memory, end).map_err(failed)?;
            }
            return Ok(());
        }
        check_limit()?;
        let memory = memfd_create("vellum-aquila", MemfdFlags::CLOEXEC).map_err(failed)?;
        if let Some(from) = from {
            // No thread brings pages in, so none is left.
            let (evicted, result) = self.core().evict_range(every_page(number), false);
            result.map_err(|failure| error(doing, CoreError::Environment(failure)))?;
            if evicted.stay > 0 {
                return Err(Error::Full { doing });
            }
            // Accesses wait: the memory file ends before them until it is registered.
            host.replace(&from, memory.as_fd(), self.faults(true)).map_err(failed)?;
        }
        // From here on the frames are there, also if it does not get longer: a later call tries
        // that again.
        file.live_in(memory);
        ftruncate(file.memory().map_err(failed)?, end).map_err(failed)
    }

    /// The mapping of a file at a place is about to go. Frames that are there leave, after they
    /// were written back; what cannot be written is lost.
    pub(crate) fn leave(&self, number: u32, place: &MappedPlace) {
        let file = self.file(number);
        let _alone = file.stop();
        if !matches!(file.home(), Home::Anonymous(home) if std::ptr::eq(home, place)) {
            return;
        }
        let (evicted, _) = self.core().evict_range(every_page(number), false);
        if evicted.stay > 0 {
            // They could not be written: `Mapping::close` has said so, if it was called.
            let _ = self.core().evict_range(every_page(number), true);
        }
        file.live_nowhere();
    }

    // Pages of a file.

    /// Writes dirty pages back, and makes them durable if `durable` says so.
    pub(crate) fn write_back(
        &self,
        number: u32,
        pages: RangeInclusive<u64>,
        durable: bool,
    ) -> Result<()> {
        let doing = if durable { "syncing a file" } else { "writing pages back" };
        let _blocked = self.enter()?;
        let stays = self.file(number).stay();
        self.core()
            .write_back(keys(number, pages))
            .map_err(|failure| error(doing, CoreError::Environment(failure)))?;
        drop(stays);
        let file = self.file(number);
        if !durable || file.writer().is_err() {
            return Ok(());
        }
        match file.sync() {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::SyncFailed { doing }),
            Err(errno) => Err(Error::of(doing, errno)),
        }
    }

    /// Evicts pages. Returns how many have left.
    pub(crate) fn evict(&self, number: u32, pages: RangeInclusive<u64>) -> Result<u64> {
        let _blocked = self.enter()?;
        let _stays = self.file(number).stay();
        let (evicted, result) = self.core().evict_range(keys(number, pages), false);
        result.map_err(|failure| error("evicting pages", CoreError::Environment(failure)))?;
        Ok(evicted.pages)
    }

    /// Reads pages and maps them at a place: as many as the cache has frames. Returns how many.
    pub(crate) fn populate(&self, place: &MappedPlace, pages: RangeInclusive<u64>) -> Result<u64> {
        let doing = "prefetching pages";
        drop(self.enter()?);
        let number = place.mapped().file;
        let file = self.file(number);
        let length = file.look().map_err(|errno| Error::of(doing, errno))?;
        let end = (*pages.end() + 1).min(pages_of(length));
        let most = u64::from(self.core().size());
        let (start, mut done) = (*pages.start(), 0);
        while start + done < end && done < most {
            let ahead =
                (end - start - done - 1).min(most - done - 1).min(u64::from(MOST_PAGES) - 1);
            let key = key(number, start + done);
            // Signals wait for one run at most.
            let _blocked = self.enter()?;
            let _stays = file.stay();
            let mapped = self.core().populate(key, ahead as u32, place);
            done += u64::from(mapped.map_err(|failed| error(doing, failed))?);
        }
        Ok(done)
    }

    pub(crate) fn pin(
        &self,
        place: &MappedPlace,
        page: u64,
        writes: bool,
    ) -> Result<(Frame, Access)> {
        let doing = "pinning pages";
        let _blocked = self.enter()?;
        let number = place.mapped().file;
        let file = self.file(number);
        let room = self.wait_for_room();
        let stays = loop {
            let stays = file.stay();
            if matches!(file.home(), Home::MemoryFile) {
                break stays;
            }
            drop(stays);
            // Pinned pages could not move any more when a second mapping comes.
            let _alone = file.stop();
            self.need_memory_file(number, 0, doing)?;
        };
        let access = self.access(place, writes);
        let frame = self.core().pin(key(number, page), access, place);
        drop(stays);
        room.into_iter().for_each(Promise::used);
        Ok((frame.map_err(|failed| error(doing, failed))?, access))
    }

    pub(crate) fn unpin(&self, frame: Frame, access: Access) {
        if let Ok(_blocked) = self.enter() {
            self.core().unpin(frame, access);
        }
    }

    /// Copies bytes of a file out of the cache. The destination may be in a mapping of the cache:
    /// nothing of the cache is locked or pinned while it is written.
    pub(crate) fn read_at(&self, number: u32, bytes: &mut [u8], offset: u64) -> Result<()> {
        let doing = "reading a mapped file";
        let file = self.file(number);
        let mut bounce = [0; PAGE_SIZE];
        self.check_end(number, bytes.len(), offset, doing)?;
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let inside = at as usize % PAGE_SIZE;
            let (part, next) = rest.split_at_mut(rest.len().min(PAGE_SIZE - inside));
            let copy = &mut bounce[..part.len()];
            let length = copy.len() as u64;
            {
                let _blocked = self.enter()?;
                let key = key(number, at / PAGE_SIZE as u64);
                let _stays = file.stay();
                let read = |page| self.host().load(&page, inside, copy);
                let result = self.core().with_page(key, 0, Access::Read, read);
                result
                    .map_err(|failed| error(doing, failed))?
                    .map_err(|errno| Error::of(doing, errno))?;
            }
            part.copy_from_slice(&bounce[..part.len()]);
            at += length;
            rest = next;
        }
        Ok(())
    }

    /// Copies bytes into the cache. The source may be in a mapping of the cache.
    pub(crate) fn write_at(&self, number: u32, bytes: &[u8], offset: u64) -> Result<()> {
        let doing = "writing a mapped file";
        let file = self.file(number);
        file.writer().map_err(|errno| Error::of(doing, errno))?;
        self.check_end(number, bytes.len(), offset, doing)?;
        let mut bounce = [0; PAGE_SIZE];
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let inside = at as usize % PAGE_SIZE;
            let (part, next) = rest.split_at(rest.len().min(PAGE_SIZE - inside));
            bounce[..part.len()].copy_from_slice(part);
            let _blocked = self.enter()?;
            let key = key(number, at / PAGE_SIZE as u64);
            let room = self.wait_for_room();
            let _stays = file.stay();
            let write = |page| self.host().store(&page, inside, &bounce[..part.len()]);
            let result = self.core().with_page(key, 0, Access::Write, write);
            room.into_iter().for_each(Promise::used);
            result
                .map_err(|failed| error(doing, failed))?
                .map_err(|errno| Error::of(doing, errno))?;
            at += part.len() as u64;
            rest = next;
        }
        Ok(())
    }

    fn check_end(&self, number: u32, bytes: usize, at: u64, doing: &'static str) -> Result<()> {
        let file = self.file(number);
        let length = file.look().map_err(|errno| Error::of(doing, errno))?;
        let is_inside = at.checked_add(bytes as u64).is_some_and(|end| end <= length);
        if is_inside { Ok(()) } else { Err(Error::BeyondEnd { doing }) }
    }

    /// Changes a file's length, by a descriptor for writing. Pages beyond it leave: an access to
    /// them is SIGBUS.
    pub(crate) fn set_length(&self, file: &File, length: u64) -> Result<()> {
        let failed = |errno| Error::of(DOING_LENGTH, errno);
        let _blocked = self.enter()?;
        let stat = fstat(file).map_err(failed)?;
        let number = {
            let mut files = self.files();
            let Some(opened) = files.get_mut(&(stat.st_dev, stat.st_ino)) else {
                // The lock keeps it from being mapped meanwhile.
                return ftruncate(file, length).map_err(failed);
            };
            // As if this were a mapping: the number stays the file's.
            opened.mappings += 1;
            opened.number
        };
        let result = self.set_length_of(number, file, length);
        self.close(number);
        result
    }

    fn set_length_of(&self, number: u32, descriptor: &File, length: u64) -> Result<()> {
        let failed = |errno| Error::of(DOING_LENGTH, errno);
        let file = self.file(number);
        // First: a thread that has the room that this waits for may wait until the file moves.
        let room = self.wait_for_room();
        let stays = file.stay();
        let before = file.look().map_err(failed)?;
        if before < length {
            // What was stored beyond the end is not in the file.
            self.clear_end(number, before)?;
        }
        file.set_length(descriptor.as_fd(), length).map_err(failed)?;
        file.look().map_err(failed)?;
        if length < before {
            self.clear_end(number, length)?;
        }
        // The last page may be dirty now.
        room.into_iter().for_each(Promise::used);
        let stay = match pages_of(length) {
            Key::PAGES.. => 0,
            first => {
                let beyond = keys(number, first..=Key::PAGES - 1);
                self.core().evict_range(beyond, true).0.stay
            }
        };
        drop(stays);
        if before < length && self.has_threads() {
            self.end_poison_from(number, pages_of(before));
        }
        if stay == 0 { Ok(()) } else { Err(Error::Full { doing: DOING_LENGTH }) }
    }

    /// Fills the rest of the last page of a file with zeros, which show if it becomes longer again.
    /// The caller has room for a dirty page.
    fn clear_end(&self, number: u32, length: u64) -> Result<()> {
        let file = self.file(number);
        let inside = length as usize % PAGE_SIZE;
        let page = length / PAGE_SIZE as u64;
        if inside == 0 || page >= Key::PAGES {
            return Ok(());
        }
        match file.home() {
            // The cache does not have the page.
            Home::None => return Ok(()),
            Home::Anonymous(place) if place.mapped().address(page).is_none() => return Ok(()),
            // It is clean, and is read with its new end.
            Home::Anonymous(place) if !place.mapped().writable => {
                let (_, result) = self.core().evict_range(keys(number, page..=page), false);
                return result
                    .map_err(|failure| error(DOING_LENGTH, CoreError::Environment(failure)));
            }
            _ => {}
        }
        let zeros = [0; PAGE_SIZE];
        let write = |page| {
            self.host().store(&page, inside, &zeros[inside..])?;
            // From now on the page ends as the file does.
            self.host().set_length_of(&page, inside);
            Ok::<_, Errno>(())
        };
        // A file that is mapped for reading only has no pages to write back.
        let access = if file.writer().is_ok() { Access::Write } else { Access::Read };
        let result = self.core().with_page(key(number, page), 0, access, write);
        let result = result.map_err(|failure| error(DOING_LENGTH, failure))?;
        result.map_err(|errno| Error::of(DOING_LENGTH, errno))
    }

    // The whole cache.

    pub(crate) fn resize(&self, pages: u32) -> Result<()> {
        let _blocked = self.enter()?;
        let resized = self.make_room_for(pages).and_then(|()| self.core().resize(pages));
        // Whatever it is now: it may have failed, or another thread may have changed it, too.
        self.room.set_size(self.core().size());
        self.cell.borrow_owner().counters.set_frames(self.core().statistics().frames);
        resized.map_err(|failed| error("resizing the cache", failed))
    }

    /// Waits until a cache of so many frames has enough clean pages.
    fn make_room_for(&self, pages: u32) -> Result<(), CoreError<PageError>> {
        self.room.set_size(pages);
        let mut asked = 0;
        for attempt in 0.. {
            if !self.has_threads() || self.room.is_kept(|| self.taken()) {
                break;
            }
            self.host().ask_to_write(&mut asked).map_err(CoreError::Environment)?;
            self.host().wait(attempt);
        }
        Ok(())
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.core().capacity()
    }

    pub(crate) fn statistics(&self) -> Statistics {
        self.core().statistics()
    }
}

/// A descriptor of the cache's own: the file, opened once more. So flags that the program sets do
/// not matter (with `O_APPEND` the system would write pages to the end of the file, with `O_DIRECT`
/// it would ask for aligned memory), and the program's own `fsync` takes no error of write-back
/// away from the cache. A process that may not open the file, or would have to wait for the end of
/// a lease, gets a duplicate.
fn copies_of(file: &File, flags: OFlags, direct_io: bool) -> Result<Copies, Errno> {
    // A thread may have descriptors of its own.
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let mode = (flags & OFlags::RWMODE) | OFlags::CLOEXEC;
    // To open a file waits for the end of a lease that this process may have on it itself.
    let open = |flags| {
        let opened = rustix::fs::open(&path, flags | OFlags::NONBLOCK, Mode::empty())?;
        let flags = fcntl_getfl(&opened)?;
        fcntl_setfl(&opened, flags.difference(OFlags::NONBLOCK))?;
        Ok::<_, Errno>(opened)
    };
    let buffered = match open(mode) {
        Err(_) if !flags.intersects(OFlags::APPEND | OFlags::DIRECT) => {
            rustix::io::fcntl_dupfd_cloexec(file, 0)
        }
        // A duplicate would share these flags, so this waits.
        Err(Errno::AGAIN) => rustix::fs::open(&path, mode, Mode::empty()),
        opened => opened,
    }?;
    let direct = direct_io.then(|| open(mode | OFlags::DIRECT).ok()).flatten();
    Ok(Copies { buffered, direct })
}

/// The number of an advice, which a place keeps.
pub(crate) fn number_of_advice(advice: Advice) -> u32 {
    match advice {
        Advice::Normal => 0,
        Advice::Random => 1,
        Advice::Sequential => 2,
    }
}

fn advice_of(number: u32) -> Advice {
    match number {
        1 => Advice::Random,
        2 => Advice::Sequential,
        _ => Advice::Normal,
    }
}

/// The key of a page. Mappings have no page that a key cannot name.
fn key(number: u32, page: u64) -> Key {
    Key::new(number, page).expect("numbers are small, and mappings end before the last page")
}

fn keys(number: u32, pages: RangeInclusive<u64>) -> RangeInclusive<Key> {
    key(number, *pages.start())..=key(number, *pages.end())
}

fn every_page(number: u32) -> RangeInclusive<Key> {
    keys(number, 0..=Key::PAGES - 1)
}

fn error(doing: &'static str, error: CoreError<PageError>) -> Error {
    match error {
        CoreError::Environment(PageError::System(errno)) => Error::of(doing, errno),
        CoreError::Environment(PageError::BeyondEnd) => Error::BeyondEnd { doing },
        CoreError::TooManyPins => Error::TooManyPins { doing },
        _ => Error::Full { doing },
    }
}
