//! Remembers the sources with which tests passed, so that they run again only after a change: the
//! module's tests of `cargo xtask check`, and the lab's promises.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::workspace::{Outcome, target};

/// The module, its interface, the crates that run on it and are tested with it, and its tests.
const MODULE: [&str; 6] =
    ["kernel", "lab", "crates/uapi", "crates/vm", "crates/testing", "crates/xtask/src/lab"];

/// The lab, and the versions of what it is built of.
const LAB: [&str; 2] = ["lab", "Cargo.lock"];

/// A checksum of the sources, and the file that has the checksum with which the tests passed.
pub struct Mark {
    sources: String,
    file: PathBuf,
}

impl Mark {
    /// The mark of the module's present sources.
    ///
    /// # Errors
    /// When git does not list the files.
    pub fn of_module(root: &Path) -> Outcome<Self> {
        Mark::of(root, &MODULE, "lab/passed")
    }

    /// The mark of the lab's present sources.
    ///
    /// # Errors
    /// When git does not list the files.
    pub fn of_lab(root: &Path) -> Outcome<Self> {
        Mark::of(root, &LAB, "lab/promised")
    }

    /// The mark of these files and folders. `file` lies in the folder of builds.
    fn of(root: &Path, looked_at: &[&str], file: &str) -> Outcome<Self> {
        let mut git = Command::new("git");
        git.current_dir(root).args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "-z",
        ]);
        let listing = git.arg("--").args(looked_at).output();
        let listing = listing.map_err(|error| format!("git does not run: {error}"))?;
        if !listing.status.success() {
            return Err(format!("git: {}", String::from_utf8_lossy(&listing.stderr).trim()));
        }
        let mut hasher = DefaultHasher::new();
        for name in String::from_utf8_lossy(&listing.stdout).split_terminator('\0') {
            // git still lists a file whose removal is not committed.
            (name, fs::read(root.join(name)).ok()).hash(&mut hasher);
        }
        let sources = format!("{:016x}", hasher.finish());
        Ok(Self { sources, file: target(root).join(file) })
    }

    /// True if the tests have passed with these sources.
    pub fn is_current(&self) -> bool {
        fs::read_to_string(&self.file).is_ok_and(|passed| passed == self.sources)
    }

    /// Records that the tests have passed with these sources.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn set(&self) -> Outcome {
        let folder = self.file.parent().unwrap_or(&self.file);
        let written =
            fs::create_dir_all(folder).and_then(|()| fs::write(&self.file, &self.sources));
        written.map_err(|error| format!("{}: {error}", self.file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_changes_the_mark() {
        let root = std::env::temp_dir().join(format!("vellum-mark-{}", std::process::id()));
        fs::create_dir_all(root.join("kernel")).unwrap();
        let run = |words: &[&str]| {
            assert!(Command::new("git").current_dir(&root).args(words).status().unwrap().success());
        };
        run(&["init", "--quiet"]);
        let mark =
            || Mark { file: root.join("target/lab/passed"), ..Mark::of_module(&root).unwrap() };
        fs::write(root.join("kernel/main.c"), "one").unwrap();
        assert!(!mark().is_current());
        mark().set().unwrap();
        assert!(mark().is_current());
        fs::write(root.join("kernel/main.c"), "two").unwrap();
        assert!(!mark().is_current());
        mark().set().unwrap();
        fs::write(root.join("kernel/other.c"), "").unwrap();
        assert!(!mark().is_current());
        mark().set().unwrap();
        fs::write(root.join("README.md"), "").unwrap();
        assert!(mark().is_current());
        fs::remove_dir_all(root).unwrap();
    }
}
