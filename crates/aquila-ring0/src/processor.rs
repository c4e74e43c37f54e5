//! A virtual processor: its registers as ring 0 of a 64-bit kernel has them, and its own memory.
//!
//! A thread takes one when it enters. The process' half of the thread, which serves its exits, has
//! a stack of its own, because the program's stack is in use.
#![allow(unsafe_code)]

use std::arch::x86_64::__cpuid_count;
use std::os::fd::{AsRawFd as _, BorrowedFd, IntoRawFd as _};
use std::ptr;
use std::sync::atomic::AtomicU64;

use kvm_bindings::{
    CpuId, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Msrs,
    kvm_device_attr, kvm_msr_entry, kvm_regs, kvm_run, kvm_segment, kvm_sregs, kvm_xcrs,
};
use kvm_ioctls::{VcpuFd, VmFd};
use rustix::io::Errno;
use rustix::mm::ProtFlags;

use crate::descriptors::{self, Kept};
use crate::entry::{self, Block, BlockCounts, EXCEPTION, Native, PAGE};
use crate::error::{Error, Result};
use crate::memory::{self, Mapped, Memory, pointer};
use crate::running::Running;
use crate::sys::raw_system_call;

/// Bytes of the stack on which exits are served, and on which handlers of signals run that arrive
/// while the thread is in ring 0 (unless they have an alternate stack). Programs count on the usual
/// stack of a thread. The kernel gives it memory where it is used.
const HOST_STACK: u64 = 8 << 20;

const MAKING: &str = "making a virtual processor";

/// Pages of the stack on which managed faults are handled.
const HANDLER_STACK: usize = 16;

/// Where the parts of the segment table are: code, data, the task, and the processor's number,
/// which the vDSO reads by LSL.
const CODE: u16 = 0x08;
const DATA: u16 = 0x10;
const TASK: u16 = 0x18;
const NUMBER: u64 = 0x78;
const SEGMENTS_LIMIT: u16 = NUMBER as u16 + 7;

/// The task's segment is in the second half of the page.
const TASK_PLACE: u64 = 2048;
const TASK_LIMIT: u32 = 0x67;

/// Registers by number.
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const FMASK: u32 = 0xc000_0084;
const TSC_AUX: u32 = 0xc000_0103;

/// Bits of control registers. Without WP, ring 0 would store to pages that are read-only.
const CR0: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31; // PE MP ET NE WP PG
const CR4: u64 = 1 << 5 | 1 << 9 | 1 << 10 | 1 << 18; // PAE OSFXSR OSXMMEXCPT OSXSAVE
const FSGSBASE: u64 = 1 << 16;
const EFER: u64 = 1 | 1 << 8 | 1 << 10 | 1 << 11; // SCE LME LMA NXE

/// Components of the vector registers: those that libraries choose their code by, and PKRU, whose
/// keys ring 0 does not obey and which the process keeps.
const CHOSEN: u64 = 0b1110_0110;
const PKRU: u64 = 1 << 9;

/// A bit of CR3 that says how the highest table is cached. A change of it by the process has KVM
/// forget the processor's translations.
const FORGET: u64 = 1 << 3;

/// The program's flags when it enters: interrupts on, as in ring 3, and the bit that is always set.
pub(crate) const FLAGS: u64 = 1 << 9 | 1 << 1;

/// What all virtual processors of a machine have in common.
#[derive(Debug)]
pub(crate) struct Model {
    cpuid: CpuId,
    /// Vector registers of the guest.
    components: u64,
    interrupts: u64,
    /// Bits of a guest-physical address.
    pub(crate) bits: u32,
    /// Whether the tables may have entries of 1 GiB.
    pub(crate) has_large_pages: bool,
    has_fsgsbase: bool,
    has_number: bool,
}

