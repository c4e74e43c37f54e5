//! `cargo xtask deb`: the Debian package of the kernel module, for DKMS, built and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{Outcome, setup};

/// Parts of `kernel/` that are not for users of the package.
const LEFT_OUT: [&str; 2] = ["kernel/tests/", "kernel/README.md"];

/// Builds the package in `target/deb` and has lintian look at it; returns where it is.
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
    for file in kernel_files(root)? {
        let target = sources.join(file.strip_prefix("kernel/").unwrap_or(&file));
        copy(&root.join(&file), &target)?;
    }
    let mut build = Command::new("dpkg-buildpackage");
    quietly(build.current_dir(&sources).args(["-us", "-uc", "-b"]))?;
    let package = find(&place, ".deb")?;
    let mut check = Command::new("lintian");
    quietly(check.args(["--fail-on", "error,warning", "--allow-root"]).arg(&package))?;
    Ok(package)
}

/// The files that git knows below `kernel/`, but for those that are left out.
fn kernel_files(root: &Path) -> Outcome<Vec<String>> {
    let mut command = Command::new("git");
    command.current_dir(root).args(["ls-files", "kernel"]);
    let output = command.output().map_err(|error| format!("git does not run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let wanted = |file: &&str| !LEFT_OUT.iter().any(|part| file.starts_with(part));
    let files: Vec<String> = text.lines().filter(wanted).map(str::to_owned).collect();
    if files.is_empty() { Err("git knows no files in kernel/".to_owned()) } else { Ok(files) }
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

/// Runs a program, and shows what it says only if it fails.
fn quietly(command: &mut Command) -> Outcome {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{name} does not run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(format!("{name}: {}\n{}", output.status, String::from_utf8_lossy(&said)))
}
