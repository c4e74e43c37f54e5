//! Code of the kernel that inspects a process, pins its pages, or unmaps its memory handles entries
//! of 2 MiB correctly, and leaves them unchanged. Also transfers between files and such pages.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;

use rustix::io::Errno;
use vellum_kernel_tests::backing::{Backing, scratch};
use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::counters::assert_exmaps_are_sound;
use vellum_kernel_tests::{PAGE, Plan, Surface, TABLE_PAGES, access, sys, turn_with};
use vellum_uapi::exmap::{self, Harvest};

/// Pages of 2 MiB.
const HUGE: u64 = TABLE_PAGES;
const ALL: u16 = HUGE as u16;

/// Surfaces whose tables are mounted one by one, and as one.
const SHAPES: [u64; 2] = [8 * HUGE + 30, HUGE * HUGE];

/// A populated surface: 2 MiB by one entry, 2 MiB without some pages, and a single page.
fn populated(pages: u64) -> Surface {
    let surface = Plan::new(pages, 64).blocks(2).make();
    assert_eq!(surface.alloc(0, &[(0, 2 * HUGE), (3 * HUGE, 1)]), [(0, 2 * ALL), (0, 1)]);
    assert_eq!(surface.free(0, &[(HUGE + 1, 2)]), [(0, 2)]);
    THERE.iter().for_each(|page| surface.stamp(*page, *page));
    surface
}

const THERE: [u64; 6] = [0, 300, 511, 512, 1023, 1536];

#[track_caller]
fn assert_unchanged(surface: &Surface, after: &str) {
    for page in THERE {
        let found = surface.contents(page);
        let is_same = found.as_deref() == Ok(&access::stamped(page)[..]);
        assert!(is_same, "page {page} after {after}: {:?}", found.err());
        assert_eq!(surface.store(page, access::stamped(page)[0]), Ok(()), "{after}");
    }
    let stat = surface.stat();
    assert_eq!((stat.resident, stat.huge, stat.splits), (2 * HUGE - 1, 1, 1), "after {after}");
    assert_exmaps_are_sound();
}

#[test]
fn inspecting_a_process_leaves_huge_pages_unchanged() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let surface = populated(pages);
        for name in ["maps", "smaps", "smaps_rollup", "numa_maps", "status", "statm"] {
            let mut text = String::new();
            let file = File::open(format!("/proc/self/{name}"));
            file.unwrap().read_to_string(&mut text).unwrap();
            assert_unchanged(&surface, name);
        }
        let own = File::open("/proc/self/pagemap").unwrap();
        let mut bytes = vec![0_u8; 2048 * 8];
        let into = bytes.as_mut_ptr().expose_provenance();
        let first = (surface.mapping.start() / PAGE * 8) as u64;
        assert_eq!(sys::pread(own.as_fd(), into, bytes.len(), first), Ok(bytes.len() as u64));
        assert_unchanged(&surface, "pagemap");
        for what in ["1", "2", "3", "4", "5"] {
            fs::write("/proc/self/clear_refs", what).unwrap();
            assert_unchanged(&surface, "clear_refs");
        }
        let (start, length) = (surface.mapping.start() as i64, 2048 * PAGE as i64);
        let calls: [(&str, i64, [i64; 6]); 6] = [
            ("mincore", libc::SYS_mincore, [start, length, into as i64, 0, 0, 0]),
            ("mlock", libc::SYS_mlock, [start, length, 0, 0, 0, 0]),
            ("munlock", libc::SYS_munlock, [start, length, 0, 0, 0, 0]),
            ("mbind", libc::SYS_mbind, [start, length, 2, 0, 0, 3]),
            ("futex", libc::SYS_futex, [start, libc::FUTEX_WAKE.into(), 1, 0, 0, 0]),
            ("shared futex", libc::SYS_futex, [start + 4096, 0, 77, 0, 0, 0]),
        ];
        for (name, number, [a, b, c, d, e, f]) in calls {
            // SAFETY: the calls are about the surface, or write to `bytes`, which is longer.
            let returned = sys::checked(unsafe { libc::syscall(number, a, b, c, d, e, f) });
            println!("{pages} pages: {name}: {returned:?}");
            assert_unchanged(&surface, name);
        }
        for advice in [3, 4, 8, 9, 14, 15, 16, 18, 19, 20, 21, 22, 23, 25] {
            let advised = sys::madvise(start as usize, 2 * HUGE as usize * PAGE, advice);
            println!("{pages} pages: madvise {advice}: {advised:?}");
            assert_unchanged(&surface, "madvise");
        }
    }
}

#[test]
fn huge_pages_cannot_be_pinned() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let path = scratch().join("huge");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    let file = options.open(&path).unwrap();
    for pages in SHAPES {
        let surface = populated(pages);
        let memory = OpenOptions::new().read(true).write(true).open("/proc/self/mem").unwrap();
        let own = std::process::id() as i32;
        for page in THERE {
            let at = surface.mapping.page(page);
            assert_eq!(sys::pwrite(file.as_fd(), at, PAGE, 0), Err(Errno::FAULT), "O_DIRECT");
            assert_eq!(sys::pread(file.as_fd(), at, PAGE, 0).unwrap_or(0), 0, "O_DIRECT");
            assert_eq!(sys::process_vm_readv(own, at, &mut [0; 8]), Err(Errno::FAULT));
            let mut bytes = access::stamped(page);
            let buffer = bytes.as_mut_ptr().expose_provenance();
            let whole = Ok(PAGE as u64);
            assert_eq!(sys::pwrite(memory.as_fd(), buffer, PAGE, at as u64), whole, "a debugger");
            bytes.fill(0);
            assert_eq!(sys::pread(memory.as_fd(), buffer, PAGE, at as u64), whole, "a debugger");
            assert!(bytes == access::stamped(page));
            assert_unchanged(&surface, "an attempt to hold a page");
        }
    }
    fs::remove_file(path).unwrap();
}