impl Model {
    /// What KVM supports.
    ///
    /// # Errors
    /// If the guest would lack vector registers that the process has, and that its libraries
    /// therefore use.
    pub(crate) fn new(cpuid: CpuId) -> Result<Self> {
        let find = |function: u32, index: u32| {
            let same = |entry: &&kvm_bindings::kvm_cpuid_entry2| {
                entry.function == function && entry.index == index
            };
            cpuid.as_slice().iter().find(same).copied().unwrap_or_default()
        };
        // MPX and others that KVM does not know are left out, or it refuses the whole set.
        let supported = find(0xd, 0);
        let supported = u64::from(supported.edx) << 32 | u64::from(supported.eax);
        let own = own_components()?;
        let components = own & supported;
        if own & CHOSEN & !components != 0 {
            return Err(Error::Missing {
                what: "AVX or AVX-512 in guests of KVM",
                advice: "a program's libraries use it where the processor has it",
            });
        }
        if state_size(components) > PAGE as u64 {
            return Err(Error::Missing {
                what: "room for the vector registers",
                advice: "4096 bytes of state are supported",
            });
        }
        let structured = find(7, 0);
        let extended = find(0x8000_0001, 0);
        let has_number = extended.edx & 1 << 27 != 0 || structured.ecx & 1 << 22 != 0;
        Ok(Self {
            components,
            interrupts: 0,
            bits: find(0x8000_0008, 0).eax & 0xff,
            has_large_pages: extended.edx & 1 << 26 != 0,
            has_fsgsbase: structured.ebx & 1 != 0,
            has_number,
            cpuid,
        })
    }

    /// Makes the table of interrupts: page faults have the entry of their own; double faults, NMI
    /// and machine checks a stack of their own.
    pub(crate) fn make_interrupts(&mut self, memory: &Memory) -> Result<()> {
        self.interrupts = memory.pages(1)?;
        let others = address(entry::exceptions).next_multiple_of(EXCEPTION);
        for vector in 0..256 {
            let (place, stack) = match vector {
                14 => (address(entry::page_fault), 1),
                2 | 8 | 18 => (others + EXCEPTION * vector, 2),
                _ => (others + EXCEPTION * vector, 1),
            };
            let gate = [
                place & 0xffff
                    | u64::from(CODE) << 16
                    | stack << 32
                    | 0x8e << 40
                    | (place >> 16 & 0xffff) << 48,
                place >> 32,
            ];
            // SAFETY: the table is a page of the guest's, which nothing uses yet.
            unsafe { pointer::<[u64; 2]>(self.interrupts).add(vector as usize).write(gate) };
        }
        Ok(())
    }

    /// The table of CPUID for a processor.
    fn cpuid(&self, id: u32) -> CpuId {
        let mut cpuid = self.cpuid.clone();
        for entry in cpuid.as_mut_slice() {
            match entry.function {
                1 => entry.ebx = entry.ebx & 0x00ff_ffff | id << 24,
                0xb | 0x1f => entry.edx = id,
                _ => {}
            }
        }
        cpuid
    }
}

/// The address of an entry.
fn address(entry: unsafe extern "C" fn()) -> u64 {
    entry as *const () as u64
}

/// The addresses that exceptions lead to, whose windows must be there before the first one.
pub(crate) fn entries() -> [u64; 5] {
    [
        address(entry::page_fault),
        address(entry::managed_page_fault),
        // It is shorter than that.
        address(entry::managed_page_fault) + 512,
        address(entry::exceptions),
        address(entry::exceptions) + EXCEPTION * 257,
    ]
}

/// The process' own vector registers (XCR0).
fn own_components() -> Result<u64> {
    let has_xsave = __cpuid_count(1, 0).ecx & 1 << 27 != 0;
    if !has_xsave {
        let advice = "all x86-64 processors since 2011 have it";
        return Err(Error::Missing { what: "XSAVE", advice });
    }
    let (low, high): (u32, u32);
    // SAFETY: the kernel has enabled XSAVE, and with it this instruction.
    unsafe {
        std::arch::asm!(
            "xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack)
        );
    }
    Ok(u64::from(high) << 32 | u64::from(low))
}

/// Bytes that XSAVE needs for these.
fn state_size(components: u64) -> u64 {
    let ends = (2..63).filter(|bit| components & 1 << bit != 0).map(|bit| {
        let found = __cpuid_count(0xd, bit);
        u64::from(found.eax) + u64::from(found.ebx)
    });
    ends.max().unwrap_or(0).max(576)
}

/// A virtual processor.
#[derive(Debug)]
pub(crate) struct Processor {
    _descriptor: Kept,
    fd: VcpuFd,
    run: *mut kvm_run,
    block: *mut Block,
    segments: u64,
    system: kvm_sregs,
    has_number: bool,
    /// The last window that it asked for.
    pub(crate) last_window: u64,
    _stack: Mapped,
}

// SAFETY: the pointers lead to memory of the process that belongs to this processor alone.
unsafe impl Send for Processor {}

