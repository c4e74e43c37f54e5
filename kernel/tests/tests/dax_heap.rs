//! Ephemeral mappings: parts of files in a heap of slots. They show the file as mappings do, and
//! nothing but ATTACH and DETACH changes what is in a heap.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{self, File};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use rustix::fs::{FallocateFlags, fallocate};
use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::child::{End, in_child};
use vellum_kernel_tests::counters::{assert_file_tables_are_sound, assert_no_file_tables};
use vellum_kernel_tests::dax::{DaxFile, Heap};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::sys::{self, READ_WRITE, Request};
use vellum_kernel_tests::threads::{Deadline, Place, Stop, rounds, stay_on, wait_until};
use vellum_kernel_tests::{Errno, Mapping, PAGE, Table, dax_turn};
use vellum_uapi::dax::{
    ATTACH, Attach, DURABLE, HEAP_STAT, HEAP_WRITES, MAX_BATCH, MAX_EXTENT, NOSYNC, READ_UNIT,
    STAT, UNIT,
};

/// Pages of a slot.
const SLOT: u64 = UNIT / PAGE as u64;

fn page_at(address: usize, page: u64) -> usize {
    address + page as usize * PAGE
}

#[track_caller]
fn assert_stamped(address: usize, stamp: u64) {
    let found = access::kernel_load(address, PAGE).expect("a present page");
    assert!(found == access::stamped(stamp), "{address:#x} is not of stamp {stamp:#x}");
    // An instruction of the program sees the same.
    assert_eq!(access::load(address).unwrap(), found[0]);
}

#[track_caller]
fn assert_absent(address: usize, signal: i32) {
    assert_eq!(access::load(address), Err(Fault { signal, address }));
}

#[test]
fn a_part_of_a_file_is_shown_and_then_gone() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("part", 3 * SLOT, 7);
    let heap = Heap::for_reading(0);
    // The program's own code has faults, too, the first time.
    assert!(access::load((&raw const heap).expose_provenance()).is_ok());
    sys::faults();
    for (page, pages) in [(0, 1), (0, 3 * SLOT), (5, 2), (SLOT - 1, 2), (SLOT, SLOT)] {
        let address = heap.attach(file.file(), page, pages).unwrap();
        let before = sys::faults();
        for at in [0, pages / 2, pages - 1] {
            access::load(page_at(address, at)).unwrap();
        }
        assert_eq!(sys::faults(), before, "an access faults");
        for at in [0, pages / 2, pages - 1] {
            assert_stamped(page_at(address, at), 7 + page + at);
        }
        let slots = (page + pages).div_ceil(SLOT) - page / SLOT;
        assert_eq!(heap.stat().attached, slots);
        assert_file_tables_are_sound();
        heap.detach(address).unwrap();
        assert_eq!(heap.stat().attached, 0);
        assert_eq!(heap.detach(address), Err(Errno::INVAL));
        // Until then a processor may have it cached.
        heap.reap();
        assert_absent(address, libc::SIGSEGV);
    }
    let stat = heap.stat();
    assert_eq!((stat.attaches, stat.detaches, stat.served_faults), (5, 5, 0));
    assert_eq!((heap.stat().zombies, heap.stat().taken), (0, 0));
    drop(heap);
    assert_no_file_tables();
}

#[test]
fn an_attachment_may_end_where_the_file_does() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("whole", SLOT + 3, 7);
    file.file().set_len((SLOT + 2) * PAGE as u64 + 5).unwrap();
    let heap = Heap::for_reading(0);
    for offset in [0, 77, UNIT + 1] {
        let size = size_of::<Attach>() as u32;
        let file = file.file().as_raw_fd();
        let mut attach = Attach { size, file, offset, length: 0, address: 0 };
        heap.ioctl(ATTACH, (&raw mut attach).expose_provenance() as u64).unwrap();
        assert_eq!(attach.length, (SLOT + 2) * PAGE as u64 + 5 - offset);
        let last = attach.address + attach.length - 1;
        assert_eq!(access::load(last as usize), Ok(access::stamped(7 + SLOT + 2)[4]));
    }
}

