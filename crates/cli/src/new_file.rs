//! A file that has its name only when it is complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::error::{Doing, Outcome};

/// Until it is complete the file is called `NAME.NUMBER.partial`, with the number of the process,
/// and dropping this removes it.
pub struct NewFile {
    file: File,
    partial: PathBuf,
    target: PathBuf,
}

impl NewFile {
    /// Creates the file `target`, which must not be there yet.
    ///
    /// # Errors
    /// When it is there, or cannot be created.
    pub fn create(target: &Path) -> Outcome<Self> {
        let mut partial = target.as_os_str().to_owned();
        partial.push(format!(".{}.partial", std::process::id()));
        let partial = PathBuf::from(partial);
        let created = match fs::symlink_metadata(target) {
            Ok(_) => Err(Errno::EXIST.into()),
            Err(_) => File::create_new(&partial),
        };
        let file = created.doing(|| format!("creating {}", target.display()))?;
        Ok(Self { file, partial, target: target.to_path_buf() })
    }

    /// Makes the content durable and gives the file its name.
    ///
    /// # Errors
    /// When the disk fails, or a file of that name has come meanwhile.
    pub fn complete(self) -> Outcome {
        let renamed =
            || match renameat_with(CWD, &self.partial, CWD, &self.target, RenameFlags::NOREPLACE) {
                // The file system cannot tell; nothing had the name when this began.
                Err(Errno::INVAL) => fs::rename(&self.partial, &self.target),
                result => result.map_err(io::Error::from),
            };
        let completed = self.file.sync_all().and_then(|()| renamed());
        completed.doing(|| format!("completing {}", self.target.display()))
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // Once the file is complete there is nothing of this name.
        let _ = fs::remove_file(&self.partial);
    }
}
