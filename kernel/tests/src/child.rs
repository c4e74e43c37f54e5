//! Children: the part of a test that runs in a process of its own, however that ends.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

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

/// How long a child may take before it counts as stuck.
const PATIENCE: Duration = Duration::from_secs(120);

impl Child {
    /// Starts a process that does `work` and ends with the status that it returns. It has this
    /// process' memory, as of now, and this thread alone.
    pub fn start(work: impl FnOnce() -> i32) -> Self {
        // A child that is made while another thread is just doing that would wait for it for ever.
        access::prepare();
        // SAFETY: the C library sees to it that memory can be allocated afterwards; the child uses
        // no lock that another thread of a test may hold, as tests take turns.
        let process = unsafe { libc::fork() };
        assert!(process >= 0, "fork: {}", sys::last_error());
        if process == 0 {
            // The harness would keep a panic's message to itself.
            std::panic::set_hook(Box::new(|panic| say(&format!("in a child: {panic}\n"))));
            let status = catch_unwind(AssertUnwindSafe(work)).unwrap_or(101);
            // SAFETY: nothing of this process is needed any more.
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

    /// Has it stop, and waits until it has: `None`. Its end, if it came to that before.
    pub fn stop(&self) -> Option<End> {
        self.signal(libc::SIGSTOP);
        let status = self.status(libc::WUNTRACED);
        (!libc::WIFSTOPPED(status)).then(|| End::of(status))
    }

    /// Waits for its end.
    pub fn wait(self) -> End {
        End::of(self.status(0))
    }

    /// Waits for its end, or for something else that can be waited for.
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
                // The reader of the tests' output waits for all processes that have it open.
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

/// Writes to the standard error, past the harness.
fn say(text: &str) {
    // SAFETY: the text is there, and as long as it says.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// Does `work` in a child, which has to come to its end.
#[track_caller]
pub fn in_child(work: impl FnOnce()) {
    let child = Child::start(|| {
        work();
        0
    });
    assert_eq!(child.wait(), End::Status(0));
}

/// Makes this process, which should be a child, an ordinary user's, with a bound on the memory
/// that it may lock.
pub fn become_user(lock_limit: u64) {
    let limit = libc::rlimit { rlim_cur: lock_limit, rlim_max: lock_limit };
    // SAFETY: the calls take numbers, and one a structure that is there.
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

/// Sends this process, which should be a child, SIGALRM all the time, which does nothing.
pub fn be_disturbed() {
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
    fn ends_are_told_apart() {
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
