//! The instructions between the rings: entering and leaving, system calls, page faults, exceptions.
//!
//! All of them run with the program's addresses, because a guest address is the process' address.
//! What they write is in the [`Block`] of the virtual processor, whose last bytes are the stack of
//! the entries for exceptions (an IST stack). An entry finds the block by its stack pointer, so GS
//! and FS are the program's.
//!
//! An exit to the process is an `out` to one of the [ports](port). The numbers avoid those of the
//! interrupt controller, the timer and 0x7e, which KVM would serve itself once it has such devices,
//! or treats in its own way.
#![allow(unsafe_code)]

use std::arch::naked_asm;
use std::mem::offset_of;
use std::sync::atomic::AtomicU64;

use kvm_bindings::kvm_regs;

use crate::running::Running;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// The ports by which the guest says why it exits.
pub(crate) mod port {
    /// A system call, its registers as usual.
    pub(crate) const SYSTEM_CALL: u16 = 0xe0;
    /// The thread goes back to ring 3; its stack has the saved registers.
    pub(crate) const LEAVE: u16 = 0xe1;
    /// A page fault whose address is in [`Block::address`](super::Block::address).
    pub(crate) const FAULT: u16 = 0xe2;
    /// An exception that the process must see.
    pub(crate) const EXCEPTION: u16 = 0xe3;
    /// Nothing: for measurements.
    pub(crate) const NOTHING: u16 = 0xe4;
    /// [`copy`](super::copy) has ended.
    pub(crate) const COPIED: u16 = 0xe5;
}

/// What the entries know of their virtual processor. The first page of its memory.
#[repr(C, align(4096))]
pub(crate) struct Block {
    /// The end of the stack on which the process serves exits.
    pub(crate) host_stack: u64,
    /// Serves the exits until the guest leaves; returns the stack pointer with which it left.
    pub(crate) serve: unsafe extern "C" fn(*mut Block) -> u64,
    /// The stack pointer with which the thread entered.
    pub(crate) entered: u64,
    /// Handles a page fault in a managed range, in ring 0. Returns whether it did.
    pub(crate) managed_fault: unsafe extern "C" fn(*mut Block, u64, u64) -> u64,
    /// Where managed ranges are.
    pub(crate) managed_start: u64,
    /// The address after them.
    pub(crate) managed_end: u64,
    /// The end of the stack on which `managed_fault` runs.
    pub(crate) handler_stack: u64,
    /// Where the program's vector registers are while it runs, with room for a page.
    pub(crate) handler_state: u64,
    /// Whether it runs.
    pub(crate) is_handling: u64,
    /// For a moment: what it has returned, and the control word of its vector registers.
    pub(crate) scratch: u64,
    /// The address of the last page fault.
    pub(crate) address: u64,
    /// The program's registers, while the process acts for it in ring 3.
    pub(crate) native: Native,
    /// The virtual processor that the block belongs to, and the guest.
    pub(crate) processor: u64,
    pub(crate) guest: u64,
    /// The guest's shootdowns, and the processor's number.
    pub(crate) shootdown: usize,
    pub(crate) number: usize,
    /// 1 while no thread has the processor, or [`LOST`]: the next that wants one may take it.
    pub(crate) is_idle: AtomicU64,
    /// What other threads know of the processor.
    pub(crate) running: Running,
    /// How often what happened.
    pub(crate) counts: BlockCounts,
}

/// In [`Block::is_idle`]: the thread that had the processor has left ring 0 without a word, at any
/// moment, and uses it no more.
pub(crate) const LOST: u64 = 2;

/// All registers of the program, for ring 3.
#[repr(C)]
pub(crate) struct Native {
    /// The general registers.
    pub(crate) registers: kvm_regs,
    /// The vector registers, in a page, as XSAVE has them.
    pub(crate) state: u64,
    /// Which of these there are.
    pub(crate) components: u64,
    /// The stack pointer of the process meanwhile.
    pub(crate) host: u64,
    /// The components that the guest keeps.
    pub(crate) kept: u64,
    /// The mask of signals before the step.
    pub(crate) mask: u64,
    /// Whether the thread is making the step.
    pub(crate) is_stepping: bool,
}

