//! A device that fails as a test plans it: errors, torn and misdirected writes, flipped bits,
//! delays, and gates that hold operations. Nothing here is fast.
#![allow(unsafe_code)]

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};

use rustix::io::Errno;
use vellum_vm::{BackendChoice, PAGE_SIZE, PageRange, Surface};

use super::super::workers::{Job, Workers, lock, run_foreign, wait};
use super::super::{Device, DeviceInfo, ReadDone, ReadRange, RegisteredMemory, Write};
use super::fault_plan::{Fault, FaultPlan, Operation};

/// Threads that finish delayed reads.
const THREADS: usize = 4;

/// Another device, with faults.
#[derive(Debug)]
pub struct FaultyDevice<D> {
    shared: Arc<Shared<D>>,
    plan: FaultPlan,
    workers: Arc<Workers>,
    in_flight: Arc<InFlight>,
}

/// The part that outlives a call, because asynchronous reads finish here.
#[derive(Debug)]
struct Shared<D> {
    inner: D,
    /// A surface for reads of other pages than the caller asked for.
    scratch: Mutex<Surface>,
}

/// Asynchronous reads that were started and are not done.
#[derive(Debug, Default)]
struct InFlight {
    state: Mutex<InFlightState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct InFlightState {
    count: usize,
    /// The threads that are in a `done` just now.
    calling: Vec<ThreadId>,
}

impl<D: Device> FaultyDevice<D> {
    /// Wraps a device. It has no faults until [`plan`](Self::plan) gets some.
    ///
    /// # Errors
    /// If the system has no more threads or address space.
    pub fn new(inner: D, seed: u64) -> io::Result<Self> {
        let scratch = Surface::reserve(1, BackendChoice::Auto).map_err(io::Error::other)?;
        Ok(Self {
            shared: Arc::new(Shared { inner, scratch: Mutex::new(scratch) }),
            plan: FaultPlan::new(seed),
            workers: Arc::new(Workers::start(THREADS)?),
            in_flight: Arc::default(),
        })
    }

    /// The plan of the faults.
    pub fn plan(&self) -> FaultPlan {
        self.plan.clone()
    }

    /// The device below.
    pub fn inner(&self) -> &D {
        &self.shared.inner
    }

    /// Wraps the `done` of a read, so that the planned fault happens first.
    fn interpose(&self, range: PageRange, memory: Memory, done: ReadDone) -> ReadDone {
        let fault = self.plan.decide(Operation::Read);
        let delay = self.plan.delay();
        let (shared, plan) = (Arc::clone(&self.shared), self.plan.clone());
        let workers = Arc::downgrade(&self.workers);
        let in_flight = Arc::clone(&self.in_flight);
        lock(&in_flight.state).count += 1;
        ReadDone::new(move |result| {
            let for_gate = plan.clone();
            let finish: Job = Box::new(move || {
                let result = result.and_then(|()| match fault {
                    Some(fault) => shared.spoil(&plan, fault, range, &memory),
                    None => Ok(()),
                });
                // Dropped first: the device below must not be dropped last by one of its reads.
                drop(shared);
                in_flight.finish(|| done.call(result));
            });
            let workers = workers.upgrade().filter(|_| !delay.is_zero());
            match workers {
                Some(workers) => workers.run([Box::new(move || {
                    thread::sleep(delay);
                    for_gate.pass_later(Operation::Read, finish);
                }) as Job]),
                None => for_gate.pass_later(Operation::Read, finish),
            }
        })
    }
}

impl InFlight {
    /// Runs the last step of a read.
    fn finish(&self, done: impl FnOnce()) {
        let me = thread::current().id();
        lock(&self.state).calling.push(me);
        run_foreign(done);
        let mut state = lock(&self.state);
        if let Some(place) = state.calling.iter().position(|&thread| thread == me) {
            state.calling.swap_remove(place);
        }
        state.count -= 1;
        self.changed.notify_all();
    }
}

impl<D> Drop for FaultyDevice<D> {
    fn drop(&mut self) {
        self.plan.close_down();
        // All but those that this thread is just finishing: a `done` may drop the device, if no
        // other read is in flight on the same thread of the device below.
        let me = thread::current().id();
        let mut state = lock(&self.in_flight.state);
        while state.count > state.calling.iter().filter(|&&thread| thread == me).count() {
            state = wait(&self.in_flight.changed, state);
        }
    }
}

/// The memory that a read fills.
struct Memory {
    address: *mut u8,
    len: usize,
}

// SAFETY: the read alone has it until it is done, on whatever thread (contract of `Device`).
unsafe impl Send for Memory {}

impl Memory {
    /// The memory of a range, or none of it if that is not on the surface.
    fn of(surface: &Surface, range: PageRange) -> Self {
        if range.is_within(surface.pages()) && range.count > 0 {
            Self { address: surface.address(range.start).as_ptr(), len: range.bytes() }
        } else {
            Self { address: std::ptr::null_mut(), len: 0 }
        }
    }

