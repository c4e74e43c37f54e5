//! What the process does when the guest exits. It does so on the thread itself, on another stack:
//! so a system call is the thread's own, with its number, its signals, its locks and its limits.
//!
//! The program is in the middle of something, perhaps of an allocation: nothing here allocates,
//! takes a lock of the program's, or changes `errno`.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{KVM_EXIT_HLT, KVM_EXIT_IO, kvm_regs};

use crate::entry::{self, Block, BlockCounts, CALL, EXCEPTION, frame, port};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::memory::{Window, pointer};
use crate::message::stop;
use crate::processor::{Calls, Processor, SET_FS, SET_GS, errno};
use crate::running::Running;
use crate::sys::{QUIET, keeping_errno, quiet_system_call, raw_system_call};
use crate::{native, running};

/// The functions for blocks.
pub(crate) const CALLS: Calls = Calls { serve, managed_fault };

/// Exceptions.
const DEBUG: u64 = 1;
const BREAKPOINT: u64 = 3;
/// Errors of the machine: an exception within an exception, and two that the host keeps to itself.
const OF_THE_MACHINE: [u64; 3] = [2, 8, 18];
/// Vectors whose exceptions have an error code.
const WITH_ERROR: u64 = 0x6022_7d00;
/// The first vector that only `int` leads to.
const BY_INSTRUCTION: u64 = 32;
/// Bytes of `hlt`, of `int 3` and of `int` with a number.
const HLT: u64 = 1;
const INT_3: u64 = 1;
const INT: u64 = 2;

/// In the error code of a page fault: the page is present; the access is a store.
const PRESENT: u64 = 1;
const STORE: u64 = 1 << 1;
/// In RFLAGS: a trap after each instruction.
const TRAP: u64 = 1 << 8;

/// Serves the exits of the calling thread until it leaves ring 0, and returns its stack pointer
/// then.
///
/// # Safety
/// The block is that of a virtual processor that this thread alone uses.
pub(crate) unsafe extern "C" fn serve(block: *mut Block) -> u64 {
    // SAFETY: the caller's; the machine and its processors outlive the thread's stay.
    let mut thread = unsafe {
        Thread {
            block,
            processor: &mut *pointer::<Processor>((*block).processor),
            guest: &*pointer::<Guest>((*block).guest),
            blocks_kicks: false,
        }
    };
    // SAFETY: the guest does not run, and the thread has stored its stack pointer. The registers go
    // to the guest when it runs.
    unsafe { (*thread.processor.run()).s.regs.regs.rdi = (*block).entered };
    thread.blocks_kicks = thread.running().take();
    loop {
        match thread.exit() {
            Ok(None) => {}
            Ok(Some(stack)) => {
                running::block(thread.blocks_kicks);
                return stack;
            }
            Err(error) => stop(format_args!("{error}")),
        }
    }
}

/// Handles a fault in a managed range, in ring 0.
///
/// # Safety
/// As for [`serve`].
pub(crate) unsafe extern "C" fn managed_fault(block: *mut Block, address: u64, error: u64) -> u64 {
    // SAFETY: the caller's.
    let (guest, counts) = unsafe { (&*pointer::<Guest>((*block).guest), &(*block).counts) };
    counts.managed_faults.fetch_add(1, Ordering::Relaxed);
    u64::from(error & PRESENT == 0 && guest.managed_fault(address, error & STORE != 0))
}

/// A thread that is in ring 0.
struct Thread<'a> {
    block: *mut Block,
    processor: &'a mut Processor,
    guest: &'a Guest,
    /// Whether the program has blocked the signal of kicks, which the thread then does not block.
    blocks_kicks: bool,
}

