//! An NVMe controller that user space drives: one queue for administration, one for data. Both are
//! polled, and are in memory that the caller has registered with the device.
//!
//! Numbers are those of the NVM Express base specification.

use std::time::Instant;

use crate::counters::PATIENCE;
use crate::vfio::Device;
use crate::{PAGE, access};

/// Pages at the start of the memory that the queues take.
pub const QUEUE_PAGES: u64 = 4;

/// Entries of a queue: as many submissions as fit into a page.
const ENTRIES: u16 = 64;
const SUBMISSION: usize = 64;
const COMPLETION: usize = 16;

// Registers.
const CAPABILITIES: u64 = 0x0;
const CONFIGURATION: u64 = 0x14;
const STATUS: u64 = 0x1c;
const ADMIN_ENTRIES: u64 = 0x24;
const ADMIN_SUBMISSIONS: u64 = 0x28;
const ADMIN_COMPLETIONS: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

/// Enabled, with entries of 2^6 and 2^4 bytes.
const ENABLED: u32 = 1 | 6 << 16 | 4 << 20;

// Commands; those of administration come first.
const CREATE_SUBMISSIONS: u8 = 0x01;
const CREATE_COMPLETIONS: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;

/// Blocks of 512 bytes.
const BLOCKS_OF_PAGE: u64 = PAGE as u64 / 512;

/// The status of a command that failed: its type and code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed(pub u16);

/// A controller that is enabled, until this is dropped.
#[derive(Debug)]
pub struct Controller<'device> {
    device: &'device Device,
    admin: Queue,
    data: Queue,
}

/// A pair of queues: a page of submissions, and one of completions.
#[derive(Debug)]
struct Queue {
    number: u16,
    submissions: usize,
    completions: usize,
    tail: u16,
    head: u16,
    /// The phase bit that the device writes into each completion of this round.
    phase: u8,
}

#[derive(Clone, Copy, Debug, Default)]
struct Command {
    code: u8,
    namespace: u32,
    data: u64,
    words: [u32; 3],
}

impl<'device> Controller<'device> {
    /// Enables it. The queues lie at the start of memory that is registered with the device.
    pub fn new(device: &'device Device, address: usize, seen_at: u64) -> Self {
        let page = |number: usize| address + number * PAGE;
        let queue = |number: u16, first| Queue::new(number, page(first), page(first + 1));
        let mut controller = Self { device, admin: queue(0, 0), data: queue(1, 2) };
        controller.disable();
        let seen = |number: u64| seen_at + number * PAGE as u64;
        let last = u32::from(ENTRIES - 1);
        device.store(ADMIN_ENTRIES, last << 16 | last);
        controller.store_wide(ADMIN_SUBMISSIONS, seen(0));
        controller.store_wide(ADMIN_COMPLETIONS, seen(1));
        controller.configure(ENABLED);
        for (code, data, flags) in
            [(CREATE_COMPLETIONS, seen(3), 1), (CREATE_SUBMISSIONS, seen(2), 1 << 16 | 1)]
        {
            let words = [last << 16 | 1, flags, 0];
            let command = Command { code, data, words, ..Command::default() };
            controller.admin.execute(device, command).expect("a queue for data");
        }
        controller
    }

    /// The device writes a page that identifies it to an address of its own view of memory.
    pub fn identify(&mut self, to: u64) -> Result<(), Failed> {
        let command = Command { code: IDENTIFY, data: to, words: [1, 0, 0], ..Command::default() };
        self.admin.execute(self.device, command)
    }

    /// The device writes a page from an address of its own view of memory to its disk.
    pub fn write(&mut self, from: u64, disk_page: u64) -> Result<(), Failed> {
        self.transfer(WRITE, from, disk_page)
    }

    /// The device reads a page of its disk to an address of its own view of memory.
    pub fn read(&mut self, to: u64, disk_page: u64) -> Result<(), Failed> {
        self.transfer(READ, to, disk_page)
    }

    fn transfer(&mut self, code: u8, data: u64, disk_page: u64) -> Result<(), Failed> {
        let block = disk_page * BLOCKS_OF_PAGE;
        let words = [block as u32, (block >> 32) as u32, BLOCKS_OF_PAGE as u32 - 1];
        self.data.execute(self.device, Command { code, namespace: 1, data, words })
    }

    fn disable(&self) {
        self.configure(0);
    }

    /// Sets the configuration, and waits until the controller is ready, or no longer.
    fn configure(&self, configuration: u32) {
        self.device.store(CONFIGURATION, configuration);
        let start = Instant::now();
        while self.device.load(STATUS) & 1 != configuration & 1 {
            let status = self.device.load(STATUS);
            assert!(start.elapsed() < PATIENCE, "the controller has status {status:#x}");
            std::thread::yield_now();
        }
    }

    fn store_wide(&self, register: u64, value: u64) {
        self.device.store(register, value as u32);
        self.device.store(register + 4, (value >> 32) as u32);
    }
}

impl Drop for Controller<'_> {
    /// After this it accesses no memory.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.disable();
        }
    }
}

impl Queue {
    fn new(number: u16, submissions: usize, completions: usize) -> Self {
        // Earlier contents may look like completions.
        access::kernel_store(completions, &[0; PAGE]).expect("memory for a queue");
        Self { number, submissions, completions, tail: 0, head: 0, phase: 1 }
    }

    /// Submits a command and waits for its end.
    fn execute(&mut self, device: &Device, command: Command) -> Result<(), Failed> {
        let at = self.submissions + usize::from(self.tail) * SUBMISSION;
        access::kernel_store(at, &command.bytes()).expect("memory for a queue");
        self.tail = (self.tail + 1) % ENTRIES;
        device.store(self.doorbell(device, 0), self.tail.into());
        let status = self.wait();
        device.store(self.doorbell(device, 1), self.head.into());
        if status == 0 { Ok(()) } else { Err(Failed(status)) }
    }

    /// The status of the next completion.
    fn wait(&mut self) -> u16 {
        let at = self.completions + usize::from(self.head) * COMPLETION;
        // The phase is the lowest bit of the last word, which is written last.
        let word = || {
            let bytes = access::kernel_load(at + 14, 2).expect("memory for a queue");
            u16::from_le_bytes([bytes[0], bytes[1]])
        };
        let start = Instant::now();
        while word() & 1 != u16::from(self.phase) {
            assert!(start.elapsed() < PATIENCE, "queue {} does not answer", self.number);
            std::thread::yield_now();
        }
        self.head = (self.head + 1) % ENTRIES;
        if self.head == 0 {
            self.phase ^= 1;
        }
        // Without the bit that says whether the command may be retried.
        word() >> 1 & 0x7ff
    }

    /// The doorbell of new submissions (0), or of consumed completions (1).
    fn doorbell(&self, device: &Device, which: u64) -> u64 {
        let stride = 4 << (device.load(CAPABILITIES + 4) & 0xf);
        DOORBELLS + (2 * u64::from(self.number) + which) * stride
    }
}

impl Command {
    fn bytes(&self) -> [u8; SUBMISSION] {
        let mut bytes = [0; SUBMISSION];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &[self.code]);
        put(4, &self.namespace.to_le_bytes());
        put(24, &self.data.to_le_bytes());
        for (word, at) in self.words.iter().zip([40, 44, 48]) {
            put(at, &word.to_le_bytes());
        }
        bytes
    }
}
