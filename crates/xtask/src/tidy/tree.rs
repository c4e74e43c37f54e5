//! The files that the rules check.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::workspace::Outcome;

use super::rust_text::{self, RustText};

/// One text file of the repository.
pub struct File {
    /// Relative to the top of the repository, with `/` between the parts.
    pub path: String,
    /// Its contents.
    pub text: String,
}

impl File {
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    pub fn is_markdown(&self) -> bool {
        self.path.ends_with(".md")
    }

    /// Lines with their numbers, counted from 1.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.split('\n').enumerate().map(|(index, line)| (index + 1, line))
    }

    /// The file taken apart into code and comments; only useful for Rust.
    pub fn rust(&self) -> RustText {
        rust_text::take_apart(&self.text)
    }
}

/// All text files of the repository.
pub struct Tree {
    pub files: Vec<File>,
    /// Every file, text or not, and every folder that has one.
    names: BTreeSet<String>,
}

impl Tree {
    /// The files that git tracks, and those that it would if they were added.
    pub fn of_repository(root: &Path) -> Outcome<Self> {
        let output = Command::new("git")
            // A checkout of another user is fine, because git runs nothing in it here.
            .arg("-c")
            .arg(format!("safe.directory={}", root.display()))
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(root)
            .output()
            .map_err(|error| format!("git does not run: {error}"))?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(format!("tidy needs a git checkout: {}", reason.trim()));
        }
        let listing = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut files = Vec::new();
        let mut paths = Vec::new();
        for path in listing.split('\0').filter(|path| !path.is_empty()) {
            // A deleted file may still be in the index.
            let Ok(bytes) = std::fs::read(root.join(path)) else {
                continue;
            };
            paths.push(path.to_string());
            if let Ok(text) = String::from_utf8(bytes) {
                files.push(File { path: path.to_string(), text });
            }
        }
        Ok(Self { files, names: names(&paths) })
    }

    /// A tree of the given paths and texts, for unit tests of a rule.
    #[cfg(test)]
    pub fn of(entries: &[(&str, &str)]) -> Self {
        let file = |entry: &(&str, &str)| File { path: entry.0.into(), text: entry.1.into() };
        let files: Vec<File> = entries.iter().map(file).collect();
        let paths: Vec<String> = files.iter().map(|file| file.path.clone()).collect();
        Self { files, names: names(&paths) }
    }

    /// Whether `path` is a file of the repository or a folder with one.
    pub fn exists(&self, path: &str) -> bool {
        path.is_empty() || self.names.contains(path)
    }

    pub fn rust_files(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.is_rust())
    }
}

fn names(paths: &[String]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for path in paths {
        names.insert(path.clone());
        for (position, _) in path.match_indices('/') {
            names.insert(path[..position].to_string());
        }
    }
    names
}
