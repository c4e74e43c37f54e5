//! What the process does when the guest exits. It does so on the thread itself, on another stack:
//! so a system call is the thread's own, with its number, its signals, its locks and its limits.
//!
//! The program is in the middle of something, perhaps of an allocation: nothing here allocates,
//! takes a lock of the program's, or changes `errno`.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{KVM_EXIT_HLT, KVM_EXIT_IO, kvm_regs};

use crate::entry::{self, Block, BlockCounts, CALL, EXCEPTION, frame, port};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::memory::{Window, pointer};
use crate::message::stop;
use crate::processor::{Calls, FLAGS, Processor, SET_FS, SET_GS, errno};
use crate::running::Running;
use crate::sys::{
    QUIET, keeping_errno, quiet_system_call, raw_system_call, read_memory, set_mask, thread_number,
};
use crate::{descriptors, native, running};

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

/// Bytes that are copied at a time where a call may be made in parts, and where nothing says that
/// it may.
const CHUNK: u64 = 256 << 10;
const MOST: u64 = 64 << 20;

/// Bytes that the kernel reads or writes in one call, and vectors that it takes.
const MOST_OF_KERNEL: u64 = 0x7fff_f000;
const VECTORS: usize = 1024;

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
            is_copying: false,
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
    /// Whether the guest copies for the process.
    is_copying: bool,
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

    /// Runs the guest until it exits, and serves the exit. Returns the stack pointer if it leaves;
    /// and while it [copies](Self::copy), the bytes that are left.
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
            port::COPIED if self.is_copying => Ok(Some(0)),
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
            // The thread ends, and others go on.
            libc::SYS_exit => self.end(registers.rdi),
            // The program does not know that these numbers are in use.
            libc::SYS_close if descriptors::is_own(registers.rdi) => refuse(libc::EBADF),
            libc::SYS_dup2 | libc::SYS_dup3 if descriptors::is_own(registers.rsi) => {
                refuse(libc::EBUSY)
            }
            libc::SYS_close_range => close_range(registers),
            // The C library uses `clone` then.
            libc::SYS_clone3 => refuse(libc::ENOSYS),
            // The kernel would not abort a sequence in ring 0.
            libc::SYS_rseq => refuse(libc::ENOSYS),
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
                if registers.rax as i64 == libc::SYS_exit_group {
                    self.guest.report();
                }
                self.with_own_mask(|_| Ok(forward(registers)))?
            }
            // The kernel takes the registers from the stack that it is called on.
            libc::SYS_rt_sigreturn => {
                return self.step(&kvm_regs { rip: registers.rcx - 2, ..*registers });
            }
            _ if registers.rax & QUIET != 0 => quietly(registers),
            _ => match self.lend(registers)? {
                Some(result) => {
                    // The guest has been elsewhere, so it goes on after the call by itself.
                    let rip = registers.rcx;
                    self.processor.set_registers(&kvm_regs { rax: result, rip, ..*registers });
                    return Ok(None);
                }
                None => forward(registers),
            },
        };
        self.processor.set_registers(&kvm_regs { rax: result, ..*registers });
        Ok(None)
    }

    /// Makes a call that reads or fills managed memory, with a copy in its place. `None` if it is
    /// no such call, or if the kernel has the answer: nothing is to be copied, or has no place.
    fn lend(&mut self, registers: &kvm_regs) -> Result<Option<u64>> {
        let kvm_regs { rax, rsi, rdx, .. } = *registers;
        let is_managed = is_among(self.guest.managed(), [rsi, rdx]) && (rdx as i64) > 0;
        let result = match rax as i64 {
            libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_sendto if is_managed => {
                self.write(registers)?
            }
            libc::SYS_read | libc::SYS_pread64 | libc::SYS_recvfrom if is_managed => {
                return self.read(registers);
            }
            libc::SYS_writev | libc::SYS_pwritev | libc::SYS_pwritev2
                if self.guest.has_managed() =>
            {
                return self.write_vectors(registers);
            }
            _ => return Ok(None),
        };
        Ok(Some(result))
    }

    /// Makes a call that writes RDX bytes from RSI.
    fn write(&mut self, registers: &kvm_regs) -> Result<u64> {
        let (address, length) = (registers.rsi, registers.rdx.min(MOST_OF_KERNEL));
        let Some(room) = Room::for_writing(registers.rdi, length) else {
            return Ok(refuse(libc::ENOMEM));
        };
        let has_place = registers.rax as i64 == libc::SYS_pwrite64;
        let mut done = 0;
        while done < length {
            let part = (length - done).min(room.length);
            let result = match self.copy(room.start, address + done, part)? {
                true => {
                    let place = if has_place { done } else { 0 };
                    let r10 = registers.r10.wrapping_add(place);
                    let call = kvm_regs { rsi: room.start, rdx: part, r10, ..*registers };
                    write_part(&call, done)
                }
                false => i64::from(-libc::EFAULT),
            };
            if result < 0 {
                // What was written before counts.
                return Ok(if done > 0 { done } else { result.cast_unsigned() });
            }
            done += result.cast_unsigned();
            if result.cast_unsigned() < part {
                break;
            }
        }
        Ok(done)
    }

    /// Makes a call that reads at most RDX bytes to RSI. `None` if ring 0 cannot store there: the
    /// kernel cannot either, and takes nothing from a pipe or a socket then.
    fn read(&mut self, registers: &kvm_regs) -> Result<Option<u64>> {
        let storable = self.guest.storable(registers.rsi);
        if storable == 0 {
            return Ok(None);
        }
        let Some(room) = Room::new(registers.rdx.min(storable).min(MOST)) else {
            return Ok(Some(refuse(libc::ENOMEM)));
        };
        let result = forward(&kvm_regs { rsi: room.start, rdx: room.length, ..*registers });
        // A message may be longer than the room for it.
        let found = result.min(room.length);
        if (result as i64) < 0 || self.copy(registers.rsi, room.start, found)? {
            return Ok(Some(result));
        }
        Ok(Some(refuse(libc::EFAULT)))
    }

    /// Makes a call that writes from RDX vectors at RSI. `None` if none of them is managed, or the
    /// kernel says what is wrong with them.
    fn write_vectors(&mut self, registers: &kvm_regs) -> Result<Option<u64>> {
        let mut vectors = [[0_u64; 2]; VECTORS];
        let Some(vectors) = vectors.get_mut(..registers.rdx as usize) else { return Ok(None) };
        let bytes = size_of_val(vectors) as i64;
        // Not by the process' number: its first thread may have ended.
        let words = vectors.as_flattened_mut();
        if read_memory(thread_number(), registers.rsi, words) != bytes
            || vectors.iter().any(|[_, length]| (*length as i64) < 0)
        {
            return Ok(None);
        }
        let managed = vectors.iter().filter(|vector| is_among(self.guest.managed(), **vector));
        let length = managed.fold(0_u64, |sum, [_, length]| sum.saturating_add(*length));
        if length == 0 {
            return Ok(None);
        }
        let length = length.min(MOST_OF_KERNEL);
        let Some(room) = Room::for_writing(registers.rdi, length) else {
            return Ok(Some(refuse(libc::ENOMEM)));
        };
        let has_place = match registers.rax as i64 {
            libc::SYS_pwritev => true,
            libc::SYS_pwritev2 => registers.r10 != u64::MAX,
            _ => false,
        };
        let mut done = 0;
        loop {
            let mut part = [[0_u64; 2]; VECTORS];
            let part = &mut part[..vectors.len()];
            let most = MOST_OF_KERNEL - done;
            let result = match self.gather(vectors, part, &room, most)? {
                Some(0) => return Ok(Some(done)),
                Some(_) => {
                    let place = if has_place { done } else { 0 };
                    let r10 = registers.r10.wrapping_add(place);
                    let rsi = part.as_ptr().addr() as u64;
                    write_part(&kvm_regs { rsi, r10, ..*registers }, done)
                }
                None => i64::from(-libc::EFAULT),
            };
            if result < 0 {
                // What was written before counts.
                return Ok(Some(if done > 0 { done } else { result.cast_unsigned() }));
            }
            done += result.cast_unsigned();
            if result.cast_unsigned() < part.iter().map(|[_, length]| length).sum() {
                return Ok(Some(done));
            }
        }
    }

    /// Takes the first bytes of vectors for one call, at most so many: managed ones are copied, as
    /// many as there is room for. Returns how many are to be written; `None` if an access is not
    /// possible.
    fn gather(
        &mut self,
        vectors: &mut [[u64; 2]],
        part: &mut [[u64; 2]],
        room: &Room,
        most: u64,
    ) -> Result<Option<u64>> {
        let (mut total, mut used) = (0, 0);
        for (vector, part) in vectors.iter_mut().zip(part) {
            let [address, length] = *vector;
            let mut taken = length.min(most - total);
            *part = [address, taken];
            if is_among(self.guest.managed(), [address, taken]) {
                taken = taken.min(room.length - used);
                if !self.copy(room.start + used, address, taken)? {
                    return Ok(None);
                }
                *part = [room.start + used, taken];
                used += taken;
            }
            total += taken;
            *vector = [address.wrapping_add(taken), length - taken];
            if taken < length {
                break;
            }
        }
        Ok(Some(total))
    }

    /// Has ring 0 copy bytes, from managed memory or to it. Returns false if an access is not
    /// possible.
    fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Result<bool> {
        let rip = entry::copy as *const () as u64;
        let registers =
            kvm_regs { rip, rdi: to, rsi: from, rcx: bytes, rflags: FLAGS, ..Default::default() };
        self.processor.set_registers(&registers);
        self.is_copying = true;
        let rest = loop {
            if let Some(rest) = self.exit()? {
                break rest;
            }
        };
        self.is_copying = false;
        Ok(rest == 0)
    }

    /// Ends the thread, which leaves its virtual processor to others.
    fn end(&mut self, status: u64) -> ! {
        // A handler would run on the stack that another thread may have by then.
        set_mask(libc::SIG_SETMASK, u64::MAX);
        // SAFETY: blocks live as long as the machine. The thread is out of the guest, and does
        // nothing more with the processor.
        unsafe { entry::end_thread(&raw const (*self.block).is_idle, status) }
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
        // A copy for the process ends where it cannot go on.
        if self.is_copying && registers.rip == entry::copy as *const () as u64 {
            return Ok(Some(registers.rcx.max(1)));
        }
        count(&self.counts().native_steps);
        // SAFETY: the guest does not run, and this thread uses it.
        unsafe { native::step(self.block, self.processor, registers)? };
        Ok(None)
    }
}

