//! `/dev/exmap`: its descriptor, its commands, and the reason if one fails.
//!
//! `kernel/include/uapi/vellum/exmap.h` says what the commands mean.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use vellum_uapi::exmap::{
    CLONE, CREATE, Create, MAX_INTERFACES, PINNABLE, QUERY, Query, READS_ZEROS, RESIZE,
    VECTOR_ENTRIES, vector,
};

use crate::{PAGE_SIZE, limits, sys};

/// The path of the module's device.
pub(crate) const PATH: &str = "/dev/exmap";

/// The interface that this backend speaks.
const VERSION: u32 = 1;

/// The flags of every exmap: direct I/O needs pages that the kernel can pin, and optimistic readers
/// need evicted pages that they can read.
const FLAGS: u64 = PINNABLE | READS_ZEROS;

/// An exmap's descriptor.
#[derive(Debug)]
pub(super) struct Device(OwnedFd);

impl Device {
    /// Opens the device: an exmap without frames.
    ///
    /// # Errors
    /// One line that says why the device cannot be used and what to do.
    pub(super) fn open() -> Result<Self, String> {
        let file =
            OpenOptions::new().read(true).write(true).open(PATH).map_err(|error| {
                match error.kind() {
                    io::ErrorKind::NotFound => {
                        format!("there is no {PATH}: load the kernel module (vellum.ko)")
                    }
                    io::ErrorKind::PermissionDenied => {
                        format!(
                            "{PATH} may not be opened by this user: join the group that owns it"
                        )
                    }
                    _ => format!("{PATH} cannot be opened: {error}"),
                }
            })?;
        let device = Self(file.into());
        device.check()?;
        Ok(device)
    }

    /// Whether the module can do what this backend needs.
    fn check(&self) -> Result<(), String> {
        let mut query = Query { size: size_of::<Query>() as u32, ..Query::default() };
        // SAFETY: the command fills the structure, which lives through the call.
        unsafe { sys::ioctl(self.as_fd(), QUERY, (&raw mut query).expose_provenance() as u64) }
            .map_err(|errno| format!("{PATH} is not Vellum's: it answers {errno} when asked"))?;
        if query.version != VERSION || query.vector_entries != VECTOR_ENTRIES {
            let found = query.version;
            return Err(format!(
                "{PATH} speaks version {found} of its interface, not {VERSION}: load the module \
                 that belongs to this program"
            ));
        }
        if query.flags & FLAGS != FLAGS {
            return Err(format!(
                "{PATH} can neither pin pages nor show zeros: load a newer module"
            ));
        }
        Ok(())
    }

    /// Gives the exmap its frames and interfaces.
    ///
    /// # Errors
    /// One line that says why not and what to do.
    pub(super) fn create(&self, frames: u64, interfaces: u32) -> Result<(), String> {
        let create = Create {
            size: size_of::<Create>() as u32,
            interfaces: interfaces.clamp(1, MAX_INTERFACES),
            flags: FLAGS,
            frames,
            backing: -1,
            blocks: 0,
        };
        let address = (&raw const create).expose_provenance() as u64;
        // SAFETY: the command reads the structure, which lives through the call.
        let created = unsafe { sys::ioctl(self.as_fd(), CREATE, address) };
        created.map(drop).map_err(|errno| why_no_frames(errno, frames, interfaces))
    }

    /// Gives the exmap another number of frames, at least one.
    pub(super) fn resize(&self, frames: u64) -> Result<(), Errno> {
        loop {
            // SAFETY: the command takes no address, and no frame that is in use.
            match unsafe { sys::ioctl(self.as_fd(), RESIZE, frames.max(1)) } {
                Err(Errno::INTR) => {}
                result => return result.map(drop),
            }
        }
    }

    /// Another descriptor for the same exmap. A thread with one of its own need not share the word
    /// in which the kernel counts the users of a descriptor.
    pub(super) fn private(&self) -> Result<OwnedFd, Errno> {
        // SAFETY: the command takes no address.
        let number = unsafe { sys::ioctl(self.as_fd(), CLONE, 0)? };
        let number = i32::try_from(number).map_err(|_| Errno::MFILE)?;
        // SAFETY: the descriptor is fresh and no other code knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Has the module carry out a command for the first `entries` entries of an interface's vector;
/// returns how many of them have an error.
///
/// # Safety
/// No code relies on memory that the command takes from the pages of those entries.
pub(super) unsafe fn carry_out(
    device: BorrowedFd<'_>,
    command: u32,
    interface: u32,
    entries: usize,
) -> Result<u32, Errno> {
    loop {
        let argument = vector(interface.into(), entries as u64);
        // SAFETY: the argument is no address; the rest is the caller's promise.
        match unsafe { sys::ioctl(device, command, argument) } {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Why there are no frames.
fn why_no_frames(errno: Errno, frames: u64, interfaces: u32) -> String {
    let kib = frames.saturating_mul(PAGE_SIZE as u64 >> 10);
    match errno {
        Errno::PERM => format!(
            "{frames} frames ({kib} KiB) and {interfaces} interfaces are more than this user may \
             lock, {}: raise that with `ulimit -l`, or ask for fewer",
            limits::lockable()
        ),
        Errno::NOMEM => {
            format!("the machine, or the memory cgroup, has no {frames} frames ({kib} KiB) to give")
        }
        errno => format!("an exmap of {frames} frames ({kib} KiB) was refused: {errno}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_frames_say_what_to_do() {
        let text = why_no_frames(Errno::PERM, 1 << 20, 4);
        assert!(text.contains("4194304 KiB") && text.contains("ulimit -l"), "{text}");
        assert!(why_no_frames(Errno::NOMEM, 512, 4).contains("2048 KiB"));
        assert!(why_no_frames(Errno::INVAL, u64::MAX, 4).contains("refused"));
    }
}