#[test]
fn what_cannot_be_attached_is_refused() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("refused", 3, 7);
    let heap = Heap::for_reading(0);
    let attach = |heap: &Heap, descriptor, offset, length| {
        heap.attach_descriptor(descriptor, offset, length).unwrap_err()
    };
    let descriptor = file.file().as_raw_fd();
    assert_eq!(attach(&heap, -1, 0, 1), Errno::BADF);
    assert_eq!(attach(&heap, descriptor, 3 * PAGE as u64, 0), Errno::INVAL);
    assert_eq!(attach(&heap, DaxFile::new("nothing").file().as_raw_fd(), 0, 0), Errno::INVAL);
    assert_eq!(attach(&heap, descriptor, MAX_EXTENT, 1), Errno::INVAL);
    assert_eq!(attach(&heap, descriptor, 4096, MAX_EXTENT), Errno::INVAL);
    assert_eq!(attach(&heap, descriptor, u64::MAX, 1), Errno::INVAL);
    assert_eq!(attach(&heap, descriptor, 0, u64::MAX), Errno::INVAL);
    assert_eq!(attach(&heap, descriptor, 0, READ_UNIT + 1), Errno::FBIG);
    assert_eq!(attach(&heap, descriptor, UNIT - 1, READ_UNIT), Errno::FBIG);
    let null = File::open("/dev/null").unwrap();
    assert_eq!(attach(&heap, null.as_raw_fd(), 0, 1), Errno::OPNOTSUPP);
    let program = File::open(std::env::current_exe().unwrap()).unwrap();
    assert_eq!(attach(&heap, program.as_raw_fd(), 0, 1), Errno::OPNOTSUPP);
    let writer = Heap::for_writing(0);
    assert_eq!(attach(&writer, file.for_reading().as_raw_fd(), 0, 1), Errno::ACCESS);
    let table = Table::open(&file.for_reading(), 0).unwrap();
    assert_eq!(writer.attach(&table, 0, 1).unwrap_err(), Errno::ACCESS);
    // The last words of an argument that is cut off, or may not be written.
    assert_eq!(heap.ioctl(ATTACH, 8), Err(Errno::FAULT));
    assert_eq!(heap.ioctl(HEAP_STAT, 8), Err(Errno::FAULT));
    let small = Attach { size: 8, ..Attach::default() };
    let argument = (&raw const small).expose_provenance() as u64;
    assert_eq!(heap.ioctl(ATTACH, argument), Err(Errno::INVAL));
    static CONSTANT: Attach =
        Attach { size: size_of::<Attach>() as u32, file: 0, offset: 0, length: 1, address: 0 };
    let page = Mapping::anonymous(None, PAGE).unwrap();
    let mut wanted = CONSTANT;
    wanted.file = descriptor;
    // SAFETY: the structure is plain numbers.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const wanted).cast(), 32) };
    access::kernel_store(page.start(), bytes).unwrap();
    sys::mprotect(page.start(), PAGE, libc::PROT_READ).unwrap();
    assert_eq!(heap.ioctl(ATTACH, page.start() as u64), Err(Errno::FAULT));
    assert_eq!(heap.ioctl(STAT, 0), Err(Errno::NOTTY));
    // Addresses outside, of no attachment, and of slots that were never used.
    let (start, end) = (heap.mapping().start(), heap.mapping().end());
    for address in [0, start - 1, start, end - 1, end, usize::MAX] {
        assert_eq!(heap.detach(address), Err(Errno::INVAL), "{address:#x}");
    }
    heap.reap();
    assert_eq!((heap.stat().taken, writer.stat().taken), (0, 0));
    // A flag and a batch that do not exist.
    assert_eq!(Heap::open(2, 0).unwrap_err(), Errno::INVAL);
    assert_eq!(Heap::open(0, MAX_BATCH + 1).unwrap_err(), Errno::INVAL);
}

