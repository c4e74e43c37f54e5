//! The guest's first file system: an archive in the format `newc` of cpio, which the kernel unpacks
//! into memory (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Kinds of entries, as `stat` has them.
const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// An archive under construction. Adding a file also adds its folders.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Archive {
    /// Adds a folder and those above it. Names begin without a slash.
    pub fn folder(&mut self, name: &str) {
        if name.is_empty() || self.names.contains(name) {
            return;
        }
        self.above(name);
        self.entry(name, FOLDER | 0o755, &[]);
    }

    /// Adds a file with these contents, unless it has a file of this name.
    pub fn file(&mut self, name: &str, permissions: u32, contents: &[u8]) {
        if !self.names.contains(name) {
            self.above(name);
            self.entry(name, FILE | (permissions & 0o777), contents);
        }
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, name: &str, target: &str) {
        if !self.names.contains(name) {
            self.above(name);
            self.entry(name, LINK | 0o777, target.as_bytes());
        }
    }

    /// Adds a file of this machine under another name, or its own.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn copy(&mut self, from: &Path, name: &str) -> Result<()> {
        let context = || format!("reading {}", from.display());
        let contents = fs::read(from).with_context(context)?;
        let permissions = fs::metadata(from).with_context(context)?.permissions().mode();
        self.file(name, permissions, &contents);
        Ok(())
    }

    /// Ends the archive and returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn above(&mut self, name: &str) {
        if let Some((folder, _)) = name.rsplit_once('/') {
            self.folder(folder);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) {
        let number = self.names.len() + 1;
        self.names.insert(name.to_owned());
        // Magic, inode, mode, user, group, links, time, size, device and its kind, length of the
        // name with its end, and a checksum that is not used.
        let fields = [
            number as u32,
            mode,
            0,
            0,
            1,
            0,
            contents.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    /// Headers and contents begin at multiples of four.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_reads_what_is_written() {
        let mut archive = Archive::default();
        archive.file("bin/deep/tool", 0o755, b"#!/bin/sh\n");
        archive.file("bin/deep/tool", 0o600, b"another of the same name");
        archive.file("empty", 0o640, b"");
        archive.link("bin/alias", "deep/tool");
        let bytes = archive.finish();
        let folder = tempfile::tempdir().unwrap();
        let mut cpio = Command::new("/bin/busybox");
        cpio.args(["cpio", "-i", "-d", "-m"]).current_dir(folder.path());
        let mut child = match cpio.stdin(Stdio::piped()).spawn() {
            Ok(child) => child,
            Err(error) => {
                eprintln!("skipped: no busybox here: {error}");
                return;
            }
        };
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        let tool = folder.path().join("bin/deep/tool");
        assert_eq!(fs::read(&tool).unwrap(), b"#!/bin/sh\n");
        assert_eq!(fs::metadata(&tool).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read(folder.path().join("empty")).unwrap(), b"");
        let alias = fs::read_link(folder.path().join("bin/alias")).unwrap();
        assert_eq!(alias, Path::new("deep/tool"));
    }
}
