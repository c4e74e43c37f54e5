//! Leases of files: the kernel has a process that opens a file for writing, or calls `truncate`,
//! wait until this process has let go of the file, and tells a thread of the library.
//!
//! Each mapping of the cache has a lease on a descriptor of its own (`owner`), which is closed
//! after the mapping has ended. So a writer comes after the last page has left the cache, and after
//! `mounts` has put the file itself where the mappings were.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::system;

/// The signal that says that a lease is to end. Programs do not use it, and only the thread that
/// waits for it gets it.
const SIGNAL: c_int = 16; // SIGSTKFLT

/// How long the thread waits if the kernel does not let it put a file in its place.
const PAUSE: Duration = Duration::from_millis(50);

/// What became of the attempt to take a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    Taken,
    /// The file system has none, or this process may not: the file belongs to another user.
    Impossible,
    /// A process has the file open for writing.
    Written,
}

/// The thread that ends leases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watcher {
    thread: c_int,
}

impl Watcher {
    /// Starts the thread, which has a function put files in the place of mounts whose leases are to
    /// end. The caller has blocked [`SIGNALS`](crate::cache_thread::SIGNALS), and so the thread
    /// has.
    pub(crate) fn start(give_up_broken: fn() -> bool) -> Option<Self> {
        let (sender, receiver) = mpsc::channel();
        let watch = move || {
            let _ = sender.send(system::thread());
            loop {
                system::wait_for_signal(SIGNAL);
                while !give_up_broken() {
                    thread::sleep(PAUSE);
                }
            }
        };
        thread::Builder::new().name("vellum-leases".to_owned()).spawn(watch).ok()?;
        Some(Self { thread: receiver.recv().ok()? })
    }

    /// Has the thread look for leases that are to end.
    pub(crate) fn look(self) {
        system::send_signal(self.thread, SIGNAL);
    }

    /// Takes a lease by a descriptor that only the cache thread has.
    pub(crate) fn take(self, file: &File) -> Lease {
        let file = file.as_raw_fd();
        let is_ours = system::send_signals_to(file, self.thread, SIGNAL);
        match is_ours.then(|| system::file_control(file, libc::F_SETLEASE, libc::F_RDLCK)) {
            Some(Ok(_)) => Lease::Taken,
            Some(Err(libc::EAGAIN)) => Lease::Written,
            _ => Lease::Impossible,
        }
    }
}

/// Whether the program has a lease by a descriptor of its own.
pub(crate) fn has(file: c_int) -> bool {
    system::file_control(file, libc::F_GETLEASE, 0).is_ok_and(|lease| lease != libc::F_UNLCK)
}

/// Whether a lease that was taken is to end, or has ended because that took too long.
pub(crate) fn is_broken(file: &File) -> bool {
    system::file_control(file.as_raw_fd(), libc::F_GETLEASE, 0) == Ok(libc::F_UNLCK)
}
