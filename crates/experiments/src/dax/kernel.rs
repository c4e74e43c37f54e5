//! What an experiment tells the kernel, and what it asks it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, bail};
use rustix::ioctl::{Opcode, Updater, ioctl};

/// The module's bound for the memory of tables that nothing uses.
const KEPT: &str = "/sys/module/vellum/parameters/dax_kept_kib";

/// Where root has the kernel forget inodes and names of files.
const CACHES: &str = "/proc/sys/vm/drop_caches";

/// How often the kernel is told to forget.
const PASSES: usize = 5;

/// Where the kernel counts inodes.
const INODES: &str = "/proc/sys/fs/inode-nr";

/// While this exists, the module has another bound for the tables that nothing uses.
#[derive(Debug)]
pub(super) struct KeptBound {
    before: String,
}

impl KeptBound {
    /// `None`: the module keeps no table in any case.
    pub(super) fn of(kib: u64) -> Result<Option<Self>> {
        let Ok(before) = fs::read_to_string(KEPT) else { return Ok(None) };
        fs::write(KEPT, kib.to_string()).with_context(|| format!("writing {KEPT}"))?;
        Ok(Some(Self { before }))
    }

    /// Has the module free all tables that nothing uses.
    pub(super) fn free_all() -> Result<()> {
        Self::of(0).map(drop)
    }

    /// The bound before, in KiB.
    pub(super) fn before(&self) -> Result<u64> {
        let text = self.before.trim();
        text.parse().with_context(|| format!("{KEPT} was '{text}'"))
    }
}

impl Drop for KeptBound {
    fn drop(&mut self) {
        // What could be written before can be written now.
        let _ = fs::write(KEPT, &self.before);
    }
}

/// Has the kernel forget all inodes and names that no process uses, and so their tables. It cannot
/// forget the inode of a file of several pages that `mmap` has shown since it was written anew.
/// Fails if it forgets fewer than so many.
pub(super) fn forget_inodes(at_least: u64) -> Result<()> {
    // A file whose pages or times are not written back keeps its inode.
    rustix::fs::sync();
    // Both are open before, so that the kernel makes no inode for them meanwhile.
    let counts = File::open(INODES)?;
    let caches = File::options().write(true).open(CACHES)?;
    let before = inodes(&counts)?;
    let mut forgotten = 0;
    // A name that was used lately stays for once.
    for _ in 0..PASSES {
        caches.write_all_at(b"2", 0).with_context(|| format!("writing {CACHES}"))?;
        forgotten = before.saturating_sub(inodes(&counts)?);
        if forgotten >= at_least {
            return Ok(());
        }
    }
    bail!("the kernel has forgotten {forgotten} inodes, not {at_least}")
}

/// Inodes that the kernel has cached, of which it tells the number first.
fn inodes(counts: &File) -> Result<u64> {
    let mut text = [0; 64];
    let length = counts.read_at(&mut text, 0)?;
    let text = str::from_utf8(&text[..length])?;
    let count = text.split_whitespace().next().and_then(|word| word.parse().ok());
    count.with_context(|| format!("{INODES} has '{text}'"))
}

/// The number of pieces in which a file is on the storage.
pub(super) fn extents(file: &File) -> Result<u32> {
    /// `struct fiemap` without room for extents: the file system counts them.
    #[repr(C)]
    struct Asked {
        start: u64,
        length: u64,
        flags: u32,
        mapped: u32,
        room: u32,
        reserved: u32,
    }
    const FIEMAP: Opcode = 0xc020_660b;
    let mut asked = Asked { start: 0, length: u64::MAX, flags: 0, mapped: 0, room: 0, reserved: 0 };
    // SAFETY: the kernel reads and writes the structure, and nothing after it without room.
    #[allow(unsafe_code)]
    unsafe {
        ioctl(file, Updater::<FIEMAP, Asked>::new(&mut asked)).context("counting extents")?;
    }
    Ok(asked.mapped)
}

/// The number of interrupts by which CPUs have flushed each other's TLBs so far.
pub(super) fn shootdowns() -> Result<u64> {
    let text = fs::read_to_string("/proc/interrupts")?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("TLB:"));
    let counts = line.unwrap_or_default().split_whitespace();
    Ok(counts.filter_map(|word| word.parse::<u64>().ok()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_counts_inodes() {
        let counts = File::open(INODES).unwrap();
        // Also when it asks again.
        for _ in 0..2 {
            assert!(inodes(&counts).unwrap() > 0);
        }
    }

    #[test]
    fn a_file_has_pieces() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [7; 10_000]).unwrap();
        file.as_file().sync_all().unwrap();
        match extents(file.as_file()) {
            Ok(pieces) => assert!((1..=3).contains(&pieces), "{pieces}"),
            // The file system has no such question.
            Err(error) => println!("left out: {error:#}"),
        }
    }
}