#[test]
fn a_heap_is_mapped_once_and_as_it_was_opened() {
    let Some(_turn) = dax_turn() else { return };
    let read = libc::PROT_READ;
    let heap = Heap::open(0, 0).unwrap();
    let refused = |request| Mapping::new(request).map(drop).unwrap_err();
    let right = Heap::request(&heap, 1, read);
    let length = right.length;
    for length in [PAGE, length + PAGE, length / 2, MAX_EXTENT as usize + length] {
        assert_eq!(refused(Request { length, ..right }), Errno::INVAL, "{length}");
    }
    assert_eq!(refused(Request { flags: libc::MAP_PRIVATE, ..right }), Errno::INVAL);
    assert_eq!(refused(Request { offset: READ_UNIT, ..right }), Errno::INVAL);
    assert_eq!(refused(Request { protection: READ_WRITE, ..right }), Errno::INVAL);
    assert_eq!(refused(Request { protection: libc::PROT_NONE, ..right }), Errno::INVAL);
    assert_eq!(refused(Request { protection: read | libc::PROT_EXEC, ..right }), Errno::ACCESS);
    let fixed = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
    let unaligned = (1 << 44) + UNIT as usize;
    assert_eq!(refused(Request { address: unaligned, flags: fixed, ..right }), Errno::INVAL);
    let file = DaxFile::stamped("once", 3, 7);
    let attach = |heap: &std::os::fd::OwnedFd| {
        let (size, file) = (size_of::<Attach>() as u32, file.file().as_raw_fd());
        let mut attach = Attach { size, file, offset: 0, length: 1, address: 0 };
        let argument = (&raw mut attach).expose_provenance() as u64;
        sys::ioctl(heap.as_fd(), ATTACH, argument).map(|_| attach.address as usize)
    };
    assert_eq!(attach(&heap), Err(Errno::NXIO));
    let mapping = Mapping::new(right).unwrap();
    assert_eq!(refused(right), Errno::BUSY);
    assert_stamped(attach(&heap).unwrap(), 7);
    in_child(|| assert_eq!(attach(&heap), Err(Errno::NXIO)));
    mapping.unmap().unwrap();
    assert_eq!((attach(&heap), refused(right)), (Err(Errno::NXIO), Errno::BUSY));
    assert_no_file_tables();
    // Of a heap for writing every mapping may write.
    let heap = Heap::open(HEAP_WRITES, 0).unwrap();
    assert_eq!(refused(Heap::request(&heap, 1, read)), Errno::INVAL);
}

#[test]
fn nothing_else_changes_a_heap() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("heap", 2 * SLOT, 7);
    for heap in [Heap::for_reading(0), Heap::for_writing(0)] {
        let (start, length) = (heap.mapping().start(), heap.mapping().length());
        let address = heap.attach(file.file(), 0, 2 * SLOT).unwrap();
        let works = || {
            for page in [0, SLOT - 1, SLOT, 2 * SLOT - 1] {
                assert_stamped(page_at(address, page), 7 + page);
            }
            assert_file_tables_are_sound();
        };
        works();
        let unit = UNIT as usize;
        assert_eq!(sys::munmap(address, unit), Err(Errno::INVAL));
        assert_eq!(sys::munmap(start, READ_UNIT as usize), Err(Errno::INVAL));
        assert_eq!(sys::mprotect(address, unit, libc::PROT_NONE), Err(Errno::INVAL));
        assert_eq!(sys::mprotect(start, length, READ_WRITE), Err(Errno::INVAL));
        assert_eq!(sys::mprotect(start, length, libc::PROT_NONE), Err(Errno::INVAL));
        works();
        for advice in [libc::MADV_DONTNEED, libc::MADV_COLD, libc::MADV_PAGEOUT, libc::MADV_FREE] {
            for (start, length) in [(address, unit), (start, length), (address + PAGE, PAGE)] {
                let _ = sys::madvise(start, length, advice);
                works();
            }
        }
        for what in ["1", "4"] {
            fs::write("/proc/self/clear_refs", what).unwrap();
            works();
        }
        fs::read_to_string("/proc/self/smaps").unwrap();
        in_child(|| assert_absent(address, libc::SIGSEGV));
        works();
        assert_eq!(heap.stat().served_faults, 0);
    }
    assert_no_file_tables();
}

#[test]
fn a_heap_that_is_copied_or_moved_has_ended() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("ended", SLOT, 7);
    let holes = DaxFile::new("ended-holes");
    holes.file().set_len(UNIT).unwrap();
    for is_moved in [false, true] {
        let heap = Heap::for_writing(0);
        let (start, length) = (heap.mapping().start(), heap.mapping().length());
        let address = heap.attach(file.file(), 0, SLOT).unwrap();
        let served = heap.attach(holes.file(), 0, SLOT).unwrap();
        assert_stamped(address, 7);
        access::store(served, 1).unwrap();
        if is_moved {
            assert!(sys::mremap(start, length, length, libc::MREMAP_MAYMOVE).is_ok());
            let elsewhere = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
            assert!(sys::mremap(start, length, length, elsewhere).is_err());
            assert!(sys::mremap(start, length, 2 * length, libc::MREMAP_MAYMOVE).is_err());
            move_to(start, length, 1 << 44);
        } else {
            sys::madvise(start, length, libc::MADV_DOFORK).unwrap();
            in_child(|| {
                assert_absent(address, libc::SIGSEGV);
                assert_absent(served, libc::SIGSEGV);
            });
        }
        assert_absent(address, libc::SIGBUS);
        assert_absent(served, libc::SIGBUS);
        assert_eq!(heap.attach(file.file(), 0, 1), Err(Errno::NXIO));
        assert_eq!(heap.detach(address), Ok(()));
        assert_file_tables_are_sound();
    }
    let mut byte = [0];
    holes.file().read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [1]);
    assert_no_file_tables();
}

