//! Calls on file tables, their descriptors and mappings: each works, or is refused and changes
//! nothing.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::child::in_child;
use vellum_kernel_tests::counters::assert_file_tables_are_sound;
use vellum_kernel_tests::dax::{self, DaxFile};
use vellum_kernel_tests::sys::{self, READ_WRITE, Request};
use vellum_kernel_tests::threads::wait_until;
use vellum_kernel_tests::{Errno, Mapping, PAGE, Table, dax_turn};
use vellum_uapi::dax::{
    DURABLE, HAS_HEAPS, KEEPS_TABLES, MAX_EXTENT, NOSYNC, Open, READ_UNIT, READS_STORED, REFRESH,
    UNIT,
};

const PAGES: u64 = 700;

/// Checks that the mapping works as before.
#[track_caller]
fn assert_works(file: &DaxFile, mapping: &Mapping) {
    for page in [0, 511, 512, PAGES - 1] {
        file.stamp(page, page + 7);
        mapping.assert_stamped(page, page + 7);
    }
    assert_file_tables_are_sound();
}

#[test]
fn files_that_can_have_no_table_are_refused() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("refused", 3, 7);
    let refused = |file: &File, flags| Table::open(file, flags).unwrap_err();
    assert_eq!(Table::open_descriptor(-1, 0).unwrap_err(), Errno::BADF);
    assert_eq!(Table::open_descriptor(1 << 20, 0).unwrap_err(), Errno::BADF);
    let writer = OpenOptions::new().write(true).open(file.path()).unwrap();
    assert_eq!(refused(&writer, 0), Errno::BADF);
    assert_eq!(refused(&File::open("/pmem").unwrap(), 0), Errno::OPNOTSUPP);
    assert_eq!(refused(&File::open("/dev/null").unwrap(), 0), Errno::OPNOTSUPP);
    assert_eq!(refused(&File::open("/proc/version").unwrap(), 0), Errno::OPNOTSUPP);
    let elsewhere = std::env::current_exe().unwrap();
    assert_eq!(refused(&File::open(elsewhere).unwrap(), 0), Errno::OPNOTSUPP);
    assert_eq!(refused(file.file(), 4), Errno::INVAL);
    assert_eq!(refused(file.file(), NOSYNC), Errno::INVAL);
    assert_eq!(refused(file.file(), u64::MAX), Errno::INVAL);
    // A table's own descriptor is no file with blocks.
    let table = file.table();
    let open = |size, descriptor| {
        let open = Open { size, file: descriptor, flags: 0 };
        let argument = (&raw const open).expose_provenance() as u64;
        dax::device_ioctl(vellum_uapi::dax::OPEN, argument)
    };
    assert_eq!(open(8, file.file().as_raw_fd()), Err(Errno::INVAL));
    assert_eq!(open(5_000, file.file().as_raw_fd()), Err(Errno::TOOBIG));
    assert_eq!(dax::device_ioctl(vellum_uapi::dax::OPEN, 8), Err(Errno::FAULT));
    assert_eq!(dax::device_ioctl(REFRESH, 0), Err(Errno::NOTTY));
    assert_eq!(table.ioctl(vellum_uapi::dax::OPEN, 0), Err(Errno::NOTTY));
    assert_eq!(table.ioctl(vellum_uapi::dax::STAT, 8), Err(Errno::FAULT));
    let query = dax::query();
    let features = HAS_HEAPS | KEEPS_TABLES | READS_STORED;
    assert_eq!((query.version, query.features), (1, features));
    assert_eq!(query.flags, DURABLE | NOSYNC);
}

