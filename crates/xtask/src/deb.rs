//! `cargo xtask deb`: the Debian package of the kernel module, for DKMS, built and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::setup;
use crate::workspace::Outcome;

/// Parts of `kernel/` that are not for users of the package.
const LEFT_OUT: [&str; 3] = ["kernel/tests/", "kernel/README.md", "kernel/checkpatch.exceptions"];

/// Builds the package in `target/deb` and has lintian check it; returns its path.
///
/// # Errors
/// When something is missing, the build fails, or lintian finds an error or a warning.
pub fn run(root: &Path) -> Outcome<PathBuf> {
    setup::ensure(setup::Need::Package)?;
    let place = root.join("target/deb");
    if place.exists() {
        fs::remove_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
    }
    let sources = place.join("vellum");
    let files = kernel_files(root)?;
    for file in &files {
        copy(&root.join(file), &sources.join(below_kernel(file)))?;
    }
    let mut build = Command::new("dpkg-buildpackage");
    quietly(build.current_dir(&sources).args(["-us", "-uc", "-b"]))?;
    let package = find(&place, ".deb")?;
    let listing = quietly(Command::new("dpkg-deb").arg("--contents").arg(&package))?;
    if let Some(file) = missing(&files, &listing) {
        return Err(format!("{file} is not in the package: see kernel/debian/rules"));
    }
    let mut check = Command::new("lintian");
    quietly(check.args(["--fail-on", "error,warning", "--allow-root"]).arg(&package))?;
    Ok(package)
}

/// A source file of the module that a listing of the package lacks.
fn missing<'a>(files: &'a [String], listing: &str) -> Option<&'a str> {
    let names = files.iter().map(|file| below_kernel(file));
    let of_module = |name: &&str| !name.starts_with("debian/") && *name != "dkms.conf";
    names.filter(of_module).find(|name| {
        let is_it = |line: &str| {
            let below = line.split_once("/usr/src/").and_then(|(_, path)| path.split_once('/'));
            below.is_some_and(|(_, path)| path == *name)
        };
        !listing.lines().any(is_it)
    })
}

fn below_kernel(file: &str) -> &str {
    file.strip_prefix("kernel/").unwrap_or(file)
}

/// The files that git tracks below `kernel/`, without those that are left out.
fn kernel_files(root: &Path) -> Outcome<Vec<String>> {
    let mut command = Command::new("git");
    command.current_dir(root).args(["ls-files", "kernel"]);
    let output = command.output().map_err(|error| format!("git does not run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let wanted = |file: &&str| !LEFT_OUT.iter().any(|part| file.starts_with(part));
    let files: Vec<String> = text.lines().filter(wanted).map(str::to_owned).collect();
    if files.is_empty() { Err("git tracks no files in kernel/".to_owned()) } else { Ok(files) }
}

fn copy(from: &Path, to: &Path) -> Outcome {
    let copied =
        to.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::copy(from, to).map(drop));
    copied.map_err(|error| format!("copying {}: {error}", from.display()))
}

fn find(folder: &Path, ending: &str) -> Outcome<PathBuf> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths
        .find(|path| path.to_string_lossy().ends_with(ending))
        .ok_or_else(|| format!("no {ending} in {}", folder.display()))
}

/// Runs a program, and shows its messages only if it fails; returns its output.
fn quietly(command: &mut Command) -> Outcome<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{name} does not run: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(format!("{name}: {}\n{}", output.status, String::from_utf8_lossy(&said)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_that_the_package_lacks_are_found() {
        let files =
            ["kernel/main.c", "kernel/debian/rules", "kernel/core/frames.c"].map(str::to_owned);
        let line =
            |name: &str| format!("-rw-r--r-- root/root 9 2026-01-01 ./usr/src/vellum-1/{name}\n");
        let whole = line("main.c") + &line("core/frames.c");
        assert_eq!(missing(&files, &whole), None);
        assert_eq!(missing(&files, &line("core/main.c")), Some("main.c"));
        assert_eq!(missing(&files, &line("main.c")), Some("core/frames.c"));
    }
}