/// How often what happened on a virtual processor.
#[repr(C)]
#[derive(Default)]
pub(crate) struct BlockCounts {
    pub(crate) exits: AtomicU64,
    pub(crate) system_calls: AtomicU64,
    pub(crate) windows: AtomicU64,
    pub(crate) interrupted: AtomicU64,
    pub(crate) native_steps: AtomicU64,
    pub(crate) managed_faults: AtomicU64,
    pub(crate) kicks: AtomicU64,
}

/// Where the stack for exceptions begins, which grows down to the end of the block's fields.
const _: () = assert!(offset_of!(Block, counts) + size_of::<BlockCounts>() < PAGE - 1024);

/// The interrupted code as the entry for page faults leaves it at its stack pointer.
pub(crate) mod frame {
    /// Words from the stack pointer: RCX, RAX, then the vector, or the address after the call in
    /// [`exceptions`](super::exceptions).
    pub(crate) const RCX: usize = 0;
    pub(crate) const RAX: usize = 1;
    pub(crate) const VECTOR: usize = 2;
    /// The error code, if the exception has one.
    pub(crate) const ERROR: usize = 3;
    /// Words from RIP to RFLAGS and RSP.
    pub(crate) const RFLAGS: usize = 2;
    pub(crate) const RSP: usize = 3;
}

/// Moves the calling thread to ring 0: returns there.
///
/// The process' half of the thread goes on in `Block::serve` on another stack, and returns from
/// [`leave`] when the guest leaves. Vector registers are the callee's in the C calling convention,
/// so only their control words move along.
///
/// # Safety
/// The block is that of a virtual processor which is ready and which no other thread uses.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn enter(block: *mut Block) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "stmxcsr [rsp]",
        "fnstcw [rsp + 4]",
        "mov [rdi + {entered}], rsp",
        "mov rsp, [rdi + {host_stack}]", // a multiple of 16, as the convention asks for
        "call qword ptr [rdi + {serve}]",
        "mov rdi, rax",
        "jmp {resume}",
        entered = const offset_of!(Block, entered),
        host_stack = const offset_of!(Block, host_stack),
        serve = const offset_of!(Block, serve),
        resume = sym resume,
    )
}

/// Takes the registers that [`enter`] or [`leave`] has saved at the address from the stack, and
/// returns to its caller. The guest begins here.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn resume(stack: u64) {
    naked_asm!(
        "mov rsp, rdi",
        // A step in ring 3 may have left values there.
        "fninit",
        "ldmxcsr [rsp]",
        "fldcw [rsp + 4]",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}

/// Moves the calling thread back to ring 3: returns there. A thread that is there already, because
/// it was forked or has left by `longjmp`, goes on.
///
/// # Safety
/// The thread has called [`enter`], in this function or in one that is still running.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn leave() {
    naked_asm!(
        "mov eax, cs",
        "test al, 3",
        "jnz 2f",
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "stmxcsr [rsp]",
        "fnstcw [rsp + 4]",
        "out {leave}, al",
        "ud2",
        "2:",
        "ret",
        leave = const port::LEAVE,
    )
}

/// Where SYSCALL leads. It must not touch the stack, because the 128 bytes below the stack pointer
/// are the program's. RFLAGS are the program's too, because FMASK is zero.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn system_call() {
    naked_asm!("out {port}, al", "jmp rcx", port = const port::SYSTEM_CALL)
}

/// Copies RCX bytes from RSI to RDI, for the process, of which one is managed memory: the process
/// has the guest go on here, without a stack.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn copy() {
    naked_asm!("rep movsb", "out {port}, al", "ud2", port = const port::COPIED)
}

