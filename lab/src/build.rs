//! Builds modules that are not the kernel's own, for each kernel against its headers.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};

use crate::kernel::Kernel;
use crate::lock::lock;
use crate::mirror;
use crate::packages::starting;

/// The compiler that Debian's kernels of these series are built with.
pub const COMPILER: &str = "gcc-12";

/// Where a kernel's folder has the copies in which modules are built.
const BUILDS: &str = "build";

/// A module that was built.
#[derive(Debug)]
pub struct Built {
    /// Its name, as `lsmod` shows it.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// The file's contents.
    pub contents: Vec<u8>,
}

/// Builds the modules that the Kbuild file of `folder` names, for one kernel. It only reads the
/// folder itself. Any warning, of the compiler or of a later step, is an error.
///
/// # Errors
/// With all that was said, if there was a warning or the build failed.
pub fn build(kernel: &Kernel, folder: &Path) -> Result<Vec<Built>> {
    let folder = canonical(folder)?;
    let builds = kernel.folder.join(BUILDS);
    let _alone = lock(&builds)?;
    let copy = copy_of(&builds, &folder);
    build_copy(kernel, &folder, &copy)?;
    built(&copy)
}

/// What sparse says of the files of `folder`, built against the headers of a kernel. What it says
/// of the kernel's own headers is left out.
///
/// # Errors
/// With all that was said, if the build failed.
pub fn sparse(kernel: &Kernel, folder: &Path) -> Result<Vec<String>> {
    let folder = canonical(folder)?;
    let builds = kernel.folder.join(BUILDS);
    let _alone = lock(&builds)?;
    let copy = copy_of(&builds, &folder);
    build_copy(kernel, &folder, &copy)?;
    let mut make = make(kernel, &copy);
    // All files, although they are built.
    make.args(["C=2", "CHECK=sparse", "modules"]);
    let output = make.output().with_context(|| starting("make"))?;
    let said = of_the_folder(&[output.stdout, output.stderr].concat(), &copy, &folder);
    let lines = findings(&said, &folder);
    if lines.is_empty() && !output.status.success() {
        bail!("sparse on {} for kernel {}:\n{}", folder.display(), kernel.name, said.trim_end());
    }
    Ok(lines)
}

/// The lines of what sparse says that are about a file of the folder, without those that only add
/// to another line. A header's line comes once for each file that includes it.
fn findings(said: &str, folder: &Path) -> Vec<String> {
    let prefix = format!("{}/", folder.display());
    let is_finding = |line: &&str| {
        line.starts_with(&prefix) && (line.contains(" warning: ") || line.contains(" error: "))
    };
    let lines: BTreeSet<&str> = said.lines().filter(is_finding).collect();
    lines.into_iter().map(str::to_owned).collect()
}

/// The folder's whole path. It must have a Kbuild file.
fn canonical(folder: &Path) -> Result<PathBuf> {
    let context = || format!("no folder {}", folder.display());
    let folder = folder.canonicalize().with_context(context)?;
    ensure!(folder.join("Kbuild").is_file(), "no Kbuild in {}", folder.display());
    Ok(folder)
}

/// Where the copy of a folder is. Folders of one name have a copy each: make would take another's
/// objects for this one's.
fn copy_of(builds: &Path, folder: &Path) -> PathBuf {
    builds.join(folder.to_string_lossy().trim_start_matches('/').replace('/', "-"))
}

/// Brings the copy up to date and builds it.
fn build_copy(kernel: &Kernel, folder: &Path, copy: &Path) -> Result<()> {
    mirror::follow(folder, copy)?;
    let mut make = make(kernel, copy);
    make.args(["W=1", "KCFLAGS=-Werror", "modules"]);
    let output = make.output().with_context(|| starting("make"))?;
    let said = of_the_folder(&[output.stdout, output.stderr].concat(), copy, folder);
    let has_warning = said.to_lowercase().contains("warning: ");
    if !output.status.success() || has_warning {
        if has_warning {
            // A second run would not repeat the warning, because the object is built.
            fs::remove_dir_all(copy)?;
        }
        bail!("modules in {} for kernel {}:\n{}", folder.display(), kernel.name, said.trim_end());
    }
    Ok(())
}

/// The kernel's make for the copy of a folder.
fn make(kernel: &Kernel, copy: &Path) -> Command {
    let mut make = Command::new("make");
    make.arg("-C").arg(&kernel.headers).arg(format!("M={}", copy.display()));
    make.arg(format!("-j{}", thread::available_parallelism().map_or(1, usize::from)));
    // Types for BPF would need a program and the whole kernel, and nothing here reads them.
    make.args([&format!("CC={COMPILER}"), "CONFIG_DEBUG_INFO_BTF_MODULES="]).env("LC_ALL", "C");
    make
}

/// What was said, with the paths of the folder: a person edits that, not the copy.
fn of_the_folder(said: &[u8], copy: &Path, folder: &Path) -> String {
    String::from_utf8_lossy(said).replace(&*copy.to_string_lossy(), &folder.to_string_lossy())
}

/// Removes the builds for the kernel in `folder` before another kernel replaces it: make does not
/// notice all changes.
///
/// # Errors
/// If something cannot be removed.
pub fn forget(folder: &Path) -> Result<()> {
    let builds = folder.join(BUILDS);
    if builds.exists() {
        fs::remove_dir_all(&builds).context("removing modules of another kernel")?;
    }
    Ok(())
}

/// The modules of a build, from its own list: a line is a path to the module or to its object file.
fn built(copy: &Path) -> Result<Vec<Built>> {
    let list = fs::read_to_string(copy.join("modules.order")).context("the build's modules")?;
    let paths = list.lines().map(|line| copy.join(line).with_extension("ko"));
    let module = |path: PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().replace('-', "_");
        let context = || format!("the build left no {}", path.display());
        let contents = fs::read(&path).with_context(context)?;
        Ok(Built { name, path, contents })
    };
    paths.map(module).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_about_the_kernels_headers_are_not_ours() {
        let said = "  CHECK   /k/main.c\n\
            /headers/include/linux/mm.h:1:2: warning: context imbalance\n\
            /k/core/a.h:3:4: warning: symbol 'a' was not declared\n\
            /k/core/a.h:3:4: warning: symbol 'a' was not declared\n\
            /k/core/b.c:5:6: error: incompatible types\n\
            /k/core/b.c:5:6:    expected restricted gfp_t\n";
        let expected = [
            "/k/core/a.h:3:4: warning: symbol 'a' was not declared",
            "/k/core/b.c:5:6: error: incompatible types",
        ];
        assert_eq!(findings(said, Path::new("/k")), expected);
    }
}
