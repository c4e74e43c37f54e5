//! Memory cgroups: a limit on the memory of a process and of the kernel on its behalf.
//!
//! The kernel counts the process' own memory, its page tables, and the cached pages of files that
//! it was the first to access. This module supports both interfaces of the kernel: version 2, and
//! version 1 if the memory controller is mounted there. Creating a group needs root, or a delegated
//! part of the hierarchy.

mod hierarchy;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::owner::Owner;
use hierarchy::{Hierarchy, Version};

/// The beginning of the groups' names. The owner and a number follow.
const PREFIX: &str = "vellum-bench-";

/// How long killed processes of a group may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// A group of processes with a common memory limit. Drop kills all its processes and removes it.
#[derive(Debug)]
pub struct MemoryCgroup {
    path: PathBuf,
    version: Version,
}

/// The memory of a group, now and at its peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes charged to the group now.
    pub bytes: u64,
    /// The most bytes that were ever charged.
    pub peak: u64,
    /// How often the group reached its limit and the kernel reclaimed memory.
    pub limit_met: u64,
    /// Processes that the kernel killed because it could reclaim nothing.
    pub killed: u64,
}

impl MemoryCgroup {
    /// Creates a group without processes, with the limit `bytes` and without swap.
    ///
    /// # Errors
    /// Without a memory controller, or without the right to create groups. The error names what is
    /// missing.
    pub fn create(bytes: u64) -> Result<MemoryCgroup> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let hierarchy = Hierarchy::find()?;
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = hierarchy.parent.join(format!("{PREFIX}{}-{number}", Owner::this_process()));
        fs::create_dir(&path)
            .with_context(|| format!("cannot create the memory cgroup {}", path.display()))?;
        let group = MemoryCgroup { path, version: hierarchy.version };
        group.set_limit(bytes)?;
        Ok(group)
    }

    fn set_limit(&self, bytes: u64) -> Result<()> {
        let bytes = bytes.to_string();
        match self.version {
            Version::One => {
                self.write("memory.limit_in_bytes", &bytes)?;
                // A limit on memory and swap together would work, too, but the kernel does not
                // count how often a group reaches it.
                self.write_if_there("memory.swappiness", "0")
            }
            Version::Two => {
                self.write("memory.max", &bytes)?;
                self.write_if_there("memory.swap.max", "0")
            }
        }
    }

    /// Moves a process into the group. Its present memory stays charged to the old group.
    ///
    /// # Errors
    /// If there is no such process, or the kernel refuses.
    pub fn add(&self, process: u32) -> Result<()> {
        self.write("cgroup.procs", &process.to_string())
    }

    /// The memory of the group.
    ///
    /// # Errors
    /// If the kernel's files cannot be read.
    pub fn usage(&self) -> Result<MemoryUse> {
        Ok(match self.version {
            Version::One => MemoryUse {
                bytes: self.number("memory.usage_in_bytes")?,
                peak: self.number("memory.max_usage_in_bytes")?,
                limit_met: self.number("memory.failcnt")?,
                killed: self.field("memory.oom_control", "oom_kill")?,
            },
            Version::Two => MemoryUse {
                bytes: self.number("memory.current")?,
                // Only since Linux 5.19.
                peak: self.number("memory.peak").unwrap_or(0),
                limit_met: self.field("memory.events", "max")?,
                killed: self.field("memory.events", "oom_kill")?,
            },
        })
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {text} to {}", path.display()))
    }

    /// Kernels without swap, or without its accounting, do not have this file.
    fn write_if_there(&self, name: &str, text: &str) -> Result<()> {
        if self.path.join(name).exists() { self.write(name, text) } else { Ok(()) }
    }

    fn read(&self, name: &str) -> Result<String> {
        let path = self.path.join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn number(&self, name: &str) -> Result<u64> {
        let text = self.read(name)?;
        text.trim().parse().with_context(|| format!("{name} says '{}'", text.trim()))
    }

    fn field(&self, name: &str, field: &str) -> Result<u64> {
        let text = self.read(name)?;
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.trim().parse().ok());
        // Older kernels do not have all counters.
        Ok(value.unwrap_or(0))
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            eprintln!("vellum bench: {error:#}");
        }
    }
}

/// Kills the processes of a group and removes it.
fn remove(path: &Path) -> Result<()> {
    let start = Instant::now();
    loop {
        kill_all(path);
        // Version 1 keeps cached pages charged to a group until it is told to drop them.
        let force_empty = path.join("memory.force_empty");
        if force_empty.exists() {
            // The kernel refuses this while pages are left. Then the removal reports the error.
            let _ = fs::write(force_empty, "0");
        }
        match fs::remove_dir(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if start.elapsed() > PATIENCE => {
                bail!("cannot remove the memory cgroup {}: {error}", path.display());
            }
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn kill_all(path: &Path) {
    let processes = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    for process in processes.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
        // The process may have ended already.
        let _ = kill_process(process, Signal::KILL);
    }
}

/// Removes the groups of killed processes; returns how many.
pub(super) fn remove_leftovers() -> usize {
    let Ok(hierarchy) = Hierarchy::find() else { return 0 };
    leftovers(&hierarchy.parent).iter().filter(|path| remove(path).is_ok()).count()
}

fn leftovers(parent: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let is_left_over = |name: &str| {
        let owner = name.strip_prefix(PREFIX)?.rsplit_once('-')?.0;
        Some(!Owner::parse(owner)?.is_alive())
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().and_then(is_left_over) == Some(true))
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_of_the_dead_are_left_over() {
        let parent = tempfile::tempdir().unwrap();
        let alive = format!("{PREFIX}{}-0", Owner::this_process());
        for name in [&alive, "vellum-bench-1-2-3", "vellum-bench-x", "system.slice", "4-5-6"] {
            fs::create_dir(parent.path().join(name)).unwrap();
        }
        assert_eq!(leftovers(parent.path()), [parent.path().join("vellum-bench-1-2-3")]);
    }

    #[test]
    fn both_versions_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        put("memory.usage_in_bytes", "4096\n");
        put("memory.max_usage_in_bytes", "8192\n");
        put("memory.failcnt", "3\n");
        put("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n");
        put("memory.current", "12288\n");
        put("memory.peak", "16384\n");
        put("memory.events", "low 0\nhigh 0\nmax 5\noom 1\noom_kill 1\n");
        put("memory.max", "max\n");
        let group = |version| MemoryCgroup { path: directory.path().to_owned(), version };
        let (one, two) = (group(Version::One), group(Version::Two));
        let expected = MemoryUse { bytes: 4096, peak: 8192, limit_met: 3, killed: 2 };
        assert_eq!(one.usage().unwrap(), expected);
        let expected = MemoryUse { bytes: 12288, peak: 16384, limit_met: 5, killed: 1 };
        assert_eq!(two.usage().unwrap(), expected);
        two.set_limit(65536).unwrap();
        assert_eq!(fs::read_to_string(directory.path().join("memory.max")).unwrap(), "65536");
        // Drop removes real groups; these are files.
        std::mem::forget((one, two));
    }
}
