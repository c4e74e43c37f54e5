//! Builds out-of-tree modules, for each kernel against its headers.

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

/// The subfolder of a kernel's folder with the copies in which modules are built.
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
/// With the whole output, if there was a warning or the build failed.
pub fn build(kernel: &Kernel, folder: &Path) -> Result<Vec<Built>> {
    let folder = canonical(folder)?;
    let builds = kernel.folder.join(BUILDS);
    let _alone = lock(&builds)?;
    let copy = copy_of(&builds, &folder);
    build_copy(kernel, &folder, &copy)?;
    built(&copy)
}

/// The findings of sparse in the files of `folder`, built against the headers of a kernel, without
/// findings in the kernel's headers.
///
/// # Errors
/// With the whole output, if the build failed.
pub fn sparse(kernel: &Kernel, folder: &Path) -> Result<Vec<String>> {
    let folder = canonical(folder)?;
    let builds = kernel.folder.join(BUILDS);
    let _alone = lock(&builds)?;
    let copy = copy_of(&builds, &folder);
    build_copy(kernel, &folder, &copy)?;
    let mut make = make(kernel, &copy);
    // Checks all files, even those that are built already.
    make.args(["C=2", "CHECK=sparse", "modules"]);
    let output = make.output().with_context(|| starting("make"))?;
    let said = of_the_folder(&[output.stdout, output.stderr].concat(), &copy, &folder);
    let lines = findings(&said, &folder);
    if lines.is_empty() && !output.status.success() {
        bail!("sparse on {} for kernel {}:\n{}", folder.display(), kernel.name, said.trim_end());
    }
    Ok(lines)
}

/// The lines of sparse's output about files of the folder, without those that only continue another
/// line. Sparse repeats a header's line for each file that includes it; this has it once.
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

/// The path of a folder's copy. Two folders with the same name have two copies, because make would
/// mistake the objects of one for those of the other.
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
            // Removes the copy: the object is built, so a second run would not repeat the warning.
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
    // Type data for BPF needs another program and the whole kernel, and the lab does not use it.
    make.args([&format!("CC={COMPILER}"), "CONFIG_DEBUG_INFO_BTF_MODULES="]).env("LC_ALL", "C");
    make
}

/// The output with the paths of the folder instead of the copy's, because people edit the folder.
fn of_the_folder(said: &[u8], copy: &Path, folder: &Path) -> String {
    String::from_utf8_lossy(said).replace(&*copy.to_string_lossy(), &folder.to_string_lossy())
}

/// Removes the builds for the kernel in `folder` before another kernel replaces it, because make
/// does not notice all changes.
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
    fn findings_in_the_kernel_s_headers_are_left_out() {
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
