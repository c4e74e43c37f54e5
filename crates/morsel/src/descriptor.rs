//! What the kernel says about a descriptor, and a weaker descriptor for the same file.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::error::Error;

/// Where the kernel shows a descriptor of this process.
fn place(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// How it may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
    ReadAndWrite,
    /// `O_PATH`: it names a file, and does not prove that its owner may read the file.
    NameOnly,
}

/// The access mode of a descriptor, from the kernel.
pub(crate) fn usage(file: impl AsFd) -> Result<Use, Errno> {
    let flags = fs::fcntl_getfl(file)?;
    if flags.contains(OFlags::PATH) {
        return Ok(Use::NameOnly);
    }
    Ok(match flags & OFlags::RWMODE {
        OFlags::RDWR => Use::ReadAndWrite,
        OFlags::WRONLY => Use::Write,
        _ => Use::Read,
    })
}

/// Another descriptor for the same file, which cannot write.
pub(crate) fn read_only(file: impl AsFd) -> Result<OwnedFd, Errno> {
    fs::open(place(file.as_fd()), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a file for reading that a Morsel can be filled from: a regular one, or a block device.
/// It does not open anything else, because that alone may block or have effects. Needs `/proc`.
///
/// # Errors
/// The system's error; [`ErrorKind::InvalidInput`] with [`Error::BadSource`] for anything else.
pub fn open_source(path: impl AsRef<Path>) -> io::Result<File> {
    let place = fs::open(path.as_ref(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    match FileType::from_raw_mode(fs::fstat(&place)?.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => Ok(read_only(&place)?.into()),
        _ => Err(io::Error::new(ErrorKind::InvalidInput, Error::BadSource)),
    }
}

/// The name of the file, from the kernel.
pub(crate) fn name(file: impl AsFd) -> Result<Vec<u8>, Errno> {
    fs::readlink(place(file.as_fd()), Vec::new()).map(std::ffi::CString::into_bytes)
}
