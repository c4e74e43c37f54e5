//! Maps files through a cache of the process' own (Aquila).
//!
//! The first file that is mapped so makes the cache. Its threads handle the faults, also those of
//! system calls, so the program's own signals are as they were.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use vellum_aquila::{
    Access, Backend, BackendChoice, Cache, Faults, Options, PolicyChoice, Statistics,
};

use crate::mounts::{self, Part};
use crate::owner;
use crate::request::Request;
use crate::system::{self, PAGE};

/// Bytes of the cache if the environment does not say them.
const USUAL: u64 = 256 << 20;

/// A cache, and who has it.
struct Own {
    cache: Cache,
    process: u32,
    /// The file to which the process appends statistics when it exits.
    statistics: Option<OsString>,
}

/// The process whose thread makes the cache, or has made it; 0 before.
static MAKER: AtomicU32 = AtomicU32::new(0);

/// `Some(None)` if there can be no cache.
static OWN: OnceLock<Option<Own>> = OnceLock::new();

/// This process' cache. A child of the process that has made it has none.
fn own() -> Option<&'static Own> {
    let process = system::process();
    let (order, failed) = (Ordering::Relaxed, Ordering::Relaxed);
    match MAKER.compare_exchange(0, process, order, failed) {
        Ok(_) => drop(OWN.set(make())),
        Err(maker) if maker != process => return None,
        Err(_) => {
            while OWN.get().is_none() {
                system::give_way();
            }
        }
    }
    OWN.get()?.as_ref()
}

/// Maps a part of a file through the cache. `None` if there can be no cache, or if it cannot map
/// the file.
pub(crate) fn map(file: &File, request: &Request) -> Option<usize> {
    // A handler of a signal may unmap memory, for which it needs what this thread has now.
    let signals = system::block_signals();
    let mapped = match system::is_open_for_writing(file) {
        true => None,
        false => own().and_then(|own| own.map(file, request)),
    };
    system::set_signals(signals);
    mapped
}

impl Own {
    fn map(&self, file: &File, request: &Request) -> Option<usize> {
        let start = request.offset.cast_unsigned();
        let end = start.checked_add(request.length as u64)?;
        let mapping = self.cache.map(file, start..end, Access::Read).ok()?;
        if request.flags & libc::MAP_POPULATE != 0 {
            // As the kernel does, without an error.
            let _ = mapping.prefetch(..);
        }
        let anchor = mounts::map_anchor(request, request.offset)?;
        let base = mapping.as_ptr().addr();
        let extent = request.length.next_multiple_of(PAGE);
        let owner = owner::number_of(mapping);
        let part = Part { start: base, end: base + extent, base, extent, anchor, owner };
        if mounts::add(&part) {
            return Some(base);
        }
        // SAFETY: the anchor and the mapping are of this call, and no table has the owner.
        unsafe {
            owner::detach(owner);
            system::unmap(&(anchor..anchor + PAGE));
            system::unmap(&(base..base + extent));
            owner::retire(owner);
        }
        owner::end_retired();
        None
    }
}

/// The cache that the environment asks for.
fn make() -> Option<Own> {
    let variable = |name: &str| std::env::var(name).ok();
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
    let statistics = std::env::var_os("VELLUM_AQUILA_STATISTICS");
    // SAFETY: the functions are there as long as the process: a library that is preloaded is never
    // unloaded.
    unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
        libc::atexit(at_exit);
    }
    Some(Own { cache, process: system::process(), statistics })
}

extern "C" fn in_child() {
    mounts::give_up_in_child();
}

extern "C" fn at_exit() {
    let Some(Some(own)) = OWN.get() else { return };
    if own.process != system::process() {
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
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let Statistics { faults, hits, misses, read_ahead, read_ahead_hits, evictions, frames, .. } =
        statistics;
    format!(
        "{} {}: {faults} faults, {hits} hits, {misses} misses, {read_ahead} read ahead, \
         {read_ahead_hits} of these used, {evictions} evictions, {frames} frames\n",
        name.trim_end(),
        system::process(),
    )
}
