//! Where a buffer manager's pages come from.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use vellum_pool::PAGE_SIZE;

/// Pages by their number.
pub trait Storage: Sync {
    /// Reads a page.
    ///
    /// # Errors
    /// Those of the storage; a page that is not there.
    fn read(&self, page: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes a page.
    ///
    /// # Errors
    /// Those of the storage.
    fn write(&self, page: u64, bytes: &[u8]) -> io::Result<()>;

    /// Waits until all writes are durable.
    ///
    /// # Errors
    /// Those of the storage.
    fn sync(&self) -> io::Result<()>;
}

/// A file, whose pages bypass the kernel's page cache if its file system can do that.
#[derive(Debug)]
pub struct FileStorage {
    file: File,
    direct: bool,
}

impl FileStorage {
    /// Opens an existing file.
    ///
    /// # Errors
    /// If that is not possible.
    pub fn open(path: &Path) -> io::Result<FileStorage> {
        let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        match open(libc::O_DIRECT) {
            Ok(file) => Ok(FileStorage { file, direct: true }),
            // A file system without direct I/O.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(FileStorage { file: open(0)?, direct: false })
            }
            Err(error) => Err(error),
        }
    }

    /// Whether its pages bypass the kernel's page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }
}

impl Storage for FileStorage {
    fn read(&self, page: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, page * PAGE_SIZE as u64)
    }

    fn write(&self, page: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, page * PAGE_SIZE as u64)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}
