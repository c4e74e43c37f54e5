//! Opening a file or a block device: what it must be, the lock, and whether I/O can go past the
//! kernel's page cache.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, OFlags, StatxFlags};
use rustix::io::Errno;
use vellum_vm::PAGE_SIZE;

use super::DeviceError;

/// Whether to go past the kernel's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Direct {
    /// Past the page cache if the file system allows it; otherwise through it, with a warning.
    #[default]
    Auto,
    /// Through the page cache, which caches the pages a second time. For tests and comparisons.
    Never,
}

/// The engine that moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoEngineChoice {
    /// io_uring where it works, otherwise threads.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// A few threads.
    Threads,
}

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Only to read. Several handles may read one file at a time; a writer is alone.
    pub read_only: bool,
    /// Whether to go past the kernel's page cache.
    pub direct: Direct,
    /// The engine that moves the bytes.
    pub engine: IoEngineChoice,
    /// Lock the file against other processes and handles, as long as the device lives. Without
    /// the lock, a program that opens the file twice destroys it.
    pub lock: bool,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { read_only: false, direct: Direct::Auto, engine: IoEngineChoice::Auto, lock: true }
    }
}

/// An open, locked file.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: Arc<File>,
    pub(super) lock: Option<FileLock>,
    pub(super) is_block_device: bool,
    pub(super) direct: Result<(), String>,
}

/// The lock on a file. Dropping it unlocks the file at once. Closing the file would unlock it only
/// when the kernel drops its last reference: io_uring may hold one for a moment after the end of an
/// operation, and so may a child process between fork and exec.
#[derive(Debug)]
pub(super) struct FileLock(Arc<File>);

impl Drop for FileLock {
    fn drop(&mut self) {
        if let Err(error) = rustix::fs::flock(&*self.0, FlockOperation::Unlock) {
            tracing::warn!(%error, "unlocking a file failed: it is unlocked when it is closed");
        }
    }
}

/// Opens a file. With `create`, makes a new file, or opens an existing block device. Errors name
/// the file `path`, also while it has a temporary name.
pub(super) fn open(
    path: &Path,
    name: &Path,
    options: FileOptions,
    create: bool,
) -> Result<Opened, DeviceError> {
    let failed = |doing| move |source| DeviceError::Io { doing, path: path.to_path_buf(), source };
    let existing = match name.metadata() {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(open_failed(path, options.read_only, error)),
    };
    // Checked before the open: an open of a pipe would block, and one of a tape would wind it.
    let is_block_device = match &existing {
        Some(metadata) => is_block_device(path, metadata)?,
        None => false,
    };
    let new = create && !is_block_device;
    if new && existing.is_some() {
        return Err(DeviceError::AlreadyExists { path: path.to_path_buf() });
    }
    let mut how = OpenOptions::new();
    how.read(true).write(!options.read_only).create_new(new && !options.read_only);
    if is_block_device && !options.read_only {
        // The kernel refuses this while the device is mounted, or the system uses it otherwise.
        how.custom_flags(libc::O_EXCL);
    }
    let file = open_patiently(&how, name, is_block_device).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound if new => {
            DeviceError::NoFolder { path: path.to_path_buf(), folder: folder_of(path).into() }
        }
        _ => open_failed(path, options.read_only, error),
    })?;
    let opened = file.metadata().map_err(failed("looking at"))?;
    if self::is_block_device(path, &opened)? != is_block_device {
        let source = io::Error::other("it was replaced while it was being opened");
        return Err(failed("opening")(source));
    }
    let file = Arc::new(file);
    let lock = match options.lock {
        true => lock(&file, path, options.read_only, &opened).map(Some),
        false => Ok(None),
    };
    if new && matches!(lock, Err(DeviceError::NoLocks { .. })) {
        // The caller may try again without a lock, and must not find this file then.
        drop(std::fs::remove_file(name));
    }
    let lock = lock?;
    if new && name == path {
        sync_directory_of(name).map_err(failed("making durable the directory entry of"))?;
    }
    let direct = match options.direct {
        Direct::Auto => go_direct(&file).map_err(failed("probing direct I/O on"))?,
        Direct::Never => Err("buffered I/O was asked for".into()),
    };
    if let (Err(reason), Direct::Auto) = (&direct, options.direct) {
        tracing::warn!(path = %path.display(), %reason, "I/O goes through the kernel's page cache");
    }
    Ok(Opened { file, lock, is_block_device, direct })
}

