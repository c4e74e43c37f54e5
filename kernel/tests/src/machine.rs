//! Virtual machines of KVM that use a test's memory. They have their own translations, and mostly
//! no references to the pages. KVM has a reference to a page that describes a nested machine.
#![allow(unsafe_code)]

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Error, Kvm, VcpuExit, VcpuFd, VmFd};

use crate::{Mapping, PAGE, access};

/// The machine's program, in real mode: `mov ax, [bx]; hlt; mov [bx], ax; hlt`.
const PROGRAM: [u8; 6] = [0x8b, 0x07, 0xf4, 0x89, 0x07, 0xf4];

/// Where the machine has the program, and where each of its parts begins.
const CODE: u64 = 0x1000;
const LOAD: u64 = CODE;
const STORE: u64 = CODE + 3;

/// The address of the test's memory in the machine, the segment of its data.
const DATA: u64 = 0x10000;

/// The number of pages that the program can address.
const PAGES: usize = 16;

/// KVM; `None`, and a printed line, if this kernel has no virtual machines.
fn kvm() -> Option<Kvm> {
    let kvm = Kvm::new();
    if kvm.is_err() {
        eprintln!("skipped: no /dev/kvm");
    }
    kvm.ok()
}

/// Repeats a call while a signal interrupts it, because KVM then stops registering its notifier.
fn without_signal<T>(mut call: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    loop {
        match call() {
            Err(error) if error.errno() == libc::EINTR => {}
            result => return result,
        }
    }
}

/// A machine with its own memory at one address, and the first pages of a test's memory at another.
fn make(kvm: &Kvm, own: (u64, &Mapping), tests: (u64, &Mapping)) -> VmFd {
    let machine = without_signal(|| kvm.create_vm()).expect("a machine");
    for (slot, (place, memory)) in [own, tests].into_iter().enumerate() {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: place,
            memory_size: memory.length().min(PAGES * PAGE) as u64,
            userspace_addr: memory.start() as u64,
        };
        // SAFETY: no references exist to memory that the machine writes.
        unsafe { machine.set_user_memory_region(region) }.expect("a slot");
    }
    machine
}

/// A machine with one processor. It must be dropped before its memory.
#[derive(Debug)]
pub struct Machine {
    processor: VcpuFd,
    _machine: VmFd,
    _code: Mapping,
}

impl Machine {
    /// A machine with the first pages of a mapping; `None`, and a message, if this kernel has no
    /// virtual machines.
    pub fn new(memory: &Mapping) -> Option<Self> {
        let kvm = kvm()?;
        let code = Mapping::anonymous(None, PAGE).expect("a page");
        access::kernel_store(code.start(), &PROGRAM).expect("a page");
        let machine = make(&kvm, (CODE, &code), (DATA, memory));
        let processor = machine.create_vcpu(0).expect("a processor");
        let mut registers = processor.get_sregs().expect("its registers");
        (registers.cs.base, registers.cs.selector) = (0, 0);
        (registers.ds.base, registers.ds.selector) = (DATA, (DATA >> 4) as u16);
        processor.set_sregs(&registers).expect("its registers");
        Some(Self { processor, _machine: machine, _code: code })
    }

    /// Loads the first word of a page; an error if the kernel does not give the page to the
    /// machine.
    pub fn load(&mut self, page: usize) -> Result<u16, Error> {
        self.run(LOAD, page, 0)
    }

    /// Stores the first word of a page.
    pub fn store(&mut self, page: usize, word: u16) -> Result<(), Error> {
        self.run(STORE, page, word).map(drop)
    }

    fn run(&mut self, part: u64, page: usize, word: u16) -> Result<u16, Error> {
        assert!(page < PAGES, "the program cannot address page {page}");
        let mut registers = self.processor.get_regs()?;
        (registers.rip, registers.rflags) = (part, 2);
        (registers.rax, registers.rbx) = (word.into(), (page * PAGE) as u64);
        self.processor.set_regs(&registers)?;
        let exit = self.processor.run()?;
        match exit {
            VcpuExit::Hlt => Ok(self.processor.get_regs()?.rax as u16),
            // A store to read-only memory.
            VcpuExit::MmioWrite(..) => Err(Error::new(libc::EFAULT)),
            other => panic!("the machine stopped with {other:?}"),
        }
    }
}

/// The memory layout of a machine that starts machines, a page each.
const DIRECTORY: usize = 0x1000;
const INTERRUPTS: usize = 0x2000;
const SEGMENTS: usize = 0x3000;
const STARTER: usize = 0x4000;
const HANDLER: usize = 0x5000;
/// Where the processor saves its state.
const STATE: u64 = 0x6000;
const STACK: u64 = 0x8000;

/// The address of the test's memory in it: the second 4 MiB.
const OTHERS: u64 = 0x40_0000;

/// How often the machine tries to start another before it stops.
const TRIES: u32 = 200;

