//! The file of the demonstration's store. The demonstration leaves no half-written file.
//!
//! A temporary store loses its name as soon as it is open. From then on the program opens it
//! through its own file descriptor. So the kernel frees it however the program ends, after SIGKILL
//! too. Only while the demonstration kills its child processes is there a folder, with their log;
//! if the demonstration itself is killed then, the next one removes the folder. A store that the
//! user keeps is named FILE.partial until it is complete.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;

use crate::error::{Doing, Failure, Outcome};
use crate::progress::say;
use crate::size;

/// File systems that are in memory, by their number in `statfs(2)`.
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;

/// The store's file.
pub enum StoreFile {
    /// Removed when this is dropped.
    Temporary {
        folder: PathBuf,
        /// Keeps the content alive while the file has no name.
        open: Option<File>,
        path: PathBuf,
    },
    /// Renamed to `target` at the end.
    Kept { partial: PathBuf, target: PathBuf },
}

impl StoreFile {
    /// Chooses a place with room for `bytes`.
    ///
    /// # Errors
    /// When the file exists already, or there is no room.
    pub fn choose(store: Option<&Path>, bytes: u64) -> Outcome<Self> {
        match store {
            Some(target) => Self::kept(target, bytes),
            None => Self::temporary(bytes),
        }
    }

    fn kept(target: &Path, bytes: u64) -> Outcome<Self> {
        if target.exists() {
            let shown = target.display();
            return Err(Failure::message(format!(
                "{shown} exists already; remove it, or choose another name"
            )));
        }
        let folder = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        require_space(folder, bytes)?;
        let mut partial = target.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        // An interrupted demonstration may have left these.
        let is_in_the_way = |removed: &io::Result<()>| {
            removed.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::NotFound)
        };
        let removed = fs::remove_file(&partial);
        if is_in_the_way(&removed) {
            removed.doing(|| format!("removing {}", partial.display()))?;
        }
        let log = log_beside(&partial);
        let removed = fs::remove_dir_all(&log);
        if is_in_the_way(&removed) {
            removed.doing(|| format!("removing {}", log.display()))?;
        }
        say(&format!("until it is complete the store is named {}", partial.display()));
        Ok(Self::Kept { partial, target: target.to_path_buf() })
    }

    fn temporary(bytes: u64) -> Outcome<Self> {
        let parent = temporary_parent(bytes)?;
        remove_left(&parent);
        let folder = parent.join(format!("{FOLDER}{}", std::process::id()));
        fs::create_dir(&folder).doing(|| format!("creating {}", folder.display()))?;
        let path = folder.join("store.vellum");
        Ok(Self::Temporary { folder, open: None, path })
    }

    /// The path by which the store is to be created or opened.
    pub fn path(&self) -> &Path {
        match self {
            Self::Temporary { path, .. } => path,
            Self::Kept { partial, .. } => partial,
        }
    }

    /// The path by which another process can open the store while this process lives.
    pub fn path_for_others(&self) -> PathBuf {
        match self {
            Self::Temporary { open: Some(file), .. } => {
                PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
            }
            _ => self.path().to_path_buf(),
        }
    }

    /// The folder for the log of a temporary store. The log of another store lies beside it.
    pub fn log_folder(&self) -> Option<PathBuf> {
        match self {
            Self::Temporary { folder, .. } => Some(folder.join("log")),
            Self::Kept { .. } => None,
        }
    }

    /// Makes the folder that the log's folder is in.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn make_log_folder(&self) -> Outcome {
        let Self::Temporary { folder, .. } = self else { return Ok(()) };
        fs::create_dir_all(folder).doing(|| format!("creating {}", folder.display()))
    }

    /// Removes the folder of the log. The caller has closed the store.
    pub fn remove_log_folder(&self) {
        let Self::Temporary { folder, .. } = self else { return };
        let _ = fs::remove_dir_all(folder.join("log"));
        // This succeeds if the store has no name in it.
        let _ = fs::remove_dir(folder);
    }

    /// Removes the name of a temporary store. The caller has created the store, and has it open.
    pub fn created(&mut self) {
        let Self::Temporary { folder, open, path } = self else { return };
        let Ok(file) = File::options().read(true).write(true).open(&*path) else { return };
        let by_descriptor = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        // Without /proc the name stays until this is dropped.
        if File::open(&by_descriptor).is_err() {
            return;
        }
        if fs::remove_file(&*path).is_ok() {
            let _ = fs::remove_dir(&*folder);
            *open = Some(file);
            *path = by_descriptor;
        }
    }

    /// Gives a kept store its name. The caller has closed the store.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn complete(self) -> Outcome {
        if let Self::Kept { partial, target } = &self {
            fs::rename(partial, target).doing(|| format!("naming {}", target.display()))?;
        }
        Ok(())
    }
}

