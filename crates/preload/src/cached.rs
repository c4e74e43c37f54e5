//! Maps files through a cache of the process' own (Aquila).
//!
//! The first file that is mapped so makes the cache. Its threads handle the faults, also those of
//! system calls, so the program's own signals are as they were.
#![allow(unsafe_code)]

use std::ffi::{OsString, c_int};
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit};
use vellum_aquila::{
    Access, Backend, BackendChoice, Cache, Faults, Options, PolicyChoice, Statistics,
};

use vellum_interpose::Request;

use crate::lease::{self, Lease, Watcher};
use crate::list::{List, Node};
use crate::system::{self, PAGE};
use crate::{cache_thread, mounts, owner};

/// Bytes of the cache if the environment does not say them.
const USUAL: u64 = 256 << 20;

/// A cache, and who has it.
struct Own {
    cache: Cache,
    watcher: Watcher,
    process: u32,
    /// The file to which the process appends statistics when it exits.
    statistics: Option<OsString>,
}

/// The process whose thread starts the cache thread, or has started it; 0 before, and [`NONE`] in
/// a child of it.
static MAKER: AtomicU32 = AtomicU32::new(0);

/// The number of no process.
const NONE: u32 = u32::MAX;

/// `Some(None)` if there can be no cache.
static OWN: OnceLock<Option<Own>> = OnceLock::new();

/// What threads ask the cache thread for.
static JOBS: List<Job> = List::new();

/// A part of a file that a thread, which waits, wants to be mapped through the cache.
struct Job {
    request: Request,
    /// The thread that has the request's descriptor.
    thread: c_int,
    /// The owner of the mapping; 0 if the cache cannot map it.
    owner: AtomicUsize,
    /// Whether the cache thread has answered: 0 or 1.
    is_answered: AtomicU32,
}

/// Whether this process has a cache, which is made if no thread has tried. A child of the process
/// that has made it has none.
fn has_cache() -> bool {
    let process = system::process();
    let (order, failed) = (Ordering::Relaxed, Ordering::Relaxed);
    match MAKER.compare_exchange(0, process, order, failed) {
        Ok(_) => cache_thread::start(|can_be| {
            // A defect must not leave a thread waiting.
            let made = catch_unwind(|| can_be.then(make).flatten()).ok().flatten();
            let is_made = made.is_some();
            (OWN.set(made).is_ok() && is_made).then_some(work)
        }),
        Err(maker) if maker != process => return false,
        Err(_) => {}
    }
    while OWN.get().is_none() {
        system::give_way();
    }
    OWN.get().is_some_and(Option::is_some)
}

/// Maps a part of a file through the cache. `None` if there can be no cache, or if it cannot map
/// the file.
pub(crate) fn map(request: &Request) -> Option<usize> {
    // The cache thread would wait for itself. Opening the file once more would end a lease that the
    // program has on it.
    if system::is_own_thread() || lease::has(request.file) {
        return None;
    }
    // A handler of a signal may unmap memory, and wait for what this thread has meanwhile. `setuid`
    // waits until all threads have its signal, while none can be started.
    let signals = system::set_signals(cache_thread::SIGNALS);
    let mapped =
        if has_cache() { ask(request).and_then(|owner| add(owner, request)) } else { None };
    system::set_signals(signals);
    mapped
}

/// The owner of a new mapping.
fn ask(request: &Request) -> Option<usize> {
    let (owner, is_answered) = (AtomicUsize::new(0), AtomicU32::new(0));
    let job = Job { request: *request, thread: system::thread(), owner, is_answered };
    let mut node = Node::new(job);
    let job = &raw mut node;
    // SAFETY: it lives until the cache thread has answered, which does not use it afterwards.
    let job = unsafe {
        JOBS.add(job);
        &(*job).value
    };
    cache_thread::wake();
    while job.is_answered.load(Ordering::Acquire) == 0 {
        system::wait_for_change(&job.is_answered, 0);
    }
    Some(job.owner.load(Ordering::Relaxed)).filter(|owner| *owner != 0)
}

/// Adds an owner to the table of mounts, or retires it.
fn add(owner: usize, request: &Request) -> Option<usize> {
    // SAFETY: it is not retired.
    let base = unsafe { owner::address(owner) };
    let mount = base..base + request.length.next_multiple_of(PAGE);
    if mounts::add(mount.clone(), &mount, owner, request) {
        if let Some(Some(own)) = OWN.get() {
            // A writer that came before the table had the mapping would wait.
            own.watcher.look();
            if request.flags & libc::MAP_POPULATE != 0 {
                let most = own.cache.statistics().map_or(0, |now| now.frames as usize * PAGE / 2);
                // SAFETY: the mapping is the program's, and no contents change.
                unsafe { system::populate(base, (mount.end - base).min(most)) };
            }
        }
        return Some(base);
    }
    // SAFETY: the mapping is of this call, and no table has the owner.
    unsafe {
        owner::detach(owner);
        system::unmap(&mount);
        owner::retire(owner);
    }
    None
}

