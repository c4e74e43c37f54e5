//! Debian packages, fetched and unpacked outside the system: the lab installs nothing, and neither
//! reads nor changes the system's own list of sources.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

/// The keys that sign the packages. Debian's package of keys has this file.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A folder with its own apt, which knows only some suites of Debian.
#[derive(Debug)]
pub struct Packages {
    root: PathBuf,
}

impl Packages {
    /// An apt in the folder `root`, for sources such as `http://deb.debian.org/debian bookworm
    /// main`. Fetches the lists, because old lists name packages that no longer exist.
    ///
    /// # Errors
    /// If the folder cannot be made, or the lists cannot be fetched.
    pub fn open(root: &Path, sources: &[&str]) -> Result<Packages> {
        let packages = Packages { root: root.to_path_buf() };
        let lines: String =
            sources.iter().map(|source| format!("deb [signed-by={KEYS}] {source}\n")).collect();
        ensure!(Path::new(KEYS).exists(), "no {KEYS}: install debian-archive-keyring");
        for folder in ["etc/apt/apt.conf.d", "etc/apt/preferences.d", "var/lib/dpkg", "debs"] {
            fs::create_dir_all(root.join(folder))
                .with_context(|| format!("creating {folder} in {}", root.display()))?;
        }
        for folder in ["var/lib/apt/lists/partial", "var/cache/apt/archives/partial"] {
            fs::create_dir_all(root.join(folder))?;
        }
        fs::write(root.join("var/lib/dpkg/status"), "")?;
        fs::write(root.join("etc/apt/sources.list"), &lines)?;
        packages.run("apt-get", &["-q", "update"])?;
        Ok(packages)
    }

    /// The package to which a metapackage, such as `linux-image-amd64`, refers: the first one that
    /// it depends on whose name begins with `prefix`.
    ///
    /// # Errors
    /// If there is none.
    pub fn resolve(&self, package: &str, prefix: &str) -> Result<String> {
        let found = self.depends(package)?.into_iter().find(|name| name.starts_with(prefix));
        found.with_context(|| format!("{package} depends on no {prefix}*"))
    }

    /// The packages that a package depends on, without alternatives.
    ///
    /// # Errors
    /// If there is no such package.
    pub fn depends(&self, package: &str) -> Result<Vec<String>> {
        let text = self.run("apt-cache", &["depends", package])?;
        let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(names.map(str::to_owned).collect())
    }

    /// The version of a package that `unpack` would fetch; `None` if there is no such package.
    pub fn version(&self, package: &str) -> Option<String> {
        let text = self.run("apt-cache", &["show", "--no-all-versions", package]).ok()?;
        let version = text.lines().find_map(|line| line.strip_prefix("Version: "));
        version.map(str::to_owned)
    }

    /// Fetches a package and unpacks it into `folder`.
    ///
    /// # Errors
    /// If it cannot be fetched or unpacked.
    pub fn unpack(&self, package: &str, folder: &Path) -> Result<()> {
        self.run("apt-get", &["-q", "download", package])?;
        let prefix = format!("{package}_");
        let debs = self.root.join("debs");
        let named = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
        };
        let files = fs::read_dir(&debs)?.flatten().map(|entry| entry.path());
        let deb = files.into_iter().find(named);
        let deb = deb.with_context(|| format!("{package} is not in {}", debs.display()))?;
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("-x").arg(&deb).arg(folder);
        finish(&mut unpack)?;
        fs::remove_file(&deb)?;
        Ok(())
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        let option = |name: &str, value: &Path| format!("{name}={}", value.display());
        command
            .arg("-o")
            .arg(option("Dir", &self.root))
            .arg("-o")
            .arg(option("Dir::State::status", &self.root.join("var/lib/dpkg/status")))
            // The user to which apt would change may have no access to root's folder.
            .args(["-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none"])
            .args(arguments)
            .current_dir(self.root.join("debs"))
            .env("LC_ALL", "C");
        finish(&mut command)
    }
}

/// The error for a program that could not be started, most likely because it is not installed.
pub fn starting(program: &str) -> String {
    format!("starting {program}; `cargo xtask lab` (`make lab`) installs all that the lab needs")
}

/// Runs a program to its end and returns what it printed.
///
/// # Errors
/// If it does not start or fails; with its output.
pub fn finish(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| starting(&name))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?}: {}\n{}", output.status, said.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_says_who_installs_it() {
        let error = finish(&mut Command::new("/sbin/no-such-program")).unwrap_err();
        let said = format!("{error:#}");
        assert!(said.contains("/sbin/no-such-program") && said.contains("make lab"), "{said}");
    }
}
