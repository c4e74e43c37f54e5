//! Pages in a file or on a block device.
//!
//! Blocking reads go straight through the surface; everything else goes through an [`IoEngine`].
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use vellum_vm::{END_OF_FILE, Entry, PAGE_SIZE, Surface};

use super::file_open::{FileLock, FileOptions, IoEngineChoice, Opened, open};
use super::promptness::Promptness;
use super::threads::ThreadEngine;
use super::transfer::{IoEngine, ReadRequest, file_offset};
use super::uring::UringEngine;
use super::uring_prompt_reads::PromptRings;
use super::workers::lock;
use super::{Device, DeviceError, DeviceInfo, ReadDone, ReadRange, RegisteredMemory, Write};

/// A file or a block device; page `p` is at byte `p * 4096`.
#[derive(Debug)]
pub struct FileDevice {
    // Dropped first: the drop waits for the reads in flight. The engine holds the file too.
    engine: Box<dyn IoEngine>,
    /// For several reads that a thread makes itself.
    prompt_rings: Option<Arc<PromptRings>>,
    file: Arc<File>,
    path: PathBuf,
    read_only: bool,
    is_block_device: bool,
    direct: Result<(), String>,
    /// Of reads by blocking calls, and of reads by a ring: there are files that the kernel reads
    /// at once by calls, and by a thread of its own for a ring.
    promptness: Promptness,
    ring_promptness: Promptness,
    /// Dropped after the engine: nothing is in flight when the file is unlocked.
    lock: Mutex<Option<FileLock>>,
    /// Held while the length changes.
    resizing: Mutex<()>,
}

impl FileDevice {
    /// Makes a new, empty file, whose name is durable when this returns. The path may also be that
    /// of a block device, which is then opened.
    ///
    /// # Errors
    /// [`DeviceError`]; among others if the file exists, or cannot be locked.
    pub fn create(path: impl AsRef<Path>, options: FileOptions) -> Result<Self, DeviceError> {
        Self::create_as(path.as_ref(), path.as_ref(), options)
    }

    /// As [`create`](Self::create), of a file whose name for now is `name`, in the same directory.
    pub(super) fn create_as(
        path: &Path,
        name: &Path,
        options: FileOptions,
    ) -> Result<Self, DeviceError> {
        Self::with(path, name, options, true)
    }

    /// Opens a file or a block device.
    ///
    /// # Errors
    /// [`DeviceError`]; among others [`DeviceError::InUse`] while another process, or another
    /// handle, has it open.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<Self, DeviceError> {
        Self::with(path.as_ref(), path.as_ref(), options, false)
    }

    fn with(
        path: &Path,
        name: &Path,
        options: FileOptions,
        create: bool,
    ) -> Result<Self, DeviceError> {
        let opened = open(path, name, options, create)?;
        let Opened { file, lock: opened_lock, is_block_device, direct } = opened;
        let (engine, prompt_rings) = start_engine(&file, options.engine)?;
        Ok(Self {
            engine,
            prompt_rings,
            file,
            path: path.to_path_buf(),
            read_only: options.read_only,
            is_block_device,
            direct,
            promptness: Promptness::default(),
            ring_promptness: Promptness::default(),
            lock: Mutex::new(opened_lock),
            resizing: Mutex::new(()),
        })
    }

    /// The device makes all reads on the calling thread, as if its storage answered at once.
    #[cfg(any(test, feature = "testing"))]
    pub fn with_prompt_storage(mut self) -> Self {
        self.promptness = Promptness::always();
        self.ring_promptness = Promptness::always();
        self
    }

    /// The length in bytes.
    fn len(&self) -> io::Result<u64> {
        if self.is_block_device {
            // The end of a block device is where seeking to the end leads. Nothing here depends on
            // the file's position.
            return (&*self.file).seek(SeekFrom::End(0));
        }
        Ok(self.file.metadata()?.len())
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.read_only {
            let cause = format!("{} is open read-only", self.path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, cause));
        }
        Ok(())
    }

    /// Makes the file longer, from `old` to `new` bytes.
    fn grow(&self, old: u64, new: u64) -> io::Result<()> {
        // Beyond this limit the kernel would not only refuse but also kill the process (SIGXFSZ).
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize);
        if limit.current.is_some_and(|limit| new > limit) {
            return Err(Errno::FBIG.into());
        }
        let result = loop {
            match rustix::fs::fallocate(&*self.file, FallocateFlags::empty(), old, new - old) {
                Err(Errno::INTR) => {}
                result => break result,
            }
        };
        match result {
            Ok(()) => Ok(()),
            // Without the call, only a write can find that space is missing.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.file.set_len(new),
            Err(error) => {
                // Some file systems keep the part that they allocated before the space ran out.
                self.file.set_len(old)?;
                Err(error.into())
            }
        }
    }

    /// Starts requests. If the storage answers at once, this thread does the reads itself.
    fn start(&self, mut requests: Vec<ReadRequest>) {
        if self.promptness.is_prompt() {
            return self.read_at_once(requests);
        }
        if self.promptness.trial_is_due()
            && let Some(request) = requests.pop()
        {
            self.promptness.watch(1, || request.run(&self.file));
        }
        self.engine.start_reads(requests);
    }

    /// Makes requests on this thread: several by a ring, as long as that does not sleep either.
    fn read_at_once(&self, requests: Vec<ReadRequest>) {
        let count = requests.len();
        let by_ring = &self.ring_promptness;
        match &self.prompt_rings {
            Some(rings) if count > 1 && (by_ring.is_prompt() || by_ring.trial_is_due()) => {
                // It would sleep once for all of them.
                by_ring.watch(1, || rings.read(requests));
            }
            _ => {
                let run = || requests.into_iter().for_each(|request| request.run(&self.file));
                self.promptness.watch(count, run);
            }
        }
    }

    /// Populates all ranges by one call. Does nothing on a surface that a read populates by itself.
    fn populate(&self, surface: &Surface, reads: &[(ReadRange, ReadDone)]) -> Vec<Entry> {
        let entry = |(read, _): &(ReadRange, ReadDone)| Entry::new(read.target());
        let mut entries: Vec<Entry> = reads.iter().map(entry).collect();
        if surface.must_be_populated() {
            surface.populate(&mut entries);
        }
        entries
    }

    /// The request that reads pages into their populated target; an error if that cannot be.
    fn request(
        &self,
        surface: &Surface,
        populated: &Entry,
        (read, done): (ReadRange, ReadDone),
    ) -> Result<ReadRequest, (ReadDone, io::Error)> {
        let target = populated.range;
        let offset = match file_offset(read.pages.start) {
            Ok(offset) if target.is_within(surface.pages()) => offset,
            Ok(_) => return Err((done, Errno::INVAL.into())),
            Err(error) => return Err((done, error)),
        };
        if let Err(errno) = populated.result {
            return Err((done, errno.into()));
        }
        let address = surface.base().as_ptr().wrapping_add(target.start as usize * PAGE_SIZE);
        // SAFETY: the target is within the surface (checked), and the caller of `start_reads`
        // keeps it mapped and to itself until `done` is called.
        Ok(unsafe { ReadRequest::new(address, target.bytes(), offset, done) })
    }
}