/// Tries to move a mapping to an address.
fn move_to(start: usize, length: usize, to: usize) {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let (from, to) = (std::ptr::with_exposed_provenance_mut(start), to as *mut libc::c_void);
    // SAFETY: nothing is at the new address, and the move fails.
    let moved = unsafe { libc::mremap(from, length, length, flags, to) };
    assert_eq!((moved, sys::last_error()), (libc::MAP_FAILED, Errno::INVAL));
}

#[test]
fn rights_are_those_of_the_heap() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("rights", SLOT, 7);
    let (reader, writer) = (Heap::for_reading(0), Heap::for_writing(0));
    let read = reader.attach(file.file(), 0, SLOT).unwrap();
    let written = writer.attach(file.file(), 0, SLOT).unwrap();
    for address in [read, page_at(read, 3)] {
        let fault = Fault { signal: libc::SIGSEGV, address };
        assert_eq!(access::store(address, 1), Err(fault));
        assert_eq!(access::kernel_store(address, &[1]), Err(Errno::FAULT));
    }
    for page in [0, 3, SLOT - 1] {
        access::store_page(page_at(written, page), 0x1234_5678_9abc_def0).unwrap();
        let seen = access::load_page(page_at(read, page)).unwrap();
        assert!(seen.iter().all(|word| *word == 0x1234_5678_9abc_def0));
    }
    assert_file_tables_are_sound();
}

#[test]
fn detachments_are_flushed_together_and_addresses_are_not_used_before() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("batches", 3, 7);
    for (batch, wanted) in [(0, 33), (1, 1), (MAX_BATCH, u64::from(MAX_BATCH))] {
        let heap = Heap::for_reading(batch);
        assert_eq!(u64::from(heap.stat().batch), wanted);
        let (mut used, mut flushes, mut late) = (Vec::new(), 0, 0);
        // A pause between detachments has what has gathered flushed early, by the worker: it counts
        // the flush first, and then lets the addresses go one after the other.
        while used.len() < 400 && heap.stat().flushes < 3 + late {
            let address = heap.attach(file.file(), 0, 3).unwrap();
            assert_stamped(page_at(address, 2), 9);
            let before = std::mem::replace(&mut flushes, heap.stat().flushes);
            if before != flushes {
                used.clear();
            }
            assert!(!used.contains(&address), "{address:#x} is used again too early");
            heap.detach(address).unwrap();
            used.push(address);
            if heap.stat().zombies == 0 {
                used.clear();
            }
            // A batch that is full while the worker flushes waits for the next flush.
            if heap.stat().zombies >= wanted {
                late += 1;
                heap.reap();
                used.clear();
            }
            assert!(late < 10, "full batches are not flushed: {:?}", heap.stat());
        }
        let stat = heap.stat();
        assert!(stat.flushes >= 1 || stat.detaches < wanted, "{stat:?}");
    }
    // What waits for a flush is let go soon.
    let heap = Heap::for_reading(MAX_BATCH);
    let address = heap.attach(file.file(), 0, 3).unwrap();
    assert_stamped(address, 7);
    heap.detach(address).unwrap();
    wait_until(|| heap.stat().taken == 0);
    assert_no_file_tables();
}

/// A thread finds nothing to flush while another is amid the flush. What was detached before is
/// gone when it returns all the same.
#[test]
fn a_reap_waits_for_the_reap_of_another_thread() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("reaped", 3, 7);
    let heap = Heap::for_reading(MAX_BATCH);
    for round in 0..20 {
        let all = [(); 500].map(|()| heap.attach(file.file(), 0, 3).unwrap());
        all.iter().for_each(|address| heap.detach(*address).unwrap());
        let reaps = || {
            heap.reap();
            heap.stat().taken
        };
        let left =
            thread::scope(|scope| [(); 2].map(|()| scope.spawn(reaps)).map(|one| one.join()));
        assert_eq!(left.map(Result::unwrap), [0; 2], "round {round}");
    }
    drop(heap);
    assert_no_file_tables();
}

