//! Cleans up after this process however it ends, even if it is killed, by a small process that
//! waits for the end of its input.

use std::fs;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result};

/// Reads identifiers of processes; only the last one counts. At the end of its input it kills that
/// process and removes the folder. An empty line means no process.
const SCRIPT: &str = r#"
    while read -r line; do process=$line; done
    [ -z "$process" ] || kill -9 "$process" 2>/dev/null
    rm -rf "$0"
"#;

/// A folder that is removed when this is dropped, or when this process ends without dropping it.
#[derive(Debug)]
pub struct Cleaner {
    folder: PathBuf,
    child: Child,
}

impl Cleaner {
    /// Creates a new folder inside `place`.
    ///
    /// # Errors
    /// If the folder cannot be created, or the process cannot be started.
    pub fn new(place: &Path) -> Result<Cleaner> {
        let folder = tempfile::Builder::new().prefix("run-").tempdir_in(place)?.keep();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT]).arg(&folder).stdin(Stdio::piped());
        // The interrupt signal of a terminal reaches this process, not the cleaner.
        command.process_group(0);
        match command.spawn() {
            Ok(child) => Ok(Cleaner { folder, child }),
            Err(error) => {
                fs::remove_dir_all(&folder).ok();
                Err(error).context("starting a shell")
            }
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Has the cleaner kill `process`, too, if this process ends.
    ///
    /// # Errors
    /// If the cleaner is gone.
    pub fn watch_over(&mut self, process: u32) -> Result<()> {
        self.say(&process.to_string())
    }

    /// The process has ended. Another process may soon have its number.
    ///
    /// # Errors
    /// If the cleaner is gone.
    pub fn release(&mut self) -> Result<()> {
        self.say("")
    }

    fn say(&mut self, line: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().context("the cleaner has no input")?;
        writeln!(input, "{line}").context("the cleaner is gone")
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    #[test]
    fn nothing_is_left_when_the_input_ends() {
        let place = tempfile::tempdir().unwrap();
        let mut sleeper = sleeper();
        let mut cleaner = Cleaner::new(place.path()).unwrap();
        fs::write(cleaner.folder().join("file"), "").unwrap();
        cleaner.watch_over(sleeper.id()).unwrap();
        drop(cleaner);
        assert!(!sleeper.wait().unwrap().success());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_process_that_was_released_lives() {
        let place = tempfile::tempdir().unwrap();
        let mut sleeper = sleeper();
        let mut cleaner = Cleaner::new(place.path()).unwrap();
        cleaner.watch_over(sleeper.id()).unwrap();
        cleaner.release().unwrap();
        drop(cleaner);
        assert!(sleeper.try_wait().unwrap().is_none());
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
