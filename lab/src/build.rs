//! Builds modules that are not the kernel's own, for each kernel against its headers.

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
    let context = || format!("no folder {}", folder.display());
    let folder = folder.canonicalize().with_context(context)?;
    ensure!(folder.join("Kbuild").is_file(), "no Kbuild in {}", folder.display());
    // Folders of one name have a copy each: make would take another's objects for this one's.
    let name = folder.to_string_lossy().trim_start_matches('/').replace('/', "-");
    let builds = kernel.folder.join(BUILDS);
    let _alone = lock(&builds)?;
    let copy = builds.join(name);
    mirror::follow(&folder, &copy)?;
    let mut make = Command::new("make");
    make.arg("-C").arg(&kernel.headers).arg(format!("M={}", copy.display()));
    make.arg(format!("-j{}", thread::available_parallelism().map_or(1, usize::from)));
    make.args([&format!("CC={COMPILER}"), "W=1", "KCFLAGS=-Werror"]);
    // Types for BPF would need a program and the whole kernel, and nothing here reads them.
    make.args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]).env("LC_ALL", "C");
    let output = make.output().with_context(|| starting("make"))?;
    let said = [output.stdout, output.stderr].concat();
    // The reader of these messages edits the folder, not the copy.
    let said =
        String::from_utf8_lossy(&said).replace(&*copy.to_string_lossy(), &folder.to_string_lossy());
    let has_warning = said.to_lowercase().contains("warning: ");
    if !output.status.success() || has_warning {
        if has_warning {
            // A second run would not repeat the warning, because the object is built.
            fs::remove_dir_all(&copy)?;
        }
        bail!("modules in {} for kernel {}:\n{}", folder.display(), kernel.name, said.trim_end());
    }
    built(&copy)
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