#[test]
fn a_heap_may_be_full() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("full", 3, 7);
    let heap = Heap::for_reading(MAX_BATCH);
    let slots = heap.mapping().length() as u64 / UNIT;
    let all: Vec<_> = (0..slots).map(|_| heap.attach(file.file(), 0, 1).unwrap()).collect();
    assert_eq!(heap.attach(file.file(), 0, 1), Err(Errno::NOSPC));
    for address in &all {
        assert_stamped(*address, 7);
    }
    // In a row there is room for two only where two have gone.
    heap.detach(all[10]).unwrap();
    heap.detach(all[20]).unwrap();
    assert_eq!(heap.attach(file.file(), 0, 2 * SLOT), Err(Errno::NOSPC));
    heap.detach(all[11]).unwrap();
    assert_stamped(heap.attach(file.file(), 0, 2 * SLOT).unwrap(), 7);
    assert_stamped(heap.attach(file.file(), 0, 1).unwrap(), 7);
    assert_eq!(heap.attach(file.file(), 0, 1), Err(Errno::NOSPC));
    drop(heap);
    // One attachment may fill a region.
    let heap = Heap::for_reading(0);
    let large = [(); 2].map(|()| heap.attach_descriptor(file.file().as_raw_fd(), 0, READ_UNIT));
    assert_stamped(large[0].unwrap(), 7);
    assert_stamped(large[1].unwrap(), 7);
    assert_eq!(heap.attach(file.file(), 0, 1), Err(Errno::NOSPC));
    assert_absent(large[0].unwrap() + 3 * PAGE, libc::SIGBUS);
    drop(heap);
    assert_no_file_tables();
}

#[test]
fn holes_are_served_and_filled() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::new("holes");
    file.file().set_len(2 * UNIT).unwrap();
    file.stamp(3, 5);
    file.stamp(SLOT + 3, 6);
    fallocate(file.file(), FallocateFlags::KEEP_SIZE, 9 * PAGE as u64, PAGE as u64).unwrap();
    let (reader, writer) = (Heap::for_reading(0), Heap::for_writing(0));
    let read = reader.attach(file.file(), 0, 2 * SLOT).unwrap();
    let written = writer.attach(file.file(), 0, 2 * SLOT).unwrap();
    assert_eq!((access::load(page_at(read, 1)), access::load(page_at(read, 9))), (Ok(0), Ok(0)));
    assert_stamped(page_at(read, 3), 5);
    assert_eq!(reader.stat().served, 1);
    assert_eq!(reader.stat().attached, 1);
    // Another call fills a hole that is shown, and a page that was reserved.
    for page in [1, 9] {
        assert_eq!(access::load(page_at(written, page)), Ok(0));
        file.stamp(page, 40 + page);
        assert_stamped(page_at(read, page), 40 + page);
        assert_stamped(page_at(written, page), 40 + page);
    }
    // A store fills one: first seen as a hole by the same heap, by another one, and by none.
    assert_eq!(access::load(page_at(written, 20)), Ok(0));
    assert_eq!(access::load(page_at(read, 21)), Ok(0));
    for page in [20, 21, 22] {
        access::kernel_store(page_at(written, page), &access::stamped(60 + page)).unwrap();
        assert_stamped(page_at(read, page), 60 + page);
        file.assert_stamped(page, 60 + page);
    }
    // A file without a block.
    let empty = DaxFile::new("empty");
    empty.file().set_len(UNIT).unwrap();
    let address = writer.attach(empty.file(), 0, SLOT).unwrap();
    access::kernel_store(page_at(address, 7), &access::stamped(1)).unwrap();
    empty.assert_stamped(7, 1);
    assert_file_tables_are_sound();
    drop((reader, writer));
    file.assert_stamped(22, 82);
    assert_no_file_tables();
}

/// Has another file take all that is free, so that it gets the blocks that a file loses.
fn take_all() -> DaxFile {
    let other = DaxFile::new("taker");
    let bytes = access::stamped(0xbad);
    let mut page = 0;
    while other.file().write_all_at(&bytes, page * PAGE as u64).is_ok() {
        page += 1;
    }
    other
}

