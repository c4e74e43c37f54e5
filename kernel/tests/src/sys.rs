//! System calls with any arguments, which return their error.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// The result of a system call, or its error.
pub fn checked(returned: i64) -> Result<u64, Errno> {
    match u64::try_from(returned) {
        Ok(value) => Ok(value),
        Err(_) => Err(last_error()),
    }
}

/// The error of this thread's last system call.
pub fn last_error() -> Errno {
    let code = std::io::Error::last_os_error().raw_os_error().unwrap_or_default();
    Errno::from_raw_os_error(code)
}

/// `ioctl` with any command and argument. The argument need not be an address; if it is one, the
/// call may write the memory there.
pub fn ioctl(fd: BorrowedFd<'_>, command: u32, argument: u64) -> Result<u64, Errno> {
    // SAFETY: the device writes to nothing but the memory that the caller named for it.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), command.into(), argument) }.into())
}

/// `fcntl` with a number, which must succeed.
#[track_caller]
pub fn fcntl(file: &impl AsRawFd, command: i32, argument: i32) -> i32 {
    // SAFETY: these commands read and write no memory of the process.
    let outcome = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    assert!(outcome >= 0, "fcntl {command}: {:?}", last_error());
    outcome
}

/// A request for `mmap`.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Where, or 0.
    pub address: usize,
    /// Bytes.
    pub length: usize,
    /// `PROT_*`.
    pub protection: i32,
    /// `MAP_*`.
    pub flags: i32,
    /// The file to map; anonymous memory if `None`.
    pub fd: Option<BorrowedFd<'a>>,
    /// The offset in the file.
    pub offset: u64,
}

/// Reading and writing.
pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// `mmap`. A request with `MAP_FIXED` is for addresses that the test mapped before.
pub fn mmap(request: Request<'_>) -> Result<usize, Errno> {
    let fd = request.fd.map_or(-1, |fd| fd.as_raw_fd());
    let offset = request.offset.cast_signed();
    let address = std::ptr::with_exposed_provenance_mut(request.address);
    let Request { length, protection, flags, .. } = request;
    // SAFETY: only tests' own addresses are replaced.
    let at = unsafe { libc::mmap(address, length, protection, flags, fd, offset) };
    if at == libc::MAP_FAILED { Err(last_error()) } else { Ok(at.addr()) }
}

/// `munmap`, of addresses that the test mapped.
pub fn munmap(address: usize, length: usize) -> Result<(), Errno> {
    let address = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: only tests' own addresses are unmapped.
    checked(unsafe { libc::munmap(address, length) }.into()).map(drop)
}

/// `mprotect`, of addresses that the test mapped.
pub fn mprotect(address: usize, length: usize, protection: i32) -> Result<(), Errno> {
    let address = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: only tests' own addresses change.
    checked(unsafe { libc::mprotect(address, length, protection) }.into()).map(drop)
}

/// `madvise`, of addresses that the test mapped.
pub fn madvise(address: usize, length: usize, advice: i32) -> Result<(), Errno> {
    let address = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: only tests' own addresses are advised about.
    checked(unsafe { libc::madvise(address, length, advice) }.into()).map(drop)
}

/// `mremap`, of addresses that the test mapped.
pub fn mremap(address: usize, from: usize, to: usize, flags: i32) -> Result<usize, Errno> {
    let address = std::ptr::with_exposed_provenance_mut::<libc::c_void>(address);
    // SAFETY: only tests' own addresses move.
    let at = unsafe { libc::mremap(address, from, to, flags) };
    if at == libc::MAP_FAILED { Err(last_error()) } else { Ok(at.addr()) }
}

/// `read` from a place in a file to any address.
pub fn pread(fd: BorrowedFd<'_>, to: usize, length: usize, offset: u64) -> Result<u64, Errno> {
    let to = std::ptr::with_exposed_provenance_mut(to);
    // SAFETY: the kernel checks the address; the memory there belongs to the test.
    let read = unsafe { libc::pread(fd.as_raw_fd(), to, length, offset.cast_signed()) };
    checked(read as i64)
}

/// `write` to a place in a file from any address.
pub fn pwrite(fd: BorrowedFd<'_>, from: usize, length: usize, offset: u64) -> Result<u64, Errno> {
    let from = std::ptr::with_exposed_provenance(from);
    // SAFETY: the kernel checks the address; the memory there belongs to the test.
    let written = unsafe { libc::pwrite(fd.as_raw_fd(), from, length, offset.cast_signed()) };
    checked(written as i64)
}

/// A part of memory for [`preadv`] and [`pwritev`]: address and length.
pub type Part = (usize, usize);

