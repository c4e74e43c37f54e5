//! The folder in which loaded files outlive the daemon: with the module a Morsel is a file, and may
//! have a name there.
//!
//! Invariants: the folder belongs to the daemon's user, no other user may enter it, and one daemon
//! uses it at a time. A Morsel gets its name, which is that of a version of a file, once it is
//! complete and sealed. So a sealed Morsel that has such a name and the length of that version is
//! that version: only this user could have put anything else there.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{self, AtFlags, CWD, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::daemon::source::{SourceId, Version};
use crate::morsel::Morsel;
use crate::provider::Provider;
use crate::seals::Seals;

/// How the names of such folders begin; the daemon's socket follows.
const PREFIX: &[u8] = b"cache";

/// The folder of the daemon at a socket.
#[derive(Debug)]
pub(super) struct Folder(OwnedFd);

impl Drop for Folder {
    fn drop(&mut self) {
        // A child process that this process is starting has a copy of the descriptor for a moment.
        let _ = fs::flock(&self.0, FlockOperation::Unlock);
    }
}

impl Folder {
    /// The folder of the daemon that listens at a socket, made if it does not exist.
    ///
    /// # Errors
    /// A sentence that says why there is none that can be used.
    pub(super) fn open(provider: &Provider, socket: &Path) -> Result<Self, String> {
        let name = name(socket)?;
        let shown = name.display();
        let folder = provider.folder(&name).map_err(|error| error.to_string())?;
        let stat = fs::fstat(&folder).map_err(|errno| format!("{shown}: {errno}"))?;
        if stat.st_uid != geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
            return Err(format!("the folder {shown} is not this user's alone: remove it"));
        }
        // Daemons in two mount namespaces whose sockets have the same path share one folder.
        fs::flock(&folder, FlockOperation::NonBlockingLockExclusive)
            .map_err(|errno| format!("the folder {shown} is another daemon's ({errno})"))?;
        Ok(Self(folder))
    }

    /// The files in the folder, the one loaded longest ago first. Removes everything else.
    pub(super) fn found(&self) -> Vec<(Version, Morsel)> {
        let mut found: HashMap<SourceId, ((i64, i64), Version, Morsel)> = HashMap::new();
        for name in self.names() {
            let Some((loaded, version, morsel)) = self.look_at(&name) else {
                self.unlink(&name);
                continue;
            };
            // No client can ask for an older version of a file.
            match found.get(&version.file) {
                Some((other, ..)) if *other > loaded => self.unlink(&name),
                _ => {
                    let older = found.insert(version.file, (loaded, version, morsel));
                    older.inspect(|(_, version, _)| self.remove(version));
                }
            }
        }
        let mut found: Vec<_> = found.into_values().collect();
        found.sort_by_key(|(loaded, ..)| *loaded);
        found.into_iter().map(|(_, version, morsel)| (version, morsel)).collect()
    }

    /// The version that a file of the folder has, and when it was loaded; `None` if the file is not
    /// a version, or is incomplete.
    fn look_at(&self, name: &CStr) -> Option<((i64, i64), Version, Morsel)> {
        let version = Version::of_file_name(name.to_str().ok()?)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = fs::openat(&self.0, name, flags, Mode::empty()).ok()?;
        let stat = fs::fstat(&file).ok()?;
        let morsel = Morsel::from_descriptor(file).ok()?;
        let state = morsel.stat().ok()?;
        let is_whole = state.missing() == 0 && state.seals.has(Seals::CONTENT);
        let is_own = stat.st_uid == geteuid().as_raw() && morsel.length() == version.length;
        #[allow(clippy::unnecessary_cast)] // how long these are depends on the machine
        let loaded = (stat.st_ctime as i64, stat.st_ctime_nsec as i64);
        (is_whole && is_own).then_some((loaded, version, morsel))
    }

    /// Gives a complete, sealed Morsel the name of its version. Without a name the daemon loads it
    /// again after a restart, so a failure is not reported.
    pub(super) fn keep(&self, version: &Version, morsel: &Morsel) {
        let place = format!("/proc/self/fd/{}", morsel.as_fd().as_raw_fd());
        self.remove(version);
        let _ = fs::linkat(CWD, place, &self.0, version.file_name(), AtFlags::SYMLINK_FOLLOW);
    }

    /// Removes the name of a version, if it has one.
    pub(super) fn remove(&self, version: &Version) {
        let _ = fs::unlinkat(&self.0, version.file_name(), AtFlags::empty());
    }

    /// Removes the files that an earlier daemon at a socket has left, and the folder.
    pub(super) fn clear(provider: &Provider, socket: &Path) {
        let (Ok(name), Ok(folder)) = (name(socket), Self::open(provider, socket)) else { return };
        for name in folder.names() {
            folder.unlink(&name);
        }
        // An empty folder does no harm.
        let _ = provider.remove_folder(&name);
    }

    fn unlink(&self, name: &CStr) {
        // A file that cannot be removed stays unused.
        if fs::unlinkat(&self.0, name, AtFlags::empty()) == Err(Errno::ISDIR) {
            let _ = fs::unlinkat(&self.0, name, AtFlags::REMOVEDIR);
        }
    }

    fn names(&self) -> Vec<CString> {
        let entries = Dir::read_from(&self.0).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_owned());
        names.filter(|name| !matches!(name.as_bytes(), b"." | b"..")).collect()
    }
}

/// The name of the folder of a socket: its path, with `-` for `/`. A socket's path is shorter than
/// a name may be.
fn name(socket: &Path) -> Result<OsString, String> {
    let path = std::path::absolute(socket).map_err(|error| error.to_string())?;
    let part = |byte: &u8| if *byte == b'/' { b'-' } else { *byte };
    let path: Vec<u8> = path.as_os_str().as_bytes().iter().map(part).collect();
    Ok(OsString::from_vec([PREFIX, &path].concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_named_after_the_socket() {
        let named = name(Path::new("/run/vellum/morseld.sock")).unwrap();
        assert_eq!(named, "cache-run-vellum-morseld.sock");
        assert!(name(Path::new("socket")).unwrap().as_bytes().len() > "cache-socket".len());
    }
}
