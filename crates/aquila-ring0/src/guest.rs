//! The virtual machine of a process: its memory, its virtual processors, its managed ranges.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fmt;
use std::os::fd::{AsRawFd as _, BorrowedFd, IntoRawFd as _};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm, VmFd};
use rustix::io::Errno;
use rustix::mm::ProtFlags;

use crate::cache::{PageCache, Replacement};
use crate::counters::Counts;
use crate::current_processor;
use crate::descriptors::{self, Kept};
use crate::entry::{self, LOST, PAGE};
use crate::error::{Error, Result};
use crate::memory::{KVM_PAGES, MANAGED, Mapped, Memory, Window, pointer};
use crate::message::{append, say, stop};
use crate::pages::{Pages, RANGES};
use crate::processor::{self, Calls, Model, Processor};
use crate::shootdown::{self, Shootdown};
use crate::sys::is_in_ring_0;

/// The version of KVM's interface, which has not changed since 2007.
const VERSION: i32 = 12;

const MAKING: &str = "making a virtual machine";

/// Pages that a cache has at least. [`VirtualMachine::cache`](crate::VirtualMachine::cache) says
/// why.
const LEAST_FRAMES: u32 = 8;

/// What has the contents of a managed range's pages.
pub trait Handler: Send + Sync {
    /// Fills a page that a thread has accessed for the first time. Returns false if the page cannot
    /// be had: then the access is SIGSEGV, and the next access asks once more.
    ///
    /// It runs in ring 0 in the middle of the thread's code, as a handler of a signal does, on a
    /// stack of 64 KiB. So it must not allocate (the thread may have the allocator's lock), panic,
    /// wait for a lock that a thread may hold while it accesses the range, or access a managed
    /// range. It must return: until then other threads wait for the page. System calls are allowed.
    fn fill(&self, page: usize, frame: &mut [u8; PAGE]) -> bool;
}

/// A managed range.
pub(crate) struct ManagedRange {
    start: u64,
    pages: u64,
    backing: Backing,
}

/// What has the pages of a range.
enum Backing {
    /// A handler, which fills each once.
    Filled {
        /// Memory for as many pages, in their order, and its guest-physical address.
        frames: Mapped,
        place: u64,
        handler: Box<dyn Handler>,
    },
    /// A file of this number in the machine's cache.
    Cached(u32),
}

impl ManagedRange {
    /// The address after the last.
    fn end(&self) -> u64 {
        self.start + self.pages * PAGE as u64
    }

    /// Maps the page at an address; false if it cannot be had.
    fn fault(&self, guest: &Guest, address: u64, is_store: bool) -> bool {
        let page = (address - self.start) / PAGE as u64;
        let (frames, place, handler) = match &self.backing {
            Backing::Filled { frames, place, handler } => (frames, place, handler),
            Backing::Cached(file) => {
                return guest.cache.get().is_some_and(|cache| cache.fault(*file, page, is_store));
            }
        };
        guest.memory.map_page(address, || {
            let frame = page * PAGE as u64;
            // SAFETY: this thread alone has the frame, which no table maps yet.
            let bytes = unsafe { &mut *pointer::<[u8; PAGE]>(frames.start() + frame) };
            handler.fill(page as usize, bytes).then_some(place + frame)
        })
    }
}

/// What managed ranges have taken.
#[derive(Debug)]
struct Taken {
    /// The next address that is free.
    next: u64,
    ranges: usize,
}

/// A virtual machine.
pub(crate) struct Guest {
    _descriptor: Kept,
    vm: VmFd,
    pub(crate) memory: Arc<Memory>,
    pub(crate) shootdown: Arc<Shootdown>,
    cache: OnceLock<PageCache>,
    model: Model,
    calls: Calls,
    process: u32,
    most_processors: usize,
    /// The number of the next new processor. KVM keeps a number also if what follows fails.
    next_processor: Mutex<usize>,
    /// Addresses for managed ranges, inaccessible for the process.
    managed: Mapped,
    taken: Mutex<Taken>,
    ranges: [AtomicPtr<ManagedRange>; RANGES],
    /// The file that gets the figures when the process exits, and the name before them.
    report: OnceLock<(CString, String)>,
}

