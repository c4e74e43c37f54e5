//! Mapped files whose page faults and cache are the program's own.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use self_cell::self_cell;
use vellum_aquila::{
    Access, Advice, Backend, BackendChoice, Cache, Faults, Mapping, Options, Pin, PolicyChoice,
};
use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given, vellum_last_error};
use crate::raw::{buffer, bytes, duplicate};

/// `vellum_aquila`.
#[derive(Debug)]
pub struct CacheHandle(Cache);

/// `vellum_aquila_mapping`.
#[derive(Debug)]
pub struct CachedHandle(Arc<Mapping>);

self_cell!(
    struct Pinned {
        owner: Arc<Mapping>,
        #[covariant]
        dependent: Pin,
    }

    impl {Debug}
);

/// `vellum_aquila_pin`.
#[derive(Debug)]
pub struct PinHandle(#[expect(dead_code, reason = "it ends the pins when it is dropped")] Pinned);

/// `struct vellum_aquila_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CCacheOptions {
    size: u64,
    capacity: u64,
    backend: u32,
    policy: u32,
    faults: u32,
    direct_io: u32,
}

/// `struct vellum_aquila_statistics`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CCacheStatistics {
    faults: u64,
    hits: u64,
    misses: u64,
    read_ahead: u64,
    read_ahead_hits: u64,
    evictions: u64,
    written_back: u64,
    writes: u64,
    write_errors: u64,
    dirty: u64,
    frames: u64,
}

const USERFAULTFD: u32 = 1;
const KERNEL: u32 = 2;

fn options(given: &CCacheOptions) -> Outcome<Options> {
    let backend = match given.backend {
        0 => BackendChoice::Auto,
        USERFAULTFD => BackendChoice::Only(Backend::Userfaultfd),
        KERNEL => BackendChoice::Only(Backend::Kernel),
        _ => return Err(Failure::argument("a backend that does not exist")),
    };
    let policy = match given.policy {
        0 => PolicyChoice::S3Fifo,
        1 => PolicyChoice::Clock,
        2 => PolicyChoice::Lru,
        _ => return Err(Failure::argument("a policy that does not exist")),
    };
    let faults = match given.faults {
        0 => Faults::Signal,
        1 => Faults::Monitor,
        _ => return Err(Failure::argument("a way of handling faults that does not exist")),
    };
    let direct = match given.direct_io {
        0 => false,
        1 => true,
        _ => return Err(Failure::argument("direct_io is neither 0 nor 1")),
    };
    let options = Options::new(given.size).capacity(given.capacity);
    Ok(options.backend(backend).policy(policy).faults(faults).direct_io(direct))
}

fn access(number: u32) -> Outcome<Access> {
    match number {
        0 => Ok(Access::Read),
        1 => Ok(Access::ReadWrite),
        _ => Err(Failure::argument("an access that does not exist")),
    }
}

