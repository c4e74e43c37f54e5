//! What an experiment tells the kernel, and what it asks it.

use std::fs;

use anyhow::{Context as _, Result};

/// The module's bound for the memory of tables that nothing uses.
const KEPT: &str = "/sys/module/vellum/parameters/dax_kept_kib";

/// Where root has the kernel forget inodes and names of files.
const CACHES: &str = "/proc/sys/vm/drop_caches";

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

/// Has the kernel forget all inodes and names that no process uses, and so their tables.
pub(super) fn forget_inodes() -> Result<()> {
    // A file whose pages or times are not written back keeps its inode.
    rustix::fs::sync();
    fs::write(CACHES, "2").with_context(|| format!("writing {CACHES}"))
}

/// The number of interrupts by which CPUs have flushed each other's TLBs so far.
pub(super) fn shootdowns() -> Result<u64> {
    let text = fs::read_to_string("/proc/interrupts")?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("TLB:"));
    let counts = line.unwrap_or_default().split_whitespace();
    Ok(counts.filter_map(|word| word.parse::<u64>().ok()).sum())
}
