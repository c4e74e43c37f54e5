//! The file that a client asks for: whether the client may have it, and which version it is.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{self, FileType};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::descriptor::{self, Use};
use crate::protocol::Refusal;
use crate::sys;

/// The kernel's clock for files stands still for a tick, a few milliseconds, and longer on a
/// virtual machine that gets little processor time. A time that is further ahead than this does not
/// come from that clock.
const AHEAD: Duration = Duration::from_secs(2);

/// A file that has not changed for this long counts as unchanging.
const REST: Duration = Duration::from_secs(4);

/// Identifies a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SourceId {
    device: u64,
    inode: u64,
}

impl fmt::Display for SourceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (fs::major(self.device), fs::minor(self.device));
        write!(formatter, "inode {} of device {major}:{minor}", self.inode)
    }
}

/// Identifies a version of a file. Every change of a file sets at least its time of change, which
/// no user can set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Version {
    pub(super) file: SourceId,
    pub(super) length: u64,
    modified: (i64, u64),
    changed: (i64, u64),
}

impl Version {
    /// As the name of a file.
    pub(super) fn file_name(&self) -> String {
        let Self { file, length, modified, changed } = *self;
        let (seconds, since) = (modified.0.cast_unsigned(), changed.0.cast_unsigned());
        format!(
            "{:x}-{:x}-{length:x}-{seconds:x}-{:x}-{since:x}-{:x}",
            file.device, file.inode, modified.1, changed.1
        )
    }

    /// The version of such a name; `None` if it is not one.
    pub(super) fn of_file_name(name: &str) -> Option<Self> {
        let mut parts = name.split('-').map(|part| u64::from_str_radix(part, 16));
        let mut number = || parts.next()?.ok();
        let version = Self {
            file: SourceId { device: number()?, inode: number()? },
            length: number()?,
            modified: (number()?.cast_signed(), number()?),
            changed: (number()?.cast_signed(), number()?),
        };
        // One version has one name.
        (version.file_name() == name).then_some(version)
    }
}

/// A regular file that the client has proved that it can read: it has opened the file for reading.
#[derive(Debug)]
pub(super) struct Source {
    descriptor: OwnedFd,
    pub(super) version: Version,
}

impl Source {
    /// Checks the descriptor that a client sent.
    pub(super) fn new(descriptor: OwnedFd) -> Result<Self, Refusal> {
        match descriptor::usage(&descriptor).map_err(failed)? {
            Use::Read | Use::ReadAndWrite => {}
            Use::Write | Use::NameOnly => return Err(Refusal::NotReadable),
        }
        let version = version(descriptor.as_fd())?;
        Ok(Self { descriptor, version })
    }

    /// Waits until the time of a new change would differ: a change within the tick of the last one
    /// has the same time. Then reads the version again.
    pub(super) fn settle(&mut self) -> Result<(), Refusal> {
        let last = self.version.changed.max(self.version.modified);
        let is_ahead =
            |now: (i64, u64)| now <= last && last.0.saturating_sub(now.0) <= AHEAD.as_secs() as i64;
        let start = Instant::now();
        while is_ahead(clock_of_files()) && start.elapsed() < AHEAD {
            thread::sleep(Duration::from_millis(1));
        }
        self.version = version(self.descriptor.as_fd())?;
        Ok(())
    }

    /// Whether no process has it open for writing, and none has changed it just now.
    ///
    /// # Errors
    /// [`Refusal::InUse`] if a process has, or if the daemon cannot tell.
    pub(super) fn check_rest(&self) -> Result<(), Refusal> {
        let refuse = |reason: &str| Err(Refusal::InUse { reason: reason.into() });
        let since = clock_of_files().0.saturating_sub(self.version.changed.0);
        if since <= REST.as_secs() as i64 {
            return refuse("a process has changed it just now");
        }
        // The client has the descriptor that it sent, so the daemon opens another one for the
        // lease.
        let own = descriptor::read_only(&self.descriptor);
        match own.and_then(|own| sys::is_open_for_writing(own.as_fd())) {
            Ok(false) => Ok(()),
            Ok(true) => refuse("a process has it open for writing"),
            Err(errno) => refuse(&format!(
                "the daemon cannot tell whether a process writes to it ({errno}): run it as root, \
                 as the file's owner, or with CAP_LEASE"
            )),
        }
    }

