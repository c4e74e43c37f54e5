//! The list of facilities that Vellum uses where they exist.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::io::Errno;

use crate::backend::choice::{Choice, choice, works};
use crate::backend::{BackendKind, exmap, trial};
use crate::huge_page::{self, HUGE_PAGE_MODE, huge_page_mode};
use crate::range::PageRange;
use crate::scratch::Scratch;
use crate::{PAGE_SIZE, limits, sys};

/// One thing that a machine may offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facility {
    /// Its name, as in the kernel's documentation.
    pub name: &'static str,
    /// Whether this process has it and may use it.
    pub found: bool,
    /// What was seen, in one line.
    pub reason: String,
}

/// What a machine offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facilities {
    /// The kernel's release, e.g. `6.1.0-56-amd64`.
    pub kernel_release: String,
    /// The facilities, in a fixed order.
    pub list: Vec<Facility>,
    /// The backend in use and why.
    pub choice: Choice,
}

impl Facilities {
    /// The facility of that name.
    pub fn get(&self, name: &str) -> Option<&Facility> {
        self.list.iter().find(|facility| facility.name == name)
    }
}

impl fmt::Display for Facilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "kernel {}", self.kernel_release)?;
        for Facility { name, found, reason } in &self.list {
            writeln!(f, "  {name:<34} {:<3}  {reason}", if *found { "yes" } else { "no" })?;
        }
        writeln!(f, "backend {}: {}", self.choice.backend, self.choice.reason)
    }
}

/// Tries everything that this machine may offer. It takes a few milliseconds, and caches only the
/// choice of backend.
pub fn facilities() -> Facilities {
    let list = vec![
        tried("MADV_POPULATE_WRITE", trial::populate_write()),
        tried("process_madvise DONTNEED", trial::vectored_release()),
        tried("process_madvise POPULATE_WRITE", trial::vectored_populate()),
        tried("pagemap", pagemap()),
        tried("PAGEMAP_SCAN", pagemap_scan()),
        collapse(),
        transparent_huge_pages(),
        io_uring(),
        tried("userfaultfd", sys::try_userfaultfd().map_err(said)),
        overcommit(),
        exmap(),
        device("/dev/kvm"),
    ];
    let system = rustix::system::uname();
    Facilities {
        kernel_release: system.release().to_string_lossy().into_owned(),
        list,
        choice: choice().clone(),
    }
}

/// A facility that was tried out.
fn tried(name: &'static str, outcome: Result<(), String>) -> Facility {
    let found = outcome.is_ok();
    let reason = outcome.err().unwrap_or_else(|| "tried, works".to_owned());
    Facility { name, found, reason }
}

fn said(errno: Errno) -> String {
    errno.to_string()
}

/// Whether pagemap tells a page of memory from the shared zero page.
fn pagemap() -> Result<(), String> {
    let scratch = Scratch::new(3).map_err(said)?;
    scratch.write(0, 1);
    scratch.read(1);
    match scratch.resident(PageRange::new(0, 3)) {
        Some(1) => Ok(()),
        Some(other) => Err(format!("it calls {other} pages resident where 1 is")),
        None => Err("/proc/self/pagemap cannot be read".to_owned()),
    }
}

fn pagemap_scan() -> Result<(), String> {
    let pagemap = File::open("/proc/self/pagemap").map_err(|error| error.to_string())?;
    let scratch = Scratch::new(8).map_err(said)?;
    scratch.write(2, 1);
    let bytes = 8 * PAGE_SIZE;
    let regions =
        sys::pagemap_scan(pagemap.as_fd(), scratch.address(0), bytes, sys::PAGE_IS_PRESENT);
    match regions.map_err(said)? {
        1 => Ok(()),
        other => Err(format!("it reported {other} regions where 1 is")),
    }
}

/// Whether the kernel can collapse and split huge pages, and what that costs.
fn collapse() -> Facility {
    let outcome = huge_page::huge_pages();
    let reason = match &outcome {
        Ok(cost) => format!(
            "tried, works; 2 MiB collapsed in {} us, split in {} us",
            cost.collapse.as_micros(),
            cost.split.as_micros()
        ),
        Err(reason) => reason.clone(),
    };
    Facility { name: "MADV_COLLAPSE", found: outcome.is_ok(), reason }
}

/// Whether the kernel module is loaded and this process can use it.
fn exmap() -> Facility {
    let outcome = works(BackendKind::Exmap);
    let found = outcome.is_ok();
    let works = || format!("tried, works; this user may lock {}", limits::lockable());
    Facility { name: exmap::PATH, found, reason: outcome.err().unwrap_or_else(works) }
}
fn transparent_huge_pages() -> Facility {
    let name = "transparent huge pages";
    match huge_page_mode() {
        Some(mode) => Facility { name, found: mode != "never", reason: format!("mode {mode}") },
        None => Facility { name, found: false, reason: format!("no {HUGE_PAGE_MODE}") },
    }
}

fn io_uring() -> Facility {
    let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
    let setting = match sysctl.as_deref().map(str::trim) {
        Some(value) => format!("kernel.io_uring_disabled = {value}"),
        None => "no sysctl kernel.io_uring_disabled".to_owned(),
    };
    let outcome = sys::try_io_uring();
    let reason = match outcome {
        Ok(()) => format!("tried, works; {setting}"),
        Err(errno) => format!("{errno}; {setting}"),
    };
    Facility { name: "io_uring", found: outcome.is_ok(), reason }
}

fn overcommit() -> Facility {
    let (found, meaning) = match limits::overcommit_mode() {
        Some(0) => (true, "0 (heuristic): fine"),
        Some(1) => (true, "1 (always): fine"),
        Some(2) => (false, "2 (never): surfaces are charged as if they were memory; set it to 0"),
        _ => (false, "/proc/sys/vm/overcommit_memory cannot be read"),
    };
    Facility { name: "vm.overcommit_memory", found, reason: meaning.to_owned() }
}

/// Whether a device exists and this process may open it.
fn device(path: &'static str) -> Facility {
    let (found, reason) = if Path::new(path).exists() {
        match OpenOptions::new().read(true).write(true).open(path) {
            Ok(_) => (true, "there, and may be opened".to_owned()),
            Err(error) => (false, format!("there, but cannot be opened: {error}")),
        }
    } else {
        (false, "not there".to_owned())
    };
    Facility { name: path, found, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_facility_has_a_reason_in_one_line() {
        let facilities = facilities();
        assert!(!facilities.kernel_release.is_empty());
        assert_eq!(facilities.list.len(), 12);
        for facility in &facilities.list {
            assert!(!facility.reason.is_empty() && !facility.reason.contains('\n'), "{facility:?}");
        }
        assert!(facilities.get("io_uring").is_some());
        assert!(facilities.to_string().lines().count() == 14);
    }
}
