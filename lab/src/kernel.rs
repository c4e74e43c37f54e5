//! The kernels of the lab: Debian's own, as they come.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::packages::{Packages, finish};

/// One of Debian's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stock {
    /// What it is called here: its series.
    pub name: &'static str,
    /// Where its packages come from.
    sources: &'static [&'static str],
}

/// All of them.
pub const STOCK: [Stock; 2] = [
    Stock {
        name: "6.1",
        sources: &[
            "http://deb.debian.org/debian bookworm main",
            "http://deb.debian.org/debian-security bookworm-security main",
        ],
    },
    Stock { name: "6.12", sources: &["http://deb.debian.org/debian bookworm-backports main"] },
];

/// A kernel that is unpacked and can be booted.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its series.
    pub name: &'static str,
    /// Its whole name, such as `6.1.0-42-amd64`.
    pub release: String,
    /// What is booted.
    pub image: PathBuf,
    /// Its modules, with the list of what each needs.
    pub modules: PathBuf,
}

impl Stock {
    /// Fetches and unpacks the kernel below `cache`, unless it is there already.
    ///
    /// # Errors
    /// If the packages do not come.
    pub fn fetch(self, cache: &Path) -> Result<Kernel> {
        let folder = cache.join(self.name);
        let unpacked = folder.join("root");
        let stamp = folder.join("release");
        let release = match fs::read_to_string(&stamp) {
            Ok(release) => release,
            Err(_) => {
                println!("fetching Debian's kernel {}", self.name);
                let release = self.unpack(&folder, &unpacked)?;
                // Last: what is there only in part is fetched again.
                fs::write(&stamp, &release)?;
                release
            }
        };
        Ok(Kernel {
            name: self.name,
            image: unpacked.join(format!("boot/vmlinuz-{release}")),
            modules: unpacked.join(format!("lib/modules/{release}")),
            release,
        })
    }

    fn unpack(self, folder: &Path, root: &Path) -> Result<String> {
        let packages = Packages::open(&folder.join("apt"), self.sources)?;
        let image = packages.resolve("linux-image-amd64", "linux-image-")?;
        let release = image.strip_prefix("linux-image-").unwrap_or(&image).to_owned();
        if root.exists() {
            fs::remove_dir_all(root)?;
        }
        fs::create_dir_all(root)?;
        packages.unpack(&image, root)?;
        // Debian makes this list when the package is installed.
        let mut depmod = Command::new("/sbin/depmod");
        finish(depmod.arg("-b").arg(root).arg(&release)).context("listing modules")?;
        Ok(release)
    }
}