impl Drop for StoreFile {
    fn drop(&mut self) {
        match self {
            Self::Temporary { open, path, .. } => {
                if open.is_none() {
                    let _ = fs::remove_file(path);
                }
                self.remove_log_folder();
            }
            Self::Kept { partial, .. } => {
                // After a failure the file is useless; after success it has its new name.
                let _ = fs::remove_file(&*partial);
                let _ = fs::remove_dir_all(log_beside(partial));
            }
        }
    }
}

/// The name of a temporary store's folder, without the number of the process.
const FOLDER: &str = "vellum-demo-";

/// The folder that the engine chooses for the log of a store with this name.
fn log_beside(store: &Path) -> PathBuf {
    let mut path = store.as_os_str().to_owned();
    path.push(".log");
    path.into()
}

/// Removes the folders of this user's demonstrations that were killed.
fn remove_left(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let user = rustix::process::geteuid().as_raw();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(FOLDER));
        let Some(Ok(process)) = process.map(str::parse::<u32>) else { continue };
        let is_own = entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user);
        if is_own
            && !Path::new(&format!("/proc/{process}")).exists()
            && Path::new("/proc/self").exists()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The first folder for temporary files that is on a disk and has enough room.
fn temporary_parent(bytes: u64) -> Outcome<PathBuf> {
    let named = std::env::var_os("TMPDIR").map(PathBuf::from);
    let usual = ["/var/tmp", "/tmp", "."].map(PathBuf::from);
    let mut reasons = Vec::new();
    for folder in named.into_iter().chain(usual) {
        let shown = folder.display();
        if is_memory(&folder) {
            reasons.push(format!("{shown} is in memory"));
            continue;
        }
        match require_space(&folder, bytes) {
            Ok(()) => return Ok(folder),
            Err(failure) => reasons.push(failure.to_string()),
        }
    }
    let reasons = reasons.join("; ");
    Err(Failure::message(format!(
        "no place for a temporary store ({reasons}); name a file with --store, or lower --limit"
    )))
}

fn is_memory(folder: &Path) -> bool {
    // The type's width depends on the architecture.
    #[allow(clippy::unnecessary_cast)]
    statfs(folder).is_ok_and(|system| matches!(system.f_type as i64, TMPFS | RAMFS))
}

fn require_space(folder: &Path, bytes: u64) -> Outcome {
    let shown = folder.display();
    let system = rustix::fs::statvfs(folder)
        .map_err(io::Error::from)
        .doing(|| format!("looking for free space in {shown}"))?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    if free >= bytes {
        return Ok(());
    }
    let (needed, free) = (size::show(bytes), size::show(free));
    Err(Failure::message(format!("{shown} has {free} free and the store needs {needed}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_store_loses_its_name_and_keeps_its_content() {
        let mut place = StoreFile::choose(None, 1).unwrap();
        let named = place.path().to_path_buf();
        fs::write(&named, b"content").unwrap();
        place.created();
        assert!(!named.exists() && !named.parent().unwrap().exists());
        assert_eq!(fs::read(place.path()).unwrap(), b"content");
    }

    #[test]
    fn folders_of_killed_demonstrations_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        // No process has a number above the kernel's bound of 2^22.
        let left = parent.path().join(format!("{FOLDER}4194305"));
        let others = [format!("{FOLDER}{}", std::process::id()), format!("{FOLDER}x"), "a".into()];
        let others = others.map(|name| parent.path().join(name));
        fs::create_dir_all(left.join("log")).unwrap();
        others.iter().for_each(|other| fs::create_dir(other).unwrap());
        remove_left(parent.path());
        assert!(!left.exists());
        assert!(others.iter().all(|other| other.exists()));
    }

    #[test]
    fn a_kept_store_gets_its_name_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.vellum");
        let place = StoreFile::choose(Some(&target), 1).unwrap();
        fs::write(place.path(), b"content").unwrap();
        assert!(!target.exists());
        place.complete().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"content");
        assert!(StoreFile::choose(Some(&target), 1).is_err());
    }

    #[test]
    fn what_is_not_completed_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.vellum");
        let place = StoreFile::choose(Some(&target), 1).unwrap();
        fs::write(place.path(), b"content").unwrap();
        drop(place);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn too_little_space_is_said_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.vellum");
        let failure = StoreFile::choose(Some(&target), u64::MAX).err().unwrap();
        assert!(failure.to_string().contains("free and the store needs"), "{failure}");
        assert!(StoreFile::choose(None, u64::MAX).is_err());
    }
}
