//! The kernels of the lab.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::debug;
use crate::stock::STOCK;

/// An unpacked kernel that can be booted.
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
    /// The folder for its files between runs.
    pub folder: PathBuf,
    /// Whether it is the debug kernel.
    pub is_debug: bool,
    /// The image of a hypervisor that starts before it; the kernel is its first domain.
    pub hypervisor: Option<PathBuf>,
}

impl Kernel {
    /// How many times longer than on a stock kernel programs may take.
    pub fn slowness(&self) -> u32 {
        if self.is_debug { 5 } else { 1 }
    }

    /// The default number of levels of its page tables: 4 for one of the kernels, as on most
    /// processors, and 5 for the others.
    pub fn levels(&self) -> u32 {
        if self.name == "6.1" { 4 } else { 5 }
    }

    /// Its boot options, in addition to those of every kernel. The kernel fills freed pages with a
    /// pattern and checks it when it reuses them, so that it notices a write through a stale
    /// translation.
    pub fn boot_arguments(&self) -> &'static str {
        if self.is_debug { "page_poison=1" } else { "" }
    }

    /// Its symbols for a debugger, if it has some.
    pub fn symbols(&self) -> Option<PathBuf> {
        self.is_debug.then(|| self.image.with_file_name(format!("vmlinux-{}", self.release)))
    }
}

/// The kernels with these names, or all stock kernels. Fetches and unpacks them below `cache`
/// unless they are there.
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
