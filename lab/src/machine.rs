//! The emulated machine.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result};

use crate::disk;
use crate::kernel::Kernel;
use crate::monitor;
use crate::packages::starting;
use crate::xen;

/// The emulator.
pub const QEMU: &str = "qemu-system-x86_64";

/// The port at which a machine waits for a debugger.
pub const GDB_PORT: u16 = 1234;

/// The boot options of every kernel. Its messages go to the second serial line. It stops after an
/// oops. Its limits for stuck tasks are high, because an emulated processor is slow on a busy host,
/// and it does not check its timer, which then seems broken. Devices of kernel drivers reach all of
/// memory; devices that user space drives reach only registered memory.
const BOOT_ARGUMENTS: &str = "console=ttyS1 loglevel=7 panic=-1 oops=panic rdinit=/init \
    watchdog_thresh=60 workqueue.watchdog_thresh=120 rcupdate.rcu_cpu_stall_timeout=120 \
    sysctl.kernel.hung_task_timeout_secs=300 no_timer_check intel_iommu=on iommu=pt";

/// The controller for user space, at the address at which the guest expects it.
const LENT: &str = "nvme,serial=lent,drive=lent,addr=10.0";

/// The parts of the machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Processors.
    pub processors: u32,
    /// Levels of its page tables, if not the kernel's default in the lab.
    pub levels: Option<u32>,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// One thread of the host emulates all processors, in turn. So no processor waits for another
    /// one that the host does not run, and several machines can run at the same time.
    pub takes_turns: bool,
    /// Runs one instruction after the other, each in one nanosecond of the guest's clock, so that
    /// the clock counts instructions.
    pub counts_instructions: bool,
    /// More for the kernel's command line.
    pub boot: String,
    /// The name that distinguishes it from other machines of its kernel.
    pub name: Option<String>,
    /// Waits for a debugger before the first instruction.
    pub waits_for_gdb: bool,
}

/// The files of one run.
#[derive(Clone, Copy, Debug)]
pub struct Files<'a> {
    /// The guest's first file system.
    pub archive: &'a Path,
    /// Contents of its NVMe disk; changes are not kept.
    pub disk: &'a Path,
    /// Contents of the disk whose controller is for user space; changes are not kept.
    pub lent: &'a Path,
    /// Contents of its persistent memory, if it has some; changes are kept.
    pub pmem: Option<&'a Path>,
    /// Whether it has a disk that the lab serves: a virtio disk.
    pub is_served: bool,
    /// The file for the kernel's messages.
    pub messages: &'a Path,
}

impl Machine {
    /// Starts the machine. The first serial line of the guest is at its standard streams.
    ///
    /// # Errors
    /// If the emulator does not start.
    pub fn start(&self, kernel: &Kernel, files: Files<'_>, interactive: bool) -> Result<Child> {
        let mut command = Command::new(QEMU);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        let (accelerator, processor) = match (self.counts_instructions, self.takes_turns) {
            (false, _) if has_virtualisation() => ("kvm,kernel-irqchip=split", "host"),
            (false, false) => ("tcg,thread=multi", EMULATED),
            _ => ("tcg,thread=single", EMULATED),
        };
        let fifth = match self.levels.unwrap_or(kernel.levels()) {
            4 => ",la57=off",
            _ => "",
        };
        command.args(["-accel", accelerator, "-cpu", &format!("{processor}{fifth}")]);
        if self.counts_instructions {
            command.args(["-icount", "shift=0,sleep=off"]);
        }
        command.args(["-smp", &self.processors.to_string()]);
        command.args(["-machine", "q35,nvdimm=on"]);
        // User space may drive a device only if the IOMMU remaps its interrupts, too. Below Xen,
        // interrupts are lost then.
        if kernel.hypervisor.is_none() {
            command.args(["-device", "intel-iommu,intremap=on,caching-mode=on"]);
        }
        self.add_memory(&mut command, files.pmem)?;
        let mut told = format!("{BOOT_ARGUMENTS} {} {}", kernel.boot_arguments(), self.boot);
        if self.waits_for_gdb {
            command.args(["-S", "-gdb", &format!("tcp:127.0.0.1:{GDB_PORT}")]);
            // Without address randomisation, so that symbols are at their linked addresses.
            told.push_str(" nokaslr");
        }
        start_kernel(&mut command, kernel, files.archive, told);
        command.args(["-serial", "stdio"]);
        command.args(["-serial", &format!("file:{}", files.messages.display())]);
        command.args([
            "-drive",
            &drive("disk", files.disk),
            "-device",
            "nvme,serial=lab,drive=disk",
        ]);
        command.args(["-drive", &drive("lent", files.lent), "-device", LENT]);
        if files.is_served {
            let device = "virtio-blk-pci,drive=kept,disable-legacy=on";
            command.args(["-drive", &served(), "-device", device]);
        }
        command.args(monitor::arguments());
        if !interactive {
            command.stdin(Stdio::null()).stdout(Stdio::piped());
        }
        command.spawn().with_context(|| starting(QEMU))
    }

