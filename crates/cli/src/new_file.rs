//! A new file that gets its name only when it is complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::error::{Doing, Outcome};

/// A new file. Until it is complete, its name is `NAME.NUMBER.partial`, with the number of the
/// process, and dropping this removes it.
pub struct NewFile {
    file: File,
    partial: PathBuf,
    target: PathBuf,
}

impl NewFile {
    /// Creates the file `target`, which must not exist.
    ///
    /// # Errors
    /// When it exists, or cannot be created.
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

    /// The name that the file has until it is complete.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Makes the content durable and gives the file its name.
    ///
    /// # Errors
    /// When the disk fails, or another process has created a file of that name meanwhile.
    pub fn complete(self) -> Outcome {
        let renamed =
            || match renameat_with(CWD, &self.partial, CWD, &self.target, RenameFlags::NOREPLACE) {
                // The file system has no such rename. `create` found no file of this name.
                Err(Errno::INVAL) => fs::rename(&self.partial, &self.target),
                result => result.map_err(io::Error::from),
            };
        // The name is durable when its folder is.
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let sync = || File::open(folder.unwrap_or(Path::new(".")))?.sync_all();
        let completed = self.file.sync_all().and_then(|()| renamed()).and_then(|()| sync());
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
        // Once the file is complete, no file has this name.
        let _ = fs::remove_file(&self.partial);
    }
}
