//! Whether a virtual processor runs, and what it has forgotten: what other threads must know of it,
//! and how they have it exit.
//!
//! A thread enters the guest in this order: it says that it runs, it looks which generation of
//! translations is the last, it forgets what is older, and it enters. A thread that begins a
//! generation looks afterwards who runs. So either the one sees the generation, or the other sees
//! that it runs, and *kicks* it: it sets a flag of KVM's, which has the next `KVM_RUN` return at
//! once, and sends a signal, which ends the present one.
//!
//! The signal is SIGTRAP, whose handler the machine has installed for other reasons. While a thread
//! is in ring 0 it is not blocked. Its handler *acknowledges* the kick: the guest does not run
//! then, and does not before the thread has looked for the last generation. So no thread waits for
//! a handler of the program's that runs on the other one. A thread that was kicked does not go on
//! before the signal has been delivered: so none comes when the thread does something else.
//!
//! A handler of the program's may take a thread out of ring 0 for good, and the thread may end
//! without a word. Then no signal reaches it, or one reaches the thread that has its number now.
//! Either way the thread that kicks learns that the processor is *lost*, and waits for it no more.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::sys::{raw_system_call, read_memory, rest, set_mask, thread_number};

/// The thread is not in the guest, nor about to enter it.
const OUT: u64 = 0;
/// It is, or a handler of a signal runs that came meanwhile.
const IN: u64 = 1;
/// It is, and another thread is sending it the signal.
const KICKING: u64 = 2;
/// It is, and the signal is on its way.
const KICKED: u64 = 3;
/// It is not in the guest any more, and has not said so itself yet.
const ACKNOWLEDGED: u64 = 4;

/// The bits of these. Above them is a number that each entry and each kick increments: so a thread
/// changes a state that it has seen, and no later one that is the same.
const STATE: u64 = 7;
const NEXT: u64 = 8;

/// The signal that ends `KVM_RUN`.
const KICK: libc::c_int = libc::SIGTRAP;
const KICK_BIT: u64 = 1 << (KICK - 1);

/// The `si_code` of a kick. The kernel and the C library use none of these numbers.
pub(crate) const KICK_CODE: libc::c_int = -0x7a11;

/// Bits of a kick's value that tell it from others of the same processor.
const KICK_NUMBER: u32 = 29;

/// The value of the last kick that has reached a thread which does not use its processor.
static ASTRAY: AtomicU64 = AtomicU64::new(0);

