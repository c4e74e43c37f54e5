//! What the kernel counts: interrupts, memory.

use std::fs;
use std::time::{Duration, Instant};

/// Interrupts by which processors ask each other for something, one number for each processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interrupts {
    /// To flush TLBs.
    pub shootdowns: Vec<u64>,
    /// To call a function; shootdowns are among them.
    pub calls: Vec<u64>,
}

impl Interrupts {
    /// Until now.
    pub fn now() -> Self {
        let text = fs::read_to_string("/proc/interrupts").expect("/proc/interrupts");
        Self { shootdowns: numbers(&text, "TLB:"), calls: numbers(&text, "CAL:") }
    }

    /// Since then.
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

/// The number after `name` in a file such as `/proc/meminfo`; 0 if it is not there.
pub fn field(path: &str, name: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| {
        let (first, rest) = line.split_once([':', ' ', '\t'])?;
        (first == name).then_some(rest)
    });
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0)
}

/// KiB that this process has locked or pinned.
pub fn locked_kib() -> u64 {
    field("/proc/self/status", "VmLck") + field("/proc/self/status", "VmPin")
}

/// Frees the kernel's caches of files, so that what is free can be compared.
fn drop_caches() {
    // Only root may; others compare what there is.
    let _ = fs::write("/proc/sys/vm/drop_caches", "3");
}

/// Free memory and page tables, to be compared with later.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    free_kib: u64,
    tables: u64,
}

impl Memory {
    /// As it is.
    pub fn now() -> Self {
        drop_caches();
        let free_kib = field("/proc/meminfo", "MemFree");
        Self { free_kib, tables: field("/proc/vmstat", "nr_page_table_pages") }
    }

    /// Fails unless memory is free again, but for `tolerance_kib`, and page tables are, but for a
    /// few. What the kernel frees in its own time is waited for.
    #[track_caller]
    pub fn assert_back(&self, tolerance_kib: u64) {
        let start = Instant::now();
        loop {
            let now = Self::now();
            let is_free = now.free_kib + tolerance_kib >= self.free_kib;
            let has_tables = now.tables > self.tables + TABLES;
            if is_free && !has_tables {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "before {self:?}, after {now:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Page tables that may come and go with anything.
const TABLES: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found() {
        let text = "       CPU0 CPU1\n 0:  1 2 IO-APIC\nTLB:   10   20   TLB shootdowns\n";
        assert_eq!(numbers(text, "TLB:"), [10, 20]);
        assert!(numbers(text, "CAL:").is_empty());
        assert!(field("/proc/meminfo", "MemTotal") > 0);
        assert!(field("/proc/vmstat", "nr_page_table_pages") > 0);
        assert_eq!(field("/proc/meminfo", "NoSuchThing"), 0);
    }
}
