//! The Morsel that stands in for a file.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, readlink};
use vellum_morsel::{BackendKind, Client, Morsel};

use crate::request::Request;
use crate::rules::Rules;

/// The Morsel of a file that is to be mapped; `None` if the file itself is to be.
pub(crate) fn find(file: &File, request: &Request) -> Option<Morsel> {
    static RULES: OnceLock<Rules> = OnceLock::new();
    let rules = RULES.get_or_init(Rules::of_environment);
    if rules.are_none() {
        return None;
    }
    let stat = fstat(file).ok()?;
    let length = u64::try_from(stat.st_size).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
        || !request.begins_within(length)
        || !rules.take(length, || path(file))
    {
        return None;
    }
    // Who may write to the file may make a shared mapping writable later.
    let mode = fcntl_getfl(file).ok()? & OFlags::RWMODE;
    if request.is_shared() && mode != OFlags::RDONLY {
        return None;
    }
    let morsel = Client::usual().load(file, |_| {}).ok()?.morsel;
    // One of the module is mounted as a whole, and unmounted so: not what the program will ask for.
    (morsel.backend() == BackendKind::Memfd && morsel.length() == length).then_some(morsel)
}

/// The file's path, as the kernel knows it.
fn path(file: &File) -> Option<Vec<u8>> {
    let place = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    readlink(place, Vec::new()).ok().map(std::ffi::CString::into_bytes)
}