/// A virtual processor, as other threads see it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Running {
    /// The processor has forgotten all translations of earlier generations than this one.
    seen: AtomicU64,
    /// One of the states above, and the number that tells it from earlier ones.
    word: AtomicU64,
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
            word: AtomicU64::new(OUT),
            thread: AtomicU32::new(0),
            exit_at_once: AtomicPtr::new(exit_at_once.cast()),
        }
    }

    // For the thread that uses the processor.

    /// The calling thread uses the processor from now on. Returns whether it has the signal
    /// [blocked](unblock), which it has not while it uses the processor.
    pub(crate) fn take(&self) -> bool {
        self.thread.store(thread_number() as u32, Ordering::Relaxed);
        unblock()
    }

    /// The thread is about to enter the guest. Afterwards it looks for the last generation.
    pub(crate) fn enter(&self) {
        let word = self.word.load(Ordering::Relaxed);
        self.flag().store(0, Ordering::SeqCst);
        self.word.store(((word & !STATE) + NEXT) | IN, Ordering::SeqCst);
    }

    /// The thread has left the guest, or has left that before. Returns whether it was kicked.
    pub(crate) fn leave(&self) -> bool {
        let mut attempt = 0;
        loop {
            let word = self.word.load(Ordering::SeqCst);
            match word & STATE {
                OUT => return false,
                IN if self.change(word, OUT) => return false,
                IN => {}
                KICKING => {
                    attempt += 1;
                    rest(attempt);
                }
                _ => {
                    // If the signal is still to come, it comes during these calls. The handler of
                    // another signal may have blocked it.
                    unblock();
                    // SAFETY: the call has no arguments.
                    unsafe { raw_system_call(libc::SYS_sched_yield as u64, [0; 6]) };
                    let word = self.word.load(Ordering::SeqCst);
                    if word & STATE != KICKING {
                        self.flag().store(0, Ordering::SeqCst);
                        if self.change(word, OUT) {
                            return true;
                        }
                    }
                }
            }
        }
    }

    /// Whether the processor has not seen the generation.
    pub(crate) fn is_before(&self, generation: u64) -> bool {
        self.seen.load(Ordering::SeqCst) < generation
    }

    /// Says that the processor has forgotten, or forgets before it runs, all translations that are
    /// older than the generation.
    pub(crate) fn see(&self, generation: u64) {
        self.seen.fetch_max(generation, Ordering::SeqCst);
    }

    /// Takes a kick that has just arrived at the calling thread, which uses the processor `own` if
    /// it uses any.
    pub(crate) fn take_kick(own: Option<&Self>, value: u64) {
        match own {
            Some(own) if own.kick_value(0) >> KICK_NUMBER == value >> KICK_NUMBER => {
                own.acknowledge();
            }
            _ => ASTRAY.store(value, Ordering::SeqCst),
        }
    }

    /// Says that the thread is not in the guest, if a signal that has just arrived at it is a kick.
    /// Returns whether it is. While another thread is sending one, this waits: what has arrived may
    /// be an earlier signal, and the flag of the new kick is not set yet.
    pub(crate) fn acknowledge(&self) -> bool {
        let mut attempt = 0;
        loop {
            let word = self.word.load(Ordering::SeqCst);
            match word & STATE {
                KICKING => {
                    attempt += 1;
                    rest(attempt);
                }
                KICKED if self.change(word, ACKNOWLEDGED) => return true,
                KICKED => {}
                // One that was sent twice.
                state => return state == ACKNOWLEDGED,
            }
        }
    }

    /// The thread is in ring 3, in a handler of a signal that came while it was about to enter the
    /// guest, in the guest, or elsewhere: it does not enter before it has looked for the last
    /// generation.
    pub(crate) fn stay_out(&self) {
        let word = self.word.load(Ordering::SeqCst);
        if word & STATE == IN {
            self.flag().store(1, Ordering::SeqCst);
            // If another thread kicks it meanwhile, that does the same.
            self.change(word, ACKNOWLEDGED);
        }
    }

    // For other threads.

    /// Has the thread leave the guest, if it is there and has not seen the generation. The caller
    /// has installed the handler of the signal. `again` sends it once more to a thread that has
    /// been sent it, because the program may have ignored it. Returns true once if the processor is
    /// lost: then it is not in the guest.
    pub(crate) fn kick(&self, generation: u64, again: bool) -> bool {
        let word = self.word.load(Ordering::SeqCst);
        let is_due = match word & STATE {
            IN => true,
            KICKED => again,
            _ => false,
        };
        let kicking = ((word & !STATE) + NEXT) | KICKING;
        let (order, failed) = (Ordering::SeqCst, Ordering::SeqCst);
        if !is_due
            || !self.is_before(generation)
            || self.word.compare_exchange(word, kicking, order, failed).is_err()
        {
            return false;
        }
        let went_astray = again && ASTRAY.load(Ordering::SeqCst) == self.kick_value(word);
        self.flag().store(1, Ordering::SeqCst);
        if went_astray || !self.send(self.kick_value(kicking), again) {
            // No thread runs the processor any more.
            self.flag().store(0, Ordering::SeqCst);
            return self.change(kicking, OUT);
        }
        // The handler may have been faster.
        self.change(kicking, KICKED);
        false
    }

    /// What tells a kick from others: the processor, and the number in the word.
    fn kick_value(&self, word: u64) -> u64 {
        // A page has one.
        let processor = (ptr::from_ref(self).addr() >> 12) as u64;
        processor << KICK_NUMBER | (word / NEXT) & ((1 << KICK_NUMBER) - 1)
    }

    /// Sends the signal to the thread, which does not go on meanwhile. Returns false if the thread
    /// has ended. Of the process' first thread the kernel says that only if it is asked (`again`).
    fn send(&self, value: u64, again: bool) -> bool {
        const GONE: i64 = -(libc::ESRCH as i64);
        let thread = u64::from(self.thread.load(Ordering::Relaxed));
        let process = u64::from(std::process::id());
        let mut about = [0_u64; 16];
        [about[0], about[1]] = [KICK as u64, u64::from(KICK_CODE.cast_unsigned())];
        [about[2], about[3]] = [process, value];
        let at = (&raw const about).addr() as u64;
        let arguments = [process, thread, KICK as u64, at, 0, 0];
        // SAFETY: the thread is one of this process', and its handler knows the code.
        let sent = unsafe { raw_system_call(libc::SYS_rt_tgsigqueueinfo as u64, arguments) };
        sent != GONE && !(again && read_memory(thread, at, &mut [0]) == GONE)
    }

    /// Whether the thread may be in the guest with translations of earlier generations.
    pub(crate) fn is_behind(&self, generation: u64) -> bool {
        let state = self.word.load(Ordering::SeqCst) & STATE;
        !matches!(state, OUT | ACKNOWLEDGED) && self.is_before(generation)
    }

    /// Changes the state, if the word is still this one.
    fn change(&self, word: u64, state: u64) -> bool {
        let new = word & !STATE | state;
        self.word.compare_exchange(word, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
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
