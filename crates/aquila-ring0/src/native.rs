//! Acting for the program in ring 3: instructions that ring 0 cannot make, and calls that make
//! threads and processes.
//!
//! The guest has the process' addresses, so the thread can go on in ring 3 at any instruction, with
//! the registers of the guest. That is how everything that the guest cannot do happens just as it
//! would have: the thread makes the one instruction in ring 3, with the trap flag set. The kernel
//! lets the stack grow, or raises the signal that the program would have seen, with its address and
//! its registers. Then the handler of SIGTRAP takes the thread back to ring 0.
//!
//! A handler that leaves by `longjmp` leaves ring 0, too: the thread goes on in ring 3, which is
//! slower or faster, and not wrong. So does the child of a `fork`, and a thread that is made in
//! ring 0.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use kvm_bindings::kvm_regs;
use rustix::io::Errno;

use crate::current_processor;
use crate::entry::{self, Block, Native, PAGE};
use crate::error::{Error, Result};
use crate::memory::{END, pointer};
use crate::processor::Processor;
use crate::running::{KICK_CODE, Running};
use crate::sys::set_mask;

/// What was to happen at SIGTRAP before: a handler, and its flags.
static PREVIOUS: (AtomicUsize, AtomicI32) = (AtomicUsize::new(libc::SIG_DFL), AtomicI32::new(0));

/// Installs the handler of SIGTRAP, if it is not the current one.
pub(crate) fn install() -> Result<()> {
    // SAFETY: the structures are plain data, which the calls fill and read.
    unsafe {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        libc::sigaction(libc::SIGTRAP, ptr::null(), &raw mut action);
        let own = on_trap as *const () as usize;
        if action.sa_sigaction == own {
            return Ok(());
        }
        PREVIOUS.0.store(action.sa_sigaction, Ordering::Relaxed);
        PREVIOUS.1.store(action.sa_flags, Ordering::Relaxed);
        action.sa_sigaction = own;
        // A kick ends `KVM_RUN` in any case, and nothing else that the thread waits in.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigfillset(&raw mut action.sa_mask);
        match libc::sigaction(libc::SIGTRAP, &raw const action, ptr::null_mut()) {
            0 => Ok(()),
            _ => Err(Error::of("installing a handler of SIGTRAP", Errno::INVAL)),
        }
    }
}

const TRACE: libc::c_int = 2; // TRAP_TRACE
const TRAP_FLAG: u64 = 1 << 8;
/// Flags that the processor sets for a moment: trap, resume.
const MOMENTARY: u64 = TRAP_FLAG | 1 << 16;

/// Has the program make the instruction at RIP in ring 3. If that is a signal which ends the
/// process, or whose handler does not return, this does not either.
///
/// # Errors
/// When KVM does not give or take registers.
///
/// # Safety
/// The guest of the block does not run, and the calling thread uses it.
pub(crate) unsafe fn step(
    block: *mut Block,
    processor: &mut Processor,
    registers: &kvm_regs,
) -> Result<()> {
    // The program may have installed a handler of its own meanwhile.
    install()?;
    processor.take_state()?;
    // SAFETY: the caller's.
    let native = unsafe { &raw mut (*block).native };
    // SAFETY: as above.
    unsafe {
        (*native).registers = *registers;
        (*native).registers.rflags &= !MOMENTARY;
    }
    // If the signal were blocked, the trap would end the process. The handler restores the mask.
    let mask = set_mask(libc::SIG_UNBLOCK, 1 << (libc::SIGTRAP - 1));
    // SAFETY: as above. The handler of SIGTRAP, below, goes on after the step.
    unsafe {
        ((*native).mask, (*native).is_stepping) = (mask, true);
        entry::native_step(native);
    }
    processor.give_state()?;
    // SAFETY: as above.
    processor.set_registers(unsafe { &(*native).registers });
    Ok(())
}

/// Makes a system call that makes a thread or a process, and returns its result. The child goes on
/// in ring 3 after the call.
///
/// # Errors
/// When KVM does not give registers.
///
/// # Safety
/// That of [`step`], and that of the call.
pub(crate) unsafe fn clone(
    block: *mut Block,
    processor: &mut Processor,
    registers: &kvm_regs,
) -> Result<u64> {
    processor.take_state()?;
    // A forked child has a copy of the block; KVM's own pages it has not.
    // SAFETY: the caller's.
    let native = unsafe { &raw mut (*block).native };
    let has_stack = registers.rax == libc::SYS_clone as u64 && registers.rsi != 0;
    // SAFETY: as above. SYSCALL has put the address after it into RCX. A new stack has room for it:
    // it is the program's, and nothing is below its end.
    unsafe {
        (*native).registers = kvm_regs { rip: registers.rcx, ..*registers };
        if has_stack {
            pointer::<u64>(registers.rsi).sub(1).write(registers.rcx);
        }
        entry::native_clone(native, has_stack.into());
        Ok((*native).registers.rax)
    }
}