#[test]
fn lost_blocks_are_not_reached() {
    let Some(_turn) = dax_turn() else { return };
    let filler = DaxFile::new("filler");
    let file = DaxFile::stamped("loser", 2 * SLOT, 7);
    let holes = DaxFile::new("loser-holes");
    holes.file().set_len(UNIT).unwrap();
    let (reader, writer) = (Heap::for_reading(0), Heap::for_writing(0));
    // What is served is lost as well.
    let served = writer.attach(holes.file(), 0, SLOT).unwrap();
    for page in 0..20 {
        access::kernel_store(page_at(served, page), &access::stamped(3)).unwrap();
    }
    assert_eq!(writer.stat().served, 1);
    let free = rustix::fs::statfs(file.path()).unwrap().f_bavail - 64;
    fallocate(filler.file(), FallocateFlags::empty(), 0, free * PAGE as u64).unwrap();
    let all = [&reader, &writer].map(|heap| heap.attach(file.file(), 0, 2 * SLOT).unwrap());
    for address in all {
        (0..2 * SLOT).for_each(|page| assert_stamped(page_at(address, page), 7 + page));
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file.file(), punch, 2 * PAGE as u64, 100 * PAGE as u64).unwrap();
    fallocate(holes.file(), punch, 0, 10 * PAGE as u64).unwrap();
    file.file().set_len((SLOT + 1) * PAGE as u64).unwrap();
    file.file().sync_all().unwrap();
    let taker = take_all();
    for address in all {
        for page in 2..102 {
            assert_eq!(access::load(page_at(address, page)), Ok(0), "{page}");
        }
        for page in [0, 1, 102, SLOT - 1, SLOT] {
            assert_stamped(page_at(address, page), 7 + page);
        }
        assert_absent(page_at(address, SLOT + 1), libc::SIGBUS);
    }
    for page in 0..20 {
        let found = access::load(page_at(served, page)).unwrap();
        assert_eq!(found == 0, page < 10, "{page}");
    }
    // A store to a hole finds no block.
    let address = page_at(all[1], 2);
    assert_eq!(access::store(address, 1), Err(Fault { signal: libc::SIGBUS, address }));
    drop((taker, filler));
    access::store(address, 1).unwrap();
    assert_file_tables_are_sound();
    fs::remove_file(file.path()).unwrap();
    assert_stamped(all[0], 7);
    drop((reader, writer, file, holes));
    assert_no_file_tables();
}

#[test]
fn stores_are_synced() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("stores", 2 * SLOT, 7);
    let holes = DaxFile::new("stores-holes");
    holes.file().set_len(UNIT).unwrap();
    let heap = Heap::for_writing(0);
    let address = heap.attach(file.file(), 0, 2 * SLOT).unwrap();
    let served = heap.attach(holes.file(), 0, SLOT).unwrap();
    let forget = |file: &DaxFile| {
        let times = [libc::timespec { tv_sec: 0, tv_nsec: 0 }; 2];
        // SAFETY: the call reads the two times.
        assert_eq!(unsafe { libc::futimens(file.file().as_raw_fd(), times.as_ptr()) }, 0);
    };
    let has_changed = |file: &DaxFile| file.file().metadata().unwrap().mtime() != 0;
    let sync = |address: usize| {
        let address = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the call changes no memory.
        assert_eq!(unsafe { libc::msync(address, PAGE, libc::MS_SYNC) }, 0);
    };
    access::store(served, 1).unwrap();
    heap.sync().unwrap();
    for (file, address) in [(&file, address), (&holes, served)] {
        for round in 0..3 {
            forget(file);
            heap.sync().unwrap();
            assert!(!has_changed(file), "nothing was stored");
            access::store(address, round).unwrap();
            access::load(address).unwrap();
            match round {
                0 => heap.sync().unwrap(),
                1 => sync(address),
                _ => file.table().sync().unwrap(),
            }
            assert!(has_changed(file), "round {round}");
        }
    }
    // What was stored is noted when the file is let go, too.
    for (file, at) in [(&file, address), (&holes, served)] {
        forget(file);
        access::store(at, 9).unwrap();
        heap.detach(at).unwrap();
        heap.reap();
        assert!(has_changed(file));
    }
    // A program that flushes by itself.
    let table = Table::open(file.file(), DURABLE | NOSYNC).unwrap();
    let address = heap.attach(&table, 0, SLOT).unwrap();
    access::store(address, 1).unwrap();
    forget(&file);
    heap.sync().unwrap();
    assert!(!has_changed(&file));
    drop((heap, table));
    assert_no_file_tables();
}