#[test]
fn mappings_of_other_lengths_and_kinds_are_refused() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("kinds", PAGES, 7);
    let table = file.table();
    let refused = |request| Mapping::new(request).map(|_| ()).unwrap_err();
    let read = libc::PROT_READ;
    for length in [PAGE as u64, UNIT - PAGE as u64, UNIT + PAGE as u64, MAX_EXTENT + READ_UNIT] {
        assert_eq!(refused(table.request(length, READ_WRITE)), Errno::INVAL, "{length}");
        assert_eq!(refused(table.request(length, read)), Errno::INVAL, "{length}");
    }
    assert_eq!(refused(table.request(UNIT, read)), Errno::INVAL);
    assert_eq!(refused(table.request(READ_UNIT + UNIT, read)), Errno::INVAL);
    let right = table.request(2 * UNIT, READ_WRITE);
    assert_eq!(refused(Request { flags: libc::MAP_PRIVATE, ..right }), Errno::INVAL);
    assert_eq!(refused(Request { offset: UNIT, ..right }), Errno::INVAL);
    let all = READ_WRITE | libc::PROT_EXEC;
    assert_eq!(refused(Request { protection: all, ..right }), Errno::ACCESS);
    let unaligned = (1 << 44) + PAGE;
    let fixed = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
    assert_eq!(refused(Request { address: unaligned, flags: fixed, ..right }), Errno::INVAL);
    let reader = Table::open(&file.for_reading(), 0).unwrap();
    assert_eq!(refused(reader.request(2 * UNIT, READ_WRITE)), Errno::ACCESS);
    let mapping = Mapping::new(Request { address: 1 << 44, flags: fixed, ..right }).unwrap();
    assert_eq!(mapping.start(), 1 << 44);
    assert_works(&file, &mapping);
    // Over it.
    assert_eq!(refused(Request { address: 1 << 44, flags: fixed, ..right }), Errno::EXIST);
    assert_works(&file, &mapping);
}

#[test]
fn a_mapping_is_one_piece() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("piece", PAGES, 7);
    let table = file.table();
    let mapping = table.mapped(PAGES);
    let (start, length, unit) = (mapping.start(), mapping.length(), UNIT as usize);
    assert_works(&file, &mapping);
    assert_eq!(sys::munmap(start, unit), Err(Errno::INVAL));
    assert_eq!(sys::munmap(start + PAGE, PAGE), Err(Errno::INVAL));
    assert_eq!(sys::mprotect(start, unit, libc::PROT_NONE), Err(Errno::INVAL));
    // Its entries could not be without the right to write.
    assert_eq!(sys::mprotect(start, length, libc::PROT_READ), Err(Errno::INVAL));
    assert!(sys::mremap(start, length, 2 * length, libc::MREMAP_MAYMOVE).is_err());
    assert!(sys::mremap(start, length, unit, 0).is_err());
    for advice in [libc::MADV_DONTNEED, libc::MADV_COLD, libc::MADV_PAGEOUT, libc::MADV_FREE] {
        let _ = sys::madvise(start, length, advice);
        assert_works(&file, &mapping);
    }
    let _ = sys::madvise(start, length, libc::MADV_HUGEPAGE);
    for what in ["1", "4"] {
        std::fs::write("/proc/self/clear_refs", what).unwrap();
        assert_works(&file, &mapping);
    }
    std::fs::read_to_string("/proc/self/smaps").unwrap();
    assert_eq!(table.stat().barred, 0);
    in_child(|| {
        let fault = Fault { signal: libc::SIGSEGV, address: start };
        assert_eq!(access::load(start), Err(fault));
    });
    assert_works(&file, &mapping);
    // Whole, it may be replaced.
    mapping.leave();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let over =
        Request { address: start, length, protection: READ_WRITE, flags, fd: None, offset: 0 };
    let over = Mapping::new(over).unwrap();
    assert_eq!((access::load(over.start()), table.stat().mounts), (Ok(0), 0));
}

#[test]
fn rights_are_those_of_the_mapping() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("rights", PAGES, 7);
    let writer = file.table();
    let reader = Table::open(&file.for_reading(), 0).unwrap();
    let writable = Mapping::new(writer.request(READ_UNIT, READ_WRITE)).unwrap();
    let readable = reader.mapped_for_reading(PAGES);
    let cannot = |address| {
        assert!(access::load(address).is_ok());
        let fault = Fault { signal: libc::SIGSEGV, address };
        assert_eq!(access::store(address, 1), Err(fault));
        assert_eq!(access::kernel_store(address, &[1]), Err(Errno::FAULT));
        let process = std::process::id() as i32;
        assert!(sys::process_vm_writev(process, address, &[1]).is_err());
    };
    cannot(readable.page(3));
    writable.stamp(3, 1_000);
    cannot(readable.page(3));
    readable.assert_stamped(3, 1_000);
    let (start, length) = (writable.start(), writable.length());
    sys::mprotect(start, length, libc::PROT_READ).unwrap();
    cannot(writable.page(3));
    sys::mprotect(start, length, libc::PROT_NONE).unwrap();
    assert!(access::load(start).is_err());
    sys::mprotect(start, length, READ_WRITE).unwrap();
    writable.stamp(3, 1_001);
    let (start, length) = (readable.start(), readable.length());
    assert_eq!(sys::mprotect(start, length, READ_WRITE), Err(Errno::ACCESS));
    let exec = libc::PROT_READ | libc::PROT_EXEC;
    assert_eq!(sys::mprotect(start, length, exec), Err(Errno::ACCESS));
    readable.assert_stamped(3, 1_001);
    assert_eq!(writer.stat().barred, 0);
    assert_file_tables_are_sound();
}