/// Has KVM make a virtual processor, whose descriptor is out of the program's way.
fn made(vm: &VmFd, id: u32) -> Result<(VcpuFd, Kept)> {
    let made = vm.create_vcpu(u64::from(id)).map_err(Error::kvm(MAKING))?;
    // SAFETY: it is open until it is dropped, at the end.
    let borrowed = unsafe { BorrowedFd::borrow_raw(made.as_raw_fd()) };
    let kept = descriptors::keep(borrowed).map_err(|errno| Error::of(MAKING, errno));
    let (own, descriptor) = kept?;
    // SAFETY: the descriptor is that of a virtual processor, and nothing else closes it.
    let fd = unsafe { vm.create_vcpu_from_rawfd(own.into_raw_fd()) };
    Ok((fd.map_err(Error::kvm(MAKING))?, descriptor))
}

/// The functions that a block calls.
#[derive(Clone, Copy)]
pub(crate) struct Calls {
    pub(crate) serve: unsafe extern "C" fn(*mut Block) -> u64,
    pub(crate) managed_fault: unsafe extern "C" fn(*mut Block, u64, u64) -> u64,
}

impl Processor {
    /// The processor of this number.
    ///
    /// # Errors
    /// When memory runs out, or KVM refuses something.
    pub(crate) fn new(
        vm: &VmFd,
        memory: &Memory,
        model: &Model,
        (id, run_length): (u32, usize),
        calls: Calls,
    ) -> Result<Box<Self>> {
        let stack = Mapped::new(HOST_STACK, PAGE as u64, ProtFlags::READ | ProtFlags::WRITE)?;
        stack.guard()?;
        // Each thread would have a large page for a few small ones.
        stack.use_small_pages();
        let (mut fd, descriptor) = made(vm, id)?;
        let run: *mut kvm_run = fd.get_kvm_run();
        // A forked child would share it, and both would see the other's registers.
        memory::keep_from_children(run.expose_provenance() as u64, run_length as u64)?;
        // The block; the stack of double faults; segments and task; two pages for vector registers.
        let block = memory.pages(5)?;
        let [faults, segments, states] = [1, 2, 3].map(|page| block + page * PAGE as u64);
        // A handler that needs more than its stack must not change what is below it.
        let guard = memory.pages(1 + HANDLER_STACK)?;
        memory::protect_page(guard)?;
        let handler_stack = guard + ((1 + HANDLER_STACK) * PAGE) as u64;
        make_segments(segments, [block + PAGE as u64, faults + PAGE as u64]);
        let block = pointer::<Block>(block);
        // SAFETY: the page is new, and nothing else refers to it.
        unsafe {
            block.write(Block {
                host_stack: stack.end(),
                serve: calls.serve,
                entered: 0,
                managed_fault: calls.managed_fault,
                managed_start: 0,
                managed_end: 0,
                handler_stack,
                handler_state: states,
                is_handling: 0,
                scratch: 0,
                address: 0,
                native: Native {
                    registers: kvm_regs::default(),
                    state: states + PAGE as u64,
                    components: model.components & !PKRU,
                    host: 0,
                    kept: model.components,
                    mask: 0,
                    is_stepping: false,
                },
                processor: 0,
                guest: 0,
                shootdown: 0,
                number: id as usize,
                is_idle: AtomicU64::new(0),
                running: Running::new(&raw mut (*run).immediate_exit),
                counts: BlockCounts::default(),
            });
        }
        let mut processor = Box::new(Self {
            fd,
            run,
            block,
            segments,
            system: kvm_sregs::default(),
            has_number: model.has_number,
            last_window: 0,
            _stack: stack,
            _descriptor: descriptor,
        });
        let place: *mut Self = &raw mut *processor;
        // SAFETY: as above.
        unsafe { (*block).processor = place.expose_provenance() as u64 };
        processor.set_up(memory, model, id)?;
        Ok(processor)
    }