impl fmt::Debug for Guest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Guest").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Guest {
    /// A machine with a window for the entries, and one for its own structures.
    ///
    /// # Errors
    /// When there is no KVM, it lacks something, or memory runs out.
    pub(crate) fn new(calls: Calls, has_large_pages: bool) -> Result<Self> {
        let failed = || Error::kvm(MAKING);
        let kvm = Kvm::new().map_err(|error| no_kvm(Errno::from_raw_os_error(error.errno())))?;
        let advice = "update the kernel";
        if kvm.get_api_version() != VERSION {
            return Err(Error::Missing { what: "version 12 of KVM's interface", advice });
        }
        if !kvm.check_extension(Cap::SyncRegs) {
            return Err(Error::Missing { what: "KVM_CAP_SYNC_REGS", advice });
        }
        if processor::has_shadow_stack() {
            return Err(Error::Missing {
                what: "a thread without a shadow stack",
                advice: "unset glibc.cpu.x86_shstk in GLIBC_TUNABLES",
            });
        }
        let made = without_signal(|| kvm.create_vm()).map_err(failed())?;
        // SAFETY: it is open until it is dropped, below.
        let borrowed = unsafe { BorrowedFd::borrow_raw(made.as_raw_fd()) };
        let (own, descriptor) =
            descriptors::keep(borrowed).map_err(|errno| Error::of(MAKING, errno))?;
        // SAFETY: the descriptor is that of a virtual machine, and nothing else closes it.
        let vm = unsafe { kvm.create_vmfd_from_rawfd(own.into_raw_fd()) }.map_err(failed())?;
        drop(made);
        // What KVM needs on Intel goes where no memory of the process is.
        vm.set_identity_map_address(KVM_PAGES).map_err(failed())?;
        vm.set_tss_address(KVM_PAGES as usize + PAGE).map_err(failed())?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(failed())?;
        let mut model = Model::new(cpuid)?;
        let slots = kvm.get_nr_memslots() as u32;
        let large = has_large_pages && model.has_large_pages;
        let memory = Arc::new(Memory::new(&vm, model.bits, slots, large)?);
        model.make_interrupts(&memory)?;
        let managed = Mapped::new(MANAGED, MANAGED, ProtFlags::empty())?;
        let guest = Self {
            _descriptor: descriptor,
            vm,
            memory,
            shootdown: Arc::new(Shootdown::new()),
            cache: OnceLock::new(),
            model,
            calls,
            process: std::process::id(),
            most_processors: kvm.get_max_vcpus().min(shootdown::MOST),
            next_processor: Mutex::default(),
            taken: Mutex::new(Taken { next: managed.start(), ranges: 0 }),
            managed,
            ranges: [const { AtomicPtr::new(std::ptr::null_mut()) }; RANGES],
            report: OnceLock::new(),
        };
        let own = guest.memory.pages(1)?;
        let tables = guest.memory.leaves();
        for address in processor::entries().into_iter().chain([own, tables]) {
            if guest.make_window(address) == Window::None {
                return Err(Error::NoMemory { doing: "giving a guest memory" });
            }
        }
        Ok(guest)
    }

    /// Whether this is the process that made the machine, and not a child of it.
    pub(crate) fn is_own_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// Held while something is taken of what the machine has once.
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Processors that no thread has. The caller has all that it takes from the iterator.
    fn idle(&self) -> impl Iterator<Item = Box<Processor>> {
        self.shootdown.blocks().filter_map(|block| {
            // SAFETY: blocks live as long as the machine, and this part of them is atomic.
            let was_idle = unsafe { (*block).is_idle.swap(0, Ordering::Acquire) };
            // SAFETY: it was a box, which `give`, or a thread that has ended, has left to the one
            // that finds it.
            let found = (was_idle != 0)
                .then(|| unsafe { Box::<Processor>::from_raw(pointer((*block).processor)) });
            // One of which KVM says nothing is of no use.
            found.filter(|found| was_idle != LOST || found.forget_events().is_ok())
        })
    }

    /// A virtual processor for the calling thread: one that no thread uses, or a new one.
    ///
    /// # Errors
    /// When KVM has no more, or memory runs out, or another thread must be alone.
    pub(crate) fn take(&self) -> Result<Box<Processor>> {
        let next = self.next_processor.lock();
        let mut next = next.unwrap_or_else(PoisonError::into_inner);
        if let Some(processor) = self.idle().next() {
            return Ok(processor);
        }
        let id = *next;
        if id >= self.most_processors {
            return Err(Error::Missing {
                what: "one more virtual processor",
                advice: "have fewer threads in ring 0 at the same time",
            });
        }
        *next += 1;
        let size = self.vm.run_size();
        let place = (id as u32, size);
        let processor = Processor::new(&self.vm, &self.memory, &self.model, place, self.calls)?;
        let block = processor.block();
        let guest: *const Self = self;
        // SAFETY: no thread uses the processor yet.
        unsafe {
            (*block).guest = guest.expose_provenance() as u64;
            (*block).shootdown = Arc::as_ptr(&self.shootdown).addr();
        }
        self.shootdown.add(block);
        Ok(processor)
    }

    /// Gives a virtual processor back.
    pub(crate) fn give(&self, processor: Box<Processor>) {
        let block = processor.block();
        let _ = Box::into_raw(processor);
        // SAFETY: blocks live as long as the machine, and this part of them is atomic.
        unsafe { (*block).is_idle.store(1, Ordering::Release) };
    }

    /// Says whether the calling thread may use the cache.
    ///
    /// # Errors
    /// When the process is a child.
    pub(crate) fn check_process(&self) -> Result<()> {
        // A child is never in ring 0 of its parent's machine.
        let is_inside = is_in_ring_0() && current_processor::running(&*self.shootdown).is_some();
        if is_inside || self.is_own_process() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Makes the machine's cache.
    ///
    /// # Errors
    /// When there is one, or memory runs out.
    pub(crate) fn make_cache(&self, frames: u32, replacement: Replacement) -> Result<&PageCache> {
        const DOING: &str = "making a cache";
        self.check_process()?;
        let _taken = self.taken();
        if self.cache.get().is_some() {
            return Err(Error::HasCache);
        }
        if frames < LEAST_FRAMES {
            return Err(Error::CacheTooSmall { pages: frames, least: LEAST_FRAMES });
        }
        if frames > vellum_aquila_core::Layout::MOST_FRAMES {
            return Err(Error::System { doing: DOING, errno: Errno::INVAL });
        }
        let length = u64::from(frames) * PAGE as u64;
        let frames_memory = Mapped::new(length, 2 << 20, ProtFlags::READ | ProtFlags::WRITE)?;
        frames_memory.keep_from_children()?;
        let place = self.memory.add_frames(&self.vm, &frames_memory)?;
        let (memory, shootdown) = (Arc::clone(&self.memory), Arc::clone(&self.shootdown));
        let pages = Pages::new(memory, shootdown, frames_memory, place);
        let cache = PageCache::new(frames, replacement, pages);
        let cache = cache.ok_or(Error::System { doing: DOING, errno: Errno::INVAL })?;
        Ok(self.cache.get_or_init(|| cache))
    }

    /// Writes the dirty pages of the cache back, because the process ends, or becomes another
    /// program.
    pub(crate) fn write_back(&self) {
        if let Some(Err(errno)) = self.cache.get().map(PageCache::write_back_all) {
            // No caller is left that could be told.
            say(format_args!("pages of mapped files could not be written back: {errno}"));
        }
    }

    /// What has happened on all virtual processors.
    pub(crate) fn counts(&self) -> Counts {
        let mut counts = Counts { windows: self.memory.windows(), ..Counts::default() };
        for block in self.shootdown.blocks() {
            // SAFETY: blocks are there as long as the machine; the counts are atomic.
            let each = unsafe { &(*block).counts };
            counts.exits += each.exits.load(Ordering::Relaxed);
            counts.system_calls += each.system_calls.load(Ordering::Relaxed);
            counts.window_faults += each.windows.load(Ordering::Relaxed);
            counts.interrupted += each.interrupted.load(Ordering::Relaxed);
            counts.native_steps += each.native_steps.load(Ordering::Relaxed);
            counts.managed_faults += each.managed_faults.load(Ordering::Relaxed);
            counts.kicks += each.kicks.load(Ordering::Relaxed);
        }
        counts
    }

    /// Has the process append its figures to a file when it exits in ring 0, after its name.
    pub(crate) fn report_to(&self, path: CString, name: String) {
        let _ = self.report.set((path, name));
    }

    /// Appends the figures, if that was asked for. Allocates nothing.
    pub(crate) fn report(&self) {
        let Some((path, name)) = self.report.get() else { return };
        let counts = self.counts();
        append(
            path,
            format_args!(
                "{name}: {} exits, {} system calls, {} windows, {} interrupted, {} native steps, \
                 {} managed faults, {} kicks",
                counts.exits,
                counts.system_calls,
                counts.windows,
                counts.interrupted,
                counts.native_steps,
                counts.managed_faults,
                counts.kicks,
            ),
        );
    }

    /// Makes the window around an address that is not managed.
    pub(crate) fn make_window(&self, address: u64) -> Window {
        if (self.managed.start()..self.managed.end()).contains(&address) {
            return Window::None;
        }
        self.memory.make_window(&self.vm, address)
    }

    /// The addresses of managed ranges.
    pub(crate) fn managed(&self) -> (u64, u64) {
        (self.managed.start(), self.managed.end())
    }

    /// Calls a function in ring 3: a thread in ring 0 leaves it meanwhile.
    pub(crate) fn outside<T>(&self, function: impl FnOnce() -> T) -> T {
        if !is_in_ring_0() {
            return function();
        }
        let block = current_processor::block();
        // SAFETY: the thread is in ring 0, so it has entered, and has the block.
        unsafe { entry::leave() };
        let result = function();
        // SAFETY: the thread still has the processor, which does not run.
        let processor = unsafe { &mut *pointer::<Processor>((*block).processor) };
        if let Err(error) = self.prepare(processor) {
            stop(format_args!("{error}"));
        }
        // SAFETY: the processor is ready, and this thread has it alone.
        unsafe { entry::enter(block) };
        result
    }

    /// Prepares a processor for the calling thread, which is to enter by it.
    ///
    /// # Errors
    /// When the system does not tell the thread's registers.
    pub(crate) fn prepare(&self, processor: &mut Processor) -> Result<()> {
        processor.prepare((entry::resume as *const () as u64, 0), self.managed())
    }

    /// Whether there is any managed range.
    pub(crate) fn has_managed(&self) -> bool {
        !self.ranges[0].load(Ordering::Relaxed).is_null()
    }

    /// Makes a managed range, and returns its first address. In ring 0 it would wait for itself, if
    /// what it calls had no window yet.
    ///
    /// # Errors
    /// When there are too many, or addresses or memory run out.
    pub(crate) fn manage(&self, pages: usize, handler: Box<dyn Handler>) -> Result<u64> {
        let doing = "making a managed range";
        let length = pages.checked_mul(PAGE).filter(|length| *length > 0);
        let length = length.ok_or(Error::System { doing, errno: Errno::INVAL })? as u64;
        let back = |_, _| {
            let frames = Mapped::new(length, 2 << 20, ProtFlags::READ | ProtFlags::WRITE)?;
            frames.keep_from_children()?;
            let place = self.memory.add_frames(&self.vm, &frames)?;
            Ok(Backing::Filled { frames, place, handler })
        };
        Ok(self.add_range(pages as u64, back)?.0)
    }

    /// Makes a managed range for a file of the cache, which `open` enters with the number of the
    /// range and the first address. Returns both.
    ///
    /// # Errors
    /// When there are too many, or addresses run out.
    pub(crate) fn add_cached(
        &self,
        pages: u64,
        open: impl FnOnce(usize, u64) -> bool,
    ) -> Result<(u64, u32)> {
        let (start, number) = self.add_range(pages, |number, start| {
            let is_open = open(number, start);
            is_open.then_some(Backing::Cached(number as u32)).ok_or(Error::AlreadyMapped)
        })?;
        Ok((start, number as u32))
    }

    /// Makes a managed range with what `back` makes of its number and its first address.
    fn add_range(
        &self,
        pages: u64,
        back: impl FnOnce(usize, u64) -> Result<Backing>,
    ) -> Result<(u64, usize)> {
        let mut taken = self.taken();
        let (start, number) = (taken.next, taken.ranges);
        let has_room = pages <= (self.managed.end() - start) / PAGE as u64;
        if !has_room {
            return Err(Error::NoMemory { doing: "making a managed range" });
        }
        let slot = self.ranges.get(number).ok_or(Error::TooManyRanges { most: RANGES })?;
        let end = start + pages * PAGE as u64;
        self.memory.link_managed(start..end)?;
        let backing = back(number, start)?;
        (taken.next, taken.ranges) = (end, number + 1);
        let range = ManagedRange { start, pages, backing };
        slot.store(Box::into_raw(Box::new(range)), Ordering::Release);
        Ok((start, number))
    }

    /// Handles a fault at an address among the managed ones. Runs in ring 0.
    pub(crate) fn managed_fault(&self, address: u64, is_store: bool) -> bool {
        self.range(address).is_some_and(|range| range.fault(self, address, is_store))
    }

    /// Bytes from a managed address on to which ring 0 may store.
    pub(crate) fn storable(&self, address: u64) -> u64 {
        let range = self.range(address).filter(|range| match &range.backing {
            Backing::Filled { .. } => true,
            Backing::Cached(file) => {
                let file = self.cache.get().and_then(|cache| cache.pages().file(*file));
                file.is_some_and(|file| file.writable && file.is_open.load(Ordering::Acquire))
            }
        });
        range.map_or(0, |range| range.end() - address)
    }

    /// The range that has an address.
    fn range(&self, address: u64) -> Option<&ManagedRange> {
        let mut ranges = self.ranges.iter().filter_map(|range| {
            // SAFETY: ranges are there as long as the machine.
            unsafe { range.load(Ordering::Acquire).as_ref() }
        });
        ranges.find(|range| (range.start..range.end()).contains(&address))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Mappings that were dropped while a thread was in ring 0.
        self.write_back();
        self.idle().for_each(drop);
        for range in &self.ranges {
            let range = range.load(Ordering::Acquire);
            if !range.is_null() {
                // SAFETY: it was a box, and nothing refers to it any more.
                drop(unsafe { Box::from_raw(range) });
            }
        }
    }
}

/// Repeats a call while a signal interrupts it.
fn without_signal<T>(
    mut call: impl FnMut() -> Result<T, kvm_ioctls::Error>,
) -> Result<T, kvm_ioctls::Error> {
    loop {
        match call() {
            Err(error) if error.errno() == libc::EINTR => {}
            result => return result,
        }
    }
}

/// Why `/dev/kvm` does not open, and what to do.
fn no_kvm(errno: Errno) -> Error {
    let advice = match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => {
            "load the module kvm-intel or kvm-amd, and allow virtualisation in the firmware, or in \
             the settings of the virtual machine that this is"
        }
        Errno::ACCESS | Errno::PERM => {
            "the user must be in its group, which is kvm on most systems"
        }
        _ => "see the kernel's messages",
    };
    Error::NoKvm { errno, advice }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_to_do() {
        let said = no_kvm(Errno::NOENT).to_string();
        assert!(said.starts_with("/dev/kvm does not open: ") && said.contains("kvm-amd"), "{said}");
        let said = no_kvm(Errno::ACCESS).to_string();
        assert!(said.contains("group"), "{said}");
    }
}
