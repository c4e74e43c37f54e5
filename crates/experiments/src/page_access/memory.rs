//! The memory of this process, by the kernel's own count.

use anyhow::{Context as _, Result};

/// Memory of the process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Private pages.
    pub anonymous: u64,
    /// Page tables.
    pub tables: u64,
    /// Of the private pages, those in huge pages.
    pub huge: u64,
}

impl Memory {
    /// As it is now.
    ///
    /// # Errors
    /// If `/proc` is not there, or says something else.
    pub fn now() -> Result<Memory> {
        let status = read("/proc/self/status")?;
        let rollup = read("/proc/self/smaps_rollup")?;
        let of = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
            Ok::<_, anyhow::Error>(kib.with_context(|| format!("no {name} in kB"))? * 1024)
        };
        Ok(Memory {
            anonymous: of(&status, "RssAnon:")?,
            tables: of(&status, "VmPTE:")?,
            huge: of(&rollup, "AnonHugePages:")?,
        })
    }

    /// The growth since `before`.
    pub fn since(self, before: Memory) -> Memory {
        Memory {
            anonymous: self.anonymous.saturating_sub(before.anonymous),
            tables: self.tables.saturating_sub(before.tables),
            huge: self.huge.saturating_sub(before.huge),
        }
    }
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("reading {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_written_to_is_counted() {
        // Other tests of the same process would give memory back meanwhile.
        let test = "page_access::memory::tests::memory_that_is_written_to_is_counted";
        if !vellum_testing::own_process::entered(test) {
            return;
        }
        let before = Memory::now().unwrap();
        let bytes = std::hint::black_box(vec![1u8; 64 << 20]);
        let added = Memory::now().unwrap().since(before);
        drop(bytes);
        assert!(added.anonymous > 60 << 20, "{added:?}");
    }
}