    /// Gives it the registers of ring 0 in 64-bit mode.
    fn set_up(&mut self, memory: &Memory, model: &Model, id: u32) -> Result<()> {
        let doing = "setting up a virtual processor";
        let failed = || Error::kvm(doing);
        self.fd.set_cpuid2(&model.cpuid(id)).map_err(failed())?;
        let flat = kvm_segment {
            limit: u32::MAX,
            selector: DATA,
            type_: 3,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        let system = &mut self.system;
        *system = self.fd.get_sregs().map_err(failed())?;
        system.cs = kvm_segment { selector: CODE, type_: 11, db: 0, l: 1, ..flat };
        (system.ds, system.es, system.ss) = (flat, flat, flat);
        (system.fs, system.gs) = (flat, flat);
        system.tr = kvm_segment {
            base: self.segments + TASK_PLACE,
            limit: TASK_LIMIT,
            selector: TASK,
            type_: 11,
            present: 1,
            ..Default::default()
        };
        (system.gdt.base, system.gdt.limit) = (self.segments, SEGMENTS_LIMIT);
        (system.idt.base, system.idt.limit) = (model.interrupts, 4095);
        (system.cr0, system.cr3) = (CR0, memory.root());
        system.cr4 = CR4 | if model.has_fsgsbase { FSGSBASE } else { 0 };
        system.efer = EFER;
        self.fd.set_sregs(system).map_err(failed())?;
        let mut components = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
        components.xcrs[0].value = model.components;
        self.fd.set_xcrs(&components).map_err(failed())?;
        let registers = [
            (STAR, u64::from(CODE) << 32),
            (LSTAR, address(entry::system_call)),
            // RFLAGS stay as they are.
            (FMASK, 0),
        ];
        let entries = registers.map(|(index, data)| kvm_msr_entry { index, data, reserved: 0 });
        // The call tells how many it has set, and fails for none.
        let set = self.fd.set_msrs(&msrs(&entries)).map_err(failed())?;
        if set != entries.len() {
            return Err(Error::System { doing, errno: Errno::INVAL });
        }
        self.keep_time()?;
        // SAFETY: KVM shares the structure with the process, and the processor does not run.
        unsafe { (*self.run).kvm_valid_regs = KVM_SYNC_X86_REGS.into() };
        Ok(())
    }

    /// Makes the guest's time stamp counter the process', by which the vDSO tells the time.
    fn keep_time(&self) -> Result<()> {
        let offset = 0_u64;
        let attribute = kvm_device_attr {
            group: KVM_VCPU_TSC_CTRL,
            attr: KVM_VCPU_TSC_OFFSET.into(),
            addr: (&raw const offset).addr() as u64,
            flags: 0,
        };
        const SET: libc::Ioctl = 0x4018_aee1; // KVM_SET_DEVICE_ATTR
        // SAFETY: the structures have the layout that the command asks for.
        let set = unsafe { libc::ioctl(self.fd.as_raw_fd(), SET, &raw const attribute) };
        if set == 0 {
            return Ok(());
        }
        Err(Error::Missing {
            what: "KVM_VCPU_TSC_OFFSET, without which clocks would be wrong in a guest",
            advice: "use Linux 5.16 or later",
        })
    }

    /// Prepares it for the calling thread: it begins at an address, with a value in RDI.
    pub(crate) fn prepare(&mut self, start: (u64, u64), managed: (u64, u64)) -> Result<()> {
        let block = self.block;
        // SAFETY: no thread runs the processor, and this one has it alone, but for `running`.
        unsafe {
            ((*block).managed_start, (*block).managed_end) = managed;
            (*block).is_handling = 0;
            (*block).native.is_stepping = false;
        }
        self.last_window = 0;
        self.system.fs.base = base(GET_FS)?;
        self.system.gs.base = base(GET_GS)?;
        self.number();
        let registers =
            kvm_regs { rip: start.0, rdi: start.1, rflags: FLAGS, ..Default::default() };
        // SAFETY: as in `set_up`.
        let run = unsafe { &mut *self.run };
        run.s.regs.regs = registers;
        run.s.regs.sregs = self.system;
        run.kvm_dirty_regs = (KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS).into();
        Ok(())
    }

    /// Tells the guest which processor of the machine the thread is on, and its node, as the kernel
    /// tells it to the vDSO: the number may be old, as always.
    fn number(&self) {
        let (mut processor, mut node) = (0_u32, 0_u32);
        // SAFETY: the call fills both.
        unsafe { libc::syscall(libc::SYS_getcpu, &raw mut processor, &raw mut node, 0) };
        let number = u64::from(node << 12 | processor & 0xfff);
        // A read-only segment for ring 3, whose limit is the number.
        let segment = number & 0xffff | 0xf5 << 40 | (number >> 16 & 0xf) << 48 | 4 << 52;
        // SAFETY: the table has room for it, and the guest does not run.
        unsafe { pointer::<u64>(self.segments + NUMBER).write(segment) };
        if self.has_number {
            let entry = kvm_msr_entry { index: TSC_AUX, data: number, reserved: 0 };
            // If KVM has no such register, the guest has no instruction that reads it.
            let _ = self.fd.set_msrs(&msrs(&[entry]));
        }
    }

    /// Has the processor forget its translations before it runs, if others have changed entries
    /// since it last did.
    pub(crate) fn catch_up(&mut self, generation: u64) -> Result<()> {
        // SAFETY: the block is there as long as the processor; this part is atomic.
        let running = unsafe { &(*self.block).running };
        if !running.is_before(generation) {
            return Ok(());
        }
        let mut system = self.fd.get_sregs().map_err(Error::kvm("reading a virtual processor"))?;
        // KVM forgets only if the value is another one than it has.
        system.cr3 ^= FORGET;
        self.system.cr3 = system.cr3;
        // SAFETY: as in `set_up`.
        let run = unsafe { &mut *self.run };
        if run.kvm_dirty_regs & u64::from(KVM_SYNC_X86_SREGS) != 0 {
            // KVM takes these registers when it runs, and would take the old value with them.
            run.s.regs.sregs.cr3 = system.cr3;
        } else {
            self.fd.set_sregs(&system).map_err(Error::kvm("changing a virtual processor"))?;
        }
        running.see(generation);
        Ok(())
    }

    /// CR3 as KVM has it, and as the guest will have it.
    #[cfg(test)]
    pub(crate) fn cr3(&self) -> [u64; 2] {
        let has = self.fd.get_sregs().unwrap().cr3;
        // SAFETY: as in `set_up`.
        let run = unsafe { &*self.run };
        let is_queued = run.kvm_dirty_regs & u64::from(KVM_SYNC_X86_SREGS) != 0;
        // SAFETY: these registers were filled in.
        [has, if is_queued { unsafe { run.s.regs.sregs.cr3 } } else { has }]
    }

    /// Its block.
    pub(crate) fn block(&self) -> *mut Block {
        self.block
    }

    /// KVM's half of it, which changes only while it runs.
    pub(crate) fn run(&self) -> *mut kvm_run {
        self.run
    }

    /// Forgets an exception that KVM was to deliver to a thread that has left in the middle of
    /// anything.
    ///
    /// # Errors
    /// When KVM does not give or take what is pending.
    pub(crate) fn forget_events(&self) -> Result<()> {
        let failed = || Error::kvm("giving a virtual processor to another thread");
        let mut events = self.fd.get_vcpu_events().map_err(failed())?;
        (events.exception.injected, events.exception.pending) = (0, 0);
        (events.interrupt.injected, events.nmi.injected, events.nmi.pending) = (0, 0, 0);
        self.fd.set_vcpu_events(&events).map_err(failed())
    }

    /// Runs the guest until it exits. Returns 0 or a negative error number, without `errno`, which
    /// may be in use.
    pub(crate) fn go(&self) -> i64 {
        const RUN: u64 = 0xae80; // KVM_RUN
        let arguments = [self.fd.as_raw_fd() as u64, RUN, 0, 0, 0, 0];
        // SAFETY: the guest runs the process' own code.
        unsafe { raw_system_call(libc::SYS_ioctl as u64, arguments) }
    }

    /// The general registers, for exits that do not leave them in [`run`](Self::run).
    pub(crate) fn registers(&self) -> Result<kvm_regs> {
        self.fd.get_regs().map_err(Error::kvm("reading a virtual processor"))
    }

    /// Has the guest go on with these registers.
    pub(crate) fn set_registers(&self, registers: &kvm_regs) {
        // SAFETY: the guest does not run.
        let run = unsafe { &mut *self.run };
        run.s.regs.regs = *registers;
        run.kvm_dirty_regs = KVM_SYNC_X86_REGS.into();
    }

    /// Copies the vector registers to the block, and makes the process' bases of segments the
    /// guest's.
    pub(crate) fn take_state(&mut self) -> Result<()> {
        let failed = || Error::kvm("reading a virtual processor");
        let state = self.fd.get_xsave().map_err(failed())?;
        let system = self.fd.get_sregs().map_err(failed())?;
        // SAFETY: the page is the block's, and has room for the structure's 4096 bytes.
        unsafe {
            let to = pointer::<[u32; 1024]>((*self.block).native.state);
            to.write(state.region);
        }
        if system.gs.base != self.system.gs.base {
            set_base(SET_GS, system.gs.base)?;
            self.system.gs.base = system.gs.base;
        }
        Ok(())
    }

    /// The way back.
    pub(crate) fn give_state(&mut self) -> Result<()> {
        // SAFETY: as in `take_state`; KVM reads as many bytes as the structure has, because no
        // larger registers are enabled.
        let set = unsafe {
            let state = pointer::<kvm_bindings::kvm_xsave>((*self.block).native.state);
            self.fd.set_xsave(&*state)
        };
        set.map_err(Error::kvm("changing a virtual processor"))
    }

    /// Makes the guest's base of GS the process', after a call that may have changed it.
    pub(crate) fn take_base(&mut self) -> Result<()> {
        self.system.gs.base = base(GET_GS)?;
        let mut system = self.fd.get_sregs().map_err(Error::kvm("reading a virtual processor"))?;
        system.gs.base = self.system.gs.base;
        self.fd.set_sregs(&system).map_err(Error::kvm("changing a virtual processor"))
    }

    /// Makes the process' base of GS the guest's, when the thread leaves.
    pub(crate) fn give_base(&mut self) -> Result<()> {
        let system = self.fd.get_sregs().map_err(Error::kvm("reading a virtual processor"))?;
        if system.gs.base != self.system.gs.base {
            set_base(SET_GS, system.gs.base)?;
        }
        Ok(())
    }
}

/// Commands of `arch_prctl`.
pub(crate) const SET_GS: u64 = 0x1001;
pub(crate) const SET_FS: u64 = 0x1002;
const GET_FS: u64 = 0x1003;
const GET_GS: u64 = 0x1004;
const SHADOW_STACK_STATUS: u64 = 0x5005;

/// The thread's base of a segment.
fn base(command: u64) -> Result<u64> {
    let mut base = 0_u64;
    let at = (&raw mut base).addr() as u64;
    // SAFETY: the call fills the number.
    match unsafe { raw_system_call(libc::SYS_arch_prctl as u64, [command, at, 0, 0, 0, 0]) } {
        0 => Ok(base),
        error => Err(Error::of("reading a segment's base", errno(error))),
    }
}

fn set_base(command: u64, base: u64) -> Result<()> {
    // SAFETY: the program has set the base in ring 0.
    match unsafe { raw_system_call(libc::SYS_arch_prctl as u64, [command, base, 0, 0, 0, 0]) } {
        0 => Ok(()),
        error => Err(Error::of("setting a segment's base", errno(error))),
    }
}

/// Whether returns are checked against a shadow stack, which the change of stacks would not pass.
pub(crate) fn has_shadow_stack() -> bool {
    let mut features = 0_u64;
    let at = (&raw mut features).addr() as u64;
    let arguments = [SHADOW_STACK_STATUS, at, 0, 0, 0, 0];
    // SAFETY: the call fills the number, or is not known.
    let result = unsafe { raw_system_call(libc::SYS_arch_prctl as u64, arguments) };
    result == 0 && features & 1 != 0
}

/// The error number of a system call's result.
pub(crate) fn errno(result: i64) -> Errno {
    Errno::from_raw_os_error(-result as i32)
}

fn msrs(entries: &[kvm_msr_entry]) -> Msrs {
    Msrs::from_entries(entries).unwrap_or_else(|_| unreachable!("a few entries fit"))
}

/// Fills the segment table and the task, whose only purpose is the two stacks for exceptions.
fn make_segments(segments: u64, stacks: [u64; 2]) {
    let task = segments + TASK_PLACE;
    let low =
        u64::from(TASK_LIMIT) | (task & 0xff_ffff) << 16 | 0x8b << 40 | (task >> 24 & 0xff) << 56;
    let write = |place: u64, value: u64| {
        // SAFETY: the page is the guest's, and nothing uses it yet.
        unsafe { ptr::write_unaligned(pointer::<u64>(place), value) };
    };
    write(segments + u64::from(CODE), 0x00af_9b00_0000_ffff);
    write(segments + u64::from(DATA), 0x00cf_9300_0000_ffff);
    write(segments + u64::from(TASK), low);
    write(segments + u64::from(TASK) + 8, task >> 32);
    // The first of the seven stacks is at byte 36.
    write(task + 36, stacks[0]);
    write(task + 44, stacks[1]);
}
