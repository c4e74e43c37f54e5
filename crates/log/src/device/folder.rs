//! What a log asks of the file system: a folder, which is locked, and the files in it.
//!
//! The log decides the order of the calls; this is where they are made. The tests put a simulated
//! folder in its place (`simulated_folder.rs`), whose power fails between any two of them.

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, IoSlice};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{Advice, AtFlags, Dir, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::fs::{
    fadvise, fallocate, flock, fstat, open, openat, renameat, renameat_with, unlinkat,
};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};

use crate::error::LogError;

/// A folder that is open, so that it is the same one wherever the process goes, and whatever its
/// name becomes.
pub(crate) trait Folder: Debug + Send + Sync {
    /// Which file system it lies in.
    fn file_system(&self) -> io::Result<u64>;

    /// The names in it.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Opens a file, past the page cache or through it, or creates one that is not there.
    fn open(&self, name: &str, direct: bool, create: bool) -> io::Result<Box<dyn FolderFile>>;

    /// Gives a file another name.
    ///
    /// # Errors
    /// `AlreadyExists` if a file has that name, where the file system can tell.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file, if it is there.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes durable which names there are.
    fn sync(&self) -> io::Result<()>;

    /// Makes durable that the folder itself is there.
    fn sync_above(&self) -> io::Result<()>;

    /// Gives the folder to the next handle.
    fn unlock(&self);
}

/// A file of a folder, open for reading and writing.
pub(crate) trait FolderFile: Debug + Send + Sync {
    fn len(&self) -> io::Result<u64>;

    /// Reads all of the bytes at a place.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes both parts, one after the other, or the beginning of them, and returns how much. If
    /// `durable`, that is durable when this returns.
    fn write(&self, offset: u64, parts: [&[u8]; 2], durable: bool) -> io::Result<usize>;

    /// Gives the file this length, and reserves its room.
    ///
    /// # Errors
    /// `Unsupported` where the file system has no such call; nothing has changed then.
    fn allocate(&self, len: u64) -> io::Result<()>;

    /// Makes durable what was written, and the length.
    fn sync(&self) -> io::Result<()>;

    /// Has the storage asked from now on, where the page cache has nothing that it still writes.
    fn forget_cache(&self) -> io::Result<()>;
}

/// A folder of the kernel's.
#[derive(Debug)]
pub(super) struct KernelFolder(File);

impl KernelFolder {
    /// Opens a folder, creates it if it is not there, and locks it.
    pub(super) fn lock(path: &Path) -> Result<KernelFolder, LogError> {
        let doing = |what: &str| format!("{what} the log's folder {}", path.display());
        loop {
            match fs::create_dir(path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(LogError::io(doing("creating"))(error)),
            }
            match KernelFolder::lock_existing(path) {
                Ok(Some(folder)) => return Ok(folder),
                // Another handle has removed it since.
                Ok(None) => {}
                Err(Errno::WOULDBLOCK) => return Err(LogError::InUse { path: path.into() }),
                Err(error) => return Err(LogError::io(doing("opening"))(error.into())),
            }
        }
    }

    /// Opens a folder that is there, and locks it. `None` if it is removed meanwhile: a file that
    /// is made there would be nowhere.
    fn lock_existing(path: &Path) -> Result<Option<KernelFolder>, Errno> {
        // The kernel would wait for the other end of a pipe.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = match open(path, flags, Mode::empty()) {
            Ok(folder) => File::from(folder),
            // A symbolic link to nothing, which `create_dir` takes for a folder, would stay.
            Err(Errno::NOENT) if !path.is_symlink() => return Ok(None),
            Err(error) => return Err(error),
        };
        flock(&folder, FlockOperation::NonBlockingLockExclusive)?;
        let links = fstat(&folder)?.st_nlink;
        Ok((links > 0).then_some(KernelFolder(folder)))
    }

    /// Removes a folder if it is empty and no handle has it.
    ///
    /// # Errors
    /// What the system said, if the folder stays though no handle has it.
    pub(super) fn remove_empty(path: &Path) -> io::Result<()> {
        // While it is locked: a handle that has just created it may be about to lock it.
        let locked = match KernelFolder::lock_existing(path) {
            Ok(Some(locked)) => locked,
            Ok(None) | Err(Errno::WOULDBLOCK) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let removed = fs::remove_dir(path);
        locked.unlock();
        removed
    }
}

impl Folder for KernelFolder {
    fn file_system(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.dev())
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            // The log gives no names that are no text.
            names.extend(entry?.file_name().to_str().ok().map(str::to_owned));
        }
        Ok(names)
    }

    fn open(&self, name: &str, direct: bool, create: bool) -> io::Result<Box<dyn FolderFile>> {
        let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        flags.set(OFlags::DIRECT, direct);
        flags.set(OFlags::CREATE | OFlags::EXCL, create);
        let file = openat(&self.0, name, flags, Mode::from_raw_mode(0o600))?;
        Ok(Box::new(File::from(file)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        match renameat_with(&self.0, from, &self.0, to, RenameFlags::NOREPLACE) {
            // Some file systems do not know the flag.
            Err(Errno::INVAL | Errno::NOSYS) => Ok(renameat(&self.0, from, &self.0, to)?),
            renamed => Ok(renamed?),
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.0, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn sync_above(&self) -> io::Result<()> {
        let above = openat(&self.0, "..", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        File::from(above).sync_all()
    }

    fn unlock(&self) {
        // The lock goes with the last descriptor anyway.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl FolderFile for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(bytes, offset)
    }

    fn write(&self, offset: u64, parts: [&[u8]; 2], durable: bool) -> io::Result<usize> {
        let flags = if durable { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        let slices = parts.map(IoSlice::new);
        loop {
            match pwritev2(self.as_fd(), &slices, offset, flags) {
                Err(Errno::INTR) => {}
                written => return Ok(written?),
            }
        }
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        Ok(fallocate(self, FallocateFlags::empty(), 0, len)?)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn forget_cache(&self) -> io::Result<()> {
        Ok(fadvise(self, 0, None, Advice::DontNeed)?)
    }
}
