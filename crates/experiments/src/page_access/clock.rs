//! The time that a thread ran.

#![allow(unsafe_code)]

use std::time::Duration;

/// How long this thread was on a processor so far. If other threads use the processor, too, this
/// still is the time of the accesses, and the wall clock includes the time of the other threads.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills in the struct that it is given. Every Linux has this clock, so it cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use vellum_testing::patience::eventually;

    use super::*;

    #[test]
    fn sleep_does_not_count() {
        // A processor that is another machine's for a while may count that as the thread's.
        eventually("a thread sleeps without its clock", || {
            let before = thread_time();
            std::thread::sleep(Duration::from_millis(30));
            thread_time() - before < Duration::from_millis(20)
        });
    }
}