/// The handler.
extern "C" fn on_trap(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let block = current_processor::block();
    // SAFETY: the kernel gives a handler the structure. A thread's block is there while it uses
    // it; this part is atomic.
    let (code, value, own) = unsafe {
        let running = (!block.is_null()).then(|| &(*block).running);
        ((*info).si_code, (*info).si_value().sival_ptr.addr(), running)
    };
    if code == KICK_CODE {
        // It was to end `KVM_RUN`, and has.
        return Running::take_kick(own, value as u64);
    }
    // If the user has too many signals pending, the kernel does not say who has sent it.
    if code == libc::SI_USER && own.is_some_and(Running::acknowledge) {
        return;
    }
    if code == TRACE && !block.is_null() {
        // SAFETY: a thread's block is there while it uses it, and no other code has a reference to
        // this part of it during a step.
        unsafe {
            let native = &mut (*block).native;
            if native.is_stepping {
                native.is_stepping = false;
                return take_back(native, &mut *context.cast());
            }
        }
    }
    pass_on(signal, info, context);
}

/// Copies the program's registers from the context of the handler, and has the handler return to
/// [`step`].
fn take_back(native: &mut Native, context: &mut libc::ucontext_t) {
    let general = &mut context.uc_mcontext.gregs;
    let get = |name: libc::c_int| general[name as usize] as u64;
    let before = native.registers.rip;
    native.registers = kvm_regs {
        rax: get(libc::REG_RAX),
        rbx: get(libc::REG_RBX),
        rcx: get(libc::REG_RCX),
        rdx: get(libc::REG_RDX),
        rsi: get(libc::REG_RSI),
        rdi: get(libc::REG_RDI),
        rsp: get(libc::REG_RSP),
        rbp: get(libc::REG_RBP),
        r8: get(libc::REG_R8),
        r9: get(libc::REG_R9),
        r10: get(libc::REG_R10),
        r11: get(libc::REG_R11),
        r12: get(libc::REG_R12),
        r13: get(libc::REG_R13),
        r14: get(libc::REG_R14),
        r15: get(libc::REG_R15),
        rip: get(libc::REG_RIP),
        rflags: get(libc::REG_EFL) & !MOMENTARY,
    };
    // SAFETY: the processor has just made the instruction at `before`, and if that was PUSHF, it
    // has stored the flags on the program's stack: with the trap flag, which is not the program's.
    // What is above the program's addresses (the page of vsyscalls) need not be readable.
    unsafe {
        if before < END && pointer::<u8>(before).read_volatile() == 0x9c {
            *pointer::<u64>(native.registers.rsp) &= !TRAP_FLAG;
        }
    }
    // SAFETY: the kernel has saved the vector registers where the context says.
    unsafe {
        let state = context.uc_mcontext.fpregs.cast::<u8>();
        copy_state(state, pointer::<u8>(native.state), native.kept);
    }
    general[libc::REG_RIP as usize] = entry::after_step as *const () as i64;
    general[libc::REG_RSP as usize] = native.host as i64;
    general[libc::REG_EFL as usize] = 0x202;
    let mask = &raw mut context.uc_sigmask;
    // SAFETY: the kernel's sets have 64 bits.
    unsafe { mask.cast::<u64>().write(native.mask) };
}

/// Copies the vector registers of a signal frame, in the format of XSAVE.
///
/// # Safety
/// `from` is that of a frame; `to` has room for a page.
unsafe fn copy_state(from: *const u8, to: *mut u8, components: u64) {
    // The kernel describes it in the last bytes of the part that processors leave to software.
    const DESCRIPTION: usize = 464;
    const MAGIC: u32 = 0x4650_5853;
    const LEGACY: usize = 512;
    const HEADER: usize = 64;
    // SAFETY: the caller's.
    unsafe {
        let has_more = from.add(DESCRIPTION).cast::<u32>().read_unaligned() == MAGIC;
        let length = match has_more {
            true => from.add(DESCRIPTION + 16).cast::<u32>().read_unaligned() as usize,
            false => LEGACY,
        };
        ptr::write_bytes(to, 0, PAGE);
        ptr::copy_nonoverlapping(from, to, length.min(PAGE));
        let header = to.add(LEGACY).cast::<u64>();
        let saved = if has_more { header.read() } else { 0b11 };
        header.write(saved & components);
        ptr::write_bytes(header.cast::<u8>().add(8), 0, HEADER - 8);
    }
}

/// Does what would have happened without a machine.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // A handler that was installed after this one, and before it once more, may pass on to this:
    // with the same context, from deeper in the stack.
    // While the thread calls the handler that was there before, it keeps the context that the
    // kernel has given, and where the stack was.
    let here = (context.addr(), (&raw const context).addr());
    let before = current_processor::replace_passed_on(here);
    let is_from_previous = before.0 == here.0 && here.1 < before.1;
    let handler = if is_from_previous { libc::SIG_DFL } else { PREVIOUS.0.load(Ordering::Relaxed) };
    let flags = PREVIOUS.1.load(Ordering::Relaxed);
    // SAFETY: the kernel gives a handler the structures. The address is the one of a handler of the
    // kind that the flag tells.
    unsafe {
        match handler {
            // A child that was made during a step has the flag of its parent.
            _ if (*info).si_code == TRACE && handler == libc::SIG_DFL => {
                let context = &mut *context.cast::<libc::ucontext_t>();
                context.uc_mcontext.gregs[libc::REG_EFL as usize] &= !(TRAP_FLAG as i64);
            }
            libc::SIG_IGN => {}
            libc::SIG_DFL => {
                let mut default = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, ptr::null_mut());
                libc::raise(signal);
            }
            handler if flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(handler);
                handler(signal, info, context);
            }
            handler => {
                let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
    current_processor::replace_passed_on(before);
}
