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

/// The kernel's number of the calling thread.
pub(crate) fn thread_number() -> u64 {
    // SAFETY: the call has no arguments.
    unsafe { raw_system_call(libc::SYS_gettid as u64, [0; 6]) }.cast_unsigned()
}

/// Copies memory of a thread of this process, or of another process, into words. Returns the bytes,
/// or a negative error number, which is that of no such process if the thread has ended.
pub(crate) fn read_memory(thread: u64, address: u64, to: &mut [u64]) -> i64 {
    let length = size_of_val(to) as u64;
    let (own, other) = ([to.as_mut_ptr().addr() as u64, length], [address, length]);
    let [own, other] = [&raw const own, &raw const other].map(|vector| vector.addr() as u64);
    // SAFETY: the kernel fills the words, and reads what may be read.
    unsafe { raw_system_call(libc::SYS_process_vm_readv as u64, [thread, own, 1, other, 1, 0]) }
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

/// In the number of a call: it must not raise SIGXFSZ, which says that a file may not become so
/// long. The kernel has no such numbers.
pub(crate) const QUIET: u64 = 1 << 40;

/// Makes a system call that writes to a file, without SIGXFSZ. In ring 0 the process does that,
/// with one exit.
///
/// # Safety
/// That of the call.
pub(crate) unsafe fn quiet_system_call(number: u64, arguments: [u64; 6]) -> i64 {
    const BIT: u64 = 1 << (libc::SIGXFSZ - 1);
    if is_in_ring_0() {
        // SAFETY: the caller's.
        return unsafe { raw_system_call(number | QUIET, arguments) };
    }
    let mask = set_mask(libc::SIG_BLOCK, BIT);
    let was_pending = mask & BIT != 0 && is_pending(BIT);
    // SAFETY: the caller's.
    let result = unsafe { raw_system_call(number, arguments) };
    if result == i64::from(-libc::EFBIG) && !was_pending {
        let (set, time) = (BIT, [0_u64; 2]);
        let [set, time] = [(&raw const set).addr() as u64, (&raw const time).addr() as u64];
        // SAFETY: the set has the size that is given, and the time is none.
        unsafe { raw_system_call(libc::SYS_rt_sigtimedwait as u64, [set, 0, time, 8, 0, 0]) };
    }
    if mask & BIT == 0 {
        set_mask(libc::SIG_UNBLOCK, BIT);
    }
    result
}

/// Whether a signal is pending that the thread blocks.
fn is_pending(bit: u64) -> bool {
    let mut set = 0_u64;
    let at = (&raw mut set).addr() as u64;
    // SAFETY: the set has the size that is given.
    unsafe { raw_system_call(libc::SYS_rt_sigpending as u64, [at, 8, 0, 0, 0, 0]) };
    set & bit != 0
}

/// Waits for a moment, before a thread looks again whether another one has done something. With
/// more attempts it waits longer.
pub(crate) fn rest(attempt: u32) {
    const LOOKS: u32 = 100;
    const YIELDS: u32 = 1000;
    match attempt {
        ..LOOKS => std::hint::spin_loop(),
        // SAFETY: the call has no arguments.
        LOOKS..YIELDS => _ = unsafe { raw_system_call(libc::SYS_sched_yield as u64, [0; 6]) },
        // The other one may have a lower priority, and need this processor.
        _ => {
            let time = [0_u64, 50_000];
            let at = (&raw const time).addr() as u64;
            // SAFETY: the time is there during the call.
            unsafe { raw_system_call(libc::SYS_nanosleep as u64, [at, 0, 0, 0, 0, 0]) };
        }
    }
}

/// Whether the calling thread is in ring 0.
pub fn is_in_ring_0() -> bool {
    let segment: u16;
    // SAFETY: the instruction only reads a register.
    unsafe { std::arch::asm!("mov {0:x}, cs", out(reg) segment, options(nomem, nostack)) };
    segment & 3 == 0
}

/// Whether some process has a file open for writing, or the program has a lease of it: the kernel
/// says so when it refuses a lease. Of files of other users it may say nothing.
pub(crate) fn may_be_written(file: &std::fs::File) -> bool {
    const SET_SIGNAL: u64 = 10;
    const GET_SIGNAL: u64 = 11;
    const SET_LEASE: u64 = 1024;
    const GET_LEASE: u64 = 1025;
    let control = |command, value: libc::c_int| {
        let number = std::os::fd::AsRawFd::as_raw_fd(file) as u64;
        // SAFETY: the call takes no memory.
        unsafe { raw_system_call(libc::SYS_fcntl as u64, [number, command, value as u64, 0, 0, 0]) }
    };
    if control(GET_LEASE, 0) != i64::from(libc::F_UNLCK) {
        return true;
    }
    // A writer that comes meanwhile sends a signal, which would end the process. This one does not.
    let signal = control(GET_SIGNAL, 0);
    control(SET_SIGNAL, libc::SIGURG);
    let taken = control(SET_LEASE, libc::F_RDLCK);
    if taken == 0 {
        control(SET_LEASE, libc::F_UNLCK);
    }
    control(SET_SIGNAL, signal as libc::c_int);
    taken == i64::from(-libc::EAGAIN)
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
