//! Remembers the sources with which tests passed, so that they run again only after a change: the
//! module's tests and style, and the lab's promises.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, thread};

use crate::workspace::{Outcome, target};

/// The module, its interface, its tests, and all that these are built of: the crates that run on
/// the module alone, the lab, and the versions of other packages.
const MODULE: [&str; 8] = [
    "kernel",
    "lab",
    "crates/dax",
    "crates/testing",
    "crates/uapi",
    "crates/vm",
    "crates/xtask/src/lab",
    "Cargo.lock",
];

/// The lab, and the versions of what it is built of.
const LAB: [&str; 2] = ["lab", "Cargo.lock"];

/// The module's sources without its tests, which are Rust, and what checks their style.
const STYLE: [&str; 4] = ["kernel", ":!kernel/tests", "lab/src/build.rs", "lab/src/style.rs"];

/// A checksum of the sources, and the file that has the checksum with which the tests passed.
pub struct Mark {
    sources: String,
    file: PathBuf,
}

impl Mark {
    /// The mark of the module's present sources, for the tests of a developer on one kernel. It
    /// lies in the folder of builds.
    ///
    /// # Errors
    /// When git does not list the files.
    pub fn of_module(root: &Path) -> Outcome<Self> {
        Mark::of(root, &MODULE, target(root).join("lab/passed"))
    }

    /// The mark of the same sources for all tests on all kernels. It is committed with them, so
    /// that a fresh clone knows it, too.
    ///
    /// # Errors
    /// When git does not list the files.
    pub fn of_module_everywhere(root: &Path) -> Outcome<Self> {
        Mark::of(root, &MODULE, root.join(".ci/module-tested"))
    }

    /// The mark of the lab's present sources. It is committed with them.
    ///
    /// # Errors
    /// When git does not list the files.
    pub fn of_lab(root: &Path) -> Outcome<Self> {
        Mark::of(root, &LAB, root.join(".ci/lab-promised"))
    }

    /// The mark of the present sources whose style is checked. It is committed with them.
    ///
    /// # Errors
    /// When git does not list the files.
    pub fn of_style(root: &Path) -> Outcome<Self> {
        Mark::of(root, &STYLE, root.join(".ci/module-style"))
    }

    /// The mark of these files and folders, which another version of git and of Rust finds, too.
    fn of(root: &Path, looked_at: &[&str], file: PathBuf) -> Outcome<Self> {
        let kinds = ["ls-files", "--cached", "--others", "--exclude-standard"];
        let names = git(root, &[&kinds, &["--"][..], looked_at].concat(), "")?;
        // git still lists a file whose removal is not committed.
        let there: String = names
            .lines()
            .filter(|name| root.join(name).exists())
            .map(|name| format!("{name}\n"))
            .collect();
        let contents = git(root, &["hash-object", "--stdin-paths"], &there)?;
        let sources = git(root, &["hash-object", "--stdin"], &format!("{there}{contents}"))?;
        Ok(Self { sources, file })
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

/// What a command of git says, which gets an input.
fn git(root: &Path, arguments: &[&str], input: &str) -> Outcome<String> {
    let failed = |error: io::Error| format!("git does not run: {error}");
    let mut command = Command::new("git");
    // Names are as they are, without quotes.
    command.current_dir(root).args(["-c", "core.quotePath=off"]).args(arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut to_child = child.stdin.take();
    let input = input.to_owned();
    let feeder = thread::spawn(move || to_child.as_mut().map(|to| to.write_all(input.as_bytes())));
    let output = child.wait_with_output().map_err(failed)?;
    let _ = feeder.join();
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("git {}: {}", arguments.join(" "), output.status)),
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