/// What the cache thread does when it was rung.
fn work() {
    owner::end_retired();
    let Some(Some(own)) = OWN.get() else { return };
    for job in JOBS.take() {
        // SAFETY: the thread that has it waits until it is answered.
        let job = unsafe { &(*job).value };
        // The thread waits for an answer, whatever happens.
        let owner = catch_unwind(AssertUnwindSafe(|| own.map(job))).ok().flatten().unwrap_or(0);
        job.owner.store(owner, Ordering::Relaxed);
        let is_answered = ptr::from_ref(&job.is_answered);
        job.is_answered.store(1, Ordering::Release);
        system::wake(is_answered);
    }
}

impl Own {
    fn map(&self, job: &Job) -> Option<usize> {
        let request = &job.request;
        let path = format!("/proc/self/task/{}/fd/{}", job.thread, request.file);
        // The first descriptor of such a file can write, and the kernel gives a lease all the same.
        let is_memory = fs::read_link(&path).ok()?.as_os_str().as_bytes().starts_with(b"/memfd:");
        // A process may have a lease for writing.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
        if is_memory || owner::has_broken(&file) {
            return None;
        }
        let start = request.offset.cast_unsigned();
        let end = start.checked_add(request.length as u64)?;
        let mapping = self.cache.map(&file, start..end, Access::Read).ok()?;
        let lease = self.watcher.take(&file);
        if lease == Lease::Written {
            return None;
        }
        Some(owner::number_of(mapping, (file, lease)))
    }
}

/// The cache that the environment asks for.
fn make() -> Option<Own> {
    let variable = |name: &str| std::env::var(name).ok();
    // A file could not take a mapping's place: the kernel counts both for a moment.
    if getrlimit(Resource::As).current.is_some() {
        return None;
    }
    let size = variable("VELLUM_AQUILA_CACHE").map_or(Some(USUAL), |size| size.parse().ok())?;
    let policy = match variable("VELLUM_AQUILA_POLICY").as_deref() {
        None | Some("s3-fifo") => PolicyChoice::S3Fifo,
        Some("clock") => PolicyChoice::Clock,
        Some("lru") => PolicyChoice::Lru,
        Some(_) => return None,
    };
    let options = Options::new(size)
        .policy(policy)
        .backend(BackendChoice::Only(Backend::Userfaultfd))
        .faults(Faults::Monitor)
        .direct_io(variable("VELLUM_AQUILA_DIRECT").is_some_and(|value| value == "1"));
    let cache = options.build().ok()?;
    let watcher = Watcher::start(mounts::give_up_broken)?;
    let statistics = std::env::var_os("VELLUM_AQUILA_STATISTICS");
    // SAFETY: the function is there as long as the process: a library that is preloaded is never
    // unloaded.
    unsafe { libc::atexit(at_exit) };
    Some(Own { cache, watcher, process: system::process(), statistics })
}

/// What a child does first that was forked.
pub(crate) extern "C" fn in_child() {
    // Later a child of its own may have the number of the process that has the cache.
    if MAKER.load(Ordering::Relaxed) != 0 {
        MAKER.store(NONE, Ordering::Relaxed);
    }
    mounts::give_up_in_child();
}

extern "C" fn at_exit() {
    let Some(Some(own)) = OWN.get() else { return };
    if own.process != system::process() || MAKER.load(Ordering::Relaxed) == NONE {
        return;
    }
    if let (Some(path), Some(statistics)) = (&own.statistics, own.cache.statistics()) {
        let file = File::options().append(true).create(true).open(path);
        // No caller would hear of an error.
        let _ = file.and_then(|mut file| file.write_all(as_line(&statistics).as_bytes()));
    }
}

/// The process, and its figures. One write appends it: other processes may write to the file, too.
fn as_line(statistics: &Statistics) -> String {
    let name = fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let Statistics { faults, hits, misses, read_ahead, read_ahead_hits, evictions, frames, .. } =
        statistics;
    format!(
        "{} {}: {faults} faults, {hits} hits, {misses} misses, {read_ahead} read ahead, \
         {read_ahead_hits} of these used, {evictions} evictions, {frames} frames\n",
        name.trim_end(),
        system::process(),
    )
}