impl Thread<'_> {
    fn counts(&self) -> &BlockCounts {
        // SAFETY: the block is there while the thread uses it; the counts are atomic.
        unsafe { &(*self.block).counts }
    }

    fn running(&self) -> &Running {
        // SAFETY: as above.
        unsafe { &(*self.block).running }
    }

    /// Runs the guest until it exits, and serves the exit. Returns the stack pointer if it leaves.
    fn exit(&mut self) -> Result<Option<u64>> {
        self.running().enter();
        self.processor.catch_up(self.guest.shootdown.generation())?;
        let result = self.processor.go();
        // A handler that has run may have blocked the signal.
        if result != 0 {
            running::unblock();
        }
        if self.running().leave() {
            count(&self.counts().kicks);
        }
        count(&self.counts().exits);
        match -result as i32 {
            0 => {}
            libc::EINTR => {
                // The handler of the signal has run, in ring 3.
                count(&self.counts().interrupted);
                return Ok(None);
            }
            libc::EAGAIN => return Ok(None),
            // The kernel does not give the guest the memory: it is not mapped, or protected, or a
            // stack that must grow. KVM does not say where.
            libc::EFAULT => {
                let registers = self.processor.registers()?;
                return self.step(&registers);
            }
            _ => return Err(Error::of("running a guest", errno(result))),
        }
        // SAFETY: KVM has filled the structure, and the guest does not run.
        let (reason, port, registers) = unsafe {
            let run = &*self.processor.run();
            (run.exit_reason, run.__bindgen_anon_1.io.port, run.s.regs.regs)
        };
        if reason == KVM_EXIT_HLT {
            // The program's own, too, and KVM has passed it.
            return self.step(&kvm_regs { rip: registers.rip - HLT, ..registers });
        }
        if reason != KVM_EXIT_IO {
            let registers = self.processor.registers().unwrap_or(registers);
            let (rip, rsp) = (registers.rip, registers.rsp);
            stop(format_args!("KVM's exit {reason} at {rip:#x}, stack {rsp:#x}"));
        }
        match port {
            port::SYSTEM_CALL => self.system_call(&registers),
            port::LEAVE => {
                self.processor.give_base()?;
                Ok(Some(registers.rsp))
            }
            port::FAULT => self.fault(&registers),
            port::EXCEPTION => self.exception(&registers),
            port::NOTHING => Ok(None),
            // The program's own: in ring 3 it is SIGSEGV.
            _ => self.step(&registers),
        }
    }

    /// Makes the program's system call.
    fn system_call(&mut self, registers: &kvm_regs) -> Result<Option<u64>> {
        count(&self.counts().system_calls);
        let result = match registers.rax as i64 {
            libc::SYS_clone | libc::SYS_fork | libc::SYS_vfork => {
                // SAFETY: the program has made the call.
                let clone = |thread: &mut Self| unsafe {
                    native::clone(thread.block, thread.processor, registers)
                };
                self.with_own_mask(clone)?
            }
            // The C library uses `clone` then.
            libc::SYS_clone3 => refuse(libc::ENOSYS),
            // Keys protect nothing in ring 0: the program learns that there are none.
            libc::SYS_pkey_alloc => refuse(libc::ENOSPC),
            // The process' half of the thread finds its own data by FS.
            libc::SYS_arch_prctl if registers.rdi == SET_FS => refuse(libc::EPERM),
            libc::SYS_arch_prctl => {
                let result = forward(registers);
                if registers.rdi == SET_GS {
                    self.processor.take_base()?;
                }
                result
            }
            libc::SYS_rt_sigprocmask => self.with_own_mask(|_| Ok(forward(registers)))?,
            // The program ends, or becomes another one.
            libc::SYS_exit_group | libc::SYS_execve | libc::SYS_execveat => {
                self.guest.write_back();
                self.with_own_mask(|_| Ok(forward(registers)))?
            }
            // The kernel takes the registers from the stack that it is called on.
            libc::SYS_rt_sigreturn => {
                return self.step(&kvm_regs { rip: registers.rcx - 2, ..*registers });
            }
            _ if registers.rax & QUIET != 0 => quietly(registers),
            _ => forward(registers),
        };
        self.processor.set_registers(&kvm_regs { rax: result, ..*registers });
        Ok(None)
    }

    /// Makes a call that sees or changes the mask of the thread's signals, with the program's own.
    fn with_own_mask<T>(&mut self, call: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        running::block(self.blocks_kicks);
        let result = call(self);
        self.blocks_kicks = running::unblock();
        result
    }

    /// A page fault: of an address that has no window yet, or of one that cannot have any.
    fn fault(&mut self, registers: &kvm_regs) -> Result<Option<u64>> {
        // SAFETY: the entry has stored the address and the frame, and the guest does not run.
        let (address, error) =
            unsafe { ((*self.block).address, *pointer::<u64>(registers.rsp).add(frame::ERROR)) };
        if error & PRESENT == 0 {
            match keeping_errno(|| self.guest.make_window(address)) {
                Window::Made => {
                    count(&self.counts().windows);
                    self.processor.last_window = 0;
                    return Ok(None);
                }
                // Another thread has made it. But twice the same would be an error of the tables,
                // and never end.
                Window::There if self.processor.last_window != address => {
                    self.processor.last_window = address;
                    return Ok(None);
                }
                Window::There | Window::None => {}
            }
        }
        let interrupted = interrupted(registers, frame::ERROR + 1);
        self.step(&interrupted)
    }

    /// An exception. In ring 3 the instruction raises it once more, as a signal.
    fn exception(&mut self, registers: &kvm_regs) -> Result<Option<u64>> {
        // SAFETY: the entry has stored the frame, and the guest does not run.
        let word = unsafe { *pointer::<u64>(registers.rsp).add(frame::VECTOR) };
        let first = (entry::exceptions as *const () as u64).next_multiple_of(EXCEPTION);
        // A page fault that a handler refused has its vector there.
        let vector = if word < 256 { word } else { (word - CALL - first) / EXCEPTION };
        let has_error = vector < 32 && WITH_ERROR >> vector & 1 != 0;
        let place = if has_error { frame::ERROR + 1 } else { frame::VECTOR + 1 };
        let mut interrupted = interrupted(registers, place);
        match vector {
            vector if OF_THE_MACHINE.contains(&vector) => {
                stop(format_args!("exception {vector} at {:#x}", interrupted.rip));
            }
            // The program has set the trap flag itself: traps are not offered in ring 0.
            DEBUG => {
                interrupted.rflags &= !TRAP;
                self.processor.set_registers(&interrupted);
                return Ok(None);
            }
            BREAKPOINT => interrupted.rip -= INT_3,
            BY_INSTRUCTION.. => interrupted.rip -= INT,
            _ => {}
        }
        self.step(&interrupted)
    }

    /// Has the program make the instruction in ring 3.
    fn step(&mut self, registers: &kvm_regs) -> Result<Option<u64>> {
        count(&self.counts().native_steps);
        // SAFETY: the guest does not run, and this thread uses it.
        unsafe { native::step(self.block, self.processor, registers)? };
        Ok(None)
    }
}

