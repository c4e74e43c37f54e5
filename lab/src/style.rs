//! Checks the sources of a module as the kernel's maintainers do, with `checkpatch.pl --strict` and
//! with sparse.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::build;
use crate::kernel::Kernel;
use crate::lock::lock;
use crate::packages::{Packages, finish, starting};

/// The package whose archive has the script.
const SOURCE: &str = "linux-source-6.1";

/// Where that package comes from.
const ARCHIVE: &str = "http://deb.debian.org/debian bookworm main";

/// The script, and the lists that it reads.
const SCRIPTS: [&str; 3] =
    ["scripts/checkpatch.pl", "scripts/spelling.txt", "scripts/const_structs.checkpatch"];

/// The list of exceptions in a folder: findings of checkpatch that the project does not follow.
const EXCEPTIONS: &str = "checkpatch.exceptions";

/// A line of that list: `end of the file's path | part of the message | reason`.
#[derive(Debug, PartialEq, Eq)]
struct Exception<'a> {
    file: &'a str,
    says: &'a str,
    reason: &'a str,
}

/// Checks all C files of `folder` by the script, which it keeps below `cache`, and by sparse,
/// against the headers of each kernel. Returns the findings, each as `FILE:LINE: MESSAGE`.
///
/// # Errors
/// If the script cannot be fetched, or the module does not build.
pub fn findings(cache: &Path, kernels: &[Kernel], folder: &Path) -> Result<Vec<String>> {
    let script = script(cache)?;
    let said = checkpatch(&script, folder)?;
    let list = fs::read_to_string(folder.join(EXCEPTIONS)).unwrap_or_default();
    let mut findings = without_exceptions(&said, &exceptions(&list)?);
    for kernel in kernels {
        let said = build::sparse(kernel, folder)?;
        findings.extend(said.into_iter().map(|line| format!("{line} (kernel {})", kernel.name)));
    }
    Ok(findings)
}

/// The path of the script. Fetches it unless it is there.
fn script(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join("style");
    let _alone = lock(&folder)?;
    let script = folder.join(SCRIPTS[0]);
    // Renamed as a whole, so that it is never incomplete.
    if script.exists() {
        return Ok(script);
    }
    println!("fetching {} of {SOURCE}", SCRIPTS[0]);
    let packages = Packages::open(&folder.join("apt"), &[ARCHIVE])?;
    let package = folder.join("package");
    fs::create_dir_all(&package)?;
    packages.unpack(SOURCE, &package)?;
    let archive = package.join(format!("usr/src/{SOURCE}.tar.xz"));
    extract(&archive, &package)?;
    fs::create_dir_all(folder.join("scripts"))?;
    for name in SCRIPTS.iter().rev() {
        fs::rename(package.join(SOURCE).join(name), folder.join(name))
            .with_context(|| format!("{SOURCE} has no {name}"))?;
    }
    fs::remove_dir_all(&package)?;
    Ok(script)
}

/// Unpacks the scripts alone. The archive has 1.3 GB; tar ends with the last of them.
fn extract(archive: &Path, to: &Path) -> Result<()> {
    let names = SCRIPTS.map(|name| format!("{SOURCE}/{name}"));
    let mut xz = Command::new("xz");
    xz.arg("-dc").arg(archive).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut xz: Child = xz.spawn().with_context(|| starting("xz"))?;
    let plain = xz.stdout.take().context("the output of xz")?;
    let mut tar = Command::new("tar");
    // With `--occurrence`, tar stops reading once it has all of them.
    tar.arg("-C").arg(to).args(["-x", "--occurrence=1"]).args(&names).stdin(plain);
    let unpacked = finish(&mut tar);
    // xz fails, because tar does not read its whole output.
    xz.kill().ok();
    xz.wait()?;
    unpacked.map(drop)
}

/// The findings of checkpatch in the C files of the folder, without those in Rust packages.
fn checkpatch(script: &Path, folder: &Path) -> Result<String> {
    let mut files = Vec::new();
    collect(folder, &mut files)?;
    files.sort();
    ensure!(!files.is_empty(), "no C files in {}", folder.display());
    let mut command = Command::new("perl");
    command.arg(script).args(["--no-tree", "--strict", "--file", "--terse", "--no-summary"]);
    let output = command.args(files).output().with_context(|| starting("perl"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // The script fails if it finds something. Output of a script that did not run is no finding.
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() || !said.is_empty(), "checkpatch.pl: {}", complaint.trim_end());
    Ok(said)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let context = || format!("reading {}", folder.display());
    for entry in fs::read_dir(folder).with_context(context)? {
        let path = entry?.path();
        if path.is_dir() && !path.join("Cargo.toml").exists() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|ending| ending == "c" || ending == "h") {
            files.push(path);
        }
    }
    Ok(())
}

/// The exceptions of a list. Each needs a reason.
fn exceptions(list: &str) -> Result<Vec<Exception<'_>>> {
    let parse = |line| {
        let mut parts = str::splitn(line, 3, '|').map(str::trim);
        let mut part = || parts.next().filter(|part| !part.is_empty());
        let exception = part().zip(part()).zip(part());
        let ((file, says), reason) = exception
            .with_context(|| format!("{EXCEPTIONS}: '{line}' is not FILE | MESSAGE | REASON"))?;
        Ok(Exception { file, says, reason })
    };
    let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(parse).collect()
}

/// The lines that no exception covers, and the exceptions that cover none.
fn without_exceptions(said: &str, exceptions: &[Exception<'_>]) -> Vec<String> {
    let mut needed = vec![false; exceptions.len()];
    let mut findings = Vec::new();
    for line in said.lines() {
        let file = line.split(':').next().unwrap_or_default();
        let covers = |exception: &Exception<'_>| {
            file.ends_with(exception.file) && line.contains(exception.says)
        };
        match exceptions.iter().position(covers) {
            Some(index) => needed[index] = true,
            None => findings.push(line.to_owned()),
        }
    }
    let unneeded = exceptions.iter().zip(needed).filter(|(_, needed)| !needed);
    findings.extend(unneeded.map(|(exception, _)| {
        let Exception { file, says, reason } = exception;
        format!("{EXCEPTIONS}: nothing needs '{file} | {says} | {reason}' any more")
    }));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# A comment.\n\na.h | macro | user space | has none\n";

    #[test]
    fn an_exception_covers_only_its_file_and_message() {
        let said = "k/a.h:1: CHECK: a macro\nk/a.h:2: CHECK: a line\nk/b.h:1: CHECK: a macro\n";
        let expected = ["k/a.h:2: CHECK: a line", "k/b.h:1: CHECK: a macro"];
        assert_eq!(without_exceptions(said, &exceptions(LIST).unwrap()), expected);
    }

    #[test]
    fn an_exception_that_nothing_needs_is_a_finding() {
        let findings = without_exceptions("", &exceptions(LIST).unwrap());
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("a.h | macro | user space | has none"), "{findings:?}");
    }

    #[test]
    fn an_exception_without_a_reason_is_refused() {
        for list in ["a.h | macro", "a.h | macro | \n", "a.h\n"] {
            let error = exceptions(list).unwrap_err();
            assert!(error.to_string().contains(list.trim_end()), "{error}");
        }
    }
}