/// The entry for page faults, on a stack of its own.
///
/// An address outside of the managed ranges is the process' business: an exit. Nothing up to there
/// can fault, so the stack is not used twice. So is an address that the handler of managed ranges
/// itself accesses.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn page_fault() {
    naked_asm!(
        "push 14",
        "push rax",
        "push rcx",
        "mov rax, rsp",
        "and rax, -4096", // the block
        "mov rcx, cr2",
        "mov [rax + {address}], rcx",
        "cmp rcx, [rax + {start}]",
        "jb 2f",
        "cmp rcx, [rax + {end}]",
        "jae 2f",
        "cmp qword ptr [rax + {is_handling}], 0",
        "je {managed}",
        "2:",
        "out {fault}, al",
        "pop rcx",
        "pop rax",
        "add rsp, 16",
        "iretq",
        address = const offset_of!(Block, address),
        start = const offset_of!(Block, managed_start),
        end = const offset_of!(Block, managed_end),
        is_handling = const offset_of!(Block, is_handling),
        managed = sym managed_page_fault,
        fault = const port::FAULT,
    )
}

/// Where [`page_fault`] goes on for a managed address, with the block in RAX.
///
/// It moves the frame to the handler's stack first, because the handler may fault in its turn, in
/// memory whose window is not there yet, and that fault has the other stack. The handler is
/// compiled code, so all registers are saved; the vector registers by XSAVE, which is slow and
/// right.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn managed_page_fault() {
    naked_asm!(
        "mov qword ptr [rax + {is_handling}], 1",
        "mov rcx, rsp",
        "mov rsp, [rax + {stack}]",
        "push qword ptr [rcx + 64]", // SS, RSP, RFLAGS, CS, RIP, error, vector, RAX, RCX
        "push qword ptr [rcx + 56]",
        "push qword ptr [rcx + 48]",
        "push qword ptr [rcx + 40]",
        "push qword ptr [rcx + 32]",
        "push qword ptr [rcx + 24]",
        "push qword ptr [rcx + 16]",
        "push qword ptr [rcx + 8]",
        "push qword ptr [rcx]",
        "push rdx",
        "push rsi",
        "push rdi",
        "push r8",
        "push r9",
        "push r10",
        "push r11",
        "push rbx",
        "push rbp", // 18 words: the stack pointer is a multiple of 16
        "mov rbx, rax",
        "mov rcx, [rbx + {state}]",
        "mov eax, -1",
        "mov edx, -1",
        "xsave64 [rcx]",
        "fninit",
        "mov dword ptr [rbx + {scratch}], 0x1f80",
        "ldmxcsr [rbx + {scratch}]",
        "cld",
        "mov rdi, rbx",
        "mov rsi, [rbx + {address}]",
        "mov rdx, [rsp + 96]", // the error
        "call qword ptr [rbx + {handler}]",
        "mov [rbx + {scratch}], rax",
        "mov rcx, [rbx + {state}]",
        "mov eax, -1",
        "mov edx, -1",
        "xrstor64 [rcx]",
        "mov qword ptr [rbx + {is_handling}], 0",
        "cmp qword ptr [rbx + {scratch}], 0",
        "pop rbp",
        "pop rbx",
        "pop r11",
        "pop r10",
        "pop r9",
        "pop r8",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "je 2f",
        "pop rcx",
        "pop rax",
        "add rsp, 16",
        "iretq",
        "2:", // The process makes the access, and gets the signal that it deserves.
        "out {exception}, al",
        "ud2",
        address = const offset_of!(Block, address),
        is_handling = const offset_of!(Block, is_handling),
        stack = const offset_of!(Block, handler_stack),
        state = const offset_of!(Block, handler_state),
        scratch = const offset_of!(Block, scratch),
        handler = const offset_of!(Block, managed_fault),
        exception = const port::EXCEPTION,
    )
}

