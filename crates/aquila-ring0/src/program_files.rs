//! Files that a program as it is maps for reading: those that the rules take are in the cache.
//!
//! The kernel maps the file at the same addresses. Ring 0 does not see that mapping, because the
//! guest has tables of its own there. But all that runs in ring 3 does: handlers of signals, system
//! calls, children. Both have the same bytes as long as no process changes the file.
//!
//! Invariant: addresses of managed ranges are never the program's to change. Calls for them end
//! here. What it has mapped stays accessible in ring 0 until it has unmapped the last page of it.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, readlink};
use rustix::io::Errno;
use vellum_aquila_core::Advice;
use vellum_interpose::{Request, Rules};

use crate::cache::Replacement;
use crate::entry::PAGE;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::mapping::{Cache, Mapping};
use crate::memory::Mapped;
use crate::sys::may_be_written;

/// Bytes of the cache if the environment does not say them.
const USUAL: u64 = 256 << 20;

/// Pages that a program's cache has at least: several for each of its threads.
const LEAST: u32 = 64;

/// What two ranges have in common.
fn common(one: &Range<u64>, other: &Range<u64>) -> Option<Range<u64>> {
    let both = one.start.max(other.start)..one.end.min(other.end);
    (!both.is_empty()).then_some(both)
}

/// A file in a managed range.
#[derive(Debug)]
struct View {
    mapping: Mapping<'static>,
    is_shared: bool,
    /// The addresses that the program has.
    parts: Vec<Range<u64>>,
}

impl View {
    fn has(&self, range: &Range<u64>) -> bool {
        self.parts.iter().any(|part| common(part, range).is_some())
    }

    /// Takes addresses away.
    fn remove(&mut self, range: &Range<u64>) {
        let rest = |part: &Range<u64>| {
            [part.start..part.end.min(range.start), part.start.max(range.end)..part.end]
        };
        let parts = self.parts.iter().flat_map(rest);
        self.parts = parts.filter(|part| !part.is_empty()).collect();
    }
}

/// The files of a program, and the cache that they are in.
#[derive(Debug)]
pub(crate) struct ProgramFiles {
    guest: &'static Guest,
    cache: Cache<'static>,
    rules: Rules,
    views: Mutex<Vec<View>>,
}

impl ProgramFiles {
    /// What the environment asks for: `None` if no file is to be taken. The thread is in ring 3.
    ///
    /// # Errors
    /// When a value is wrong, or there can be no cache.
    pub(crate) fn of_environment(guest: &'static Guest) -> Result<Option<Self>> {
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let rules = Rules::of_environment(Rules::OF_CACHES);
        if rules.are_none() {
            return Ok(None);
        }
        let wrong = || Error::of("reading the settings of the cache", Errno::INVAL);
        let bytes = match variable("VELLUM_AQUILA_CACHE").as_str() {
            "" => USUAL,
            bytes => bytes.parse().map_err(|_| wrong())?,
        };
        let frames = u32::try_from(bytes / PAGE as u64).map_err(|_| wrong())?;
        if frames < LEAST {
            return Err(Error::CacheTooSmall { pages: frames, least: LEAST });
        }
        let replacement = match variable("VELLUM_AQUILA_POLICY").as_str() {
            "" | "s3-fifo" => Replacement::S3Fifo,
            "clock" => Replacement::Clock,
            "lru" => Replacement::Lru,
            _ => return Err(wrong()),
        };
        let cache = Cache::new(guest, guest.make_cache(frames, replacement)?);
        Ok(Some(Self { guest, cache, rules, views: Mutex::default() }))
    }

    fn views(&self) -> MutexGuard<'_, Vec<View>> {
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any address of a range is managed. Takes no lock.
    pub(crate) fn touch(&self, range: &Range<u64>) -> bool {
        let (start, end) = self.guest.managed();
        range.start < end && start < range.end
    }

    /// Maps a part of a file through the cache. `None` if the kernel is to map it.
    pub(crate) fn map(&self, request: &Request, file: &File) -> Option<u64> {
        let bytes = request.bytes()?;
        let status = fstat(file).ok()?;
        let length = status.st_size.cast_unsigned();
        let is_file = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
        let path = || {
            let path = readlink(format!("/proc/thread-self/fd/{}", file.as_raw_fd()), Vec::new());
            path.ok().map(std::ffi::CString::into_bytes)
        };
        if !is_file
            || bytes.end > length.next_multiple_of(PAGE as u64)
            || !self.rules.take(length, path)
            || fcntl_getfl(file).ok()? & OFlags::RWMODE != OFlags::RDONLY
            || may_be_written(file)
        {
            return None;
        }
        let mapping = self.guest.outside(|| self.cache.map(file)).ok()?;
        let start = mapping.as_ptr().addr() as u64;
        let part = start + bytes.start..start + bytes.end;
        let is_shared = request.flags & libc::MAP_SHARED != 0;
        if !Mapped::file_over(&part, mapping.descriptor(), bytes.start, is_shared) {
            self.guest.outside(|| drop(mapping));
            return None;
        }
        self.views().push(View { mapping, is_shared, parts: vec![part.clone()] });
        Some(part.start)
    }

    /// Unmaps managed addresses. The file leaves the cache with the last of them.
    pub(crate) fn unmap(&self, range: &Range<u64>) {
        let mut views = self.views();
        for view in views.iter_mut() {
            view.parts.iter().filter_map(|part| common(part, range)).for_each(Mapped::reserve_over);
            view.remove(range);
        }
        let ended: Vec<View> = views.extract_if(.., |view| view.parts.is_empty()).collect();
        drop(views);
        // What was read only is not written back.
        self.guest.outside(|| drop(ended));
    }

    /// Changes the rights of managed addresses, if that makes no difference.
    ///
    /// # Errors
    /// `ENOMEM` if the program does not have the addresses, or if only another mapping could have
    /// the rights; `EACCES` if the file is shared and not open for writing.
    pub(crate) fn protect(&self, range: &Range<u64>, rights: i32) -> Result<(), Errno> {
        let views = self.views();
        let view = views.iter().find(|view| view.has(range)).ok_or(Errno::NOMEM)?;
        match rights {
            libc::PROT_READ => Ok(()),
            _ if rights & libc::PROT_WRITE != 0 && view.is_shared => Err(Errno::ACCESS),
            _ => Err(Errno::NOMEM),
        }
    }

    /// Takes advice for managed addresses. What only says when pages are needed is not followed.
    ///
    /// # Errors
    /// `ENOMEM` if the program does not have the addresses, and `EINVAL` for other advice.
    pub(crate) fn advise(&self, range: &Range<u64>, advice: i32) -> Result<(), Errno> {
        let views = self.views();
        let view = views.iter().find(|view| view.has(range)).ok_or(Errno::NOMEM)?;
        match advice {
            libc::MADV_NORMAL => view.mapping.advise(Advice::Normal),
            libc::MADV_RANDOM => view.mapping.advise(Advice::Random),
            libc::MADV_SEQUENTIAL => view.mapping.advise(Advice::Sequential),
            libc::MADV_WILLNEED | libc::MADV_DONTNEED | libc::MADV_COLD | libc::MADV_PAGEOUT => {}
            libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE => {}
            libc::MADV_DONTDUMP | libc::MADV_DODUMP => {}
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// Whether the program has all pages of a range mapped, of which none is ever dirty.
    pub(crate) fn have(&self, range: &Range<u64>) -> bool {
        let within = |part: &Range<u64>| part.start <= range.start && range.end <= part.end;
        self.views().iter().any(|view| view.parts.iter().any(within))
    }
}
