//! A group of processes (cgroup), to which the kernel charges the memory that they take.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::child::Child;
use crate::counters::PATIENCE;

/// A group; its processes have ended when this is dropped.
#[derive(Debug)]
pub struct Group(PathBuf);

impl Group {
    /// `None` where the kernel has none, which is said.
    pub fn new(name: &str) -> Option<Self> {
        let root = PathBuf::from("/sys/fs/cgroup");
        if fs::write(root.join("cgroup.subtree_control"), "+memory").is_err() {
            eprintln!("skipped: no groups with bounds on memory");
            return None;
        }
        let folder = root.join(name);
        fs::create_dir(&folder).expect("a new group");
        Some(Self(folder))
    }

    /// Sets one of its parameters.
    pub fn set(&self, name: &str, value: &str) {
        fs::write(self.0.join(name), value).expect("a parameter of a group");
    }

    /// Keeps its memory from being swapped, where the kernel swaps.
    pub fn forbid_swap(&self) {
        let _ = fs::write(self.0.join("memory.swap.max"), "0");
    }

    /// Bytes that are charged to it.
    pub fn charged(&self) -> u64 {
        let text = fs::read_to_string(self.0.join("memory.current")).expect("memory.current");
        text.trim().parse().expect("a number of bytes")
    }

    /// Starts a process in it.
    pub fn start(&self, work: impl FnOnce() -> i32) -> Child {
        Child::start(|| {
            self.set("cgroup.procs", "0");
            work()
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let start = Instant::now();
        // The kernel removes ended processes from the group in its own time.
        while fs::remove_dir(&self.0).is_err() {
            assert!(start.elapsed() < PATIENCE, "{:?} cannot be removed", self.0);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
