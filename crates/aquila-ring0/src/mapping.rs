//! The interface of a cache in a machine: files in managed ranges.

use std::fs::File;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::Errno;
use vellum_aquila_core::{Advice, Key, Statistics};

use crate::cache::PageCache;
use crate::descriptors::{self, Kept};
use crate::error::{Error, Result};
use crate::file::{About, Io, MappedFile};
use crate::guest::Guest;
use crate::memory::pointer;
use crate::sys::is_in_ring_0;

const WRITING: &str = "writing pages back to their file";
const MAPPING: &str = "mapping a file in a managed range";

/// A cache of file pages in a machine: [`VirtualMachine::cache`](crate::VirtualMachine::cache).
///
/// Threads call its functions, and those of its mappings, in both rings, while others are in ring
/// 0.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'machine> {
    guest: &'machine Guest,
    cache: &'machine PageCache,
}

impl<'machine> Cache<'machine> {
    pub(crate) fn new(guest: &'machine Guest, cache: &'machine PageCache) -> Self {
        Self { guest, cache }
    }

    /// Maps a whole file, as long as it is now, which must not change meanwhile. If the file is
    /// open for reading only, a store to the mapping is SIGSEGV. Addresses and numbers of files are
    /// not used again: a machine can map few files.
    ///
    /// # Errors
    /// [`Error::AlreadyMapped`]; [`Error::TooManyRanges`]; [`Error::OnlyInRing3`];
    /// [`Error::Forked`] in a child; [`Error::System`] if it is no regular file, has no byte, or
    /// cannot be read.
    pub fn map(&self, file: &File) -> Result<Mapping<'machine>> {
        self.map_with(file, Io::Calls)
    }

    /// The same with a choice of how the file is read and written.
    ///
    /// # Errors
    /// As for [`map`](Self::map); and [`Error::System`] if there is no such way here.
    pub fn map_with(&self, file: &File, io: Io) -> Result<Mapping<'machine>> {
        if is_in_ring_0() {
            return Err(Error::OnlyInRing3 { doing: MAPPING });
        }
        self.guest.check_process()?;
        let failed = |errno| Error::of(MAPPING, errno);
        let status = fstat(file).map_err(failed)?;
        let is_file = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
        let access = fcntl_getfl(file).map_err(failed)? & OFlags::RWMODE;
        let length = status.st_size.cast_unsigned();
        if !is_file || length == 0 || access == OFlags::WRONLY {
            return Err(failed(Errno::INVAL));
        }
        let identity = (status.st_dev, status.st_ino);
        let is_same = |other: &MappedFile| {
            !other.has_ended.load(Ordering::Acquire) && other.identity == identity
        };
        // To open the file, and close it again, would end the process' `fcntl` locks of it.
        if self.cache.pages().files().any(is_same) {
            return Err(Error::AlreadyMapped);
        }
        let descriptor = copy_of(file, access).map_err(failed)?;
        let about = About { identity, length, writable: access == OFlags::RDWR };
        let file = MappedFile::new(descriptor, about, io, || self.cache.ring())?;
        let all = self.cache.pages();
        let (start, number) = self.guest.add_cached(file.pages(), |number, start| {
            // One thread at a time is here.
            !all.files().any(is_same) && all.open(number, file.at(start))
        })?;
        let file = all.file(number).ok_or_else(|| failed(Errno::BADF))?;
        Ok(Mapping { cache: *self, file, number, start })
    }

    /// What the cache has done. The pages that only page tables call dirty are not in
    /// [`Statistics::dirty`].
    pub fn statistics(&self) -> Statistics {
        self.cache.core().statistics()
    }

    /// How often processors were told to forget translations: once for each batch of pages that
    /// left or were written back.
    pub fn flushes(&self) -> u64 {
        self.guest.shootdown.generation()
    }
}

/// A file in a managed range: [`Cache::map`]. When it is dropped, dirty pages are written back, and
/// errors of that are lost: call [`close`](Self::close) or [`sync`](Self::sync) before.
#[derive(Debug)]
pub struct Mapping<'machine> {
    cache: Cache<'machine>,
    file: &'machine MappedFile,
    number: u32,
    start: u64,
}

