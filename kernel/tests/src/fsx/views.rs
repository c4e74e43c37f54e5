//! Ways by which a file is shown in memory, and accesses by them.
#![allow(unsafe_code)]

use std::os::fd::AsFd as _;

use vellum_uapi::dax::{MAX_EXTENT, READ_UNIT, UNIT};

use super::Around;
use crate::access::{self, Fault};
use crate::dax::{Heap, Table};
use crate::fuzz::session::Session;
use crate::random::Random;
use crate::sys::{self, READ_WRITE, Request};
use crate::{Errno, Mapping, PAGE};

/// Bytes of a page.
const BYTES: u64 = PAGE as u64;

/// A heap for reading, and one for reading and writing.
pub(super) struct Heaps([Heap; 2]);

impl Heaps {
    pub(super) fn new(session: &mut Session) -> Self {
        let batch = session.random.pick(&[0, 1, 5]);
        Self([Heap::for_reading(batch), Heap::for_writing(batch)])
    }

    /// Makes durable what was stored in one of them.
    pub(super) fn sync(&self, which: usize) {
        self.0[which].sync().expect("fsync of a heap");
    }

    /// Flushes for what was detached.
    pub(super) fn reap(&self) {
        self.0.iter().for_each(Heap::reap);
    }
}

/// By what a part of a file is shown.
#[derive(Debug)]
enum Way {
    Table,
    Plain,
    /// With the number of the heap.
    Heap(usize),
}

/// A part of a file in memory.
#[derive(Debug)]
pub(super) struct View {
    way: Way,
    /// None of an attachment.
    mapping: Option<Mapping>,
    start: usize,
    /// Of the first byte, in the file.
    offset: u64,
    length: u64,
    writes: bool,
    /// The mapping may be made one for reading.
    may_lose_right: bool,
}

impl View {
    /// The file by its table.
    pub(super) fn of_table(session: &mut Session, table: &Table, durable: bool, most: u64) -> Self {
        let whole = most.next_multiple_of(UNIT);
        let (length, writes) = match session.random.below(12) {
            0..5 => (whole, true),
            5..8 => (READ_UNIT, true),
            8..11 => (READ_UNIT, false),
            _ => (MAX_EXTENT, session.random.one_in(2)),
        };
        let protection = if writes { READ_WRITE } else { libc::PROT_READ };
        let mut request = table.request(length, protection);
        if durable && session.random.one_in(2) {
            request.flags = libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC;
        }
        let mapping = Mapping::new(request).expect("a mapping by the table");
        let may_lose_right = writes && length == READ_UNIT;
        let start = mapping.start();
        let way = Way::Table;
        Self { way, mapping: Some(mapping), start, offset: 0, length, writes, may_lose_right }
    }

    /// Part of the file without a table.
    pub(super) fn plain(session: &mut Session, file: &std::fs::File, most: u64) -> Self {
        let first = session.random.below(most / BYTES) * u64::from(session.random.one_in(2));
        let offset = first * BYTES;
        let writes = !session.random.one_in(4);
        let mapping = Mapping::new(Request {
            address: 0,
            length: (most - offset) as usize,
            protection: if writes { READ_WRITE } else { libc::PROT_READ },
            flags: libc::MAP_SHARED,
            fd: Some(file.as_fd()),
            offset,
        });
        let mapping = mapping.expect("an ordinary mapping");
        let (start, length) = (mapping.start(), mapping.length() as u64);
        let (way, may_lose_right) = (Way::Plain, false);
        Self { way, mapping: Some(mapping), start, offset, length, writes, may_lose_right }
    }

    /// Part of what a descriptor is of, in a heap.
    pub(super) fn in_heap(
        session: &mut Session,
        heaps: &Heaps,
        descriptor: impl std::os::fd::AsFd,
        most: u64,
    ) -> Self {
        let pages = most / BYTES;
        let page = session.random.below(pages) * u64::from(session.random.one_in(2));
        let count = match session.random.one_in(2) {
            true => pages - page,
            false => 1 + session.random.below(pages - page),
        };
        let which = session.random.below(3).min(1) as usize;
        let address = heaps.0[which].attach(descriptor, page, count).expect("ATTACH");
        let (first, end) = (page * BYTES, (page + count) * BYTES);
        // The attachment shows all of the slots.
        let offset = first - first % UNIT;
        let length = end.next_multiple_of(UNIT) - offset;
        let start = address - (first - offset) as usize;
        let writes = which == 1;
        let way = Way::Heap(which);
        Self { way, mapping: None, start, offset, length, writes, may_lose_right: false }
    }

    /// Ends it.
    pub(super) fn end(self, heaps: &Heaps) {
        if let Way::Heap(which) = self.way {
            heaps.0[which].detach(self.start).expect("DETACH");
        }
    }

    /// What it is, for the list of operations.
    pub(super) fn name(&self) -> String {
        let rights = if self.writes { "rw" } else { "r" };
        format!("{:?} {rights} {:#x}+{:#x}", self.way, self.offset, self.length)
    }

