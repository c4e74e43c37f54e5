//! The interface: a machine, and functions that run in its ring 0.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::cache::Replacement;
use crate::counts::{Check, Counts};
use crate::entry;
use crate::error::{Error, Result};
use crate::exits::CALLS;
use crate::guest::{Guest, Handler};
use crate::mapping::Cache;
use crate::memory::pointer;
use crate::sys::is_in_ring_0;
use crate::{current, native, self_test};

/// A virtual machine with the memory of the process, in whose ring 0 threads run.
#[derive(Debug)]
pub struct VirtualMachine {
    guest: Arc<Guest>,
    nanoseconds: f64,
}

impl VirtualMachine {
    /// Makes a machine, and tests it. Takes some milliseconds.
    ///
    /// # Errors
    /// [`Error::NoKvm`] if `/dev/kvm` does not open, [`Error::Interpreted`] if KVM does not run
    /// guests on the processor, [`Error::Missing`] if something else is missing.
    pub fn new() -> Result<Self> {
        Self::with(true)
    }

    /// Makes a machine whose page tables have no entries of 1 GiB, as on processors that lack them:
    /// for tests.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    #[doc(hidden)]
    pub fn without_large_pages() -> Result<Self> {
        Self::with(false)
    }

    fn with(has_large_pages: bool) -> Result<Self> {
        let guest = Arc::new(Guest::new(CALLS, has_large_pages)?);
        let mut processor = guest.take()?;
        let nanoseconds = self_test::run(&guest, &mut processor)?;
        guest.give(processor);
        native::install()?;
        Ok(Self { guest, nanoseconds })
    }

    /// Runs a function in ring 0, on the calling thread, and returns what it returns. A panic of
    /// the function goes on in ring 3.
    ///
    /// # Errors
    /// [`Error::Inside`] if the thread is in ring 0 already, [`Error::Forked`] in a child of the
    /// process that made the machine, and [`Error::Missing`] or [`Error::NoMemory`] if there is no
    /// virtual processor for the thread.
    pub fn run<T>(&self, function: impl FnOnce() -> T) -> Result<T> {
        if !self.guest.is_own_process() {
            return Err(Error::Forked);
        }
        if !current::block().is_null() {
            return Err(Error::Inside);
        }
        let mut processor = self.guest.take()?;
        let start = (entry::resume as *const () as u64, 0);
        let prepared = processor.prepare(start, self.guest.managed());
        if let Err(error) = prepared {
            self.guest.give(processor);
            return Err(error);
        }
        let block = processor.block();
        current::set_block(block);
        // From here to the end of the function's run, the processor belongs to what serves exits.
        let processor = Box::into_raw(processor);
        // SAFETY: the processor is ready, and this thread has it alone.
        unsafe { entry::enter(block) };
        let result = catch_unwind(AssertUnwindSafe(function));
        // SAFETY: the thread has entered above.
        unsafe { entry::leave() };
        // A handler that has left by `longjmp` has left ring 0, and has not said so.
        // SAFETY: the thread still has the block, and this part is atomic.
        unsafe { (*block).running.leave() };
        current::set_block(std::ptr::null_mut());
        // A child that the function has forked comes here, too, in ring 3. What it has of the
        // machine is of no use, and its lock may be one that a thread of the parent has.
        if self.guest.is_own_process() {
            // SAFETY: it was a box, and the thread has left it.
            self.guest.give(unsafe { Box::from_raw(processor) });
        }
        Ok(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    /// Reserves addresses for pages that a handler fills, in ring 0, when threads first access
    /// them. The pages stay until the machine is dropped.
    ///
    /// # Errors
    /// [`Error::OnlyInRing3`], [`Error::Forked`], [`Error::TooManyRanges`], and [`Error::NoMemory`]
    /// if addresses run out.
    pub fn manage(&self, pages: usize, handler: Box<dyn Handler>) -> Result<Managed<'_>> {
        if is_in_ring_0() {
            return Err(Error::OnlyInRing3 { doing: "making a managed range" });
        }
        if !self.guest.is_own_process() {
            return Err(Error::Forked);
        }
        let start = self.guest.manage(pages, handler)?;
        Ok(Managed { start, pages, _machine: PhantomData })
    }

    /// Makes a cache of file pages, of which ring 0 handles the faults. It has so many pages of
    /// memory.
    ///
    /// # Errors
    /// [`Error::HasCache`] if the machine has one, [`Error::OnlyInRing3`], [`Error::Forked`],
    /// [`Error::NoMemory`], and [`Error::System`] for zero or too many pages.
    pub fn cache(&self, pages: u32, replacement: Replacement) -> Result<Cache<'_>> {
        if is_in_ring_0() {
            return Err(Error::OnlyInRing3 { doing: "making a cache" });
        }
        let cache = self.guest.make_cache(pages, replacement)?;
        Ok(Cache::new(&self.guest, cache))
    }

    /// What has happened so far. Makes no system call, and takes no lock.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.guest.each(|each| {
            counts.exits += each.exits.load(Ordering::Relaxed);
            counts.system_calls += each.system_calls.load(Ordering::Relaxed);
            counts.window_faults += each.windows.load(Ordering::Relaxed);
            counts.interrupted += each.interrupted.load(Ordering::Relaxed);
            counts.native_steps += each.native_steps.load(Ordering::Relaxed);
            counts.managed_faults += each.managed_faults.load(Ordering::Relaxed);
            counts.kicks += each.kicks.load(Ordering::Relaxed);
        });
        counts.windows = self.guest.memory.windows();
        counts
    }
}

impl Drop for VirtualMachine {
    fn drop(&mut self) {
        // A forked child does not have KVM's pages: others of its own may be at their addresses.
        if !self.guest.is_own_process() {
            std::mem::forget(Arc::clone(&self.guest));
        }
    }
}

/// A managed range: [`VirtualMachine::manage`].
#[derive(Debug)]
pub struct Managed<'machine> {
    start: u64,
    pages: usize,
    _machine: PhantomData<&'machine VirtualMachine>,
}

impl Managed<'_> {
    /// Its first byte. Only threads in ring 0 may access it: elsewhere it is SIGSEGV.
    pub fn as_ptr(&self) -> *mut u8 {
        pointer(self.start)
    }

    /// Its pages.
    pub fn pages(&self) -> usize {
        self.pages
    }
}

/// Tests whether threads can go to ring 0 here, by running a guest. Takes some milliseconds.
pub fn doctor() -> Check {
    let run = VirtualMachine::new().and_then(|machine| {
        let is_there = machine.run(is_in_ring_0)?;
        Ok((is_there, machine.nanoseconds))
    });
    match run {
        Ok((true, nanoseconds)) => Check {
            works: true,
            about: format!(
                "a thread went there and back; an instruction takes {nanoseconds:.1} ns there"
            ),
        },
        Ok((false, _)) => {
            Check { works: false, about: "the guest did not run in ring 0".to_owned() }
        }
        Err(error) => Check { works: false, about: error.to_string() },
    }
}
