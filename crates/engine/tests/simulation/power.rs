//! A device that loses power: a write since the last sync is there in part, torn, or not at all.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_pool::PAGE_SIZE;
use vellum_pool::device::{Device, DeviceInfo, MemoryDevice, ReadDone, ReadRange, Surface, Write};

use crate::support::Random;

/// The part of a write that the device writes atomically.
const SECTOR: usize = 512;

/// An operation since the last sync.
#[derive(Clone, Debug)]
enum Unsynced {
    Write(usize, Vec<u8>),
    Resize(usize),
}

#[derive(Debug)]
struct State {
    durable: Vec<u8>,
    unsynced: Vec<Unsynced>,
    random: Random,
    /// The device takes an image of a power failure once in so many operations; 0 for never.
    image_every: u64,
    images: Vec<Vec<u8>>,
    /// Taken as often: the device as a killed process leaves it.
    killed: Vec<PowerDevice>,
}

/// Memory, and the state of it that would survive a power failure.
#[derive(Debug)]
pub struct PowerDevice {
    memory: MemoryDevice,
    slow: AtomicBool,
    state: Mutex<State>,
}

impl PowerDevice {
    pub fn new(seed: u64, image_every: u64) -> PowerDevice {
        PowerDevice {
            memory: MemoryDevice::new(),
            slow: AtomicBool::new(false),
            state: Mutex::new(State {
                durable: Vec::new(),
                unsynced: Vec::new(),
                random: Random(seed),
                image_every,
                images: Vec::new(),
                killed: Vec::new(),
            }),
        }
    }

    /// Makes writes and syncs slow, so that other threads run meanwhile.
    pub fn be_slow(&self, slow: bool) {
        self.slow.store(slow, Ordering::Relaxed);
    }

    fn linger(&self, micros: u64) {
        if self.slow.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(micros));
        }
    }

    /// A possible state after a power failure now.
    pub fn image(&self) -> Vec<u8> {
        self.state.lock().unwrap().image()
    }

    /// Possible states after power failures since the last call.
    pub fn take_images(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.state.lock().unwrap().images)
    }

    /// The device at times since the last call, for a process that goes on with it.
    pub fn take_killed(&self) -> Vec<PowerDevice> {
        std::mem::take(&mut self.state.lock().unwrap().killed)
    }

    /// All written bytes, as after a crash of the process only.
    pub fn snapshot(&self) -> Vec<u8> {
        self.memory.snapshot()
    }

    fn before(&self) {
        let mut state = self.state.lock().unwrap();
        if state.image_every > 0 && state.images.len() < 4 {
            let every = state.image_every;
            if state.random.once_in(every) {
                let image = state.image();
                state.images.push(image);
            } else if state.random.once_in(every) && state.killed.len() < 2 {
                let seed = state.random.next();
                let killed = PowerDevice::new(seed, 3);
                {
                    let mut copy = killed.state.lock().unwrap();
                    copy.durable.clone_from(&state.durable);
                    copy.unsynced.clone_from(&state.unsynced);
                    if state.random.once_in(2) {
                        // An earlier sync has failed. The page cache considers the written pages
                        // clean, and will not write them again.
                        copy.unsynced.retain(|what| matches!(what, Unsynced::Resize(_)));
                    }
                }
                killed.fill(&self.memory.snapshot());
                state.killed.push(killed);
            }
        }
    }
}

impl State {
    fn image(&mut self) -> Vec<u8> {
        let (mut bytes, random) = (self.durable.clone(), &mut self.random);
        // From all bytes of the write to none.
        let kept = random.below(5);
        for unsynced in &self.unsynced {
            if random.below(4) >= kept {
                continue;
            }
            match unsynced {
                Unsynced::Resize(len) => bytes.resize(*len, 0),
                Unsynced::Write(at, data) => {
                    let torn = random.once_in(8);
                    if bytes.len() < at + data.len() {
                        bytes.resize(at + data.len(), 0);
                    }
                    for (sector, data) in data.chunks(SECTOR).enumerate() {
                        if !torn || random.once_in(2) {
                            let at = at + sector * SECTOR;
                            bytes[at..at + data.len()].copy_from_slice(data);
                        }
                    }
                }
            }
        }
        bytes
    }

    /// Makes the first operations durable.
    fn apply(&mut self, count: usize) {
        for unsynced in self.unsynced.drain(..count) {
            match unsynced {
                Unsynced::Resize(len) => self.durable.resize(len, 0),
                Unsynced::Write(at, data) => {
                    if self.durable.len() < at + data.len() {
                        self.durable.resize(at + data.len(), 0);
                    }
                    self.durable[at..at + data.len()].copy_from_slice(&data);
                }
            }
        }
    }
}

impl Device for PowerDevice {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        self.memory.read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        self.memory.start_reads(surface, reads);
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        self.before();
        let mut state = self.state.lock().unwrap();
        for write in writes.iter() {
            let at = write.page as usize * PAGE_SIZE;
            state.unsynced.push(Unsynced::Write(at, write.parts.concat()));
        }
        drop(state);
        self.memory.write(writes);
        self.linger(100);
    }

    fn sync(&self) -> io::Result<()> {
        self.before();
        self.linger(500);
        // Writes during the sync may be durable afterwards, or not.
        let unsynced = self.state.lock().unwrap().unsynced.len();
        self.linger(500);
        self.state.lock().unwrap().apply(unsynced);
        self.before();
        Ok(())
    }

    fn pages(&self) -> io::Result<u64> {
        self.memory.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.before();
        self.memory.resize(pages)?;
        let len = pages as usize * PAGE_SIZE;
        self.state.lock().unwrap().unsynced.push(Unsynced::Resize(len));
        Ok(())
    }

    fn info(&self) -> DeviceInfo {
        self.memory.info()
    }
}

impl PowerDevice {
    /// The device with these contents, durably.
    pub fn write_all(&self, bytes: Vec<u8>) {
        self.fill(&bytes);
        let mut state = self.state.lock().unwrap();
        state.unsynced.clear();
        state.durable = bytes;
    }

    fn fill(&self, bytes: &[u8]) {
        let mut pages = Pages(vec![Page([0; PAGE_SIZE]); bytes.len() / PAGE_SIZE]);
        for (page, bytes) in pages.0.iter_mut().zip(bytes.chunks(PAGE_SIZE)) {
            page.0.copy_from_slice(bytes);
        }
        for (number, page) in pages.0.iter().enumerate() {
            self.memory.write(&mut [Write::new(number as u64, [&page.0, &[]])]);
        }
    }
}

/// Pages with the alignment that devices need.
struct Pages(Vec<Page>);

#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; PAGE_SIZE]);
