//! The read-only mapping of the surface's page tables, which shows the present pages.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::OpenOptions;
use std::os::fd::AsFd as _;

use rustix::io::Errno;
use vellum_kernel_tests::child::{become_user, in_child};
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::{Exmap, Mapping, PAGE, Plan, Surface, access, turn_for};
use vellum_uapi::exmap;

const PAGES: u64 = 300_000;
/// Bytes of the tables: 8 for each page, in whole tables.
const LENGTH: usize = (PAGES as usize * 8).next_multiple_of(PAGE);

fn map(exmap: &Exmap, length: usize, protection: i32, flags: i32) -> Result<Mapping, Errno> {
    let (fd, offset) = (Some(exmap.as_fd()), exmap::OFFSET_TABLES);
    Mapping::new(Request { address: 0, length, protection, flags, fd, offset })
}

fn shown(exmap: &Exmap) -> Mapping {
    map(exmap, LENGTH, libc::PROT_READ, libc::MAP_SHARED).unwrap()
}

/// Whether the entry of a page says that the page is present.
fn says_there(tables: &Mapping, page: u64) -> bool {
    let entry = access::load(tables.start() + page as usize * 8).expect("an entry");
    entry & 1 == 1
}

#[test]
fn an_entry_tells_whether_its_page_is_present() {
    let Some(_turn) = turn_for(exmap::CAN_SHOW_TABLES) else { return };
    let surface = Plan::new(PAGES, 100).make();
    let tables = shown(&surface.exmap);
    let pages = [0, 1, 511, 512, 262_143, 262_144, PAGES - 1];
    pages.iter().for_each(|page| assert!(!says_there(&tables, *page), "{page}"));
    let ranges = pages.map(|page| (page, 1));
    assert_eq!(surface.alloc(0, &ranges), [(0, 1); 7]);
    pages.iter().for_each(|page| assert!(says_there(&tables, *page), "{page}"));
    assert!(!says_there(&tables, 2) && !says_there(&tables, 513));
    // Reading again gives the same.
    let again = shown(&surface.exmap);
    assert!(says_there(&again, 512));
    assert_eq!(surface.free(0, &ranges), [(0, 1); 7]);
    pages.iter().for_each(|page| assert!(!says_there(&tables, *page), "{page}"));
    assert_eq!(surface.alloc(0, &[(0, 1)]), [(0, 1)]);
    assert!(says_there(&again, 0));
}