    /// Whether the file still has the same version.
    pub(super) fn is_unchanged(&self) -> bool {
        version(self.descriptor.as_fd()) == Ok(self.version)
    }

    /// Its path, from the kernel. Control characters are escaped, because a terminal may show it.
    pub(super) fn name(&self) -> String {
        let name = descriptor::name(&self.descriptor).unwrap_or_default();
        let name = String::from_utf8_lossy(&name);
        name.chars()
            .flat_map(|letter| {
                let escaped = letter.is_control().then(|| letter.escape_default());
                let plain = (!letter.is_control()).then_some(letter);
                escaped.into_iter().flatten().chain(plain)
            })
            .collect()
    }

    /// Lets the kernel drop its own copy of the file, now that a Morsel has one.
    pub(super) fn leave_page_cache(&self) {
        // This is a hint: other processes may need those pages.
        let _ = fs::fadvise(&self.descriptor, 0, None, fs::Advice::DontNeed);
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// The clock from which files get their times.
fn clock_of_files() -> (i64, u64) {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    (now.tv_sec, now.tv_nsec.unsigned_abs())
}

fn version(descriptor: BorrowedFd<'_>) -> Result<Version, Refusal> {
    let stat = fs::fstat(descriptor).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Refusal::NotRegular);
    }
    let length = stat.st_size.unsigned_abs();
    if length == 0 {
        return Err(Refusal::Empty);
    }
    #[allow(clippy::unnecessary_cast)] // how long these are depends on the machine
    Ok(Version {
        file: SourceId { device: stat.st_dev as u64, inode: stat.st_ino as u64 },
        length,
        modified: (stat.st_mtime as i64, stat.st_mtime_nsec as u64),
        changed: (stat.st_ctime as i64, stat.st_ctime_nsec as u64),
    })
}

fn failed(errno: Errno) -> Refusal {
    Refusal::Failed { reason: format!("checking the file: {errno}") }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;

    fn source(file: &File) -> Source {
        Source::new(file.try_clone().unwrap().into()).unwrap()
    }

    #[test]
    fn a_change_right_after_the_check_is_noticed() {
        let mut file = tempfile::tempfile().unwrap();
        for byte in 0..20 {
            file.write_all(&[byte; 10]).unwrap();
            let mut source = source(&file);
            source.settle().unwrap();
            assert!(source.is_unchanged());
            // The same length, as soon as possible.
            std::os::unix::fs::FileExt::write_all_at(&file, &[byte + 1; 5], 0).unwrap();
            assert!(!source.is_unchanged(), "after {byte}");
        }
    }

    #[test]
    fn a_version_has_one_name() {
        let version = Version {
            file: SourceId { device: 0x801, inode: u64::MAX },
            length: 12,
            modified: (-1, 999_999_999),
            changed: (1_700_000_000, 0),
        };
        let name = version.file_name();
        assert_eq!(Version::of_file_name(&name), Some(version));
        assert_eq!(version.file.to_string(), format!("inode {} of device 8:1", u64::MAX));
        for other in [&name[1..], &format!("0{name}"), &format!("{name}-0"), "model", ""] {
            assert_ne!(Version::of_file_name(other), Some(version), "{other}");
        }
    }

    #[test]
    fn a_name_cannot_write_to_a_terminal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a\x1b[2J\nb");
        std::fs::write(&path, b"x").unwrap();
        let name = source(&File::open(path).unwrap()).name();
        assert!(name.ends_with("a\\u{1b}[2J\\nb"), "{name}");
    }
}