impl Mapping<'_> {
    /// Its first byte. Only a thread in ring 0 may access it: elsewhere it is SIGSEGV.
    pub fn as_ptr(&self) -> *mut u8 {
        pointer(self.start)
    }

    /// Bytes of the file.
    pub fn length(&self) -> u64 {
        self.file.length
    }

    /// The machine's descriptor of the file, which stays open as long as the machine is there.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.descriptor()
    }

    /// Pages of it that are in the page tables now.
    pub fn mapped_pages(&self) -> u64 {
        self.cache.cache.pages().mapped(self.file)
    }

    /// Says how the program will access the file.
    pub fn advise(&self, advice: Advice) {
        self.file.advise(advice);
    }

    /// Writes all stores back that happened before the call, and makes them durable. Neighbouring
    /// pages are written together, in the order of the file.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::System`] if pages could not be written, which are still dirty
    /// then, or if the system could not make them durable, in this call or an earlier one.
    pub fn sync(&self) -> Result<()> {
        self.cache.guest.check_process()?;
        let failed = |errno| Error::of(WRITING, errno);
        self.cache.cache.core().write_back(self.keys()).map_err(failed)?;
        if self.file.sync_failed.load(Ordering::Acquire) {
            return Err(failed(Errno::IO));
        }
        self.file.make_durable().map_err(|errno| {
            self.file.sync_failed.store(true, Ordering::Release);
            failed(errno)
        })
    }

    /// Has all pages leave the cache, dirty ones to the file.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::System`] if pages could not be written, which stay, dirty.
    pub fn evict(&self) -> Result<()> {
        self.cache.guest.check_process()?;
        let (_, written) = self.cache.cache.core().evict_range(self.keys(), false);
        written.map_err(|errno| Error::of(WRITING, errno))
    }

    /// Takes all pages out of the page tables, and not out of the cache: for measurements.
    ///
    /// # Errors
    /// [`Error::Forked`].
    #[doc(hidden)]
    pub fn unmap_pages(&self) -> Result<()> {
        self.cache.guest.check_process()?;
        self.cache.cache.pages().unmap_all_of(self.file);
        Ok(())
    }

    /// Ends the mapping, and writes dirty pages back. No thread accesses it any more.
    ///
    /// # Errors
    /// [`Error::Forked`]; [`Error::System`] if pages could not be written: what was stored there is
    /// lost.
    pub fn close(self) -> Result<()> {
        let closed = self.end();
        std::mem::forget(self);
        closed
    }

    fn end(&self) -> Result<()> {
        self.cache.guest.check_process()?;
        let core = self.cache.cache.core();
        self.file.is_open.store(false, Ordering::Release);
        let (evicted, written) = core.evict_range(self.keys(), false);
        if evicted.stay > 0 {
            // The frames are for other files.
            let _ = core.evict_range(self.keys(), true);
        }
        self.file.has_ended.store(true, Ordering::Release);
        written.map_err(|errno| Error::of(WRITING, errno))
    }

    fn keys(&self) -> RangeInclusive<Key> {
        let key = |page| {
            // The mapping was made with fewer pages than a key can name.
            Key::new(self.number, page).unwrap_or_else(|| unreachable!("a page of a mapping"))
        };
        key(0)..=key(self.file.pages() - 1)
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// A descriptor of the cache's own: the file, opened once more. So flags that the program sets do
/// not matter: with `O_APPEND` the system would write pages to the end of the file. A process that
/// may not open the file gets a duplicate, if it has none of these flags. So does one that only
/// reads: a duplicate has a number out of the program's way from the beginning.
fn copy_of(file: &File, access: OFlags) -> Result<(OwnedFd, Kept), Errno> {
    if access == OFlags::RDONLY && !fcntl_getfl(file)?.contains(OFlags::DIRECT) {
        return descriptors::keep(file.as_fd());
    }
    // A thread may have descriptors of its own.
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    // To open a file waits for the end of a lease, which this process may have itself.
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(opened) => {
            let flags = fcntl_getfl(&opened)?;
            fcntl_setfl(&opened, flags.difference(OFlags::NONBLOCK))?;
            let kept = Kept::new(&opened);
            Ok((opened, kept))
        }
        Err(errno) if fcntl_getfl(file)?.intersects(OFlags::APPEND | OFlags::DIRECT) => Err(errno),
        Err(_) => descriptors::keep(file.as_fd()),
    }
}
