//! The kernel's operations on any mapping: advice, keys, and files that show mappings.
#![allow(unsafe_code)]

use std::arch::asm;
use std::fs::{self, File};
use std::os::fd::{AsFd as _, AsRawFd as _};

use rustix::io::Errno;

use crate::random::Random;
use crate::{PAGE, sys};

/// Advice that the kernel may refuse, and that otherwise changes no contents.
pub(super) const ADVICE: [i32; 10] = [
    libc::MADV_NORMAL,
    libc::MADV_WILLNEED,
    libc::MADV_DONTNEED,
    libc::MADV_FREE,
    libc::MADV_MERGEABLE,
    libc::MADV_HUGEPAGE,
    libc::MADV_COLD,
    libc::MADV_PAGEOUT,
    libc::MADV_POPULATE_READ,
    libc::MADV_DONTFORK,
];

/// Gives a mapping a protection key that allows every access. If the processor has no keys, that is
/// an error.
pub(super) fn protect_by_key(at: usize, length: usize) -> Result<Key, Errno> {
    // SAFETY: takes numbers.
    let key = sys::checked(unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) })?;
    let key = Key(key);
    key.protect(at, length, key.0)?;
    Ok(key)
}

/// A protection key; it is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Key(u64);

impl Key {
    fn protect(&self, at: usize, length: usize, key: u64) -> Result<(), Errno> {
        let rights = sys::READ_WRITE;
        // SAFETY: a test's own addresses get other rights.
        let done = unsafe { libc::syscall(libc::SYS_pkey_mprotect, at, length, rights, key) };
        sys::checked(done).map(drop)
    }

    /// Runs `work` while the key denies this thread loads and stores.
    pub(super) fn denying<T>(&self, action: impl FnOnce() -> T) -> T {
        let change = 0b11 << (2 * self.0);
        flip_rights(change);
        let done = action();
        flip_rights(change);
        done
    }

    /// Takes the key off.
    pub(super) fn end(self, at: usize, length: usize) {
        self.protect(at, length, 0).expect("the default key");
    }
}

/// Changes this thread's rights, two bits for each key.
fn flip_rights(change: u32) {
    // SAFETY: the processor has keys, because the kernel has allocated one. The rights of the other
    // keys do not change.
    unsafe {
        asm!(
            "rdpkru",
            "xor eax, {change:e}",
            "wrpkru",
            change = in(reg) change,
            in("ecx") 0,
            out("eax") _,
            out("edx") _,
        );
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        // SAFETY: takes a number.
        unsafe { libc::syscall(libc::SYS_pkey_free, self.0) };
    }
}

/// Has the kernel walk page tables.
pub(super) fn look(random: &mut Random, at: usize, length: usize) {
    match random.below(5) {
        0 => {
            let mut bytes = vec![0; (length / PAGE * 8).min(1 << 16)];
            let file = File::open("/proc/self/pagemap").expect("pagemap");
            let to = bytes.as_mut_ptr().expose_provenance();
            let read = sys::pread(file.as_fd(), to, bytes.len(), (at / PAGE * 8) as u64);
            assert!(read.is_ok(), "{read:?}");
        }
        1 => {
            let mut residency = vec![0_u8; length.min(1 << 24) / PAGE];
            let start = std::ptr::with_exposed_provenance_mut(at);
            // SAFETY: the kernel writes a byte for each page.
            let done =
                unsafe { libc::mincore(start, residency.len() * PAGE, residency.as_mut_ptr()) };
            sys::checked(done.into()).expect("mincore");
        }
        2 => scan(at, length),
        3 => {
            // Some kernels cannot.
            let _ = fs::write("/proc/self/clear_refs", ["1", "3", "4"][random.below(3) as usize]);
        }
        _ => {
            let text = fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
            assert!(text.len() < 1 << 20);
        }
    }
}

/// `PAGEMAP_SCAN`, where the kernel has it.
fn scan(at: usize, length: usize) {
    const PAGEMAP_SCAN: u64 = 0xc060_6610;
    /// Present pages.
    const PRESENT: u64 = 1 << 3;
    let mut regions = [[0_u64; 3]; 16];
    let argument: [u64; 12] = [
        size_of::<[u64; 12]>() as u64,
        0,
        at as u64,
        (at + length) as u64,
        0,
        regions.as_mut_ptr().expose_provenance() as u64,
        regions.len() as u64,
        0,
        0,
        0,
        PRESENT,
        PRESENT,
    ];
    let file = File::open("/proc/self/pagemap").expect("pagemap");
    // SAFETY: the kernel writes to the argument and the regions.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN, argument.as_ptr()) };
    let done = sys::checked(done.into());
    assert!(matches!(done, Ok(_) | Err(Errno::NOTTY)), "PAGEMAP_SCAN: {done:?}");
}
