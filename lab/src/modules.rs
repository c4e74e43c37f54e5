//! Modules of a kernel and their dependencies, in the order of loading.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::kernel::Kernel;
use crate::packages::starting;

/// A module for the guest.
#[derive(Debug)]
pub struct Module {
    /// Its name, as `lsmod` shows it.
    pub name: String,
    /// The file's contents, not compressed.
    pub contents: Vec<u8>,
}

/// The modules `wanted` and all their dependencies, each after those that it needs, without those
/// that are built into the kernel.
///
/// # Errors
/// If the kernel has no such module, or one cannot be read.
pub fn closure(kernel: &Kernel, wanted: &[&str]) -> Result<Vec<Module>> {
    let list = kernel.modules.join("modules.dep");
    let text = fs::read_to_string(&list).with_context(|| format!("reading {}", list.display()))?;
    let needs = needs(&text);
    let built_in = fs::read_to_string(kernel.modules.join("modules.builtin")).unwrap_or_default();
    let mut paths = Vec::new();
    for name in wanted {
        let found = needs.keys().find(|path| module_name(path) == *name);
        match found {
            // The list names dependencies in reverse order of loading.
            Some(path) => {
                let before = needs[path].iter().rev().copied();
                for path in before.chain([*path]) {
                    if !paths.contains(&path) {
                        paths.push(path);
                    }
                }
            }
            None if built_in.lines().any(|path| module_name(path) == *name) => {}
            None => bail!("kernel {} has no module {name}", kernel.release),
        }
    }
    let read = |path: &&str| {
        let contents = contents(&kernel.modules.join(path))?;
        Ok(Module { name: module_name(path), contents })
    };
    paths.iter().map(read).collect()
}

/// `modules.dep`: each module's path, and the paths of its dependencies.
fn needs(text: &str) -> HashMap<&str, Vec<&str>> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.map(|(path, rest)| (path, rest.split_whitespace().collect())).collect()
}

/// `kernel/fs/ext4/ext4.ko.xz` is `ext4`, and dashes are underscores.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

fn contents(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|extension| extension == "xz") {
        let output =
            Command::new("xz").arg("-dc").arg(path).output().with_context(|| starting("xz"))?;
        ensure!(output.status.success(), "xz -dc {}: {}", path.display(), output.status);
        return Ok(output.stdout);
    }
    fs::read(path).with_context(|| format!("reading {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(folder: &Path) -> Kernel {
        Kernel {
            name: "0.1",
            release: "0.1-test".into(),
            image: "none".into(),
            modules: folder.to_path_buf(),
            headers: "none".into(),
            folder: "none".into(),
            is_debug: false,
            hypervisor: None,
        }
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let folder = tempfile::tempdir().unwrap();
        let dep = "fs/ext4.ko: fs/jbd2.ko lib/crc-16.ko\nfs/jbd2.ko:\nlib/crc-16.ko:\n\
                   fs/ext2.ko: lib/crc-16.ko\n";
        fs::write(folder.path().join("modules.dep"), dep).unwrap();
        fs::write(folder.path().join("modules.builtin"), "kernel/block/null_blk.ko\n").unwrap();
        for folder_name in ["fs", "lib"] {
            fs::create_dir(folder.path().join(folder_name)).unwrap();
        }
        for file in ["fs/ext4.ko", "fs/jbd2.ko", "fs/ext2.ko", "lib/crc-16.ko"] {
            fs::write(folder.path().join(file), file).unwrap();
        }
        let kernel = kernel(folder.path());
        let modules = closure(&kernel, &["ext4", "null_blk", "ext2"]).unwrap();
        let names: Vec<_> = modules.iter().map(|module| &module.name[..]).collect();
        assert_eq!(names, ["crc_16", "jbd2", "ext4", "ext2"]);
        assert_eq!(modules[0].contents, b"lib/crc-16.ko");
        let error = closure(&kernel, &["xfs"]).unwrap_err();
        assert!(error.to_string().contains("no module xfs"), "{error}");
    }
}