/// The file system would not see a reference to a page when it frees the block.
#[test]
fn pages_cannot_be_pinned() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("pinned", PAGES, 7);
    let table = file.table();
    let mapping = table.mapped(PAGES);
    assert_works(&file, &mapping);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
    let path = vellum_kernel_tests::backing::scratch().join("direct");
    std::fs::write(&path, [1; PAGE]).unwrap();
    let direct = options.open(&path).unwrap();
    direct.sync_all().unwrap();
    assert!(sys::pwrite(direct.as_fd(), mapping.start(), PAGE, 0).is_err());
    assert!(sys::pread(direct.as_fd(), mapping.start(), PAGE, 0).is_err());
    let (ends, mut bytes) = (std::io::pipe().unwrap(), [0; 16]);
    assert!(sys::vmsplice(ends.1.as_fd(), mapping.start(), PAGE).is_err());
    let process = std::process::id() as i32;
    assert!(sys::process_vm_readv(process, mapping.start(), &mut bytes).is_err());
    assert_works(&file, &mapping);
    assert_eq!(table.stat().barred, 0);
    std::fs::remove_file(path).unwrap();
}

/// A write holds the inode's lock while it reads its buffer, which is a mapping of the same file
/// that has a fault there.
#[test]
fn a_file_is_written_from_its_own_mapping() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("own", 10, 7);
    let table = file.table();
    let mapping = table.mapped(20);
    assert_eq!(sys::pwrite(file.file().as_fd(), mapping.start(), PAGE, 0), Ok(PAGE as u64));
    // Beyond what the table knows, and over the end.
    file.stamp(10, 17);
    let page = mapping.page(10);
    let from = 11 * PAGE as u64;
    assert_eq!(sys::pwrite(file.file().as_fd(), page, PAGE, from), Ok(PAGE as u64));
    file.assert_stamped(11, 17);
    file.file().set_len(30 * PAGE as u64).unwrap();
    let hole = mapping.page(15);
    assert_eq!(sys::pwrite(file.file().as_fd(), hole, PAGE, from), Ok(PAGE as u64));
    assert_eq!(sys::pread(file.file().as_fd(), hole, PAGE, 0), Ok(PAGE as u64));
    file.assert_stamped(15, 7);
    table.refresh().unwrap();
    mapping.assert_stamped(15, 7);
    assert_file_tables_are_sound();
}

#[test]
fn sync_notes_stores_once() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("times", PAGES, 7);
    let modified = || {
        let data = file.file().metadata().unwrap();
        (data.mtime(), data.mtime_nsec())
    };
    for flags in [0, DURABLE, DURABLE | NOSYNC] {
        let table = Table::open(file.file(), flags).unwrap();
        let mapping = table.mapped(PAGES);
        table.sync().unwrap();
        for page in [0, 511, 512, PAGES - 1] {
            let before = modified();
            thread::sleep(Duration::from_millis(20));
            mapping.assert_stamped(page, page + 7);
            table.sync().unwrap();
            assert_eq!(modified(), before, "reading page {page} with flags {flags}");
            mapping.stamp(page, page + 7);
            table.sync().unwrap();
            assert_eq!(modified() != before, flags & NOSYNC == 0, "page {page}, flags {flags}");
            let once = modified();
            thread::sleep(Duration::from_millis(20));
            table.sync().unwrap();
            assert_eq!(modified(), once, "page {page} again");
        }
        assert_eq!(table.stat().flags, if flags == 0 { 0 } else { DURABLE });
        assert_eq!(table.stat().barred, 0);
    }
}

