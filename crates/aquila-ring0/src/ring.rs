//! An io_uring that ring 0 uses without exits: a thread of the kernel takes the requests.
//!
//! Ring 0 writes a request to memory that it shares with the kernel, and looks there for the
//! result. It makes a system call only when the thread of the kernel sleeps, and when it has waited
//! for long. Each call waits for its own request, and takes the results of others meanwhile.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::{fmt, ptr, thread};

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use vellum_aquila_core::MOST_PAGES;

use crate::error::{Error, Result};
use crate::message::stop;
use crate::sys::{keeping_errno, raw_system_call};

/// Requests at a time. The parts of the ring have a page each, so that KVM finds them in mappings
/// of all kinds.
const SLOTS: u32 = 32;

/// Milliseconds without requests after which the thread of the kernel sleeps.
const IDLE: u32 = 50;

/// How often a waiting thread looks before it gives its processor away, by a system call. On a
/// machine with one processor it does so at once: the thread of the kernel needs it.
const LOOKS: u32 = 20_000;

/// What a slot has instead of a result.
const FREE: i64 = i64::MIN;
const WAITING: i64 = i64::MIN + 1;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
}

/// The ring.
pub(crate) struct Ring {
    ring: IoUring,
    looks: u32,
    /// A thread submits a request or takes results.
    is_locked: AtomicBool,
    /// The result of each request, by the number that it has.
    slots: [AtomicI64; SLOTS as usize],
    /// The vectors of each request. They are not on the thread's stack, because the kernel reads
    /// them at any time.
    vectors: [UnsafeCell<[libc::iovec; MOST_PAGES as usize]>; SLOTS as usize],
}

// SAFETY: the lock, and the thread that has a slot has its vectors.
unsafe impl Sync for Ring {}
// SAFETY: vectors are addresses only.
unsafe impl Send for Ring {}

impl fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    /// # Errors
    /// What the system said.
    pub(crate) fn new() -> Result<Self> {
        let failed = |error: std::io::Error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Error::of("making an io_uring that the kernel polls", errno)
        };
        let ring = IoUring::builder().setup_sqpoll(IDLE).build(SLOTS).map_err(failed)?;
        let slots = [const { AtomicI64::new(FREE) }; SLOTS as usize];
        let looks =
            if thread::available_parallelism().is_ok_and(|n| n.get() == 1) { 0 } else { LOOKS };
        const EMPTY: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let vectors = std::array::from_fn(|_| UnsafeCell::new([EMPTY; MOST_PAGES as usize]));
        Ok(Self { ring, looks, is_locked: AtomicBool::new(false), slots, vectors })
    }

    /// Reads or writes at a place of a file, and returns what the system call would.
    ///
    /// # Safety
    /// The vectors are those of memory that the thread has.
    pub(crate) unsafe fn call(
        &self,
        operation: Operation,
        file: i32,
        vectors: &[libc::iovec],
        place: u64,
    ) -> i64 {
        let slot = self.take_slot();
        // SAFETY: this thread has the slot, and the kernel has no request of it.
        let own = unsafe { &mut *self.vectors[slot].get() };
        own[..vectors.len()].copy_from_slice(vectors);
        let (file, at, count) = (types::Fd(file), own.as_ptr(), vectors.len() as u32);
        let entry = match operation {
            Operation::Read => opcode::Readv::new(file, at, count).offset(place).build(),
            Operation::Write => opcode::Writev::new(file, at, count).offset(place).build(),
        };
        let entry = entry.user_data(slot as u64);
        self.lock();
        // SAFETY: the lock. The memory is there until the result is, for which this call waits.
        // There is room, because each slot has one request.
        let pushed = unsafe { self.ring.submission_shared().push(&entry) };
        self.unlock();
        if pushed.is_err() {
            // The thread of the kernel has not taken those before: their results are there.
            self.slots[slot].store(FREE, Ordering::Release);
            return i64::from(-libc::EAGAIN);
        }
        self.wake();
        self.wait(slot)
    }

    /// A slot that is free.
    fn take_slot(&self) -> usize {
        let mut attempt = 0;
        loop {
            let (order, failed) = (Ordering::Acquire, Ordering::Relaxed);
            let is_taken = |slot: &AtomicI64| {
                slot.load(Ordering::Relaxed) == FREE
                    && slot.compare_exchange(FREE, WAITING, order, failed).is_ok()
            };
            if let Some(slot) = self.slots.iter().position(is_taken) {
                return slot;
            }
            self.take_results();
            self.rest(&mut attempt);
        }
    }

    /// Waits for the result of a slot, and gives the slot back.
    fn wait(&self, slot: usize) -> i64 {
        let mut attempt = 0;
        loop {
            let result = self.slots[slot].load(Ordering::Acquire);
            if result != WAITING {
                self.slots[slot].store(FREE, Ordering::Release);
                return result;
            }
            self.take_results();
            if self.rest(&mut attempt) {
                // It may have fallen asleep, or be gone.
                self.wake();
            }
        }
    }

    /// Takes the results that are there, unless another thread does.
    fn take_results(&self) {
        if self.is_locked.swap(true, Ordering::Acquire) {
            return;
        }
        // SAFETY: the lock.
        for entry in unsafe { self.ring.completion_shared() } {
            let slot = &self.slots[entry.user_data() as usize];
            slot.store(entry.result().into(), Ordering::Release);
        }
        self.unlock();
    }

    /// Wakes the thread of the kernel, if it sleeps.
    fn wake(&self) {
        let woken = keeping_errno(|| self.ring.submit());
        if let Err(error) = woken
            && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
        {
            // What is under way is never done. The program may have closed the descriptor.
            stop(format_args!("the ring of a cache does not work any more: {error}"));
        }
    }

    fn lock(&self) {
        let mut attempt = 0;
        while self.is_locked.swap(true, Ordering::Acquire) {
            self.rest(&mut attempt);
        }
    }

    fn unlock(&self) {
        self.is_locked.store(false, Ordering::Release);
    }

    /// Waits for a moment. Returns whether it gave the processor away.
    fn rest(&self, attempt: &mut u32) -> bool {
        *attempt += 1;
        if *attempt < self.looks {
            std::hint::spin_loop();
            return false;
        }
        // SAFETY: the call has no arguments.
        unsafe { raw_system_call(libc::SYS_sched_yield as u64, [0; 6]) };
        true
    }
}
