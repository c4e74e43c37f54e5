//! The kernels of the lab, as the rest of it sees them.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::debug;
use crate::stock::STOCK;

/// A kernel that is unpacked and can be booted.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its name in the lab: its series.
    pub name: &'static str,
    /// Its whole name, such as `6.1.0-42-amd64`.
    pub release: String,
    /// The image to boot.
    pub image: PathBuf,
    /// Its modules, with the list of their dependencies.
    pub modules: PathBuf,
    /// The headers to build modules against.
    pub headers: PathBuf,
    /// Where its things are kept between runs.
    pub folder: PathBuf,
    /// It checks itself at every step.
    pub is_debug: bool,
}

impl Kernel {
    /// How many times longer than a stock kernel it may take.
    pub fn slowness(&self) -> u32 {
        if self.is_debug { 5 } else { 1 }
    }

    /// Levels of page tables that it has by default: one of the kernels has as many as most
    /// processors, the others one more.
    pub fn levels(&self) -> u32 {
        if self.name == "6.1" { 4 } else { 5 }
    }

    /// Its boot options, in addition to those of every kernel: it fills freed pages and checks them
    /// when it uses them again, so that a write through a stale translation shows.
    pub fn boot_arguments(&self) -> &'static str {
        if self.is_debug { "page_poison=1" } else { "" }
    }

    /// Its symbols for a debugger, if it has some.
    pub fn symbols(&self) -> Option<PathBuf> {
        self.is_debug.then(|| self.image.with_file_name(format!("vmlinux-{}", self.release)))
    }
}

/// The kernels of these names, or every stock one: fetched and unpacked below `cache` unless they
/// are there.
///
/// # Errors
/// If there is no kernel of a name, or one cannot be fetched.
pub fn chosen(names: &[String], cache: &Path) -> Result<Vec<Kernel>> {
    if names.is_empty() {
        return STOCK.iter().map(|stock| stock.fetch(cache)).collect();
    }
    let find = |name: &String| {
        if name == debug::NAME {
            return debug::fetch(cache);
        }
        let found = STOCK.iter().find(|stock| stock.name == name);
        let known = STOCK.map(|stock| stock.name).join(", ");
        let unknown = || format!("no kernel '{name}'; there are {known} and {}", debug::NAME);
        found.with_context(unknown)?.fetch(cache)
    };
    names.iter().map(find).collect()
}