/// Memory for a moment, that the kernel can read and fill.
struct Room {
    start: u64,
    length: u64,
}

impl Room {
    /// Room for what is written to a file at a time, of so many bytes.
    fn for_writing(file: u64, length: u64) -> Option<Self> {
        Self::new(at_a_time(file, length))
    }

    /// `None` if there is none.
    fn new(length: u64) -> Option<Self> {
        let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
        let arguments = [0, length, access, flags, u64::MAX, 0];
        // SAFETY: a new mapping, where nothing is.
        let start = unsafe { raw_system_call(libc::SYS_mmap as u64, arguments) };
        (start > 0).then_some(Self { start: start.cast_unsigned(), length })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let arguments = [self.start, self.length, 0, 0, 0, 0];
        // SAFETY: it is this mapping, which nothing uses any more.
        unsafe { raw_system_call(libc::SYS_munmap as u64, arguments) };
    }
}

/// Bytes that are given to the kernel at a time when so many are written to a file. Files, pipes
/// and streams take them in parts. A message is one, and what other files do is not known.
fn at_a_time(file: u64, length: u64) -> u64 {
    if length <= CHUNK {
        return length;
    }
    let most = match kind_of(file) {
        libc::S_IFREG | libc::S_IFBLK | libc::S_IFIFO => CHUNK,
        libc::S_IFSOCK if is_stream(file) => CHUNK,
        libc::S_IFSOCK => MOST_OF_KERNEL,
        _ => MOST,
    };
    length.min(most)
}

