//! Lists the files under a directory, up to a limit, without reading them.

use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::record::{Kind, Stamp};
use crate::error::{Doing, Failure, Outcome};

/// A file or a symbolic link.
#[derive(Clone, Debug)]
pub struct Found {
    /// Relative to the directory, as bytes.
    pub path: Vec<u8>,
    pub kind: Kind,
    pub mode: u32,
    pub stamp: Stamp,
}

impl Found {
    /// Its path.
    pub fn place(&self, root: &Path) -> PathBuf {
        root.join(std::ffi::OsStr::from_bytes(&self.path))
    }
}

/// Counts of what a listing left out, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Folders and files that could not be read.
    pub unreadable: u64,
    /// Sockets, devices and pipes.
    pub special: u64,
    /// Folders that are on another file system.
    pub elsewhere: u64,
    /// Files that did not fit the limit.
    pub over_limit: u64,
    /// The walk ended early because the limit was reached.
    pub ended_early: bool,
}

/// The files under a directory, in the order of the paths' bytes.
#[derive(Debug, Default)]
pub struct Listing {
    pub files: Vec<Found>,
    /// Sum of the sizes of regular files.
    pub bytes: u64,
    pub left_out: LeftOut,
}

/// Lists `root` until the files' sizes reach `limit` bytes. Skips the files and folders in `skip`
/// (device and inode), and files on other file systems.
///
/// # Errors
/// When `root` is not a directory that can be read.
pub fn list(root: &Path, limit: u64, skip: &[(u64, u64)]) -> Outcome<Listing> {
    let name = || format!("listing {}", root.display());
    let top = fs::metadata(root).doing(name)?;
    if !top.is_dir() {
        return Err(Failure::message(format!("{} is not a directory", root.display())));
    }
    fs::read_dir(root).doing(name)?;
    if is_pseudo(root) {
        let shown = root.display();
        return Err(Failure::message(format!(
            "{shown} shows the kernel's state, and its files change all the time; choose another \
             directory"
        )));
    }
    let mut walk = Walk { root, device: top.dev(), limit, skip, listing: Listing::default() };
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        if walk.is_full() {
            walk.listing.left_out.ended_early = true;
            break;
        }
        // A stack: the first folder by name is on top.
        folders.extend(walk.folder(&folder).into_iter().rev());
    }
    let mut listing = walk.listing;
    listing.files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(listing)
}

/// Whether `folder` is in proc or sysfs. Their files have no sizes, and change without a new time
/// stamp.
fn is_pseudo(folder: &Path) -> bool {
    const PROC: i64 = 0x9fa0;
    const SYSFS: i64 = 0x6265_6572;
    // The type's width depends on the architecture.
    #[allow(clippy::unnecessary_cast)]
    rustix::fs::statfs(folder).is_ok_and(|system| matches!(system.f_type as i64, PROC | SYSFS))
}

struct Walk<'a> {
    root: &'a Path,
    device: u64,
    limit: u64,
    skip: &'a [(u64, u64)],
    listing: Listing,
}

impl Walk<'_> {
    /// Whether less than a thousandth of the limit is left. Then the walk ends, as hardly a file
    /// fits.
    fn is_full(&self) -> bool {
        self.limit - self.listing.bytes <= self.limit / 1024
    }

    /// Lists the files of one folder and returns its folders, in the order of their names.
    fn folder(&mut self, folder: &Path) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.root.join(folder)) else {
            self.listing.left_out.unreadable += 1;
            return Vec::new();
        };
        let mut names: Vec<_> =
            entries.filter_map(Result::ok).map(|entry| entry.file_name()).collect();
        names.sort();
        let mut folders = Vec::new();
        for name in names {
            let path = folder.join(name);
            let Ok(metadata) = fs::symlink_metadata(self.root.join(&path)) else {
                self.listing.left_out.unreadable += 1;
                continue;
            };
            if self.skip.contains(&(metadata.dev(), metadata.ino())) {
                continue;
            }
            let kind = metadata.file_type();
            if kind.is_dir() && metadata.dev() != self.device {
                self.listing.left_out.elsewhere += 1;
            } else if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                self.add(path, Kind::File, &metadata);
            } else if kind.is_symlink() {
                self.add(path, Kind::Link, &metadata);
            } else {
                self.listing.left_out.special += 1;
            }
        }
        folders
    }

    fn add(&mut self, path: PathBuf, kind: Kind, metadata: &fs::Metadata) {
        let stamp = Stamp::of(metadata);
        let bytes = if kind == Kind::File { stamp.size } else { 0 };
        if bytes > self.limit - self.listing.bytes {
            self.listing.left_out.over_limit += 1;
            return;
        }
        self.listing.bytes += bytes;
        let path = path.into_os_string().into_vec();
        self.listing.files.push(Found { path, kind, mode: metadata.mode(), stamp });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("b/c")).unwrap();
        fs::write(at("a"), [1; 100]).unwrap();
        fs::write(at("b/c/d"), [2; 200]).unwrap();
        fs::write(at("b.txt"), [3; 300]).unwrap();
        std::os::unix::fs::symlink("a", at("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        root
    }

    fn paths(listing: &Listing) -> Vec<String> {
        let path = |found: &Found| String::from_utf8(found.path.clone()).unwrap();
        listing.files.iter().map(path).collect()
    }

    #[test]
    fn files_and_links_are_found_in_order() {
        let root = tree();
        let listing = list(root.path(), 1 << 20, &[]).unwrap();
        assert_eq!(paths(&listing), ["a", "b.txt", "b/c/d", "link"]);
        assert_eq!(listing.bytes, 600);
        assert_eq!(listing.left_out, LeftOut { special: 1, ..LeftOut::default() });
    }

    #[test]
    fn the_limit_holds() {
        let root = tree();
        let listing = list(root.path(), 350, &[]).unwrap();
        assert_eq!(paths(&listing), ["a", "b/c/d", "link"]);
        assert_eq!((listing.bytes, listing.left_out.over_limit), (300, 1));
        let listing = list(root.path(), 400, &[]).unwrap();
        assert!(listing.left_out.ended_early);
    }

    #[test]
    fn what_is_to_be_skipped_is() {
        let root = tree();
        let store = fs::metadata(root.path().join("a")).unwrap();
        let listing = list(root.path(), 1 << 20, &[(store.dev(), store.ino())]).unwrap();
        assert_eq!(paths(&listing), ["b.txt", "b/c/d", "link"]);
    }

    #[test]
    fn a_file_is_not_a_directory() {
        let root = tree();
        assert!(list(&root.path().join("a"), 1, &[]).is_err());
        assert!(list(&root.path().join("none"), 1, &[]).is_err());
        assert!(list(Path::new("/proc/self"), 1, &[]).is_err());
    }
}