#[test]
fn nothing_pins_pages_of_a_heap() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::new("pinned");
    file.file().set_len(UNIT).unwrap();
    file.stamp(0, 7);
    let heap = Heap::for_writing(0);
    let address = heap.attach(file.file(), 0, SLOT).unwrap();
    let path = vellum_kernel_tests::backing::scratch().join("direct-heap");
    fs::write(&path, [1; PAGE]).unwrap();
    let mut options = fs::OpenOptions::new();
    let disk = options.read(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    disk.sync_all().unwrap();
    let me = std::process::id() as i32;
    // One page of the file's table, and one that the file system has served.
    for at in [address, page_at(address, 1)] {
        access::store(at, 3).unwrap();
        let mut byte = [0];
        sys::process_vm_readv(me, at, &mut byte).unwrap_err();
        sys::process_vm_writev(me, at, &[1]).unwrap_err();
        sys::pread(disk.as_fd(), at, PAGE, 0).unwrap_err();
        let (_out, pipe) = std::io::pipe().unwrap();
        sys::vmsplice(pipe.as_fd(), at, PAGE).unwrap_err();
    }
    fs::remove_file(path).unwrap();
    assert_eq!(heap.stat().served, 1);
    assert_file_tables_are_sound();
}

#[test]
fn a_process_may_end_at_any_time() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("end", SLOT, 7);
    for round in 0..8 {
        let child = vellum_kernel_tests::child::Child::start(|| {
            let heap = Heap::for_writing(64);
            for number in 0..1_000_u64 {
                let address = heap.attach(file.file(), 0, SLOT).unwrap();
                access::store(address, 1).unwrap();
                if number % 3 != 0 {
                    heap.detach(address).unwrap();
                }
                if round % 2 == 0 && number == 300 {
                    std::mem::forget(heap);
                    return 0;
                }
            }
            0
        });
        if round % 2 == 0 {
            assert_eq!(child.wait(), End::Status(0));
        } else {
            thread::sleep(std::time::Duration::from_millis(20 * round));
            child.signal(libc::SIGKILL);
            child.wait();
        }
    }
    assert_no_file_tables();
    assert_eq!(file.file().metadata().unwrap().len(), UNIT);
}

/// A write holds the inode's lock while it reads its buffer, an attachment of the same file
/// that has a fault there.
#[test]
fn a_file_is_written_from_its_own_attachment() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("own", 10, 7);
    let heap = Heap::for_reading(0);
    let address = heap.attach(file.file(), 0, 20).unwrap();
    assert_eq!(sys::pwrite(file.file().as_fd(), address, PAGE, 0), Ok(PAGE as u64));
    // Beyond what the table knows, and over the end.
    file.stamp(10, 17);
    let from = 11 * PAGE as u64;
    assert_eq!(sys::pwrite(file.file().as_fd(), page_at(address, 10), PAGE, from), Ok(PAGE as u64));
    file.assert_stamped(11, 17);
    file.file().set_len(30 * PAGE as u64).unwrap();
    let hole = page_at(address, 15);
    assert_eq!(sys::pwrite(file.file().as_fd(), hole, PAGE, 16 * PAGE as u64), Ok(PAGE as u64));
    assert_eq!(access::load(page_at(address, 16)), Ok(0));
    assert_file_tables_are_sound();
}

/// Threads attach, use and detach, while others take the tables out by notifications.
#[test]
fn threads_share_a_heap() {
    let Some(_turn) = dax_turn() else { return };
    let files: Vec<_> = (0..4_u64)
        .map(|number| {
            DaxFile::stamped(&format!("shared-{number}"), 3 + number * SLOT, number << 32)
        })
        .collect();
    let heap = Heap::for_reading(7);
    let mut random = Random::of_this_run();
    let seeds = [(); 4].map(|()| random.number());
    let (deadline, stop) = (Deadline::after_ms(3_000), Stop::default());
    thread::scope(|scope| {
        let _end = stop.at_end();
        for seed in &seeds[1..] {
            scope.spawn(|| use_heap(&heap, &files, &stop, Random::new(*seed)));
        }
        let (start, length) = (heap.mapping().start(), heap.mapping().length());
        // On a busy machine the threads may hardly have run by then.
        for _ in deadline.rounds_until(|| heap.stat().attaches > 100) {
            sys::madvise(start, length, libc::MADV_DONTNEED).unwrap();
            fs::write("/proc/self/clear_refs", "4").unwrap();
            thread::sleep(std::time::Duration::from_millis(1));
        }
    });
    assert_file_tables_are_sound();
    let stat = heap.stat();
    assert_eq!((stat.attaches, stat.attached), (stat.detaches, 0));
    assert!(stat.attaches > 100, "{stat:?}");
    drop(heap);
    assert_no_file_tables();
}