    /// Whether a program may store by it.
    pub(super) fn writes(&self) -> bool {
        self.writes
    }

    /// The offset in the file of its first byte.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The offset in the file after its last byte.
    pub(super) fn end_offset(&self) -> u64 {
        self.offset + self.length
    }

    /// The address of a byte of the file.
    pub(super) fn address(&self, at: u64) -> usize {
        assert!((self.offset..self.end_offset()).contains(&at), "{at:#x} in {}", self.name());
        self.start + (at - self.offset) as usize
    }

    /// Counts an access.
    pub(super) fn count(&self, around: &mut Around<'_>, table: Option<&Table>) {
        let tally = &mut *around.tally;
        *match (&self.way, table) {
            (Way::Plain, _) => &mut tally.by_plain,
            (Way::Heap(which), _) if around.heaps.0[*which].stat().served == 0 => {
                &mut tally.by_heap
            }
            (Way::Heap(_), _) => &mut tally.heap_served,
            (Way::Table, Some(table)) if table.stat().barred == 0 => &mut tally.by_table,
            (Way::Table, Some(_)) => &mut tally.table_served,
            (Way::Table, None) => return,
        } += 1;
    }

    /// Loads bytes of the file: by a system call, byte by byte, or page by page.
    pub(super) fn load(&self, random: &mut Random, from: u64, count: u64) -> Vec<u8> {
        let address = self.address(from);
        match random.below(4) {
            0 => access::kernel_load(address, count as usize).expect("bytes of the file"),
            1 if count <= 64 => (0..count as usize).map(|at| byte_at(address + at)).collect(),
            _ => self.load_pages(from, count),
        }
    }

    fn load_pages(&self, from: u64, count: u64) -> Vec<u8> {
        let first = from / BYTES * BYTES;
        let mut bytes = Vec::new();
        for page in (first..from + count).step_by(PAGE) {
            let words = access::load_page(self.address(page)).expect("a page of the file");
            words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        }
        bytes.drain(..(from - first) as usize);
        bytes.truncate(count as usize);
        bytes
    }

    /// Stores bytes of the file: by a system call, or byte by byte.
    pub(super) fn store(&self, random: &mut Random, from: u64, bytes: &[u8]) {
        let address = self.address(from);
        if bytes.len() > 64 || random.one_in(2) {
            return access::kernel_store(address, bytes).expect("bytes of the file");
        }
        for (at, byte) in bytes.iter().enumerate() {
            access::store(address + at, *byte).expect("a byte of the file");
        }
    }

    /// Fills a page of the file with a word.
    pub(super) fn store_page(&self, page: u64, word: u64) {
        access::store_page(self.address(page * BYTES), word).expect("a page of the file");
    }

    /// Accesses a byte behind the file's end, or one that has no right.
    pub(super) fn expect_signal(&self, random: &mut Random, at: u64, signal: i32, stores: bool) {
        let address = self.address(at);
        let expected = Fault { signal, address };
        match (stores, random.below(3)) {
            (true, 0) => assert_eq!(access::kernel_store(address, &[1]), Err(Errno::FAULT)),
            (true, _) => assert_eq!(access::store(address, 1), Err(expected)),
            (false, 0) => assert_eq!(access::kernel_load(address, 1), Err(Errno::FAULT)),
            (false, _) => assert_eq!(access::load(address), Err(expected)),
        }
    }

    /// Makes durable what was stored to some pages.
    pub(super) fn sync(&self, from: u64, count: u64) {
        let first = self.address(from / BYTES * BYTES);
        let length = (self.address(from) - first) + count as usize;
        let address = std::ptr::with_exposed_provenance_mut(first);
        // SAFETY: msync changes no memory.
        let done = unsafe { libc::msync(address, length, libc::MS_SYNC) };
        assert_eq!(done, 0, "msync: {}", sys::last_error());
    }

    /// Takes out what is in the process' page tables; the next access puts it in again.
    pub(super) fn forget(&self) {
        let length = self.length.min(READ_UNIT) as usize;
        sys::madvise(self.start, length, libc::MADV_DONTNEED).expect("MADV_DONTNEED");
    }

    /// Without the right to write loads find what is there, and stores are refused.
    pub(super) fn lose_right(
        &self,
        session: &mut Session,
        at: Option<u64>,
        around: &mut Around<'_>,
    ) {
        let Some(mapping) = self.mapping.as_ref().filter(|_| self.may_lose_right) else { return };
        let change = |rights| sys::mprotect(mapping.start(), mapping.length(), rights);
        change(libc::PROT_READ).expect("mprotect");
        if let Some(at) = at {
            self.expect_signal(&mut session.random, at, libc::SIGSEGV, true);
            around.tally.refused += 1;
        }
        change(READ_WRITE).expect("mprotect");
    }
}

fn byte_at(address: usize) -> u8 {
    access::load(address).expect("a byte of the file")
}