/// Ends the calling thread, which leaves its virtual processor to others: a word becomes 1. Another
/// thread may then use the stack at once, and this one does not any more.
///
/// # Safety
/// The word is the processor's `is_idle`, which no other code of this thread uses. The thread
/// blocks all signals.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn end_thread(is_idle: *const AtomicU64, status: u64) -> ! {
    naked_asm!(
        "mov qword ptr [rdi], 1",
        "mov rdi, rsi",
        "mov eax, {exit}",
        "syscall",
        "ud2",
        exit = const libc::SYS_exit,
    )
}

/// Bytes of one of the entries in [`exceptions`], and of the call that it begins with.
pub(crate) const EXCEPTION: u64 = 16;
pub(crate) const CALL: u64 = 5;

/// The entries for all vectors but that of page faults, 16 bytes each. The address after the call
/// tells which it was. The process does not come back here: it has the program go on where that
/// should.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn exceptions() {
    naked_asm!(
        ".rept 256",
        ".balign 16",
        "call 2f",
        ".endr",
        "2:",
        "push rax",
        "push rcx",
        "out {port}, al",
        "ud2",
        port = const port::EXCEPTION,
    )
}

/// The program of the self-test. First a few instructions with vector registers, whose result 42 is
/// in RDX at the first exit; then, between any two exits, [`LOOP`] rounds of two instructions.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn self_test() {
    naked_asm!(
        "mov eax, 21",
        "movq xmm0, rax",
        "paddq xmm0, xmm0",
        "movq rdx, xmm0",
        "out {port}, al",
        "2:",
        "mov ecx, {rounds}",
        "3:",
        "dec ecx",
        "jnz 3b",
        "out {port}, al",
        "jmp 2b",
        port = const port::NOTHING,
        rounds = const LOOP,
    )
}

/// Rounds of the self-test's loop.
pub(crate) const LOOP: u32 = 10_000;

/// Has the program make one instruction in ring 3, with all of its registers, and returns after the
/// trap that follows it ([`after_step`]).
///
/// # Safety
/// The handler of SIGTRAP fills `registers` and `state` and goes on at [`after_step`].
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn native_step(native: *mut Native) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi + {host}], rsp",
        "mov rcx, [rdi + {state}]",
        "mov eax, [rdi + {components}]",
        "mov edx, [rdi + {components} + 4]",
        "xrstor64 [rcx]",
        "mov eax, ss",
        "push rax",
        "push qword ptr [rdi + {rsp}]",
        "mov rax, [rdi + {rflags}]",
        "or rax, 0x100", // the trap flag
        "push rax",
        "mov eax, cs",
        "push rax",
        "push qword ptr [rdi + {rip}]",
        "mov rax, [rdi + {rax}]",
        "mov rbx, [rdi + {rbx}]",
        "mov rcx, [rdi + {rcx}]",
        "mov rdx, [rdi + {rdx}]",
        "mov rsi, [rdi + {rsi}]",
        "mov rbp, [rdi + {rbp}]",
        "mov r8, [rdi + {r8}]",
        "mov r9, [rdi + {r9}]",
        "mov r10, [rdi + {r10}]",
        "mov r11, [rdi + {r11}]",
        "mov r12, [rdi + {r12}]",
        "mov r13, [rdi + {r13}]",
        "mov r14, [rdi + {r14}]",
        "mov r15, [rdi + {r15}]",
        "mov rdi, [rdi + {rdi}]",
        "iretq",
        host = const offset_of!(Native, host),
        state = const offset_of!(Native, state),
        components = const offset_of!(Native, components),
        rax = const offset_of!(kvm_regs, rax),
        rbx = const offset_of!(kvm_regs, rbx),
        rcx = const offset_of!(kvm_regs, rcx),
        rdx = const offset_of!(kvm_regs, rdx),
        rsi = const offset_of!(kvm_regs, rsi),
        rdi = const offset_of!(kvm_regs, rdi),
        rsp = const offset_of!(kvm_regs, rsp),
        rbp = const offset_of!(kvm_regs, rbp),
        r8 = const offset_of!(kvm_regs, r8),
        r9 = const offset_of!(kvm_regs, r9),
        r10 = const offset_of!(kvm_regs, r10),
        r11 = const offset_of!(kvm_regs, r11),
        r12 = const offset_of!(kvm_regs, r12),
        r13 = const offset_of!(kvm_regs, r13),
        r14 = const offset_of!(kvm_regs, r14),
        r15 = const offset_of!(kvm_regs, r15),
        rip = const offset_of!(kvm_regs, rip),
        rflags = const offset_of!(kvm_regs, rflags),
    )
}

