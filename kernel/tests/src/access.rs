//! Accesses to addresses that may have no page: by an instruction of the program, which then gets a
//! signal, and by the kernel on behalf of the program, which then gets `EFAULT`.
#![allow(unsafe_code)]

use std::arch::asm;
use std::cell::OnceCell;
use std::fs::File;
use std::os::fd::{AsFd as _, FromRawFd as _};
use std::sync::Once;

use rustix::io::Errno;

use crate::{PAGE, sys};

/// The signal that an access has caused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// `SIGSEGV` or `SIGBUS`.
    pub signal: i32,
    /// The address.
    pub address: usize,
}

/// Loads a byte.
pub fn load(address: usize) -> Result<u8, Fault> {
    prepare();
    let (mut signal, mut found): (u64, u64) = (0, MAGIC);
    let value: u8;
    // SAFETY: the handler skips an access to an absent page. It recognises the access by MAGIC in
    // r10, continues at the address in r11, and answers in rax and r10. Loading changes nothing.
    unsafe {
        asm!(
            "lea r11, [rip + 2f]",
            "mov {value}, byte ptr [{address}]",
            "2:",
            address = in(reg) address,
            value = out(reg_byte) value,
            inout("r10") found,
            inout("rax") signal,
            out("r11") _,
            options(nostack, readonly),
        );
    }
    outcome(signal, found, value)
}

/// Stores a byte.
pub fn store(address: usize, value: u8) -> Result<(), Fault> {
    prepare();
    let (mut signal, mut found): (u64, u64) = (0, MAGIC);
    // SAFETY: as above; the addresses that tests store to are those of surfaces and of memory that
    // they mapped for it.
    unsafe {
        asm!(
            "lea r11, [rip + 2f]",
            "mov byte ptr [{address}], {value}",
            "2:",
            address = in(reg) address,
            value = in(reg_byte) value,
            inout("r10") found,
            inout("rax") signal,
            out("r11") _,
            options(nostack),
        );
    }
    outcome(signal, found, ())
}

/// Loads a page, word by word.
pub fn load_page(address: usize) -> Result<Box<[u64; PAGE / 8]>, Fault> {
    prepare();
    let mut words = Box::new([0_u64; PAGE / 8]);
    let (mut signal, mut found): (u64, u64) = (0, MAGIC);
    // SAFETY: as above; the words are this function's.
    unsafe {
        asm!(
            "lea r11, [rip + 2f]",
            "rep movsq",
            "2:",
            inout("rsi") address => _,
            inout("rdi") words.as_mut_ptr() => _,
            inout("rcx") PAGE / 8 => _,
            inout("r10") found,
            inout("rax") signal,
            out("r11") _,
            options(nostack),
        );
    }
    outcome(signal, found, words)
}

/// Fills a page with a word.
pub fn store_page(address: usize, word: u64) -> Result<(), Fault> {
    prepare();
    let (mut signal, mut found): (u64, u64) = (word, MAGIC);
    // SAFETY: as for a byte. The value to store is in the register in which the handler answers.
    unsafe {
        asm!(
            "lea r11, [rip + 2f]",
            "rep stosq",
            "2:",
            inout("rdi") address => _,
            inout("rcx") PAGE / 8 => _,
            inout("r10") found,
            inout("rax") signal,
            out("r11") _,
            options(nostack),
        );
    }
    outcome(if found == MAGIC { 0 } else { signal }, found, ())
}

fn outcome<T>(signal: u64, found: u64, value: T) -> Result<T, Fault> {
    match signal {
        0 => Ok(value),
        _ => Err(Fault { signal: signal as i32, address: found as usize }),
    }
}

/// The value of r10 during an access.
const MAGIC: u64 = 0x7665_6c6c_756d_0a0a;

