//! Xen below a Debian kernel, which is its first domain then: a PV domain, whose page tables the
//! hypervisor writes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::lock::lock;
use crate::packages::{Packages, finish};
use crate::stock::BOOKWORM;

/// The hypervisor's boot options. Its messages and those of the kernel go to the second serial
/// line.
pub const BOOT_ARGUMENTS: &str = "com2=115200 console=com2 loglvl=warning";

/// The kernel's own: it has no serial line of its own for its messages.
pub const DOMAIN_ARGUMENTS: &str = "console=hvc0";

/// The hypervisor's image, fetched and unpacked below `cache` unless it is there.
///
/// # Errors
/// If the package cannot be fetched, or has no image.
pub fn fetch(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join("xen");
    let _alone = lock(&folder)?;
    // It is written last.
    let image = folder.join("xen");
    if image.exists() {
        return Ok(image);
    }
    println!("fetching Debian's Xen");
    let packages = Packages::open(&folder.join("apt"), &BOOKWORM)?;
    let root = folder.join("root");
    packages.unpack(&packages.resolve("xen-system-amd64", "xen-hypervisor-")?, &root)?;
    let files = fs::read_dir(root.join("boot"))?.flatten().map(|entry| entry.path());
    let packed = files.into_iter().find(|path| path.extension().is_some_and(|end| end == "gz"));
    let packed = packed.context("the package of Xen has no image")?;
    // The emulator starts it unpacked only.
    finish(Command::new("gzip").arg("-df").arg(&packed)).context("unpacking Xen")?;
    fs::rename(packed.with_extension(""), &image)?;
    Ok(image)
}
