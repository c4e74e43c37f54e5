//! Processors, memory and kernel of this machine.

use std::fs;

/// Processors, memory, kernel, in a line.
pub fn describe() -> String {
    let cpus = processors();
    let model = first_value("/proc/cpuinfo", "model name").unwrap_or_else(|| "processor".into());
    let memory = kib("/proc/meminfo", "MemTotal").map_or(0.0, |kib| kib as f64 / 1024.0 / 1024.0);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{cpus} x {model}, {memory:.0} GiB, Linux {}", kernel.trim())
}

/// Processors that this process may use.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes of memory that could be used without anything being swapped out.
pub fn memory_available() -> u64 {
    kib("/proc/meminfo", "MemAvailable").unwrap_or(0) * 1024
}

/// A size of the form `name: 17 kB`.
pub fn kib(path: &str, name: &str) -> Option<u64> {
    first_value(path, name)?.split_whitespace().next()?.parse().ok()
}

/// The value of the first line of the form `name : value`.
fn first_value(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