/// A range of a mapping's bytes; one that overflows is not within any mapping.
fn range(offset: usize, length: usize) -> Range<usize> {
    offset..offset.saturating_add(length)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_last_error() -> *const c_char {
    vellum_last_error()
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_open(
    given_options: Option<&CCacheOptions>,
    result: Option<&mut MaybeUninit<Box<CacheHandle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let cache = options(given(given_options, "the options")?)?.build()?;
        out.set(Box::new(CacheHandle(cache)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_close(cache: Option<Box<CacheHandle>>) {
    drop(cache);
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_backend(cache: Option<&CacheHandle>) -> u32 {
    cache.map_or(0, |cache| match cache.0.backend() {
        Backend::Userfaultfd => USERFAULTFD,
        Backend::Kernel => KERNEL,
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_why_not_better(cache: Option<&CacheHandle>) -> c_int {
    call(|| match given(cache, "the cache")?.0.why_not_better() {
        None => Ok(()),
        Some(why) => Err(Failure::new(Errno::OPNOTSUPP, why.to_owned())),
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_resize(cache: Option<&CacheHandle>, size: u64) -> c_int {
    call(|| Ok(given(cache, "the cache")?.0.resize(size)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_set_length(
    cache: Option<&CacheHandle>,
    fd: c_int,
    length: u64,
) -> c_int {
    call(|| {
        let (cache, file) = (given(cache, "the cache")?, File::from(duplicate(fd)?));
        Ok(cache.0.set_length(&file, length)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_get_statistics(
    cache: Option<&CacheHandle>,
    result: Option<&mut MaybeUninit<CCacheStatistics>>,
) -> c_int {
    call(|| {
        let (out, cache) = (OutParameter::new(result)?, given(cache, "the cache")?);
        let Some(found) = cache.0.statistics() else {
            let why = "the kernel has the cache, and counts for the whole machine only";
            return Err(Failure::new(Errno::OPNOTSUPP, why.to_owned()));
        };
        out.set(CCacheStatistics {
            faults: found.faults,
            hits: found.hits,
            misses: found.misses,
            read_ahead: found.read_ahead,
            read_ahead_hits: found.read_ahead_hits,
            evictions: found.evictions,
            written_back: found.written_back,
            writes: found.writes,
            write_errors: found.write_errors,
            dirty: found.dirty,
            frames: found.frames.into(),
        });
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_map(
    cache: Option<&CacheHandle>,
    fd: c_int,
    offset: u64,
    length: u64,
    access_number: u32,
    result: Option<&mut MaybeUninit<Box<CachedHandle>>>,
) -> c_int {
    call(|| {
        let (out, cache) = (OutParameter::new(result)?, given(cache, "the cache")?);
        let (file, access) = (File::from(duplicate(fd)?), access(access_number)?);
        let mapping = match length {
            0 => cache.0.map(&file, offset.., access),
            _ => cache.0.map(&file, offset..offset.saturating_add(length), access),
        };
        out.set(Box::new(CachedHandle(Arc::new(mapping?))));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_unmap(mapping: Option<Box<CachedHandle>>) -> c_int {
    call(|| match mapping {
        None => Ok(()),
        // It is freed in any case.
        Some(mapping) => Ok(mapping.0.sync()?),
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_mapping_base(mapping: Option<&CachedHandle>) -> *mut c_void {
    mapping.map_or(ptr::null_mut(), |mapping| mapping.0.as_ptr().cast())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_mapping_length(mapping: Option<&CachedHandle>) -> usize {
    mapping.map_or(0, |mapping| mapping.0.len())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_advise(mapping: Option<&CachedHandle>, advice: u32) -> c_int {
    call(|| {
        let advice = match advice {
            0 => Advice::Normal,
            1 => Advice::Random,
            2 => Advice::Sequential,
            _ => return Err(Failure::argument("an advice that does not exist")),
        };
        Ok(given(mapping, "the mapping")?.0.advise(advice)?)
    })
}

/// Runs an operation on a range that says how many pages it was for.
fn pages(
    mapping: Option<&CachedHandle>,
    result: Option<&mut MaybeUninit<u64>>,
    operation: impl FnOnce(&Mapping) -> vellum_aquila::Result<u64>,
) -> c_int {
    call(|| {
        let pages = operation(&given(mapping, "the mapping")?.0)?;
        if let Some(result) = result {
            result.write(pages);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_prefetch(
    mapping: Option<&CachedHandle>,
    offset: usize,
    length: usize,
    result: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    pages(mapping, result, |mapping| mapping.prefetch(range(offset, length)))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_evict(
    mapping: Option<&CachedHandle>,
    offset: usize,
    length: usize,
    result: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    pages(mapping, result, |mapping| mapping.evict(range(offset, length)))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_write_back(
    mapping: Option<&CachedHandle>,
    offset: usize,
    length: usize,
) -> c_int {
    call(|| Ok(given(mapping, "the mapping")?.0.write_back(range(offset, length))?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_sync(mapping: Option<&CachedHandle>) -> c_int {
    call(|| Ok(given(mapping, "the mapping")?.0.sync()?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_read(
    mapping: Option<&CachedHandle>,
    offset: usize,
    begin: *mut c_void,
    length: usize,
) -> c_int {
    call(|| Ok(given(mapping, "the mapping")?.0.read_at(buffer(begin, length)?, offset)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_write(
    mapping: Option<&CachedHandle>,
    offset: usize,
    begin: *const c_void,
    length: usize,
) -> c_int {
    call(|| Ok(given(mapping, "the mapping")?.0.write_at(bytes(begin, length)?, offset)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_pin_pages(
    mapping: Option<&CachedHandle>,
    offset: usize,
    length: usize,
    access_number: u32,
    result: Option<&mut MaybeUninit<Box<PinHandle>>>,
) -> c_int {
    call(|| {
        let (out, mapping) = (OutParameter::new(result)?, given(mapping, "the mapping")?);
        let access = access(access_number)?;
        let pinned = Pinned::try_new(Arc::clone(&mapping.0), |mapping| {
            mapping.pin(range(offset, length), access)
        })?;
        out.set(Box::new(PinHandle(pinned)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_aquila_unpin(pin: Option<Box<PinHandle>>) {
    drop(pin);
}