#[test]
fn tables_cannot_be_written() {
    let Some(_turn) = turn_for(exmap::CAN_SHOW_TABLES) else { return };
    let surface = Plan::new(PAGES, 100).make();
    assert_eq!(surface.alloc(0, &[(0, 4)]), [(0, 4)]);
    let exmap = &surface.exmap;
    let (read, both) = (libc::PROT_READ, sys::READ_WRITE);
    for (protection, flags) in [
        (both, libc::MAP_SHARED),
        (libc::PROT_WRITE, libc::MAP_SHARED),
        (both, libc::MAP_PRIVATE),
        (read, libc::MAP_PRIVATE),
        (read | libc::PROT_EXEC, libc::MAP_SHARED),
    ] {
        let mapped = map(exmap, LENGTH, protection, flags);
        assert!(mapped.is_err(), "protection {protection}, flags {flags:#x}");
    }
    let tables = shown(exmap);
    for protection in [both, libc::PROT_WRITE, libc::PROT_EXEC | read] {
        assert!(sys::mprotect(tables.start(), PAGE, protection).is_err(), "{protection}");
        assert!(sys::mprotect(tables.start(), LENGTH, protection).is_err(), "{protection}");
    }
    let entry = || access::kernel_load(tables.start(), 8).unwrap();
    let before = entry();
    assert!(access::store(tables.start(), 0).is_err());
    assert!(access::kernel_store(tables.start(), &[0; 8]).is_err());
    let memory = OpenOptions::new().read(true).write(true).open("/proc/self/mem").unwrap();
    let zeros = [0_u8; 8];
    let from = zeros.as_ptr().expose_provenance();
    let written = sys::pwrite(memory.as_fd(), from, 8, tables.start() as u64);
    assert!(written.is_err(), "through /proc/self/mem: {written:?}");
    let local = libc::iovec { iov_base: zeros.as_ptr().cast_mut().cast(), iov_len: 8 };
    let iov_base = std::ptr::with_exposed_provenance_mut(tables.start());
    let remote = libc::iovec { iov_base, iov_len: 8 };
    let own = std::process::id() as i32;
    // SAFETY: the kernel checks the memory that it writes to, which this tests.
    let written =
        unsafe { libc::process_vm_writev(own, &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(written, -1);
    assert_eq!(entry(), before);
    surface.assert_works();
}

/// A process without privileges only sees in an entry whether the page is present.
#[test]
fn the_unprivileged_see_no_addresses() {
    let Some(_turn) = turn_for(exmap::CAN_SHOW_TABLES) else { return };
    for flags in [0, exmap::READS_ZEROS, exmap::STEALING] {
        let exmap = Exmap::open();
        in_child(move || {
            become_user(64 << 20);
            exmap.create(&vellum_kernel_tests::exmap::plan(600, 2, flags)).unwrap();
            let mapping = exmap.map(PAGES).unwrap();
            let vectors = (0..2).map(|interface| exmap.vector(interface).unwrap()).collect();
            let surface = Surface { vectors, mapping, exmap };
            let pages = [0, 1, 511, 512, 262_143, 262_144, PAGES - 1];
            // Some are present before the first read.
            assert_eq!(surface.alloc(0, &[(511, 3)]), [(0, 3)]);
            let tables = shown(&surface.exmap);
            let entry = |page: u64| {
                let bytes = access::kernel_load(tables.start() + page as usize * 8, 8).unwrap();
                u64::from_le_bytes(bytes.try_into().unwrap())
            };
            (508..520).for_each(|page| {
                assert_eq!(entry(page), u64::from((511..514).contains(&page)), "{page}");
            });
            let ranges = pages.map(|page| (page, 1));
            surface.alloc(0, &ranges);
            pages.iter().for_each(|page| assert_eq!(entry(*page), 1, "{page}"));
            surface.free(0, &ranges);
            pages.iter().for_each(|page| assert_eq!(entry(*page), 0, "{page}"));
            assert_eq!((entry(513), entry(514)), (1, 0));
            // A page that shows zeros has no frame.
            let _ = surface.load(600);
            assert_eq!(entry(600), 0);
            the_tables_show_what_threads_change(&surface, &entry);
        });
    }
}

/// After threads have raced for the same pages, the tables show the present pages.
fn the_tables_show_what_threads_change(surface: &Surface, entry: &impl Fn(u64) -> u64) {
    std::thread::scope(|scope| {
        for interface in 0..2 {
            scope.spawn(move || {
                for round in 0..300 {
                    surface.alloc(interface, &[(round % 7, 20), (100, 1)]);
                    surface.free(interface, &[(round % 5, 11), (100, 1)]);
                }
            });
        }
    });
    for page in (0..40).chain(100..101) {
        assert_eq!(entry(page) == 1, surface.is_there(page), "page {page}");
    }
}

#[test]
fn there_are_no_tables_before_and_after_the_surface() {
    let Some(_turn) = turn_for(exmap::CAN_SHOW_TABLES) else { return };
    let exmap = Exmap::with(16, 1, 0);
    assert!(map(&exmap, PAGE, libc::PROT_READ, libc::MAP_SHARED).is_err());
    let surface = exmap.map(PAGES).unwrap();
    let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
    assert!(map(&exmap, LENGTH + PAGE, read, shared).is_err(), "longer than the surface");
    assert!(map(&exmap, 1 << 40, read, shared).is_err());
    let beyond = exmap::OFFSET_TABLES + LENGTH as u64;
    let (address, length, fd) = (0, PAGE, Some(exmap.as_fd()));
    let request = |offset| Request { address, length, protection: read, flags: shared, fd, offset };
    for offset in [beyond, beyond + (1 << 30), exmap::OFFSET_TABLES - PAGE as u64] {
        assert!(sys::mmap(request(offset)).is_err(), "offset {offset:#x}");
    }
    drop(surface);
}

/// The mapping does not show freed tables, whose memory may have other uses.
#[test]
fn unmapping_the_surface_removes_them() {
    let Some(_turn) = turn_for(exmap::CAN_SHOW_TABLES) else { return };
    for _ in 0..5 {
        let Surface { vectors, mapping, exmap } = Plan::new(PAGES, 100).make();
        let tables = shown(&exmap);
        assert!(!says_there(&tables, 5));
        mapping.unmap().unwrap();
        drop((vectors, exmap));
        let memory = Mapping::anonymous(None, 16 << 20).unwrap();
        for at in (memory.start()..memory.end()).step_by(PAGE) {
            access::store(at, 0xff).unwrap();
        }
        for page in (0..PAGES).step_by(512) {
            let found = access::load(tables.start() + page as usize * 8);
            assert!(matches!(found, Err(_) | Ok(0)), "entry of {page}: {found:?}");
        }
    }
}

/// After a part is unmapped, the rest shows the same tables.
#[test]
fn a_part_still_shows_its_tables() {
    let Some(_turn) = turn_for(exmap::CAN_SHOW_TABLES) else { return };
    let surface = Plan::new(PAGES, 100).make();
    assert_eq!(surface.alloc(0, &[(512, 1), (1025, 1)]), [(0, 1); 2]);
    let tables = shown(&surface.exmap);
    sys::munmap(tables.start(), PAGE).unwrap();
    assert!(says_there(&tables, 512) && !says_there(&tables, 513));
    assert!(says_there(&tables, 1025) && !says_there(&tables, 1024));
}

#[test]
fn a_child_sees_no_tables() {
    let Some(_turn) = turn_for(exmap::CAN_SHOW_TABLES) else { return };
    let surface = Plan::new(PAGES, 100).make();
    surface.alloc(0, &[(5, 1)]);
    let tables = shown(&surface.exmap);
    assert!(says_there(&tables, 5));
    in_child(|| assert!(access::load(tables.start() + 40).is_err()));
    assert!(says_there(&tables, 5));
}