fn use_heap(heap: &Heap, files: &[DaxFile], stop: &Stop, mut random: Random) {
    while !stop.is_said() {
        let number = random.below(files.len() as u64);
        let pages = 3 + number * SLOT;
        let first = random.below(pages);
        let count = 1 + random.below(pages - first);
        let address = heap.attach(files[number as usize].file(), first, count).unwrap();
        for _ in 0..random.below(8) {
            let page = random.below(count);
            let words = access::load_page(page_at(address, page)).unwrap();
            let stamp = access::stamped((number << 32) + first + page);
            assert!(words[5].to_le_bytes() == stamp[40..48], "{number} {first} {page}");
        }
        heap.detach(address).unwrap();
    }
}

/// Interrupts by which processors have flushed each other's TLBs so far.
fn shootdowns() -> u64 {
    let text = fs::read_to_string("/proc/interrupts").unwrap();
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("TLB:")).unwrap();
    line.split(' ').filter_map(|word| word.parse::<u64>().ok()).sum()
}

/// A thread goes on to read what was detached, on a processor that has it cached. It may, until the
/// file loses the block.
#[test]
fn what_was_detached_is_flushed_before_a_block_is_another_file_s() {
    let Some(_turn) = dax_turn() else { return };
    const OTHER: u64 = 0xbad_bad;
    let other = DaxFile::new("other");
    let heap = Heap::for_reading(MAX_BATCH);
    let _place = Place::on(0);
    let mut flushed = 0;
    for _ in 0..rounds(40) {
        let file = DaxFile::stamped("detached", 64, 7);
        let address = heap.attach(file.file(), 0, 64).unwrap();
        let (has_read, is_lost) = (Stop::default(), Stop::default());
        let seen = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                stay_on(1);
                access::load(address).unwrap();
                drop(has_read.at_end());
                while !is_lost.is_said() {
                    std::hint::spin_loop();
                }
                access::load_page(address)
            });
            let _end = is_lost.at_end();
            wait_until(|| has_read.is_said());
            heap.detach(address).unwrap();
            let before = shootdowns();
            file.file().set_len(0).unwrap();
            flushed += u32::from(shootdowns() > before);
            file.file().sync_all().unwrap();
            other.file().write_all_at(&access::stamped(OTHER).repeat(64), 0).unwrap();
            drop(is_lost.at_end());
            reader.join().unwrap()
        });
        if let Ok(words) = seen {
            assert!(words[9].to_le_bytes() != access::stamped(OTHER)[72..80]);
        }
        other.file().set_len(0).unwrap();
    }
    // A processor that runs a thread of the kernel meanwhile is flushed later, and not counted.
    assert!(flushed * 4 >= rounds(40), "other processors were flushed {flushed} times");
}

/// Where a heap is and how long it is does not become known at once.
#[test]
fn a_heap_may_be_synced_while_it_is_mapped() {
    let Some(_turn) = dax_turn() else { return };
    let (descriptor, stop) = (AtomicI32::new(-1), Stop::default());
    let deadline = Deadline::after_ms(3_000);
    thread::scope(|scope| {
        let _end = stop.at_end();
        scope.spawn(|| {
            while !stop.is_said() {
                // SAFETY: the call does no harm to any descriptor; a closed one is an error.
                unsafe { libc::fsync(descriptor.load(Ordering::Relaxed)) };
            }
        });
        for _ in deadline.rounds() {
            let heap = Heap::open(0, 0).unwrap();
            descriptor.store(heap.as_raw_fd(), Ordering::Relaxed);
            let mapping = Mapping::new(Heap::request(&heap, 1, libc::PROT_READ)).unwrap();
            descriptor.store(-1, Ordering::Relaxed);
            drop(mapping);
        }
    });
}
