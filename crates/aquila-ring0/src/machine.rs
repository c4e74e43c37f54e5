//! The interface: a machine, and functions that run in its ring 0.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::cache::Replacement;
use crate::counters::{Check, Counts};
use crate::entry::{self, Block};
use crate::error::{Error, Result};
use crate::exits::CALLS;
use crate::guest::{Guest, Handler};
use crate::mapping::Cache;
use crate::memory::pointer;
use crate::processor::Processor;
use crate::sys::is_in_ring_0;
use crate::{current_processor, native, self_test};

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
        let block = enter(&self.guest, None)?;
        let result = catch_unwind(AssertUnwindSafe(function));
        // SAFETY: the thread has entered above.
        unsafe { entry::leave() };
        // A handler that has left by `longjmp` has left ring 0, and has not said so.
        // SAFETY: the thread still has the block, and this part is atomic.
        unsafe { (*block).running.leave() };
        current_processor::set_block(std::ptr::null_mut());
        // A child that the function has forked comes here, too, in ring 3. What it has of the
        // machine is of no use, and its lock may be one that a thread of the parent has.
        if self.guest.is_own_process() {
            // SAFETY: it was a box, and the thread has left it.
            self.guest.give(unsafe { Box::from_raw(pointer((*block).processor)) });
        }
        Ok(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    /// Keeps a virtual processor for a thread that is to [stay](ReservedProcessor::stay) in ring 0.
    /// The thread may be another one than the caller.
    ///
    /// # Errors
    /// [`Error::Forked`], and [`Error::Missing`], [`Error::System`] or [`Error::NoMemory`] if there
    /// is none.
    pub fn reserve(&'static self) -> Result<ReservedProcessor> {
        if !self.guest.is_own_process() {
            return Err(Error::Forked);
        }
        Ok(ReservedProcessor { guest: &self.guest, processor: Some(self.guest.take()?) })
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
    /// memory, and at least 8. An instruction goes on only when all pages are there that it
    /// accesses. These are six at most: two of code, and two for each of two operands, or for an
    /// operand and the stack. What accesses more (`rep movs`, gathers) goes on where it was
    /// interrupted. The two others are for pages that leave meanwhile. Each thread that uses the
    /// cache at the same time needs as many.
    ///
    /// # Errors
    /// [`Error::HasCache`] if the machine has one, [`Error::CacheTooSmall`],
    /// [`Error::OnlyInRing3`], [`Error::Forked`], [`Error::NoMemory`], and [`Error::System`] for
    /// too many pages.
    pub fn cache(&self, pages: u32, replacement: Replacement) -> Result<Cache<'_>> {
        if is_in_ring_0() {
            return Err(Error::OnlyInRing3 { doing: "making a cache" });
        }
        let cache = self.guest.make_cache(pages, replacement)?;
        Ok(Cache::new(&self.guest, cache))
    }

    /// What has happened so far. Makes no system call, and takes no lock.
    pub fn counts(&self) -> Counts {
        self.guest.counts()
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

/// Moves the calling thread to ring 0: returns there. `processor` was kept for it, or it takes one.
fn enter(guest: &Guest, processor: Option<Box<Processor>>) -> Result<*mut Block> {
    let check = || {
        if !guest.is_own_process() {
            return Err(Error::Forked);
        }
        if current_processor::block().is_null() { Ok(()) } else { Err(Error::Inside) }
    };
    let mut processor = match (check(), processor) {
        (Ok(()), Some(processor)) => processor,
        (Ok(()), None) => guest.take()?,
        (Err(error), kept) => {
            kept.into_iter().for_each(|processor| guest.give(processor));
            return Err(error);
        }
    };
    if let Err(error) = guest.prepare(&mut processor) {
        guest.give(processor);
        return Err(error);
    }
    let block = processor.block();
    current_processor::set_block(block);
    // From here on the processor belongs to what serves exits.
    let _ = Box::into_raw(processor);
    // SAFETY: the processor is ready, and this thread has it alone.
    unsafe { entry::enter(block) };
    Ok(block)
}

/// A virtual processor for a thread that is to stay in ring 0: [`VirtualMachine::reserve`].
#[derive(Debug)]
pub struct ReservedProcessor {
    guest: &'static Guest,
    processor: Option<Box<Processor>>,
}

impl ReservedProcessor {
    /// Moves the calling thread to ring 0, where it stays until it ends. The functions that have
    /// called this one go on there, too, and any unwinding passes through them as it would in
    /// ring 3. A thread that ends leaves its virtual processor to others.
    ///
    /// # Errors
    /// [`Error::Inside`], [`Error::Forked`], and [`Error::System`] if the thread cannot enter.
    pub fn stay(mut self) -> Result<()> {
        enter(self.guest, self.processor.take()).map(drop)
    }
}

impl Drop for ReservedProcessor {
    fn drop(&mut self) {
        self.processor.take().into_iter().for_each(|processor| self.guest.give(processor));
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

/// Programs as they are: the functions behind those of `libvellum_ring0.so` ([`launcher`]).
///
/// The library is preloaded and stands in front of the C library. It moves the program's first
/// thread to ring 0 before `main`, and each other one before the function that it is made for. Both
/// stay there. So what runs at `exit` does so in ring 0, and `pthread_exit` unwinds as usual.
///
/// Files that the program maps for reading are in managed ranges, if the rules take them
/// (`program_files.rs`). Calls for such addresses end here.
///
/// [`launcher`]: crate::launcher
#[doc(hidden)]
pub mod launch {
    use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
    use std::fs::File;
    use std::mem::{ManuallyDrop, transmute_copy};
    use std::ops::Range;
    use std::os::fd::FromRawFd as _;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering;

    use rustix::io::Errno;
    use vellum_interpose::Request;

    use super::{ReservedProcessor, VirtualMachine};
    use crate::current_processor;
    use crate::entry::{LOST, PAGE};
    use crate::error::{Error, Result};
    use crate::message::say;
    use crate::program_files::ProgramFiles;
    use crate::sys::{is_in_ring_0, keeping_errno};

    /// `main`.
    pub type Main = unsafe extern "C-unwind" fn(c_int, *mut *mut c_char, *mut *mut c_char) -> c_int;

    /// The function that a thread is made for.
    pub type Routine = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;

    type Pointers = *mut *mut c_char;
    type Any = *mut c_void;
    type StartMain =
        unsafe extern "C-unwind" fn(Main, c_int, Pointers, Any, Any, Any, Any) -> c_int;
    type CreateThread = unsafe extern "C" fn(
        *mut libc::pthread_t,
        *const libc::pthread_attr_t,
        Routine,
        Any,
    ) -> c_int;

    /// Has the calling thread leave its virtual processor to others when it ends, if it has left
    /// ring 0 without a word.
    fn give_back_at_the_end() {
        if let Some(key) = KEY.get() {
            // SAFETY: the key was made. Its value is no address.
            unsafe { libc::pthread_setspecific(*key, std::ptr::without_provenance(1)) };
        }
    }

    /// What the C library calls on a thread that ends, on the thread's own stack. A thread that is
    /// in ring 0 ends there. Another one was taken out of it by a handler of a signal: by
    /// `longjmp`, or because it was cancelled, or by `pthread_exit`.
    unsafe extern "C" fn give_back(_: *mut c_void) {
        let (block, machine) = (current_processor::block(), MACHINE.get());
        let is_own = machine.is_some_and(|machine| machine.guest.is_own_process());
        if is_in_ring_0() || block.is_null() || !is_own {
            return;
        }
        // SAFETY: blocks live as long as the machine, and these parts of them are atomic. The
        // thread does not use the processor, nor its stack, any more.
        unsafe {
            (*block).running.leave();
            current_processor::set_block(std::ptr::null_mut());
            (*block).is_idle.store(LOST, Ordering::Release);
        }
    }

    /// The exit code if the program cannot go to ring 0: that of a command that cannot be executed.
    const CANNOT_RUN: c_int = 126;

    static MAIN: OnceLock<Main> = OnceLock::new();
    static MACHINE: OnceLock<VirtualMachine> = OnceLock::new();
    static FILES: OnceLock<ProgramFiles> = OnceLock::new();
    /// Whose function the C library calls on threads that end.
    static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();
    /// The C library's. To look it up waits for a lock of the loader's, which another thread may
    /// hold until a thread is made.
    static CREATE_THREAD: OnceLock<CreateThread> = OnceLock::new();

    /// `__libc_start_main`: the C library's, with another `main`.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn start_main(
        main: Main,
        count: c_int,
        arguments: Pointers,
        rest: [Any; 4],
    ) -> c_int {
        let _ = MAIN.set(main);
        next_create_thread();
        let [at_start, at_end, loader_at_end, stack] = rest;
        // SAFETY: the function has this type, and the arguments are the caller's.
        unsafe {
            let next: StartMain = next(c"__libc_start_main");
            next(main_in_ring_0, count, arguments, at_start, at_end, loader_at_end, stack)
        }
    }

    /// Goes to ring 0 and calls the program's `main` there. Nothing here is to be cleaned up when
    /// `pthread_exit` unwinds through it.
    unsafe extern "C-unwind" fn main_in_ring_0(
        count: c_int,
        arguments: Pointers,
        environment: Pointers,
    ) -> c_int {
        if let Err(error) = enter() {
            end(&error);
        }
        let main = MAIN.get().unwrap_or_else(|| unreachable!("it was set at the start"));
        // SAFETY: the C library calls it so.
        unsafe { main(count, arguments, environment) }
    }

    fn enter() -> Result<()> {
        let made = VirtualMachine::new()?;
        let path = std::env::var_os("VELLUM_AQUILA_STATISTICS");
        if let Some(path) = path.and_then(|path| CString::new(path.into_encoded_bytes()).ok()) {
            let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
            made.guest.report_to(path, format!("{} {}", name.trim_end(), std::process::id()));
        }
        let machine = MACHINE.get_or_init(|| made);
        if let Some(files) = ProgramFiles::of_environment(&machine.guest)? {
            let _ = FILES.set(files);
        }
        let mut key = 0;
        // SAFETY: the call fills the number; the function is there as long as the process.
        if unsafe { libc::pthread_key_create(&raw mut key, Some(give_back)) } == 0 {
            let _ = KEY.set(key);
        }
        machine.reserve()?.stay()?;
        give_back_at_the_end();
        Ok(())
    }

    /// The pages of a range; `None` if the kernel will refuse the range.
    fn pages(address: Any, length: usize) -> Option<Range<u64>> {
        let start = address.addr();
        let end = start.checked_add(length)?.checked_next_multiple_of(PAGE)?;
        (start.is_multiple_of(PAGE) && length > 0).then_some(start as u64..end as u64)
    }

    /// The program's files, if any address of a range is one of theirs.
    fn files_at(address: Any, length: usize) -> Option<(&'static ProgramFiles, Range<u64>)> {
        let files = FILES.get()?;
        let range = pages(address, length).filter(|range| files.touch(range))?;
        // A child has the kernel's mappings there.
        let is_own = MACHINE.get().is_some_and(|machine| machine.guest.is_own_process());
        is_own.then_some((files, range))
    }

    /// The answer of a call that ends here.
    fn answer(result: Result<(), Errno>) -> c_int {
        let Err(errno) = result else { return 0 };
        // SAFETY: the place of the thread's own number.
        unsafe { *libc::__errno_location() = errno.raw_os_error() };
        -1
    }

    fn no_address() -> Any {
        answer(Err(Errno::NOMEM));
        libc::MAP_FAILED
    }

    fn address(result: c_long) -> Any {
        std::ptr::with_exposed_provenance_mut(result.cast_unsigned() as usize)
    }

    /// `mmap`: a file that the rules take is mapped through the cache.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn map(
        at: Any,
        length: usize,
        rights: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> Any {
        let request = Request { length, rights, flags, file, offset };
        if request.is_for_reading()
            && let Some(files) = FILES.get()
            && MACHINE.get().is_some_and(|machine| machine.guest.is_own_process())
        {
            // SAFETY: the descriptor is the caller's, and open during the call. If no descriptor
            // has this number, the calls on it fail.
            let file = ManuallyDrop::new(unsafe { File::from_raw_fd(file) });
            if let Some(start) = keeping_errno(|| files.map(&request, &file)) {
                return std::ptr::with_exposed_provenance_mut(start as usize);
            }
        }
        if flags & libc::MAP_FIXED != 0 && files_at(at, length).is_some() {
            return no_address();
        }
        // SAFETY: the caller's.
        address(unsafe { libc::syscall(libc::SYS_mmap, at, length, rights, flags, file, offset) })
    }

    /// `munmap`.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn unmap(at: Any, length: usize) -> c_int {
        if let Some((files, range)) = files_at(at, length) {
            keeping_errno(|| files.unmap(&range));
            return 0;
        }
        // SAFETY: the caller's.
        (unsafe { libc::syscall(libc::SYS_munmap, at, length) }) as c_int
    }

    /// `mprotect`.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn protect(at: Any, length: usize, rights: c_int) -> c_int {
        if let Some((files, range)) = files_at(at, length) {
            return answer(files.protect(&range, rights));
        }
        // SAFETY: the caller's.
        (unsafe { libc::syscall(libc::SYS_mprotect, at, length, rights) }) as c_int
    }

    /// `madvise`.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn advise(at: Any, length: usize, advice: c_int) -> c_int {
        if let Some((files, range)) = files_at(at, length) {
            return answer(files.advise(&range, advice));
        }
        // SAFETY: the caller's.
        (unsafe { libc::syscall(libc::SYS_madvise, at, length, advice) }) as c_int
    }

    /// `msync`: nothing that is mapped for reading is dirty.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn sync(at: Any, length: usize, flags: c_int) -> c_int {
        if let Some((files, range)) = files_at(at, length) {
            return answer(if files.have(&range) { Ok(()) } else { Err(Errno::NOMEM) });
        }
        // SAFETY: the caller's.
        (unsafe { libc::syscall(libc::SYS_msync, at, length, flags) }) as c_int
    }

    /// `mremap`. Callers pass the last argument only with `MREMAP_FIXED`, and it is not read
    /// otherwise.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn remap(at: Any, length: usize, new: usize, flags: c_int, to: Any) -> Any {
        let is_fixed = flags & libc::MREMAP_FIXED != 0;
        if files_at(at, length.max(1)).is_some() || (is_fixed && files_at(to, new).is_some()) {
            return no_address();
        }
        // SAFETY: the caller's.
        address(unsafe { libc::syscall(libc::SYS_mremap, at, length, new, flags, to) })
    }

    /// Ends the process, which must not go on in ring 3 without a word.
    fn end(error: &Error) -> ! {
        say(format_args!("this program cannot run in ring 0: {error}"));
        // SAFETY: it ends the process.
        unsafe { libc::_exit(CANNOT_RUN) }
    }

    /// A thread that is to be made.
    struct Start {
        routine: Routine,
        argument: Any,
        processor: ReservedProcessor,
    }

    /// `pthread_create`: the thread begins in ring 0. If there is no virtual processor for it, that
    /// is `EAGAIN`. Before `main`, and in a child that was forked, it begins in ring 3.
    ///
    /// # Safety
    /// The arguments are those of such a call.
    pub unsafe fn create_thread(
        thread: *mut libc::pthread_t,
        attributes: *const libc::pthread_attr_t,
        routine: Routine,
        argument: Any,
    ) -> c_int {
        let next = next_create_thread();
        let processor = match MACHINE.get().map(VirtualMachine::reserve) {
            Some(Ok(processor)) => processor,
            Some(Err(Error::Forked)) | None => {
                // SAFETY: the caller's.
                return unsafe { next(thread, attributes, routine, argument) };
            }
            Some(Err(_)) => return libc::EAGAIN,
        };
        let start = Box::into_raw(Box::new(Start { routine, argument, processor }));
        // SAFETY: the caller's; the thread takes what it gets.
        let result = unsafe { next(thread, attributes, begin, start.cast()) };
        if result != 0 {
            // SAFETY: it was a box, and no thread has it.
            drop(unsafe { Box::from_raw(start) });
        }
        result
    }

    /// What a thread does first. Nothing here is to be cleaned up when it ends by `pthread_exit`.
    unsafe extern "C-unwind" fn begin(start: *mut c_void) -> *mut c_void {
        // SAFETY: the thread was made with it.
        let Start { routine, argument, processor } =
            *unsafe { Box::from_raw(start.cast::<Start>()) };
        if let Err(error) = processor.stay() {
            end(&error);
        }
        give_back_at_the_end();
        // SAFETY: the program has made the thread for that.
        unsafe { routine(argument) }
    }

    fn next_create_thread() -> CreateThread {
        // SAFETY: the function has this type.
        *CREATE_THREAD.get_or_init(|| unsafe { next(c"pthread_create") })
    }

    /// The function of a name that is behind the library's own.
    ///
    /// # Safety
    /// `F` is its type.
    unsafe fn next<F: Copy>(name: &CStr) -> F {
        const { assert!(size_of::<F>() == size_of::<Any>()) };
        // SAFETY: the name ends with a zero.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        if found.is_null() {
            say(format_args!("the C library has no {name:?}"));
            // SAFETY: it ends the process.
            unsafe { libc::_exit(CANNOT_RUN) };
        }
        // SAFETY: the caller's.
        unsafe { transmute_copy(&found) }
    }
}

