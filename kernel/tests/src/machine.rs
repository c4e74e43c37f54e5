//! A virtual machine of KVM whose memory is a test's: it has translations of its own, and no
//! references to the pages.
#![allow(unsafe_code)]

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Error, Kvm, VcpuExit, VcpuFd, VmFd};

use crate::{Mapping, PAGE, access};

/// What the machine runs, in its first mode: `mov ax, [bx]; hlt; mov [bx], ax; hlt`.
const PROGRAM: [u8; 6] = [0x8b, 0x07, 0xf4, 0x89, 0x07, 0xf4];

/// Where the machine has the program, and where each of its parts begins.
const CODE: u64 = 0x1000;
const LOAD: u64 = CODE;
const STORE: u64 = CODE + 3;

/// Where it has the test's memory, the segment of its data.
const DATA: u64 = 0x10000;

/// So many pages are in reach of the program.
const PAGES: usize = 16;

/// A machine with one processor. It has to go before its memory does.
#[derive(Debug)]
pub struct Machine {
    processor: VcpuFd,
    _machine: VmFd,
    _code: Mapping,
}

impl Machine {
    /// One that has the first pages of what is mapped; `None`, and a word, where this kernel has no
    /// virtual machines.
    pub fn new(memory: &Mapping) -> Option<Self> {
        let Ok(kvm) = Kvm::new() else {
            eprintln!("skipped: no /dev/kvm");
            return None;
        };
        let machine = kvm.create_vm().expect("a machine");
        let code = Mapping::anonymous(None, PAGE).expect("a page");
        access::kernel_store(code.start(), &PROGRAM).expect("a page");
        let length = memory.length().min(PAGES * PAGE);
        for (slot, place, start, length) in
            [(0, CODE, code.start(), PAGE), (1, DATA, memory.start(), length)]
        {
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: place,
                memory_size: length as u64,
                userspace_addr: start as u64,
            };
            // SAFETY: what the machine writes is not looked at through references.
            unsafe { machine.set_user_memory_region(region) }.expect("a slot");
        }
        let processor = machine.create_vcpu(0).expect("a processor");
        let mut registers = processor.get_sregs().expect("its registers");
        (registers.cs.base, registers.cs.selector) = (0, 0);
        (registers.ds.base, registers.ds.selector) = (DATA, (DATA >> 4) as u16);
        processor.set_sregs(&registers).expect("its registers");
        Some(Self { processor, _machine: machine, _code: code })
    }

    /// Loads the first word of a page; an error where the kernel does not give it to the machine.
    pub fn load(&mut self, page: usize) -> Result<u16, Error> {
        self.run(LOAD, page, 0)
    }

    /// Stores it.
    pub fn store(&mut self, page: usize, word: u16) -> Result<(), Error> {
        self.run(STORE, page, word).map(drop)
    }

    fn run(&mut self, part: u64, page: usize, word: u16) -> Result<u16, Error> {
        assert!(page < PAGES, "page {page} is out of the program's reach");
        let mut registers = self.processor.get_regs()?;
        (registers.rip, registers.rflags) = (part, 2);
        (registers.rax, registers.rbx) = (word.into(), (page * PAGE) as u64);
        self.processor.set_regs(&registers)?;
        let exit = self.processor.run()?;
        match exit {
            VcpuExit::Hlt => Ok(self.processor.get_regs()?.rax as u16),
            // A store to what is for reading only.
            VcpuExit::MmioWrite(..) => Err(Error::new(libc::EFAULT)),
            other => panic!("the machine stopped with {other:?}"),
        }
    }
}
