//! SIGBUS: how a page fault reaches the cache.
//!
//! An access to a page that is not mapped, or a store to a page that is write-protected, is SIGBUS
//! for the thread that made it. The handler finds the mapping by the address, has the cache handle
//! the fault, and returns: the CPU repeats the access. Nothing on this way allocates, and all
//! signals of the thread are blocked meanwhile.
//!
//! A SIGBUS that is not the cache's goes to the handler that was there before, or ends the process
//! as it would have: so do errors of storage and accesses beyond the end of a file. If the program
//! installs a handler of its own later, the cache no longer hears of faults; that handler must call
//! the one that it has replaced.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::{fault, mapped_places, sys};

/// What was to happen at SIGBUS before.
struct Previous(libc::sigaction);

// SAFETY: it is plain data; a handler in it belongs to the whole process.
unsafe impl Send for Previous {}
// SAFETY: as above.
unsafe impl Sync for Previous {}

static PREVIOUS: OnceLock<Previous> = OnceLock::new();

/// Installs the handler, once in the life of the process.
pub(crate) fn install() -> Result<()> {
    let mut result = Ok(());
    PREVIOUS.get_or_init(|| {
        let previous = action();
        result = install_own().map_err(|errno| Error::of("installing a handler of SIGBUS", errno));
        Previous(previous)
    });
    result
}

/// What happens at SIGBUS now.
fn action() -> libc::sigaction {
    // SAFETY: the structure is plain data, which the call fills.
    unsafe {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut action);
        action
    }
}

fn install_own() -> Result<(), Errno> {
    // SAFETY: the structure is plain data, which the calls fill and read.
    unsafe {
        let mut own = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        own.sa_sigaction = on_sigbus as *const () as usize;
        own.sa_flags = libc::SA_SIGINFO;
        libc::sigfillset(&raw mut own.sa_mask);
        match libc::sigaction(libc::SIGBUS, &raw const own, ptr::null_mut()) {
            0 => Ok(()),
            _ => Err(Errno::INVAL),
        }
    }
}

/// Bytes of an alternate stack that must be left for a fault.
const STACK: usize = 28 << 10;

const SMALL_STACK: &str = "vellum-aquila: a signal handler faulted in a mapping on an alternate \
     stack (sigaltstack) that is too small; make the stack 48 KiB or larger\n";

/// Whether the handler runs on an alternate stack (`sigaltstack`) that is too small: it has
/// interrupted another handler that runs there.
fn is_on_a_small_stack(context: *mut libc::c_void) -> bool {
    let here = 0_u8;
    // SAFETY: the kernel gives a handler the thread's alternate stack.
    let stack = unsafe { (*context.cast::<libc::ucontext_t>()).uc_stack };
    let left = (&raw const here).addr().checked_sub(stack.ss_sp.addr());
    let is_there = |left: usize| left < stack.ss_size && left < STACK;
    stack.ss_flags & libc::SS_DISABLE == 0 && left.is_some_and(is_there)
}

/// The handler.
extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    sys::keeping_errno(|| {
        // A handler of the program's that calls this one may have left signals open.
        let blocked = sys::BlockedSignals::new();
        // SAFETY: the kernel gives a handler both structures.
        let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
        if code == libc::BUS_ADRERR
            && is_on_a_small_stack(context)
            && mapped_places::at(address).is_some()
        {
            // Going on would overwrite what is below the stack.
            // SAFETY: if the program has closed it, the call fails.
            let stderr = unsafe { sys::borrow(libc::STDERR_FILENO) };
            let _ = rustix::io::write(stderr, SMALL_STACK.as_bytes());
            return end(signal, info);
        }
        // An access to a page that cannot be had. What others send, and errors of memory, is the
        // program's.
        let is_handled = code == libc::BUS_ADRERR && is_handled(address, is_store(context));
        drop(blocked);
        if !is_handled {
            pass_on(signal, info, context);
        }
    });
}

/// Has the cache handle a fault. Returns false if there is none at the address, or if it failed.
fn is_handled(address: usize, is_store: bool) -> bool {
    let handled =
        fault::at(address, |shared, place, page| shared.fault(place, page, is_store).is_ok());
    handled.unwrap_or(false)
}

/// Whether the access that faulted was a store.
#[cfg(target_arch = "x86_64")]
fn is_store(context: *mut libc::c_void) -> bool {
    const STORE: i64 = 1 << 1;
    // SAFETY: the kernel gives a handler the thread's registers.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_ERR as usize] & STORE != 0
}

/// Other CPUs do not tell in a way that is the same for all: a page that counts as dirty without
/// need is written once too often, and nothing else.
#[cfg(not(target_arch = "x86_64"))]
fn is_store(_: *mut libc::c_void) -> bool {
    true
}

/// Does what would have happened without the cache.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // While the handler is being installed there is nothing that could fault.
    let Some(Previous(previous)) = PREVIOUS.get() else {
        return end(signal, info);
    };
    match previous.sa_sigaction {
        libc::SIG_DFL => end(signal, info),
        // The kernel does not ignore the fault of an access either: it would repeat for ever.
        // SAFETY: the kernel gives a handler the structure.
        libc::SIG_IGN if unsafe { (*info).si_code } > 0 => end(signal, info),
        libc::SIG_IGN => {}
        handler => {
            // The mask of the code that called this handler comes back afterwards.
            let _mask = sys::BlockedSignals::for_changes();
            set_mask(previous, context);
            // SAFETY: the address is the one of a handler of the kind that the flag tells.
            unsafe {
                if previous.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(
                        libc::c_int,
                        *mut libc::siginfo_t,
                        *mut libc::c_void,
                    ) = std::mem::transmute(handler);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                    handler(signal);
                }
            }
            // A signal that another process has sent says nothing of later faults. A handler that
            // gives up (that of Rust's library waits for the access to be repeated) must not take
            // the faults away from the caches.
            // SAFETY: the kernel gives a handler the structure.
            let is_sent = unsafe { (*info).si_code } <= 0;
            if is_sent && action().sa_sigaction == libc::SIG_DFL {
                let _ = install_own();
            }
        }
    }
}

/// Blocks the signals that would be blocked in the previous handler, and no others.
fn set_mask(previous: &libc::sigaction, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler the mask of the interrupted code; the calls read and fill
    // sets.
    unsafe {
        let mut mask = (*context.cast::<libc::ucontext_t>()).uc_sigmask;
        for signal in 1..=64 {
            if libc::sigismember(&raw const previous.sa_mask, signal) == 1 {
                libc::sigaddset(&raw mut mask, signal);
            }
        }
        if previous.sa_flags & libc::SA_NODEFER == 0 {
            libc::sigaddset(&raw mut mask, libc::SIGBUS);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, ptr::null_mut());
    }
}

/// Ends the process by the signal, with the address of the access in its report: the default action
/// is back when the handler returns and the CPU repeats the access.
fn end(signal: libc::c_int, info: *mut libc::siginfo_t) {
    // SAFETY: the structures are plain data; both calls are allowed in a handler.
    unsafe {
        let mut default = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &raw const default, ptr::null_mut());
        if (*info).si_code <= 0 {
            // Another process sent it: there is no access to repeat.
            libc::raise(signal);
        }
    }
}