/// The engine, and the rings if it is io_uring.
type EngineAndRings = (Box<dyn IoEngine>, Option<Arc<PromptRings>>);

/// Starts the chosen engine.
fn start_engine(file: &Arc<File>, choice: IoEngineChoice) -> Result<EngineAndRings, DeviceError> {
    let uring = || -> io::Result<EngineAndRings> {
        let engine = Box::new(UringEngine::new(Arc::clone(file))?);
        Ok((engine, Some(Arc::new(PromptRings::new(Arc::clone(file))))))
    };
    let threads = || -> Result<EngineAndRings, DeviceError> {
        match ThreadEngine::new(Arc::clone(file)) {
            Ok(engine) => Ok((Box::new(engine), None)),
            Err(source) => Err(DeviceError::Engine { engine: "threads", source }),
        }
    };
    match choice {
        IoEngineChoice::Threads => threads(),
        IoEngineChoice::Uring => {
            uring().map_err(|source| DeviceError::Engine { engine: "io_uring", source })
        }
        IoEngineChoice::Auto => uring().or_else(|error| {
            tracing::info!(%error, "io_uring is not available: threads do the I/O");
            threads()
        }),
    }
}

impl Device for FileDevice {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        let offset = file_offset(read.pages.start)?;
        // SAFETY: the contract of `Device::read`: the caller has the target to itself.
        let result = unsafe { surface.read_at(self.file.as_fd(), offset, read.target()) };
        result.map_err(|error| match error {
            END_OF_FILE => io::ErrorKind::UnexpectedEof.into(),
            error => error.into(),
        })
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        let mut requests = Vec::with_capacity(reads.len());
        let mut refused = Vec::new();
        let populated = self.populate(surface, &reads);
        for (populated, read) in populated.iter().zip(reads) {
            match self.request(surface, populated, read) {
                Ok(request) => requests.push(request),
                Err(why) => refused.push(why),
            }
        }
        self.start(ReadRequest::merge(requests));
        for (done, error) in refused {
            done.call(Err(error));
        }
    }

    fn registered_memory(&self, surface: &Surface) -> RegisteredMemory {
        match &self.prompt_rings {
            Some(rings) => RegisteredMemory::new(rings, surface),
            None => RegisteredMemory::none(),
        }
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        if self.check_writable().is_ok() {
            self.engine.write(writes);
        } else {
            for write in writes {
                write.result = self.check_writable();
            }
        }
    }

    fn sync(&self) -> io::Result<()> {
        // `fdatasync` covers the size and the allocation as far as they are needed to read back.
        match self.read_only {
            true => Ok(()),
            false => self.file.sync_data(),
        }
    }

    fn pages(&self) -> io::Result<u64> {
        Ok(self.len()? / PAGE_SIZE as u64)
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.check_writable()?;
        let _one_at_a_time = lock(&self.resizing);
        let (old, new) = (self.len()?, file_offset(pages)?);
        if self.is_block_device {
            if new <= old {
                return Ok(());
            }
            let cause = format!(
                "{pages} pages do not fit on {}, which has {}",
                self.path.display(),
                old / PAGE_SIZE as u64
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, cause));
        }
        if new > old { self.grow(old, new) } else { self.file.set_len(new) }
    }

    fn unlock(&self) {
        drop(lock(&self.lock).take());
    }

    fn answers_at_once(&self) -> bool {
        self.promptness.is_prompt()
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            path: Some(self.path.clone()),
            direct: self.direct.clone(),
            engine: self.engine.name(),
        }
    }
}
