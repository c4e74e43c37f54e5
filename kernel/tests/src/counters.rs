//! The kernel's counters: interrupts, memory.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::PAGE;

/// Counts of interrupts between processors, one number for each processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interrupts {
    /// To flush TLBs.
    pub shootdowns: Vec<u64>,
    /// To call a function; shootdowns are among them.
    pub calls: Vec<u64>,
}

impl Interrupts {
    /// The present counts.
    pub fn now() -> Self {
        let text = fs::read_to_string("/proc/interrupts").expect("/proc/interrupts");
        Self { shootdowns: numbers(&text, "TLB:"), calls: numbers(&text, "CAL:") }
    }

    /// The interrupts since then.
    pub fn since(&self) -> Self {
        let now = Self::now();
        let less = |now: &[u64], then: &[u64]| now.iter().zip(then).map(|(a, b)| a - b).collect();
        Self {
            shootdowns: less(&now.shootdowns, &self.shootdowns),
            calls: less(&now.calls, &self.calls),
        }
    }
}

fn numbers(text: &str, name: &str) -> Vec<u64> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(name));
    let words = line.unwrap_or_default().split_whitespace();
    words.map_while(|word| word.parse().ok()).collect()
}

/// The number after `name` in a file such as `/proc/meminfo`; 0 if the file does not have it.
pub fn field(path: &str, name: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| {
        let (first, rest) = line.split_once([':', ' ', '\t'])?;
        (first == name).then_some(rest)
    });
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0)
}

/// How long a test waits for the kernel's deferred work, for another thread, or for a process. An
/// emulated machine is slow, and the host may be busy.
pub const PATIENCE: Duration = Duration::from_secs(200);

/// The folder of the module's self-checks.
const SELF_CHECKS: &str = "/sys/kernel/debug/vellum";

/// The results of the module's self-check: a line for each exmap, or Morsel. None if this kernel
/// has no self-checks, or if they are not for this user.
#[track_caller]
fn checked(what: &str) -> Vec<String> {
    let folder = Path::new(SELF_CHECKS);
    let text = match fs::read_to_string(folder.join(what)) {
        Err(_) if !folder.exists() => String::new(),
        text => text.unwrap_or_else(|error| panic!("the self-check of {what}: {error}")),
    };
    text.lines().map(str::to_owned).collect()
}

/// The number after a word of such a line.
fn number_after(line: &str, name: &str) -> Option<u64> {
    let (_, rest) = line.split_once(&format!("{name} "))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Fails unless such a line has both numbers, and they are the same.
#[track_caller]
fn assert_equal(line: &str, one: &str, other: &str) {
    let (one, other) = (number_after(line, one), number_after(line, other));
    assert!(one.is_some() && one == other, "{one:?} and {other:?}: {line}");
}

/// Fails unless the self-check of all exmaps adds up. No thread may use one meanwhile.
#[track_caller]
pub fn assert_exmaps_are_sound() {
    for line in checked("exmaps") {
        assert_equal(&line, "resident", "surface");
        for what in ["twice", "wrong", "lost", "stuck"] {
            assert_eq!(number_after(&line, what), Some(0), "{what}: {line}");
        }
    }
}

/// Fails unless the self-check of all Morsels adds up. No thread may use one meanwhile.
#[track_caller]
pub fn assert_morsels_are_sound() {
    for line in checked("morsels") {
        assert_equal(&line, "pages", "found");
        for what in [" wrong", "reader wrong"] {
            assert_eq!(number_after(&line, what), Some(0), "{what}: {line}");
        }
    }
}

/// Fails unless every leaf of a file table leads to its file's block, and the mounts are whole. No
/// thread may use one meanwhile.
#[track_caller]
pub fn assert_file_tables_are_sound() {
    for line in checked("file-tables") {
        for what in ["wrong leaves", "wrong entries"] {
            assert_eq!(number_after(&line, what), Some(0), "{what}: {line}");
        }
    }
}

/// How the module counts extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Whether it has found out if the file system takes the inode's lock for that.
    pub is_probed: bool,
    /// Whether the file system does not, so that the module does.
    pub lacks_lock: bool,
    /// How often it has counted.
    pub counted: u64,
}

