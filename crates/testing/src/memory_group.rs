//! A test whose memory the kernel counts separately, in a memory control group (version 1).

use std::fs;
use std::path::{Path, PathBuf};

use crate::own_process;

/// The folder in which groups are created.
const GROUPS: &str = "/sys/fs/cgroup/memory";
/// The prefix of the names of the tests' groups; the number of the process follows.
const PREFIX: &str = "vellum-test-";

/// The group of this process, which has no other process in it.
#[derive(Debug)]
pub struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// The group of the test's own process, because a group counts the memory of whole processes.
    /// `None` if the test has passed there and its group is removed, or, with a printed line, if no
    /// group can be created.
    ///
    /// # Panics
    /// As [`own_process::entered`].
    #[track_caller]
    pub fn entered(test: &str) -> Option<MemoryGroup> {
        if let Some(output) = own_process::run(test) {
            remove_left();
            own_process::assert_passed(test, &output);
            return None;
        }
        let group = MemoryGroup::create();
        if group.is_none() {
            println!("skipped: no memory control group can be made here");
        }
        group
    }

    fn create() -> Option<MemoryGroup> {
        let process = std::process::id().to_string();
        let group = Path::new(GROUPS).join(format!("{PREFIX}{process}"));
        fs::create_dir(&group).ok()?;
        fs::write(group.join("cgroup.procs"), process).ok()?;
        Some(MemoryGroup(group))
    }

    /// The value of one of the group's files, such as `memory.usage_in_bytes`.
    ///
    /// # Panics
    /// If the file does not exist or has no number.
    pub fn bytes(&self, file: &str) -> u64 {
        let text = fs::read_to_string(self.0.join(file)).expect("a file of the group");
        text.trim().parse().expect("a number of bytes")
    }
}

/// Removes the groups of processes that ended; a process cannot remove its own.
fn remove_left() {
    for group in fs::read_dir(GROUPS).into_iter().flatten().flatten() {
        let name = group.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = fs::remove_dir(group.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_process_is_counted() {
        let test = "memory_group::tests::memory_of_the_process_is_counted";
        let Some(group) = MemoryGroup::entered(test) else { return };
        let before = group.bytes("memory.usage_in_bytes");
        let memory = std::hint::black_box(vec![1_u8; 16 << 20]);
        assert!(group.bytes("memory.usage_in_bytes") >= before + (15 << 20));
        drop(memory);
    }

    #[test]
    fn groups_are_removed_when_their_process_has_ended() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let of = |process| Path::new(GROUPS).join(format!("{PREFIX}{process}"));
        let groups = [of(std::process::id()), of(ended.id())];
        if groups.iter().any(|group| fs::create_dir(group).is_err()) {
            println!("skipped: no memory control group can be made here");
            return;
        }
        remove_left();
        assert_eq!(groups.each_ref().map(|group| group.exists()), [true, false]);
        fs::remove_dir(&groups[0]).unwrap();
    }
}
