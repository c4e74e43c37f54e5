//! Ctrl-C, SIGTERM and SIGHUP while a command changes a store.
//!
//! A store without a log does not open again after its process was killed. So the first signal only
//! asks the command to end: it ends at its next record, closes the store, and the program exits
//! with [`EXIT_CODE`]. A second signal ends the process at once.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

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
static SIGNAL_CAME: AtomicBool = AtomicBool::new(false);
/// Becomes readable when a signal comes.
static WAKE: OnceLock<UnixStream> = OnceLock::new();

/// Installs the handlers. A command calls this before it opens the store.
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
    let (early, ignored) = (Arc::new(AtomicBool::new(false)), ignored_signals());
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // A signal that nohup or a shell has switched off for a job in the background stays off.
        if ignored & 1 << (signal - 1) != 0 {
            continue;
        }
        // The first: a signal while the others are being registered must not be forgotten.
        flag::register(signal, Arc::clone(&early))?;
        flag::register_conditional_shutdown(signal, i32::from(EXIT_CODE), &SIGNAL_CAME)?;
        flag::register(signal, &SIGNAL_CAME)?;
        pipe::register(signal, signalled.try_clone()?)?;
    }
    if early.load(Ordering::SeqCst) {
        SIGNAL_CAME.store(true, Ordering::SeqCst);
        (&signalled).write_all(&[0])?;
    }
    Ok(())
}

/// The signals that this process ignores, one bit for each.
pub fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Whether a signal has asked the command to end.
pub fn signal_came() -> bool {
    SIGNAL_CAME.load(Ordering::SeqCst)
}

/// What a function that is told the progress returns: a signal ends the work.
pub fn flow() -> ControlFlow<()> {
    match signal_came() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    }
}

/// Ends the command after a signal. A command calls this before each record.
///
/// # Errors
/// When a signal has asked the command to end.
pub fn check() -> Outcome {
    match signal_came() {
        true => Err(Failure::message(INTERRUPTED)),
        false => Ok(()),
    }
}

/// A file, a pipe or a terminal. A signal ends a read that waits.
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
            if signal_came() {
                return Err(io::Error::other(INTERRUPTED));
            }
        }
        self.0.read(buffer)
    }
}