impl Extents {
    /// The present state; `None` if this kernel has no self-checks.
    pub fn now() -> Option<Self> {
        if !Path::new(SELF_CHECKS).exists() {
            return None;
        }
        let line = checked("file-extents").into_iter().next().expect("file-extents");
        let number = |name| number_after(&line, name).expect(name);
        Some(Self {
            is_probed: number("probed") == 1,
            lacks_lock: number("lacks-lock") == 1,
            counted: number("counted"),
        })
    }
}

/// Fails unless the kernel frees all exmaps; it frees closed ones in its own time.
#[track_caller]
pub fn assert_no_exmaps() {
    assert_none("exmaps");
}

/// The same for Morsels.
#[track_caller]
pub fn assert_no_morsels() {
    assert_none("morsels");
}

/// The same for file tables, but those that the kernel keeps for their next use.
#[track_caller]
pub fn assert_no_file_tables() {
    assert_none("file-tables");
}

#[track_caller]
fn assert_none(what: &str) {
    let start = Instant::now();
    let there = || {
        let mut lines = checked(what);
        lines.retain(|line| number_after(line, " kept") != Some(1));
        lines
    };
    while !there().is_empty() {
        assert!(start.elapsed() < PATIENCE, "still there: {:?}", there());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Memory that is free or belongs to processes, and page tables, for a later comparison.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    free_kib: u64,
    tables: u64,
}

impl Memory {
    /// The present state.
    pub fn now() -> Self {
        // Files that the kernel caches are no leak. Only root may drop them; for other users the
        // comparison includes them.
        let _ = fs::write("/proc/sys/vm/drop_caches", "3");
        if is_watched() {
            end_quarantine();
        }
        let meminfo = |name| field("/proc/meminfo", name);
        // Memory of processes is no leak either: the kernel collapses stacks and heaps into huge
        // pages in its own time, 2 MiB where a few pages were.
        let free_kib = meminfo("MemFree") + meminfo("AnonPages") + processors_lists_kib();
        Self { free_kib, tables: field("/proc/vmstat", "nr_page_table_pages") }
    }

    /// Fails unless memory and page tables are free again, except for a little. Waits for memory
    /// that the kernel frees later.
    #[track_caller]
    pub fn assert_back(&self) {
        self.assert_back_but(0);
    }

    /// The same, but allows more KiB, which the kernel takes once for rare operations.
    #[track_caller]
    pub fn assert_back_but(&self, kib: u64) {
        let start = Instant::now();
        loop {
            let now = Self::now();
            let is_free = now.free_kib + tolerance_kib() + kib >= self.free_kib;
            let has_tables = now.tables > self.tables + TABLES;
            if is_free && !has_tables {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "before {self:?}, after {now:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Whether the kernel checks its memory, for which it keeps records.
fn is_watched() -> bool {
    Path::new("/sys/kernel/debug/kmemleak").exists()
}

/// Has KASAN free the objects in its quarantine: up to 1/32 of all memory, 90 MiB after 20 rounds
/// of the fuzzer. It frees those of a cache that is shrunk.
fn end_quarantine() {
    let caches = fs::read_dir("/sys/kernel/slab").into_iter().flatten().flatten();
    for cache in caches {
        let _ = fs::write(cache.path().join("shrink"), "1");
    }
}

/// Memory that may change at any time: stacks, the kernel's small objects, and the records of a
/// kernel that checks its memory.
fn tolerance_kib() -> u64 {
    if is_watched() { 16 << 10 } else { 2 << 10 }
}

/// Page tables that may come and go with anything.
const TABLES: u64 = 64;

/// Free memory that processors keep for themselves, tens of MiB, which is not in `MemFree`.
fn processors_lists_kib() -> u64 {
    let text = fs::read_to_string("/proc/zoneinfo").unwrap_or_default();
    let counts = text.lines().filter_map(|line| line.trim().strip_prefix("count:"));
    let pages: u64 = counts.filter_map(|count| count.trim().parse::<u64>().ok()).sum();
    pages * (PAGE as u64 >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found() {
        let text = "       CPU0 CPU1\n 0:  1 2 IO-APIC\nTLB:   10   20   TLB shootdowns\n";
        assert_eq!(numbers(text, "TLB:"), [10, 20]);
        assert!(numbers(text, "CAL:").is_empty());
        assert!(field("/proc/meminfo", "MemTotal") > 0);
        // Counts of single processors are added late, so those of pages may be zero.
        assert!(field("/proc/vmstat", "pgfault") > 0);
        assert_eq!(field("/proc/meminfo", "NoSuchThing"), 0);
    }
}
