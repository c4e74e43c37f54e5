//! The kernel's count of interrupts by which processors ask each other to flush TLBs.

use std::fs;

use anyhow::{Context as _, Result};

/// The number so far, of all processors.
///
/// # Errors
/// If `/proc/interrupts` cannot be read.
pub fn shootdowns() -> Result<u64> {
    let text = fs::read_to_string("/proc/interrupts").context("/proc/interrupts")?;
    Ok(sum(&text))
}

fn sum(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("TLB:"));
    let words = line.unwrap_or_default().split_whitespace();
    words.map_while(|word| word.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_added_up() {
        let text = "      CPU0 CPU1\n CAL:  9 9  Function call interrupts\n TLB:  3  40   TLB 1\n";
        assert_eq!(sum(text), 43);
        assert_eq!(sum(""), 0);
    }
}