/// A subtree that is unlinked from the process' page tables returns unchanged.
#[test]
fn huge_pages_may_be_unmapped_and_mapped_again() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let surface = populated(pages);
        let (start, length) = (surface.mapping.start(), surface.mapping.length());
        for at in [start, start + 300 * PAGE] {
            assert_eq!(sys::munmap(at, 5 * PAGE), Err(Errno::INVAL));
            assert!(sys::mprotect(at, 5 * PAGE, libc::PROT_READ).is_err());
        }
        let moved =
            sys::mremap(start, length, length, libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP);
        assert!(moved.is_err(), "{moved:?}");
        let moved = sys::mremap(start, 2 * HUGE as usize * PAGE, 4096, libc::MREMAP_MAYMOVE);
        assert!(moved.is_err(), "{moved:?}");
        assert_unchanged(&surface, "calls that are refused");
        let child = Child::start(|| i32::from(surface.load(300).is_ok()));
        assert_eq!(child.wait(), End::Status(0), "a child has the surface");
        assert_unchanged(&surface, "a fork");
        let Surface { vectors, mapping, exmap } = surface;
        mapping.unmap().unwrap();
        assert_exmaps_are_sound();
        let mapping = exmap.map(pages).unwrap();
        let surface = Surface { vectors, mapping, exmap };
        assert_unchanged(&surface, "munmap and mmap");
        // While the subtree is detached.
        fs::write("/proc/self/clear_refs", "4").unwrap();
        assert_eq!(surface.alloc(0, &[(2 * HUGE, HUGE)]), [(-libc::ENOMEM, 63)]);
        fs::write("/proc/self/clear_refs", "4").unwrap();
        assert_eq!(surface.free(0, &[(0, 4 * HUGE)]), [(0, 2 * ALL - 1 + 63)]);
        assert_eq!(surface.store(300, 1), Err(surface.fault(300)));
        fs::write("/proc/self/clear_refs", "4").unwrap();
        assert_eq!(surface.alloc(0, &[(2 * HUGE, HUGE)]), [(0, ALL)]);
        surface.stamp(2 * HUGE + 9, 9);
        surface.assert_stamped(2 * HUGE + 9, 9);
        assert_eq!((surface.stat().huge, surface.stat().blocks_free), (1, 1));
    }
}

/// READ skips present pages, REFRESH reads them again, WRITE writes them; the entry of 2 MiB stays
/// whole.
#[test]
fn huge_pages_are_read_and_written() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let file = Backing::cached(3 * HUGE);
    let surface = Plan::new(3 * HUGE, 2 * HUGE).blocks(1).backing(&file.file).make();
    assert_eq!(surface.alloc(0, &[(HUGE, HUGE)]), [(0, ALL)]);
    surface.stamp(HUGE + 5, 5);
    assert_eq!(surface.read(0, &[(HUGE - 3, HUGE + 6)]), [(0, 6)]);
    surface.assert_stamped(HUGE + 5, 5);
    (HUGE - 3..HUGE)
        .chain(2 * HUGE..2 * HUGE + 3)
        .for_each(|page| surface.assert_stamped(page, page));
    let at = surface.mapping.page(HUGE);
    let length = HUGE as usize * PAGE;
    let refresh = u64::from(exmap::OP_REFRESH) << 8;
    assert_eq!(sys::pread(surface.exmap.as_fd(), at, length, 0), Ok(0), "it is there");
    assert_eq!(sys::pread(surface.exmap.as_fd(), at, length, refresh), Ok(length as u64));
    (HUGE..2 * HUGE).step_by(37).for_each(|page| surface.assert_stamped(page, page));
    surface.stamp(HUGE + 5, 1005);
    surface.stamp(2 * HUGE - 1, 1006);
    assert_eq!(surface.write(0, &[(HUGE + 5, 1), (2 * HUGE - 2, 3)]), [(0, 1), (0, 3)]);
    assert_eq!(surface.stat().huge, 1);
    let (mut words, size) = (vec![0; 2 * HUGE as usize], size_of::<Harvest>() as u32);
    let accessed = words.as_mut_ptr().expose_provenance() as u64;
    let (page, count) = (HUGE - 4, HUGE + 8);
    let harvest = Harvest { size, flags: 0, page, count, accessed, written: 0 };
    let found = surface.exmap.pass(exmap::HARVEST, (&raw const harvest).expose_provenance());
    assert_eq!(found, Ok(HUGE + 6));
    assert_eq!(words.iter().map(|word: &u64| u64::from(word.count_ones())).sum::<u64>(), HUGE + 6);
    assert_eq!(surface.free(0, &[(0, 3 * HUGE)]), [(0, ALL + 6)]);
    assert_eq!(surface.stat().splits, 0);
    assert_eq!(surface.read(0, &[(HUGE, HUGE)]), [(0, ALL)]);
    surface.assert_stamped(HUGE + 5, 1005);
    surface.assert_stamped(2 * HUGE - 1, 1006);
    assert_eq!(surface.stat().huge, 0, "READ populates single pages");
}
