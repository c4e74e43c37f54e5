//! Debian's own kernels, unchanged.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::build;
use crate::kernel::Kernel;
use crate::lock::lock;
use crate::packages::{Packages, finish};

/// One of Debian's kernels.
#[derive(Clone, Copy, Debug)]
pub struct Stock {
    /// Its name in the lab: its series.
    pub name: &'static str,
    /// The source of its packages.
    sources: &'static [&'static str],
}

/// The source of Debian's newer kernels for an older system.
pub const BACKPORTS: &str = "http://deb.debian.org/debian bookworm-backports main";

/// The source of the older system itself.
pub const BOOKWORM: [&str; 2] = [
    "http://deb.debian.org/debian bookworm main",
    "http://deb.debian.org/debian-security bookworm-security main",
];

/// All of them.
pub const STOCK: [Stock; 2] =
    [Stock { name: "6.1", sources: &BOOKWORM }, Stock { name: "6.12", sources: &[BACKPORTS] }];

impl Stock {
    /// Fetches and unpacks the parts of the kernel that are missing below `cache`.
    ///
    /// # Errors
    /// If the packages cannot be fetched.
    pub fn fetch(self, cache: &Path) -> Result<Kernel> {
        let folder = cache.join(self.name);
        let root = folder.join("root");
        let _alone = lock(&folder)?;
        // Unpacking writes both last, so the lab fetches an incomplete kernel again.
        let (image_stamp, headers_stamp) = (folder.join("release"), folder.join("headers"));
        let mut release = fs::read_to_string(&image_stamp).ok();
        if release.is_none() || !headers_stamp.exists() {
            println!("fetching Debian's kernel {}", self.name);
            let packages = Packages::open(&folder.join("apt"), self.sources)?;
            let fits = match &release {
                Some(release) => unpack_headers(&packages, &root, release)?,
                None => false,
            };
            if !fits {
                build::forget(&folder)?;
                let newest = unpack_image(&packages, &root)?;
                let fits = unpack_headers(&packages, &root, &newest)?;
                ensure!(fits, "the headers of {newest} are not of the image's version");
                fs::write(&image_stamp, &newest)?;
                release = Some(newest);
            }
            fs::write(&headers_stamp, "")?;
        }
        let release = release.unwrap_or_default();
        Ok(Kernel {
            name: self.name,
            image: image(&root, &release),
            modules: root.join(format!("lib/modules/{release}")),
            headers: root.join(format!("usr/src/linux-headers-{release}")),
            folder,
            release,
            is_debug: false,
            hypervisor: None,
        })
    }
}

fn image(root: &Path, release: &str) -> PathBuf {
    root.join(format!("boot/vmlinuz-{release}"))
}

/// Unpacks the newest image with its modules in place of any other; returns its release.
fn unpack_image(packages: &Packages, root: &Path) -> Result<String> {
    let image = packages.resolve("linux-image-amd64", "linux-image-")?;
    let release = image.strip_prefix("linux-image-").unwrap_or(&image).to_owned();
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    fs::create_dir_all(root)?;
    packages.unpack(&image, root)?;
    // Debian creates this list during the installation of the package.
    let mut depmod = Command::new("/sbin/depmod");
    finish(depmod.arg("-b").arg(root).arg(&release)).context("listing modules")?;
    Ok(release)
}

/// Unpacks the headers for this image. False if the archive only has another version of them, which
/// is not usable for modules of this kernel.
fn unpack_headers(packages: &Packages, root: &Path, release: &str) -> Result<bool> {
    let headers = format!("linux-headers-{release}");
    let bytes = fs::read(image(root, release)).context("reading the kernel's image")?;
    let ours = version(&bytes).context("the kernel's image has no version")?;
    if packages.version(&headers).as_deref() != Some(&ours) {
        return Ok(false);
    }
    for name in packages.depends(&headers)? {
        // The headers that all flavours share, and the programs for the build.
        if name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-") {
            packages.unpack(&name, root)?;
        }
    }
    packages.unpack(&headers, root)?;
    // These links point to the paths of installed packages.
    let makefile = root.join("usr/src").join(&headers).join("Makefile");
    let text = fs::read_to_string(&makefile)?.replace("include /usr/src/", "include ../");
    fs::write(&makefile, text)?;
    for name in ["build", "source"] {
        let link = root.join(format!("lib/modules/{release}")).join(name);
        let target = fs::read_link(&link)?;
        if let Ok(inside) = target.strip_prefix("/") {
            fs::remove_file(&link)?;
            symlink(Path::new("../../..").join(inside), &link)?;
        }
    }
    Ok(true)
}

/// The version of the package that an image comes from; the image's header ends with it:
/// `6.1.0-42-amd64 (debian-kernel@...) #1 SMP PREEMPT_DYNAMIC Debian 6.1.180-1 (2026-01-01)`.
fn version(image: &[u8]) -> Option<String> {
    /// The place of the header's pointer to that text; the pointer is less by 512
    /// (Documentation/arch/x86/boot.rst, `kernel_version`).
    const POINTER: usize = 0x20e;
    let pointer = image.get(POINTER..POINTER + 2)?;
    let start = usize::from(u16::from_le_bytes([pointer[0], pointer[1]])) + 0x200;
    let text = image.get(start..)?.split(|byte| *byte == 0).next()?;
    let text = String::from_utf8_lossy(text);
    Some(text.rsplit_once("Debian ")?.1.split(' ').next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_an_image_is_found() {
        let mut image = vec![0; 0x300];
        image[0x20e..0x210].copy_from_slice(&0x40_u16.to_le_bytes());
        let text =
            b"6.1.0-42-amd64 (debian-kernel@lists.debian.org) #1 SMP Debian 6.1.180-1 (2026)\0";
        image[0x240..0x240 + text.len()].copy_from_slice(text);
        assert_eq!(version(&image).as_deref(), Some("6.1.180-1"));
        assert_eq!(version(&image[..0x200]), None);
        assert_eq!(version(&[0; 0x300]), None);
    }
}