fn vectors(parts: &[Part]) -> Vec<libc::iovec> {
    let vector = |&(at, length): &Part| libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(at),
        iov_len: length,
    };
    parts.iter().map(vector).collect()
}

/// `preadv` to any addresses.
pub fn preadv(fd: BorrowedFd<'_>, parts: &[Part], offset: u64) -> Result<u64, Errno> {
    let vectors = vectors(parts);
    let count = i32::try_from(vectors.len()).expect("so many parts");
    // SAFETY: the kernel checks the addresses; the memory there belongs to the test.
    let read =
        unsafe { libc::preadv(fd.as_raw_fd(), vectors.as_ptr(), count, offset.cast_signed()) };
    checked(read as i64)
}

/// `preadv2` to any addresses, with flags.
pub fn preadv2(fd: BorrowedFd<'_>, parts: &[Part], offset: u64, flags: i32) -> Result<u64, Errno> {
    let (vectors, offset) = (vectors(parts), offset.cast_signed());
    let count = i32::try_from(vectors.len()).expect("so many parts");
    // SAFETY: the kernel checks the addresses; the memory there belongs to the test.
    let read = unsafe { libc::preadv2(fd.as_raw_fd(), vectors.as_ptr(), count, offset, flags) };
    checked(read as i64)
}

/// `pwritev` from any addresses.
pub fn pwritev(fd: BorrowedFd<'_>, parts: &[Part], offset: u64) -> Result<u64, Errno> {
    let vectors = vectors(parts);
    let count = i32::try_from(vectors.len()).expect("so many parts");
    // SAFETY: the kernel checks the addresses; the memory there belongs to the test.
    let written =
        unsafe { libc::pwritev(fd.as_raw_fd(), vectors.as_ptr(), count, offset.cast_signed()) };
    checked(written as i64)
}

/// `process_vm_readv`: reads another process', or the caller's own, memory.
pub fn process_vm_readv(process: i32, from: usize, to: &mut [u8]) -> Result<u64, Errno> {
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let remote =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(from), iov_len: to.len() };
    // SAFETY: `to` is exclusively the caller's, for all of its length.
    checked(
        unsafe { libc::process_vm_readv(process, &raw const local, 1, &raw const remote, 1, 0) }
            as i64,
    )
}

/// `process_vm_writev`: writes another process', or the caller's own, memory.
pub fn process_vm_writev(process: i32, to: usize, from: &[u8]) -> Result<u64, Errno> {
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(to), iov_len: from.len() };
    // SAFETY: `from` is only read; the kernel checks the other address, which is the test's.
    checked(unsafe {
        libc::process_vm_writev(process, &raw const local, 1, &raw const remote, 1, 0)
    } as i64)
}

/// `splice`: moves bytes between a pipe, which has no position, and a file.
pub fn splice(
    (from, at): (BorrowedFd<'_>, Option<u64>),
    (to, into): (BorrowedFd<'_>, Option<u64>),
    count: usize,
) -> Result<usize, Errno> {
    let (mut at, mut into) = (at.map(u64::cast_signed), into.map(u64::cast_signed));
    let pointer =
        |place: &mut Option<i64>| place.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let (at, into) = (pointer(&mut at), pointer(&mut into));
    // SAFETY: the positions are this function's.
    let done = unsafe { libc::splice(from.as_raw_fd(), at, to.as_raw_fd(), into, count, 0) };
    checked(done as i64).map(|done| done as usize)
}

/// `vmsplice` of memory into a pipe, which holds its pages.
pub fn vmsplice(pipe: BorrowedFd<'_>, from: usize, length: usize) -> Result<u64, Errno> {
    let part =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(from), iov_len: length };
    // SAFETY: the kernel checks the address.
    checked(unsafe { libc::vmsplice(pipe.as_raw_fd(), &raw const part, 1, 0) } as i64)
}

/// Page faults of this thread so far.
pub fn faults() -> i64 {
    // SAFETY: all zeros are a value of the structure.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills the structure.
    checked(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }.into())
        .expect("getrusage");
    usage.ru_minflt + usage.ru_majflt
}

/// Has this thread run only when no other one wants its processor.
#[track_caller]
pub fn give_way() {
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the structure, and changes this thread alone.
    let done = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const priority) };
    assert_eq!(done, 0, "SCHED_IDLE: {:?}", last_error());
}

/// Has sleeps of this thread end in time, and not 50 microseconds later.
#[track_caller]
pub fn wake_in_time() {
    // SAFETY: this changes a number of this thread.
    let done = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    assert_eq!(done, 0, "PR_SET_TIMERSLACK: {:?}", last_error());
}