/// The kind of a file, as its mode says it.
fn kind_of(file: u64) -> u32 {
    let mut status = MaybeUninit::<libc::stat>::zeroed();
    let at = status.as_mut_ptr().addr() as u64;
    // SAFETY: the call fills the structure, which is plain data.
    let status = unsafe {
        raw_system_call(libc::SYS_fstat as u64, [file, at, 0, 0, 0, 0]);
        status.assume_init()
    };
    status.st_mode & libc::S_IFMT
}

/// Whether a socket has no messages.
fn is_stream(socket: u64) -> bool {
    let (mut kind, mut length) = (0_i32, 4_u32);
    let [at, length] = [(&raw mut kind).addr() as u64, (&raw mut length).addr() as u64];
    let arguments = [socket, libc::SOL_SOCKET as u64, libc::SO_TYPE as u64, at, length, 0];
    // SAFETY: the call fills the number.
    unsafe { raw_system_call(libc::SYS_getsockopt as u64, arguments) };
    kind == libc::SOCK_STREAM
}

/// Whether a range, of an address and a length, has any address among others.
fn is_among((start, end): (u64, u64), [address, length]: [u64; 2]) -> bool {
    length > 0 && address < end && address.saturating_add(length) > start
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

/// Makes a call that writes a part, after so many bytes. One call for all would end at the limit of
/// a file's length, and raise SIGXFSZ only if it had written nothing.
fn write_part(registers: &kvm_regs, done: u64) -> i64 {
    let result = if done > 0 { quietly(registers) } else { forward(registers) };
    result as i64
}

/// Closes a range of descriptors, except those of the machine.
fn close_range(registers: &kvm_regs) -> u64 {
    let (mut first, last) = (registers.rdi & 0xffff_ffff, registers.rsi & 0xffff_ffff);
    let close = |first, last| forward(&kvm_regs { rdi: first, rsi: last, ..*registers });
    // What is not closed at once the kernel closes when the program becomes another one: so it does
    // with the machine's.
    if registers.rdx & u64::from(libc::CLOSE_RANGE_CLOEXEC) != 0 {
        return close(first, last);
    }
    while let Some(own) = descriptors::first_own(first, last) {
        if own > first {
            let result = close(first, own - 1);
            if result != 0 {
                return result;
            }
        }
        if own == last {
            return 0;
        }
        first = own + 1;
    }
    close(first, last)
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