#[test]
fn synchronous_mappings_need_a_durable_table() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("synchronous", PAGES, 7);
    let flags = libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC;
    let map =
        |table: &Table| Mapping::new(Request { flags, ..table.request(2 * UNIT, READ_WRITE) });
    assert_eq!(map(&file.table()).unwrap_err(), Errno::OPNOTSUPP);
    let table = Table::open(file.file(), DURABLE).unwrap();
    let mapping = map(&table).unwrap();
    assert_works(&file, &mapping);
    assert_eq!(table.stat().barred, 0);
    // A reserved block becomes durably the file's in the fault.
    fallocate(file.file(), FallocateFlags::empty(), PAGES * PAGE as u64, PAGE as u64).unwrap();
    mapping.stamp(PAGES, 5);
    file.assert_stamped(PAGES, 5);
    let mut byte = [0];
    file.file().read_exact_at(&mut byte, 0).unwrap();
}

/// To open a file may wait for the program that has a lease on it.
#[test]
fn a_lease_on_one_file_does_not_stop_users_of_others() {
    let Some(_turn) = dax_turn() else { return };
    let (leased, other) = (DaxFile::stamped("leased", 3, 7), DaxFile::stamped("other", 3, 7));
    let mapping = other.table().mapped(3);
    let lease = |kind: i32| {
        // SAFETY: the command takes a number.
        unsafe { libc::fcntl(leased.file().as_raw_fd(), libc::F_SETLEASE, kind) }
    };
    // SAFETY: to ignore a signal touches no memory.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    assert_eq!(lease(libc::F_WRLCK), 0);
    thread::scope(|scope| {
        let opener = scope.spawn(|| Table::open(leased.file(), 0).map(drop));
        // The other thread waits until the lease is given up, or is 45 seconds late.
        wait_until(|| sys::fcntl(leased.file(), libc::F_GETLEASE, 0) != libc::F_WRLCK);
        drop(mapping);
        drop(other.table());
        let is_first = !opener.is_finished();
        assert_eq!(lease(libc::F_UNLCK), 0);
        assert!(is_first, "a user of another file waits until the lease has ended");
    });
}

/// Two files exchange their blocks, and nothing is unmapped.
#[test]
fn a_file_that_becomes_the_boot_loader_loses_its_table() {
    let Some(_turn) = dax_turn() else { return };
    dax::begin_anew();
    const SWAP_BOOT: u32 = 0x6611;
    let file = DaxFile::stamped("boot", 8, 7);
    file.file().sync_all().unwrap();
    let table = file.table();
    sys::ioctl(file.file().as_fd(), SWAP_BOOT, 0).unwrap();
    assert_eq!((table.stat().stale, file.file().metadata().unwrap().len()), (1, 0));
    let mapping = table.mapped(8);
    let address = mapping.page(1);
    assert_eq!(access::load(address), Err(Fault { signal: libc::SIGBUS, address }));
    table.refresh().unwrap();
    assert_eq!((table.stat().stale, table.stat().leaves), (0, 0));
    drop(mapping);
    sys::ioctl(file.file().as_fd(), SWAP_BOOT, 0).unwrap();
    table.refresh().unwrap();
    table.mapped(8).assert_stamped(1, 8);
    assert_file_tables_are_sound();
}

#[test]
fn a_file_that_is_only_appended_to_is_not_mapped_for_writing() {
    let Some(_turn) = dax_turn() else { return };
    const GET_FLAGS: u32 = 0x8008_6601;
    const SET_FLAGS: u32 = 0x4008_6602;
    const APPEND: u64 = 0x20;
    let file = DaxFile::stamped("append-only", 8, 7);
    let table = file.table();
    let set = |flag| {
        let flags = AtomicU64::new(0);
        let argument = flags.as_ptr().expose_provenance() as u64;
        sys::ioctl(file.file().as_fd(), GET_FLAGS, argument).unwrap();
        flags.store((flags.load(Ordering::Relaxed) & !APPEND) | flag, Ordering::Relaxed);
        sys::ioctl(file.file().as_fd(), SET_FLAGS, argument).unwrap();
    };
    set(APPEND);
    let mapped = Mapping::new(table.request(UNIT, READ_WRITE)).map(drop);
    let opened = Table::open(file.file(), 0).map(drop);
    set(0);
    assert_eq!((mapped, opened), (Err(Errno::ACCESS), Err(Errno::ACCESS)));
}
