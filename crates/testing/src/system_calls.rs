//! Seccomp filters: the kernel itself checks which system calls a process makes, or acts like a
//! kernel that lacks some. A process cannot remove a filter: see [`crate::own_process`].
#![allow(unsafe_code)]

use std::io;

use libc::{c_long, c_ulong, sock_filter};

/// The exit status of a process that reached [`survive`].
pub const SURVIVED: i32 = 42;

/// An instruction of a filter: loads four bytes of `struct seccomp_data`. The number of the system
/// call is at byte 0, the low half of its n-th argument, from 0 on, at byte 16 + 8 n.
pub const fn load(at: u32) -> sock_filter {
    sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: at }
}

/// An instruction of a filter: skips `jt` others if the loaded value is `k`, else `jf`.
pub const fn compare(k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt, jf, k }
}

/// An instruction of a filter: the fate of the call, `SECCOMP_RET_` and so on.
pub const fn answer(k: u32) -> sock_filter {
    sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k }
}

/// Installs a filter for the system calls of this thread, or as the `SECCOMP_FILTER_FLAG_` flags
/// say. It makes two system calls and nothing else, because nothing else is allowed between `fork`
/// and `exec`.
///
/// # Errors
/// The kernel's error, if filters are not allowed.
pub fn install(filter: &[sock_filter], flags: c_ulong) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_ptr().cast_mut(), // the kernel copies it
    };
    let set = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: both change only what this process may call, and the filter lives through them.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(libc::SYS_seccomp, set, flags, &raw const program) == 0
    };
    if installed { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// From now on a system call fails with `EPERM`, for all threads of the process. False, with a
/// printed line, if there is no seccomp.
pub fn forbid(call: c_long) -> bool {
    let filter = [
        load(0),
        compare(call as u32, 0, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let installed = install(&filter, libc::SECCOMP_FILTER_FLAG_TSYNC);
    if let Err(error) = &installed {
        println!("skipped: no seccomp here: {error}");
    }
    installed.is_ok()
}

/// From now on each system call of this thread kills the process, except for the one that exits it.
/// Without seccomp the process exits at once, as if it had survived.
pub fn forbid_all() {
    let filter = [
        load(0),
        compare(libc::SYS_exit_group as u32, 0, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
    ];
    if let Err(error) = install(&filter, 0) {
        println!("skipped: no seccomp here: {error}");
        std::process::exit(SURVIVED);
    }
}

/// Ends a process that may make no other system call.
pub fn survive() -> ! {
    // SAFETY: ends the process, in which nothing is left to do.
    unsafe { libc::_exit(SURVIVED) }
}
