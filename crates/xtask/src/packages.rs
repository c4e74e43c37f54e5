//! Programs and Debian packages of the machine.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::workspace::Outcome;

/// Whether `program` is a file in a folder of the PATH or, if it is a path, whether that file
/// exists.
pub fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Whether this is the superuser.
pub fn is_root() -> bool {
    let output = Command::new("id").arg("-u").output();
    output.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// The first two numbers of a version such as `1.95.0`.
pub fn major_and_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Runs apt-get without questions.
///
/// # Errors
/// Its output, if it fails.
pub fn apt_get(arguments: &[&str]) -> Outcome {
    let _alone = installer();
    let output = Command::new("apt-get")
        .arg("-q")
        // Another program may be installing something.
        .args(["-o", "DPkg::Lock::Timeout=600"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("apt-get does not run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(format!("apt-get {} failed:\n{reason}", arguments.join(" ")))
}

/// Waits until no other step installs something: steps may run at the same time, and apt-get does
/// not wait for all of its own locks. Without a place for the lock the step goes on.
fn installer() -> Option<File> {
    let lock = File::create(std::env::temp_dir().join("vellum-apt.lock")).ok()?;
    lock.lock().ok().map(|()| lock)
}

/// Runs a command for its exit status alone.
pub fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_looked_up_on_the_path() {
        assert!(on_path("cargo") && on_path("/bin/sh"));
        assert!(!on_path("/bin/a-program-that-nobody-has"));
        assert!(!on_path("a-program-that-nobody-has"));
    }
}
