//! Drops files from the kernel's page cache, so that engines that rely on it start as cold as the
//! others.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::fs::{Advice, fadvise};

/// Writes back and drops the cached pages of a file, or of all files below a directory. Pages that
/// a process has mapped stay.
///
/// # Errors
/// If something cannot be read or written back.
pub fn drop_cached(path: &Path) -> Result<()> {
    let context = || format!("dropping cached pages of {}", path.display());
    if path.is_dir() {
        for entry in fs::read_dir(path).with_context(context)? {
            drop_cached(&entry.with_context(context)?.path())?;
        }
        return Ok(());
    }
    if !path.is_file() {
        return Ok(());
    }
    let file = File::open(path).with_context(context)?;
    file.sync_all().with_context(context)?;
    fadvise(&file, 0, None, Advice::DontNeed).with_context(context)
}

/// The bytes that a file, or all files below a directory, take on the device.
///
/// # Errors
/// If something cannot be read.
pub fn bytes_stored(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt as _;

    let context = || format!("reading the size of {}", path.display());
    let metadata = fs::symlink_metadata(path).with_context(context)?;
    let mut bytes = metadata.blocks() * 512;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).with_context(context)? {
            bytes += bytes_stored(&entry.with_context(context)?.path())?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_below_a_directory_are_counted_and_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("below");
        fs::create_dir(&below).unwrap();
        fs::write(below.join("data"), vec![1; 1 << 20]).unwrap();
        drop_cached(directory.path()).unwrap();
        assert!(bytes_stored(directory.path()).unwrap() >= 1 << 20);
        assert!(drop_cached(&directory.path().join("none")).is_ok());
        assert!(bytes_stored(&directory.path().join("none")).is_err());
    }
}
