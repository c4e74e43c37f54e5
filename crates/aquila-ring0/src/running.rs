//! Whether a virtual processor runs, and what it has forgotten: what other threads must know of it,
//! and how they have it exit.
//!
//! A thread enters the guest in this order: it says that it runs, it looks which generation of
//! translations is the last, it forgets what is older, and it enters. A thread that begins a
//! generation looks afterwards who runs. So either the one sees the generation, or the other sees
//! that it runs, and *kicks* it: it sends a signal, which ends `KVM_RUN`, and sets a flag of KVM's
//! for the case that the signal comes before the call.
//!
//! The signal is SIGTRAP, whose handler the machine has installed for other reasons. While a thread
//! is in ring 0 it is not blocked. A thread that was kicked does not go on before the signal has
//! been delivered: so none comes when the thread does something else.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::sys::{raw_system_call, set_mask};

/// The thread is not in the guest, nor about to enter it.
const OUT: u32 = 0;
/// It is.
const IN: u32 = 1;
/// It is, and another thread is sending it the signal.
const KICKING: u32 = 2;
/// It is, and the signal is on its way.
const KICKED: u32 = 3;

/// The signal that ends `KVM_RUN`.
const KICK: libc::c_int = libc::SIGTRAP;
const KICK_BIT: u64 = 1 << (KICK - 1);

/// A virtual processor, as other threads see it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Running {
    /// The processor has forgotten all translations of earlier generations than this one.
    seen: AtomicU64,
    state: AtomicU32,
    /// The thread that uses it.
    thread: AtomicU32,
    /// KVM's flag, which has the next `KVM_RUN` return at once.
    exit_at_once: AtomicPtr<AtomicU8>,
}

impl Running {
    /// A processor with a flag of KVM's, which lives as long.
    pub(crate) fn new(exit_at_once: *mut u8) -> Self {
        Self {
            seen: AtomicU64::new(0),
            state: AtomicU32::new(OUT),
            thread: AtomicU32::new(0),
            exit_at_once: AtomicPtr::new(exit_at_once.cast()),
        }
    }

    // For the thread that uses the processor.

    /// The calling thread uses the processor from now on. Returns whether it has the signal
    /// [blocked](unblock), which it has not while it uses the processor.
    pub(crate) fn take(&self) -> bool {
        // SAFETY: the call has no arguments.
        let thread = unsafe { raw_system_call(libc::SYS_gettid as u64, [0; 6]) };
        self.thread.store(thread as u32, Ordering::Relaxed);
        unblock()
    }

    /// The thread is about to enter the guest. Afterwards it looks for the last generation.
    pub(crate) fn enter(&self) {
        self.state.store(IN, Ordering::SeqCst);
    }

    /// The thread has left the guest. Returns whether it was kicked.
    pub(crate) fn leave(&self) -> bool {
        let (order, failed) = (Ordering::SeqCst, Ordering::SeqCst);
        while let Err(found) = self.state.compare_exchange(IN, OUT, order, failed) {
            // If the signal was sent, the call does not return before its handler has run.
            // SAFETY: the call has no arguments.
            unsafe { raw_system_call(libc::SYS_sched_yield as u64, [0; 6]) };
            if found == KICKED {
                self.flag().store(0, Ordering::SeqCst);
                self.state.store(OUT, Ordering::SeqCst);
                return true;
            }
        }
        false
    }

    /// Whether the processor has not seen the generation.
    pub(crate) fn is_before(&self, generation: u64) -> bool {
        self.seen.load(Ordering::SeqCst) < generation
    }

    /// Says that the processor has forgotten, or forgets before it runs, all translations that are
    /// older than the generation. Returns whether that is news.
    pub(crate) fn see(&self, generation: u64) -> bool {
        self.seen.fetch_max(generation, Ordering::SeqCst) < generation
    }

    /// Whether a signal that has just arrived at the thread may be a kick.
    pub(crate) fn is_kicked(&self) -> bool {
        matches!(self.state.load(Ordering::SeqCst), KICKING | KICKED)
    }

    // For other threads.

    /// Has the thread leave the guest, if it is there and has not seen the generation. The caller
    /// has installed the handler of the signal.
    pub(crate) fn kick(&self, generation: u64) {
        let (order, failed) = (Ordering::SeqCst, Ordering::SeqCst);
        if !self.is_behind(generation)
            || self.state.compare_exchange(IN, KICKING, order, failed).is_err()
        {
            return;
        }
        self.flag().store(1, Ordering::SeqCst);
        let thread = u64::from(self.thread.load(Ordering::Relaxed));
        let process = u64::from(std::process::id());
        // SAFETY: the thread is one of this process', in the guest, and has not left it, because it
        // waits for the state below first.
        unsafe {
            raw_system_call(libc::SYS_tgkill as u64, [process, thread, KICK as u64, 0, 0, 0])
        };
        self.state.store(KICKED, Ordering::SeqCst);
    }

    /// Whether the thread may be in the guest with translations of earlier generations.
    pub(crate) fn is_behind(&self, generation: u64) -> bool {
        self.state.load(Ordering::SeqCst) != OUT && self.is_before(generation)
    }

    fn flag(&self) -> &AtomicU8 {
        // SAFETY: the flag lives as long as the processor, and KVM only reads it.
        unsafe { &*self.exit_at_once.load(Ordering::Relaxed) }
    }
}

/// Has the calling thread block the signal again, if the program has blocked it.
pub(crate) fn block(is_blocked: bool) {
    if is_blocked {
        set_mask(libc::SIG_BLOCK, KICK_BIT);
    }
}

/// Has the calling thread not block the signal. Returns whether it did.
pub(crate) fn unblock() -> bool {
    set_mask(libc::SIG_UNBLOCK, KICK_BIT) & KICK_BIT != 0
}

/// Whether two are the same.
pub(crate) fn is_same(one: &Running, other: &Running) -> bool {
    ptr::eq(one, other)
}
