//! A virtual machine whose memory is a Morsel: it has translations of its own, and is told when
//! pages go.
#![allow(clippy::unwrap_used, unsafe_code)]

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::{Mapping, Morsel, PAGE, access, morsel_turn};
use vellum_uapi::morsel::{HUGE, PINNABLE};

const MIB: u64 = 1 << 20;

/// What the machine runs, in its first mode: `mov ax, [0]; hlt; mov word [0], 0x1234; hlt`.
const PROGRAM: [u8; 11] = [0xa1, 0, 0, 0xf4, 0xc7, 0x06, 0, 0, 0x34, 0x12, 0xf4];

/// Where the machine has the program, and where each of its parts begins.
const CODE: u64 = 0x1000;
const READ: u64 = CODE;
const WRITE: u64 = CODE + 4;

/// Where it has the memory in question, the segment of its data.
const DATA: u64 = 0x10000;

/// A virtual machine with one processor, to whose word 0 belongs what is mapped.
struct Machine {
    processor: VcpuFd,
    _machine: VmFd,
    _code: Mapping,
}

impl Machine {
    /// `None` where this kernel has no virtual machines.
    fn new(data: &Mapping) -> Option<Machine> {
        let Ok(kvm) = Kvm::new() else {
            eprintln!("skipped: no /dev/kvm");
            return None;
        };
        let machine = kvm.create_vm().unwrap();
        let code = Mapping::anonymous(None, PAGE).unwrap();
        access::kernel_store(code.start(), &PROGRAM).unwrap();
        for (slot, place, mapping) in [(0, CODE, &code), (1, DATA, data)] {
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: place,
                memory_size: PAGE as u64,
                userspace_addr: mapping.start() as u64,
            };
            // SAFETY: what the machine writes is not looked at through references.
            unsafe { machine.set_user_memory_region(region) }.unwrap();
        }
        let processor = machine.create_vcpu(0).unwrap();
        let mut registers = processor.get_sregs().unwrap();
        (registers.cs.base, registers.cs.selector) = (0, 0);
        (registers.ds.base, registers.ds.selector) = (DATA, (DATA >> 4) as u16);
        processor.set_sregs(&registers).unwrap();
        Some(Machine { processor, _machine: machine, _code: code })
    }

    /// Runs a part of the program; what it has read last.
    #[track_caller]
    fn run(&mut self, part: u64) -> u64 {
        self.try_run(part).expect("the memory that it needs")
    }

    /// The same, or the error where the kernel does not give it the memory.
    fn try_run(&mut self, part: u64) -> Result<u64, kvm_ioctls::Error> {
        let mut registers = self.processor.get_regs()?;
        (registers.rip, registers.rflags) = (part, 2);
        self.processor.set_regs(&registers)?;
        let exit = self.processor.run()?;
        assert!(matches!(exit, VcpuExit::Hlt), "{exit:?}");
        Ok(self.processor.get_regs()?.rax & 0xffff)
    }
}

#[test]
fn a_virtual_machine_loses_what_is_punched() {
    let Some(_turn) = morsel_turn() else { return };
    for flags in [0, PINNABLE, HUGE] {
        let morsel = Morsel::new(2, 2 * MIB, flags);
        morsel.populate(0, 2 * MIB).unwrap();
        let mapping = morsel.mapped();
        let Some(mut machine) = Machine::new(&mapping) else { return };
        let word = |mapping: &Mapping| access::kernel_load(mapping.start(), 2).unwrap();
        if flags == HUGE && machine.try_run(WRITE).is_err() {
            eprintln!("left out: this kernel gives virtual machines no such leaves of 2 MiB");
            continue;
        }
        machine.run(WRITE);
        assert_eq!((word(&mapping), machine.run(READ)), (vec![0x34, 0x12], 0x1234));

        morsel.punch(0, 2 * MIB).unwrap();
        // The page belongs to somebody else now, in all likelihood.
        let other = Morsel::new(2, 16 * MIB, 0);
        let others = other.mapped();
        let pages = 16 * MIB / PAGE as u64;
        (0..pages).for_each(|page| others.stamp(page, 3));
        assert_eq!(machine.run(READ), 0, "flags {flags:#x}: what others have is read");
        machine.run(WRITE);
        (0..pages).for_each(|page| others.assert_stamped(page, 3));
        assert_eq!((word(&mapping), machine.run(READ)), (vec![0x34, 0x12], 0x1234));

        morsel.revoke().unwrap();
        assert!(machine.processor.run().is_err(), "it has no memory any more");
        assert_morsels_are_sound();
    }
}
