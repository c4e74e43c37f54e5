//! Ctrl-C, SIGTERM and SIGHUP while a store is open to be changed.
//!
//! A store whose process is killed does not open again, until there is a log. So the first signal
//! asks only: the command ends at its next record, closes the store, and the program exits with
//! [`EXIT_CODE`]. A second signal ends the process at once.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;

use crate::error::{Doing, Failure, Outcome};

/// The exit code of a program that a signal has ended.
pub const EXIT_CODE: u8 = 130;

const INTERRUPTED: &str = "interrupted by a signal";

/// A signal has come.
static ASKED: AtomicBool = AtomicBool::new(false);
/// Becomes readable when a signal comes.
static WAKE: OnceLock<UnixStream> = OnceLock::new();

/// Has signals ask from now on. To be called before the store is opened.
///
/// # Errors
/// When the system refuses the handlers.
pub fn watch() -> Outcome {
    install().doing(|| "waiting for signals".into())
}

fn install() -> io::Result<()> {
    let (wake, signalled) = UnixStream::pair()?;
    if WAKE.set(wake).is_err() {
        return Ok(());
    }
    let ignored = ignored_signals();
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // What nohup, or a shell that starts a job in the background, has switched off stays off.
        if ignored & 1 << (signal - 1) != 0 {
            continue;
        }
        flag::register_conditional_shutdown(signal, i32::from(EXIT_CODE), &ASKED)?;
        flag::register(signal, &ASKED)?;
        pipe::register(signal, signalled.try_clone()?)?;
    }
    Ok(())
}

/// The signals that this process ignores, a bit each.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Whether a signal has asked the command to end.
pub fn was_asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}

/// To be called before each record.
///
/// # Errors
/// When a signal has asked the command to end.
pub fn check() -> Outcome {
    match was_asked() {
        true => Err(Failure::message(INTERRUPTED)),
        false => Ok(()),
    }
}

/// A file, a pipe or a terminal whose reading a signal ends.
pub struct Input(pub File);

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(wake) = WAKE.get() {
            let mut both = [PollFd::new(&self.0, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
            while let Err(errno) = poll(&mut both, None) {
                if errno != Errno::INTR {
                    return Err(errno.into());
                }
            }
            if was_asked() {
                return Err(io::Error::other(INTERRUPTED));
            }
        }
        self.0.read(buffer)
    }
}