/// Opens a file. If a block device is busy, tries again for a moment: the kernel ends its claim on
/// a closed device with the last reference, which io_uring may still hold.
fn open_patiently(how: &OpenOptions, path: &Path, is_block_device: bool) -> io::Result<File> {
    for _ in 0..20 {
        match how.open(path) {
            Err(error) if is_block_device && error.kind() == io::ErrorKind::ResourceBusy => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
    how.open(path)
}

/// Whether it is a block device. An error if it is neither that nor a regular file.
fn is_block_device(path: &Path, metadata: &Metadata) -> Result<bool, DeviceError> {
    let file_type = metadata.file_type();
    let kind = match file_type {
        _ if file_type.is_file() => return Ok(false),
        _ if file_type.is_block_device() => return Ok(true),
        _ if file_type.is_dir() => "directory",
        _ if file_type.is_fifo() => "pipe",
        _ if file_type.is_socket() => "socket",
        _ if file_type.is_char_device() => "character device",
        _ => "special file",
    };
    Err(DeviceError::WrongKind { path: path.to_path_buf(), kind })
}

pub(super) fn open_failed(path: &Path, read_only: bool, source: io::Error) -> DeviceError {
    let path = path.to_path_buf();
    match source.kind() {
        io::ErrorKind::NotFound => DeviceError::NotFound { path },
        io::ErrorKind::AlreadyExists => DeviceError::AlreadyExists { path },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            DeviceError::Permission { path, read_only, source }
        }
        io::ErrorKind::ResourceBusy => DeviceError::InUse { path, holder: None },
        _ => DeviceError::Io { doing: "opening", path, source },
    }
}

/// Locks the open file: shared to read, exclusively to write.
pub(super) fn lock(
    file: &Arc<File>,
    path: &Path,
    read_only: bool,
    metadata: &Metadata,
) -> Result<FileLock, DeviceError> {
    let operation = if read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    let path = path.to_path_buf();
    loop {
        return match rustix::fs::flock(&**file, operation) {
            Ok(()) => Ok(FileLock(Arc::clone(file))),
            Err(Errno::INTR) => continue,
            Err(Errno::WOULDBLOCK) => {
                Err(DeviceError::InUse { path, holder: lock_holder(metadata) })
            }
            Err(error) => Err(DeviceError::NoLocks { path, source: error.into() }),
        };
    }
}

/// The process with a lock on the file, as far as `/proc/locks` shows it.
fn lock_holder(metadata: &Metadata) -> Option<u32> {
    let device = metadata.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
    holder_in(&std::fs::read_to_string("/proc/locks").ok()?, &file)
}

/// Finds a line like `1: FLOCK  ADVISORY  WRITE 708 08:01:1234 0 EOF`.
fn holder_in(locks: &str, file: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            [_, "FLOCK", _, _, pid, held, ..] if held == file => {
                // Processes outside of the namespace have the number 0 or -1.
                pid.parse().ok().filter(|&pid| pid > 0)
            }
            _ => None,
        }
    })
}

/// The folder that a file is in.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes the name of a new file durable.
pub(super) fn sync_directory_of(path: &Path) -> io::Result<()> {
    match File::open(folder_of(path))?.sync_all() {
        // Some file systems have nothing to sync in a directory.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        result => result,
    }
}

/// Switches the file to direct I/O and tries it; `Ok(Err(reason))` if it stays buffered.
fn go_direct(file: &File) -> io::Result<Result<(), String>> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    if let Err(error) = rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT) {
        return Ok(Err(format!("the file system takes no direct I/O ({error})")));
    }
    let reason = match declared_alignment(file) {
        Some(alignment) if !(1..=PAGE_SIZE as u64).contains(&alignment) => {
            format!("direct I/O needs an alignment of {alignment} bytes here (0: not possible)")
        }
        // A read has to prove it: some file systems take the flag and then refuse the I/O.
        _ => match read_one_page(file) {
            Ok(()) => return Ok(Ok(())),
            Err(error) => format!("a first direct read of 4 KiB failed ({error})"),
        },
    };
    rustix::fs::fcntl_setfl(file, flags)?;
    Ok(Err(reason))
}

/// The alignment that the kernel reports for the file (Linux 6.1), in bytes.
fn declared_alignment(file: &File) -> Option<u64> {
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let declared = found.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    let (memory, offset) = (found.stx_dio_mem_align, found.stx_dio_offset_align);
    declared.then(|| if memory.min(offset) == 0 { 0 } else { memory.max(offset).into() })
}

fn read_one_page(file: &File) -> io::Result<()> {
    let mut memory = vec![0_u8; 2 * PAGE_SIZE];
    let start = memory.as_ptr().align_offset(PAGE_SIZE);
    let page = &mut memory[start..start + PAGE_SIZE];
    loop {
        match rustix::io::pread(file, &mut *page, 0) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_found_among_other_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 08:01:1234 0 EOF\n\
                     2: FLOCK  ADVISORY  READ 12 08:01:12345 0 EOF\n\
                     2: -> FLOCK  ADVISORY  READ 15 08:01:1234 0 EOF\n\
                     nonsense\n\
                     3: FLOCK  ADVISORY  WRITE 13 08:01:1234 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 0 08:01:9 0 EOF\n";
        assert_eq!(holder_in(locks, "08:01:1234"), Some(13));
        assert_eq!(holder_in(locks, "08:01:9"), None);
        assert_eq!(holder_in("", "08:01:9"), None);
    }
}