    /// Runs `change` on the bytes.
    fn change(&self, change: impl FnOnce(&mut [u8])) {
        if self.len > 0 {
            // SAFETY: a range on the surface that this read has to itself until it is done.
            change(unsafe { std::slice::from_raw_parts_mut(self.address, self.len) });
        }
    }
}

/// The neighbour that a misdirected operation hits.
fn neighbour(page: u64, pages: u64) -> u64 {
    page.checked_sub(pages).unwrap_or(page.saturating_add(pages))
}

impl<D: Device> Shared<D> {
    /// Applies a fault to a range that was read.
    fn spoil(
        &self,
        plan: &FaultPlan,
        fault: Fault,
        range: PageRange,
        memory: &Memory,
    ) -> io::Result<()> {
        match fault {
            Fault::Error(errno) => Err(errno.into()),
            Fault::Torn { bytes } => {
                memory.change(|memory| memory[bytes.min(range.bytes())..].fill(0xA5));
                Err(Errno::IO.into())
            }
            Fault::FlippedBit => {
                memory.change(|memory| flip_bit(plan, memory));
                Ok(())
            }
            Fault::Misdirected => {
                let other = self.stored(neighbour(range.start, range.count), range.bytes())?;
                memory.change(|memory| memory.copy_from_slice(other.bytes()));
                Ok(())
            }
            Fault::Lost => {
                memory.change(|memory| memory.fill(0));
                Ok(())
            }
        }
    }

    /// The contents of a page on the device; zeros past its end.
    fn stored(&self, page: u64, len: usize) -> io::Result<Pages> {
        let mut pages = Pages::zeroed(len);
        let count = (len / PAGE_SIZE) as u64;
        let there = self.inner.pages()?.saturating_sub(page).min(count);
        if there > 0 {
            let range = PageRange { start: page, count: there };
            let scratch = lock(&self.scratch);
            scratch.grow(page + there).map_err(io::Error::other)?;
            self.inner.read(&scratch, range.into())?;
            Memory::of(&scratch, range)
                .change(|memory| pages.bytes_mut()[..memory.len()].copy_from_slice(memory));
        }
        Ok(pages)
    }