extern "C" fn handler(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context: *mut libc::ucontext_t = context.cast();
    // SAFETY: the kernel passes both, for as long as the handler runs.
    let (registers, address) =
        unsafe { (&mut (*context).uc_mcontext.gregs, (*info).si_addr().addr()) };
    if registers[libc::REG_R10 as usize].cast_unsigned() == MAGIC {
        registers[libc::REG_RAX as usize] = signal.into();
        registers[libc::REG_R10 as usize] = address as i64;
        registers[libc::REG_RIP as usize] = registers[libc::REG_R11 as usize];
    } else {
        // Another fault: with the default action, it happens again and ends the program. SAFETY:
        // setting a signal's default is allowed in a handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Sets the handler, once in a program.
pub(crate) fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            let entry: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = handler;
            // SAFETY: all zeros is a valid value of this structure.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = entry as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            // SAFETY: the handler touches only its arguments.
            let set = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
            assert_eq!(set, 0);
        }
    });
}

thread_local! {
    /// A file in memory to copy bytes through.
    static FILE: OnceCell<File> = const { OnceCell::new() };
}

fn with_file<T>(action: impl FnOnce(&File) -> T) -> T {
    let create = || {
        // SAFETY: the name ends with a zero.
        let fd = unsafe { libc::memfd_create(c"access".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0, "memfd_create: {}", sys::last_error());
        // SAFETY: the descriptor is new and has no other owner.
        unsafe { File::from_raw_fd(fd) }
    };
    FILE.with(|file| action(file.get_or_init(create)))
}

/// Has the kernel load `length` bytes.
pub fn kernel_load(address: usize, length: usize) -> Result<Vec<u8>, Errno> {
    with_file(|file| {
        let taken = sys::pwrite(file.as_fd(), address, length, 0)?;
        if taken as usize != length {
            return Err(Errno::FAULT);
        }
        let mut bytes = vec![0; length];
        let read = sys::pread(file.as_fd(), bytes.as_mut_ptr().expose_provenance(), length, 0)?;
        assert_eq!(read as usize, length);
        Ok(bytes)
    })
}

/// Has the kernel store bytes.
pub fn kernel_store(address: usize, bytes: &[u8]) -> Result<(), Errno> {
    with_file(|file| {
        let taken = sys::pwrite(file.as_fd(), bytes.as_ptr().expose_provenance(), bytes.len(), 0)?;
        assert_eq!(taken as usize, bytes.len());
        let stored = sys::pread(file.as_fd(), address, bytes.len(), 0)?;
        if stored as usize == bytes.len() { Ok(()) } else { Err(Errno::FAULT) }
    })
}

/// A page full of the bytes of a stamp, so that tests check each byte.
pub fn stamped(stamp: u64) -> Vec<u8> {
    let word = |index: u64| (stamp ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes();
    (0..PAGE as u64 / 8).flat_map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn a_present_page_is_loaded_and_stored() {
        let memory = Mapping::anonymous(None, PAGE).unwrap();
        assert_eq!(store(memory.start() + 5, 77), Ok(()));
        assert_eq!(load(memory.start() + 5), Ok(77));
        assert_eq!(kernel_load(memory.start(), 6).unwrap(), [0, 0, 0, 0, 0, 77]);
        store_page(memory.start(), 7).unwrap();
        assert!(load_page(memory.start()).unwrap().iter().all(|word| *word == 7));
        kernel_store(memory.start(), &stamped(3)).unwrap();
        assert_eq!(kernel_load(memory.start(), PAGE).unwrap(), stamped(3));
    }

    #[test]
    fn an_absent_page_is_a_fault() {
        let memory = Mapping::anonymous(None, PAGE).unwrap();
        sys::mprotect(memory.start(), PAGE, libc::PROT_READ).unwrap();
        let address = memory.start() + 9;
        let fault = Fault { signal: libc::SIGSEGV, address };
        for _ in 0..3 {
            assert_eq!(store(address, 1), Err(fault));
            assert_eq!(load(address), Ok(0));
            assert_eq!(kernel_store(address, &[1]), Err(Errno::FAULT));
            assert_eq!(
                store_page(memory.start(), 1),
                Err(Fault { address: memory.start(), ..fault })
            );
            assert_eq!(load_page(memory.start()).unwrap()[0], 0);
        }
        sys::mprotect(memory.start(), PAGE, libc::PROT_NONE).unwrap();
        assert_eq!(load(address), Err(fault));
        assert_eq!(kernel_load(address, 1), Err(Errno::FAULT));
    }
}