/// Defines the functions of the library that is preloaded to move programs as they are to ring 0:
/// `__libc_start_main`, `pthread_create`, and those that map memory. Only that library may have
/// them: in a program they would stand in front of the C library's, too.
#[doc(hidden)]
#[macro_export]
macro_rules! launcher {
    () => {
        /// What the code that a program begins with calls.
        ///
        /// # Safety
        /// The arguments are those of the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn __libc_start_main(
            main: $crate::launch::Main,
            count: ::std::ffi::c_int,
            arguments: *mut *mut ::std::ffi::c_char,
            at_start: *mut ::std::ffi::c_void,
            at_end: *mut ::std::ffi::c_void,
            loader_at_end: *mut ::std::ffi::c_void,
            stack: *mut ::std::ffi::c_void,
        ) -> ::std::ffi::c_int {
            let rest = [at_start, at_end, loader_at_end, stack];
            // SAFETY: the caller's.
            unsafe { $crate::launch::start_main(main, count, arguments, rest) }
        }

        /// Makes a thread.
        ///
        /// # Safety
        /// The arguments are those of the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn pthread_create(
            thread: *mut ::libc::pthread_t,
            attributes: *const ::libc::pthread_attr_t,
            routine: $crate::launch::Routine,
            argument: *mut ::std::ffi::c_void,
        ) -> ::std::ffi::c_int {
            // SAFETY: the caller's.
            unsafe { $crate::launch::create_thread(thread, attributes, routine, argument) }
        }

        $crate::launcher! { map mmap }
        $crate::launcher! { map mmap64 }
        $crate::launcher! { c_int unmap munmap(length: usize) }
        $crate::launcher! { c_int protect mprotect(length: usize, rights: ::std::ffi::c_int) }
        $crate::launcher! { c_int advise madvise(length: usize, advice: ::std::ffi::c_int) }
        $crate::launcher! { c_int sync msync(length: usize, flags: ::std::ffi::c_int) }

        /// Moves a mapping.
        ///
        /// # Safety
        /// The arguments are those of the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn mremap(
            at: *mut ::std::ffi::c_void,
            length: usize,
            new_length: usize,
            flags: ::std::ffi::c_int,
            to: *mut ::std::ffi::c_void,
        ) -> *mut ::std::ffi::c_void {
            // SAFETY: the caller's.
            unsafe { $crate::launch::remap(at, length, new_length, flags, to) }
        }
    };
    (map $name:ident) => {
        /// Maps memory.
        ///
        /// # Safety
        /// The arguments are those of the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            at: *mut ::std::ffi::c_void,
            length: usize,
            rights: ::std::ffi::c_int,
            flags: ::std::ffi::c_int,
            file: ::std::ffi::c_int,
            offset: i64,
        ) -> *mut ::std::ffi::c_void {
            // SAFETY: the caller's.
            unsafe { $crate::launch::map(at, length, rights, flags, file, offset) }
        }
    };
    (c_int $way:ident $name:ident($($argument:ident: $type:ty),*)) => {
        /// Changes what is mapped.
        ///
        /// # Safety
        /// The arguments are those of the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            at: *mut ::std::ffi::c_void,
            $($argument: $type),*
        ) -> ::std::ffi::c_int {
            // SAFETY: the caller's.
            unsafe { $crate::launch::$way(at, $($argument),*) }
        }
    };
}