    /// Its memory, and its persistent memory, if it has some.
    fn add_memory(&self, command: &mut Command, pmem: Option<&Path>) -> Result<()> {
        // The emulator wants room for more than there is.
        let mut most_mib = u64::from(self.memory_mib) + 1024;
        if let Some(pmem) = pmem {
            let size = fs::metadata(pmem).context("the file for persistent memory")?.len();
            most_mib += size.div_ceil(1 << 20);
            let path = pmem.display();
            let memory =
                format!("memory-backend-file,id=pmem,share=on,size={size},mem-path={path}");
            command.args(["-object", &memory, "-device", "nvdimm,memdev=pmem"]);
        }
        command.args(["-m", &format!("{}M,slots=2,maxmem={most_mib}M", self.memory_mib)]);
        Ok(())
    }

    /// How many times longer than usual programs may take on it.
    pub fn slowness(&self) -> u32 {
        if self.counts_instructions { 4 } else { 1 }
    }
}

/// The kernel with its first file system and its command line, or the hypervisor with these.
fn start_kernel(command: &mut Command, kernel: &Kernel, archive: &Path, told: String) {
    let Some(hypervisor) = &kernel.hypervisor else {
        command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(archive);
        command.args(["-append", &told]);
        return;
    };
    command.arg("-kernel").arg(hypervisor).args(["-append", xen::BOOT_ARGUMENTS]);
    // The emulator takes a single comma for the end of a file's options.
    let told = format!("{told} {}", xen::DOMAIN_ARGUMENTS).replace(',', ",,");
    let (image, archive) = (kernel.image.display(), archive.display());
    command.args(["-initrd", &format!("{image} {told},{archive}")]);
}

/// Contents of a disk, to which changes are not kept.
fn drive(name: &str, file: &Path) -> String {
    format!("if=none,id={name},format=raw,snapshot=on,file={}", file.display())
}

/// The disk that the lab serves. The guest sees that it has a cache, and flushes it.
fn served() -> String {
    let socket = disk::socket();
    let server = format!("file.server.type=unix,file.server.path={socket},file.server.abstract=on");
    format!("if=none,id=kept,format=raw,cache=writeback,file.driver=nbd,{server}")
}

/// The emulated processor: all that the emulator knows, but the fast string instructions. The
/// emulator carries these out byte by byte. A kernel that finds none of them zeroes pages ten times
/// as fast.
const EMULATED: &str = "max,erms=off,fsrm=off,fzrm=off,fsrs=off,fsrc=off";

/// Whether the processor has hardware virtualisation and the user may use it. That the device
/// /dev/kvm opens is not enough: there are machines on which it opens although the processor lacks
/// the feature, and then guests do not start. The host's kernel must leave interrupts of devices to
/// the emulator, whose IOMMU remaps them.
fn has_virtualisation() -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has_help = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    let opens = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    has_help && opens
}