/// The handler of general protection faults. It skips the instruction, which KVM has not executed
/// because it did not get the page. `add esp, 4; add dword [esp], 3; iret`.
const SKIP: [u8; 8] = [0x83, 0xc4, 0x04, 0x83, 0x04, 0x24, 0x03, 0xcf];

/// The bit of EFER and the register for machines in machines.
const SVM_ENABLED: u64 = 1 << 12;
const STATE_REGISTER: u32 = 0xc001_0117;

/// A machine that tries to start a nested machine, again and again. The description of the nested
/// machine is in a page of the test's memory. It is invalid, and KVM writes an error into that
/// page. KVM finds the page by the process' page tables, and has a reference to it while it writes;
/// its notifier does not cover that.
#[derive(Debug)]
pub struct Starter {
    processor: VcpuFd,
    _machine: VmFd,
    _memory: Mapping,
}

impl Starter {
    /// Where in the page KVM writes that it cannot start such a machine: -1, in 8 bytes.
    pub const ANSWER: usize = 0x70;

    /// A machine with the first pages of a mapping, and the description in one of them. `None`, and
    /// a message, if this kernel has no nested machines.
    pub fn new(memory: &Mapping, page: usize) -> Option<Self> {
        assert!(page < PAGES, "page {page} is out of the machine's reach");
        let kvm = kvm()?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).expect("what it can do");
        let has_svm = |entry: &kvm_bindings::kvm_cpuid_entry2| {
            entry.function == 0x8000_0001 && entry.ecx & 4 != 0
        };
        if !cpuid.as_slice().iter().any(has_svm) {
            eprintln!("skipped: no machines in machines");
            return None;
        }
        let own = Self::memory(OTHERS + (page * PAGE) as u64);
        let machine = make(&kvm, (0, &own), (OTHERS, memory));
        let processor = machine.create_vcpu(0).expect("a processor");
        processor.set_cpuid2(&cpuid).expect("what it can do");
        let mut registers = processor.get_sregs().expect("its registers");
        let flat = kvm_segment {
            limit: u32::MAX,
            selector: 16,
            type_: 3,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        registers.cs = kvm_segment { selector: 8, type_: 0xb, ..flat };
        (registers.ds, registers.es, registers.ss) = (flat, flat, flat);
        (registers.fs, registers.gs) = (flat, flat);
        (registers.idt.base, registers.idt.limit) = (INTERRUPTS as u64, 0x7ff);
        (registers.gdt.base, registers.gdt.limit) = (SEGMENTS as u64, 23);
        // Protected mode with pages of 4 MiB.
        (registers.cr0, registers.cr3, registers.cr4) = (0x8000_0011, DIRECTORY as u64, 0x10);
        registers.efer = SVM_ENABLED;
        processor.set_sregs(&registers).expect("its registers");
        let entry = kvm_msr_entry { index: STATE_REGISTER, data: STATE, ..Default::default() };
        let entries = Msrs::from_entries(&[entry]).expect("one of them");
        assert_eq!(processor.set_msrs(&entries), Ok(1));
        Some(Self { processor, _machine: machine, _memory: own })
    }

    /// The machine's own memory, with the program for a description at this address.
    fn memory(description: u64) -> Mapping {
        let memory = Mapping::anonymous(None, PAGES * PAGE).expect("memory");
        let put = |place: usize, bytes: &[u8]| {
            access::kernel_store(memory.start() + place, bytes).expect("its memory");
        };
        // Maps two pages of 4 MiB at their own addresses.
        put(DIRECTORY, &(OTHERS << 32 | 0x83 << 32 | 0x83).to_le_bytes());
        put(SEGMENTS + 8, &0x00cf_9a00_0000_ffff_u64.to_le_bytes());
        put(SEGMENTS + 16, &0x00cf_9200_0000_ffff_u64.to_le_bytes());
        let gate = 0x8e00 << 32 | 8 << 16 | HANDLER as u64;
        put(INTERRUPTS + 13 * 8, &gate.to_le_bytes());
        put(HANDLER, &SKIP);
        // mov ecx, TRIES; mov eax, description; again: vmrun; dec ecx; jnz again; hlt
        let mut program = vec![0xb9];
        program.extend(TRIES.to_le_bytes());
        program.push(0xb8);
        program.extend((description as u32).to_le_bytes());
        program.extend([0x0f, 0x01, 0xd8, 0x49, 0x75, 0xfa, 0xf4]);
        put(STARTER, &program);
        memory
    }

    /// Tries some hundred times, whether the page is present or not.
    pub fn run(&mut self) {
        let mut registers = self.processor.get_regs().expect("its registers");
        (registers.rip, registers.rsp, registers.rflags) = (STARTER as u64, STACK, 2);
        self.processor.set_regs(&registers).expect("its registers");
        let exit = self.processor.run().expect("a machine that runs");
        assert!(matches!(exit, VcpuExit::Hlt), "the machine stopped with {exit:?}");
    }
}