/// Where the handler of SIGTRAP goes on, with `Native::host` as the stack pointer: returns from
/// [`native_step`].
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn after_step() {
    naked_asm!("pop r15", "pop r14", "pop r13", "pop r12", "pop rbx", "pop rbp", "ret")
}

/// A system call that makes a process or a thread. The caller gets the result in RAX of
/// `registers`. The child goes on in ring 3 with the program's registers, on the program's stack;
/// or if `has_stack` on the one that the program gives it, whose word below the stack pointer is
/// the address to go on at.
///
/// # Safety
/// The registers are those of such a call.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn native_clone(native: *mut Native, has_stack: u64) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rdi",
        "mov r11, rsi",
        "mov rcx, [rdi + {state}]",
        "mov eax, [rdi + {components}]",
        "mov edx, [rdi + {components} + 4]",
        "xrstor64 [rcx]",
        "mov rax, [rdi + {rax}]",
        "mov rbx, [rdi + {rbx}]",
        "mov rdx, [rdi + {rdx}]",
        "mov rsi, [rdi + {rsi}]",
        "mov rbp, [rdi + {rbp}]",
        "mov r8, [rdi + {r8}]",
        "mov r9, [rdi + {r9}]",
        "mov r10, [rdi + {r10}]",
        "mov r12, [rdi + {r12}]",
        "mov r13, [rdi + {r13}]",
        "mov r14, [rdi + {r14}]",
        "mov r15, [rdi + {r15}]",
        "mov rdi, [rdi + {rdi}]",
        "test r11, r11",
        "jnz 2f",
        "syscall",
        "test rax, rax",
        "jnz 3f",
        "mov rcx, [rsp]", // the child of a fork
        "mov rsp, [rcx + {rsp}]",
        "mov rcx, [rcx + {rip}]",
        "jmp rcx",
        "2:",
        "syscall",
        "test rax, rax",
        "jnz 3f",
        "mov rcx, [rsp - 8]", // the child with a stack of its own
        "jmp rcx",
        "3:", // the parent, or an error
        "pop rcx",
        "mov [rcx + {rax}], rax",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
        state = const offset_of!(Native, state),
        components = const offset_of!(Native, components),
        rax = const offset_of!(kvm_regs, rax),
        rbx = const offset_of!(kvm_regs, rbx),
        rdx = const offset_of!(kvm_regs, rdx),
        rsi = const offset_of!(kvm_regs, rsi),
        rdi = const offset_of!(kvm_regs, rdi),
        rsp = const offset_of!(kvm_regs, rsp),
        rbp = const offset_of!(kvm_regs, rbp),
        r8 = const offset_of!(kvm_regs, r8),
        r9 = const offset_of!(kvm_regs, r9),
        r10 = const offset_of!(kvm_regs, r10),
        r12 = const offset_of!(kvm_regs, r12),
        r13 = const offset_of!(kvm_regs, r13),
        r14 = const offset_of!(kvm_regs, r14),
        r15 = const offset_of!(kvm_regs, r15),
        rip = const offset_of!(kvm_regs, rip),
    )
}
