//! Children: parts of a test that run in their own process, however it ends.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::counters::PATIENCE;
use crate::{access, sys};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It exited, with a status; a child that panicked has 101.
    Status(i32),
    /// By a signal.
    Signal(i32),
}

impl End {
    /// The result of `waitpid`.
    fn of(status: i32) -> Self {
        match libc::WIFSIGNALED(status) {
            true => Self::Signal(libc::WTERMSIG(status)),
            false => Self::Status(libc::WEXITSTATUS(status)),
        }
    }
}

/// A child of this process.
#[derive(Debug)]
pub struct Child {
    process: i32,
}

impl Child {
    /// Forks a process that runs `work` and exits with the status that it returns. It has a copy of
    /// this process' memory, and only this thread.
    pub fn start(work: impl FnOnce() -> i32) -> Self {
        // The harness captures output under a lock. A child that is forked while another thread has
        // the lock would wait forever.
        access::prepare();
        // SAFETY: the C library makes sure that the child can allocate memory. The child uses no
        // lock that another thread of a test may hold, because tests take turns.
        let process = unsafe { libc::fork() };
        assert!(process >= 0, "fork: {}", sys::last_error());
        if process == 0 {
            // The harness would not show the message of a panic in a child.
            std::panic::set_hook(Box::new(|panic| say(&format!("in a child: {panic}\n"))));
            let status = catch_unwind(AssertUnwindSafe(work)).unwrap_or(101);
            // SAFETY: the child ends without running anything of its parent.
            unsafe { libc::_exit(status) };
        }
        Self { process }
    }

    /// Its number.
    pub fn process(&self) -> i32 {
        self.process
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: it is a child that no code has waited for.
        let sent = unsafe { libc::kill(self.process, signal) };
        assert_eq!(sent, 0, "kill: {}", sys::last_error());
    }

    /// Stops it, and waits until it has stopped. `None`, or its end if it ended before that.
    pub fn stop(&self) -> Option<End> {
        self.signal(libc::SIGSTOP);
        let status = self.status(libc::WUNTRACED);
        (!libc::WIFSTOPPED(status)).then(|| End::of(status))
    }

    /// Waits for its end.
    pub fn wait(self) -> End {
        End::of(self.status(0))
    }

    /// Waits for its end, or for another event that `waitpid` reports.
    fn status(&self, options: i32) -> i32 {
        let start = Instant::now();
        loop {
            let (mut status, options) = (0, options | libc::WNOHANG);
            // SAFETY: `status` is this function's.
            let waited = unsafe { libc::waitpid(self.process, &raw mut status, options) };
            assert!(waited >= 0, "waitpid: {}", sys::last_error());
            if waited == self.process {
                return status;
            }
            if start.elapsed() >= PATIENCE {
                // Kills the child, because the reader of the tests' output waits for all processes
                // that have it open.
                self.signal(libc::SIGKILL);
                panic!("child {} is stuck", self.process);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends it by `SIGKILL`.
    pub fn kill(self) {
        self.signal(libc::SIGKILL);
        assert_eq!(self.wait(), End::Signal(libc::SIGKILL));
    }
}

/// Writes to standard error without the harness.
fn say(text: &str) {
    // SAFETY: the pointer and the length are those of the text.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// Runs `work` in a child, which must succeed.
#[track_caller]
pub fn in_child(work: impl FnOnce()) {
    let child = Child::start(|| {
        work();
        0
    });
    assert_eq!(child.wait(), End::Status(0));
}

/// Makes this process, which should be a child, one of an ordinary user, with a limit on locked
/// memory.
pub fn become_user(lock_limit: u64) {
    let limit = libc::rlimit { rlim_cur: lock_limit, rlim_max: lock_limit };
    // SAFETY: the calls take numbers, and a pointer to a valid structure.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit), 0);
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setgid(NOBODY), 0);
        assert_eq!(libc::setuid(NOBODY), 0);
    }
}

/// A user without any rights.
const NOBODY: u32 = 65534;

extern "C" fn nothing(_signal: i32) {}

/// Sends this process, which should be a child, SIGALRM all the time. The handler does nothing.
pub fn interrupt_constantly() {
    let every = libc::timeval { tv_sec: 0, tv_usec: 100 };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: the handler does nothing, so it may run at any time.
    unsafe {
        libc::signal(libc::SIGALRM, nothing as *const () as libc::sighandler_t);
        libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut());
    }
}

/// Makes this process another program, without arguments.
pub fn execute(path: &std::ffi::CStr) -> ! {
    let arguments = [path.as_ptr(), std::ptr::null()];
    // SAFETY: the list ends with a null pointer, and its strings with a zero.
    unsafe { libc::execv(path.as_ptr(), arguments.as_ptr()) };
    panic!("execv: {}", sys::last_error());
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _, pipe};

    use super::*;

    #[test]
    fn exits_and_signals_are_distinguished() {
        assert_eq!(Child::start(|| 7).wait(), End::Status(7));
        assert_eq!(Child::start(|| panic!("on purpose")).wait(), End::Status(101));
        Child::start(|| {
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        })
        .kill();
        in_child(|| ());
    }

    #[test]
    fn a_child_stops_and_goes_on() {
        let (mut wait, mut go) = pipe().unwrap();
        let child = Child::start(|| wait.read(&mut [0]).unwrap() as i32);
        assert_eq!(child.stop(), None);
        go.write_all(b"!").unwrap();
        child.signal(libc::SIGCONT);
        assert_eq!(child.wait(), End::Status(1));
    }
}
