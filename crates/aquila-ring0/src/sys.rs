//! System calls of a thread that is in the middle of something: without `errno`, allocations or
//! locks of the C library. They work in both rings.
#![allow(unsafe_code)]

/// Blocks all signals of the thread until it is dropped: a handler that leaves by `longjmp` would
/// keep the lock.
pub(crate) struct BlockedSignals(u64);

impl BlockedSignals {
    pub(crate) fn new() -> Self {
        Self(set_mask(libc::SIG_SETMASK, u64::MAX))
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        set_mask(libc::SIG_SETMASK, self.0);
    }
}

/// Changes the mask of the thread's signals, and returns what it was, without the C library, which
/// has signals of its own in mind.
pub(crate) fn set_mask(how: libc::c_int, mask: u64) -> u64 {
    let mut old = 0_u64;
    let arguments = [how as u64, (&raw const mask).addr() as u64, (&raw mut old).addr() as u64, 8];
    let [how, mask, old_at, size] = arguments;
    // SAFETY: both sets have the size that is given.
    unsafe { raw_system_call(libc::SYS_rt_sigprocmask as u64, [how, mask, old_at, size, 0, 0]) };
    old
}

/// A system call as the program has made it, without `errno`.
///
/// # Safety
/// That of the call.
pub(crate) unsafe fn raw_system_call(number: u64, arguments: [u64; 6]) -> i64 {
    let result: i64;
    let [first, second, third, fourth, fifth, sixth] = arguments;
    // SAFETY: the caller's.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            in("r8") fifth,
            in("r9") sixth,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Calls a function, and restores the `errno` of the C library, whose caller the program may be.
pub(crate) fn keeping_errno<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: the place of the thread's own number.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *place };
    let result = act();
    // SAFETY: as above.
    unsafe { *place = before };
    result
}