/// The registers of the code that an exception has interrupted. RIP is at this word of the frame.
fn interrupted(registers: &kvm_regs, place: usize) -> kvm_regs {
    let word = |at: usize| {
        // SAFETY: an entry has left a frame at the stack pointer, and the guest does not run.
        unsafe { *pointer::<u64>(registers.rsp).add(at) }
    };
    kvm_regs {
        rcx: word(frame::RCX),
        rax: word(frame::RAX),
        rip: word(place),
        rflags: word(place + frame::RFLAGS),
        rsp: word(place + frame::RSP),
        ..*registers
    }
}

/// Makes a system call with the program's registers.
fn forward(registers: &kvm_regs) -> u64 {
    let kvm_regs { rdi, rsi, rdx, r10, r8, r9, .. } = *registers;
    // SAFETY: the program has made the call, with addresses of the process.
    unsafe { raw_system_call(registers.rax, [rdi, rsi, rdx, r10, r8, r9]).cast_unsigned() }
}

/// The same for a call of the cache's own, which must not raise SIGXFSZ.
fn quietly(registers: &kvm_regs) -> u64 {
    let kvm_regs { rdi, rsi, rdx, r10, r8, r9, .. } = *registers;
    let number = registers.rax & !QUIET;
    // SAFETY: the cache has made the call, or the program has, with addresses of the process.
    unsafe { quiet_system_call(number, [rdi, rsi, rdx, r10, r8, r9]).cast_unsigned() }
}

/// The result of a system call that fails.
fn refuse(errno: i32) -> u64 {
    i64::from(-errno).cast_unsigned()
}

fn count(counter: &AtomicU64) {
    // Only the thread that uses the processor changes it.
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KVM forgets translations where CR3 changes, and only there.
    #[test]
    fn a_processor_forgets_whenever_it_must() {
        let guest = match Guest::new(CALLS, true) {
            Ok(guest) => guest,
            Err(error) => {
                assert!(std::env::var_os("VELLUM_RING0").is_none(), "{error}");
                return eprintln!("skipped, because there is no ring 0 here: {error}");
            }
        };
        let mut processor = guest.take().unwrap();
        let mut generation = 0;
        for stay in 0..4 {
            let start = entry::self_test as *const () as u64;
            processor.prepare((start, 0), guest.managed()).unwrap();
            // With changes before the thread enters, and without.
            for change in 0..3 {
                if change + stay != 0 {
                    generation += 1;
                }
                let [before, _] = processor.cr3();
                processor.catch_up(generation).unwrap();
                let [_, after] = processor.cr3();
                assert_eq!(before != after, change + stay != 0, "stay {stay}, change {change}");
                processor.go();
                assert_eq!(processor.cr3(), [after; 2]);
            }
        }
    }
}
