//! The process that created something that may outlive it: its identifier and its start time,
//! because the kernel reuses identifiers.

use std::fmt;
use std::fs;

/// A process, which may have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    process: u32,
    /// In clock ticks since the machine started.
    began: u64,
}

impl Owner {
    /// This process.
    pub fn this_process() -> Owner {
        let process = std::process::id();
        Owner { process, began: began(process).unwrap_or(0) }
    }

    /// Reads the text of [`fmt::Display`]; `None` for any other text.
    pub fn parse(text: &str) -> Option<Owner> {
        let (process, began) = text.trim().split_once('-')?;
        Some(Owner { process: process.parse().ok()?, began: began.parse().ok()? })
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        began(self.process) == Some(self.began)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}-{}", self.process, self.began)
    }
}

/// The start time of a running process. A zombie does not count as running.
fn began(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may contain anything; the state follows it as the third field.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_and_survives_text() {
        let this = Owner::this_process();
        assert!(this.is_alive() && this.began > 0);
        assert_eq!(Owner::parse(&format!("{this}\n")), Some(this));
        assert_eq!(Owner::parse("17"), None);
        assert_eq!(Owner::parse("a-b"), None);
    }

    #[test]
    fn an_identifier_used_again_is_somebody_else() {
        let before = Owner { began: 1, ..Owner::this_process() };
        assert!(!before.is_alive());
    }

    #[test]
    fn a_process_that_ended_is_not_alive() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let owner = Owner { process: child.id(), began: began(child.id()).unwrap() };
        assert!(owner.is_alive());
        child.kill().unwrap();
        while owner.is_alive() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!owner.is_alive());
    }
}