    /// The bytes and the place of a write with a fault; `None` if it writes nothing.
    fn replacement(
        &self,
        plan: &FaultPlan,
        fault: Fault,
        write: &Write<'_>,
    ) -> io::Result<Option<(u64, Pages)>> {
        let mut wanted = Pages::zeroed(write.len());
        let (head, body) = wanted.bytes_mut().split_at_mut(write.parts[0].len());
        head.copy_from_slice(write.parts[0]);
        body.copy_from_slice(write.parts[1]);
        let pages = (write.len() / PAGE_SIZE) as u64;
        Ok(match fault {
            Fault::Error(_) | Fault::Lost => None,
            Fault::Torn { bytes } => {
                let mut torn = self.stored(write.page, write.len())?;
                let bytes = bytes.min(write.len());
                torn.bytes_mut()[..bytes].copy_from_slice(&wanted.bytes()[..bytes]);
                Some((write.page, torn))
            }
            Fault::FlippedBit => {
                flip_bit(plan, wanted.bytes_mut());
                Some((write.page, wanted))
            }
            Fault::Misdirected => Some((neighbour(write.page, pages), wanted)),
        })
    }
}

fn flip_bit(plan: &FaultPlan, bytes: &mut [u8]) {
    if !bytes.is_empty() {
        let bit = plan.random_below(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// A page that is aligned for direct I/O.
#[repr(align(4096))]
#[derive(Clone)]
struct AlignedPage(#[expect(dead_code, reason = "used through pointers")] [u8; PAGE_SIZE]);

/// Whole, aligned pages.
struct Pages(Vec<AlignedPage>);

impl Pages {
    fn zeroed(len: usize) -> Self {
        Self(vec![AlignedPage([0; PAGE_SIZE]); len / PAGE_SIZE])
    }

    fn bytes(&self) -> &[u8] {
        let len = self.0.len() * PAGE_SIZE;
        // SAFETY: the elements are plain bytes, as large as their alignment: no gaps.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.0.len() * PAGE_SIZE;
        // SAFETY: as in `bytes`, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

impl<D: Device> Device for FaultyDevice<D> {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        self.plan.pass(Operation::Read);
        self.plan.count_read_runs(vec![read.pages]);
        let fault = self.plan.decide(Operation::Read);
        thread::sleep(self.plan.delay());
        self.shared.inner.read(surface, read)?;
        let Some(fault) = fault else { return Ok(()) };
        self.shared.spoil(&self.plan, fault, read.pages, &Memory::of(surface, read.target()))
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        self.plan.count_read_runs(reads.iter().map(|(read, _)| read.pages).collect());
        let reads = reads.into_iter().map(|(read, done)| {
            let memory = Memory::of(surface, read.target());
            (read, self.interpose(read.pages, memory, done))
        });
        self.shared.inner.start_reads(surface, reads.collect());
    }

    fn registered_memory(&self, surface: &Surface) -> RegisteredMemory {
        self.inner().registered_memory(surface)
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        self.plan.pass(Operation::Write);
        self.plan.count_write_call();
        let decide = |write: &Write<'_>| {
            let fault = self.plan.decide(Operation::Write)?;
            Some((fault, self.shared.replacement(&self.plan, fault, write)))
        };
        let decisions: Vec<_> = writes.iter().map(decide).collect();
        let mut to_write = Vec::with_capacity(writes.len());
        let mut indices = Vec::with_capacity(writes.len());
        for (index, decision) in decisions.iter().enumerate() {
            let write = match decision {
                None => Write::new(writes[index].page, writes[index].parts),
                Some((_, Ok(Some((page, pages))))) => Write::new(*page, [pages.bytes(), &[]]),
                Some(_) => continue,
            };
            to_write.push(write);
            indices.push(index);
        }
        self.shared.inner.write(&mut to_write);
        for write in writes.iter_mut() {
            write.result = Ok(());
        }
        for (write, index) in to_write.into_iter().zip(indices) {
            writes[index].result = write.result;
        }
        for (write, decision) in writes.iter_mut().zip(decisions) {
            match decision {
                Some((_, Err(error))) => write.result = Err(error),
                Some((fault @ (Fault::Error(_) | Fault::Torn { .. }), _)) => {
                    write.result = Err(fault.error());
                }
                _ => {}
            }
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.plan.pass(Operation::Sync);
        match self.plan.decide(Operation::Sync) {
            None => self.shared.inner.sync(),
            Some(Fault::Lost) => Ok(()),
            Some(fault) => Err(fault.error()),
        }
    }

    fn pages(&self) -> io::Result<u64> {
        self.shared.inner.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.plan.pass(Operation::Resize);
        match self.plan.decide(Operation::Resize) {
            None => self.shared.inner.resize(pages),
            Some(fault) => Err(fault.error()),
        }
    }

    fn unlock(&self) {
        self.shared.inner.unlock();
    }

    fn answers_at_once(&self) -> bool {
        !self.plan.has_delays() && self.inner().answers_at_once()
    }

    fn info(&self) -> DeviceInfo {
        self.shared.inner.info()
    }
}
