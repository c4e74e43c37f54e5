//! Calls that inspect a process, or make the kernel walk all of its memory, leave the surface
//! unchanged.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::fd::AsFd as _;

use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::{PAGE, Plan, Surface, access, sys, turn};
use vellum_uapi::exmap;

const THERE: [u64; 4] = [0, 512, 700, 1999];

fn populated(flags: u64) -> Surface {
    let surface = Plan::new(2000, 256).flags(flags).make();
    assert_eq!(surface.alloc(0, &THERE.map(|page| (page, 1))), [(0, 1); 4]);
    THERE.iter().for_each(|page| surface.stamp(*page, *page));
    surface
}

#[track_caller]
fn assert_unchanged(surface: &Surface, after: &str) {
    for page in THERE {
        let found = surface.contents(page);
        let is_same = found.as_deref() == Ok(&access::stamped(page)[..]);
        assert!(is_same, "page {page} after {after}: {:?}", found.err());
    }
    assert_eq!(surface.stat().resident, 4, "after {after}");
    surface.assert_works();
}

/// Every kind of surface, because their entries differ.
const KINDS: [u64; 3] = [0, exmap::PINNABLE, exmap::READS_ZEROS];

#[test]
fn files_about_a_process_may_be_read() {
    let Some(_turn) = turn() else { return };
    for kind in KINDS {
        let surface = populated(kind);
        for name in ["maps", "smaps", "smaps_rollup", "numa_maps", "status", "statm", "oom_score"] {
            let mut text = String::new();
            let path = format!("/proc/self/{name}");
            File::open(path).unwrap().read_to_string(&mut text).unwrap();
            assert!(!text.is_empty(), "{name}");
            assert_unchanged(&surface, name);
        }
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let mut entries = vec![0_u64; 2000];
        let first = (surface.mapping.start() / PAGE * 8) as u64;
        let read =
            sys::pread(pagemap.as_fd(), entries.as_mut_ptr().expose_provenance(), 16_000, first);
        assert_eq!(read, Ok(16_000));
        assert_unchanged(&surface, "pagemap");
    }
}

#[test]
fn bits_about_references_may_be_cleared() {
    let Some(_turn) = turn() else { return };
    for kind in KINDS {
        let surface = populated(kind);
        for what in ["1", "2", "3", "4", "5"] {
            fs::write("/proc/self/clear_refs", what).unwrap();
            assert_unchanged(&surface, &format!("clear_refs {what}"));
            let stored = surface.store(700, access::stamped(700)[0]);
            assert_eq!(stored, Ok(()), "after clear_refs {what}");
        }
    }
}

/// A debugger's way, with the surface attached, and detached.
#[test]
fn memory_may_be_read_through_a_file() {
    let Some(_turn) = turn() else { return };
    for (kind, is_detached) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let surface = populated(kind);
        if is_detached {
            fs::write("/proc/self/clear_refs", "4").unwrap();
        }
        let memory = OpenOptions::new().read(true).write(true).open("/proc/self/mem").unwrap();
        let mut bytes = vec![0_u8; PAGE];
        let into = bytes.as_mut_ptr().expose_provenance();
        for page in THERE {
            let at = surface.mapping.page(page) as u64;
            let read = sys::pread(memory.as_fd(), into, PAGE, at);
            assert_eq!(read, Ok(PAGE as u64), "kind {kind}, page {page}, detached: {is_detached}");
            assert!(bytes == access::stamped(page), "page {page}");
            bytes.copy_from_slice(&access::stamped(page + 1));
            let written = sys::pwrite(memory.as_fd(), into, PAGE, at);
            assert_eq!(written, Ok(PAGE as u64), "kind {kind}, page {page}");
            surface.assert_stamped(page, page + 1);
            surface.stamp(page, page);
            if is_detached {
                fs::write("/proc/self/clear_refs", "4").unwrap();
            }
        }
        for page in [1, 511, 1998] {
            let at = surface.mapping.page(page) as u64;
            bytes.fill(1);
            let read = sys::pread(memory.as_fd(), into, PAGE, at);
            let is_zeros = bytes.iter().all(|byte| *byte == 0);
            let is_right = match kind {
                exmap::READS_ZEROS => read == Ok(PAGE as u64) && is_zeros,
                _ => read.is_err(),
            };
            assert!(is_right, "page {page}: {read:?}");
            let written = sys::pwrite(memory.as_fd(), into, PAGE, at);
            assert!(written.is_err(), "page {page}: {written:?}");
        }
        assert_unchanged(&surface, "/proc/self/mem");
    }
}

/// Calls on a range that do not apply to a surface. They fail, or have no effect.
#[test]
fn calls_about_memory_do_no_harm() {
    let Some(_turn) = turn() else { return };
    for kind in KINDS {
        let surface = populated(kind);
        let (start, length) = (surface.mapping.start(), surface.mapping.length());
        let node: u64 = 1;
        let mask = (&raw const node).expose_provenance() as i64;
        let (start, length) = (start as i64, length as i64);
        let mut residency = vec![0_u8; 2000];
        let into = residency.as_mut_ptr().expose_provenance() as i64;
        let calls: [(&str, i64, [i64; 6]); 11] = [
            ("mincore", libc::SYS_mincore, [start, length, into, 0, 0, 0]),
            ("mlock", libc::SYS_mlock, [start, length, 0, 0, 0, 0]),
            ("mlock of a part", libc::SYS_mlock, [start + 4096, 4096, 0, 0, 0, 0]),
            ("mlock2", libc::SYS_mlock2, [start, length, 1, 0, 0, 0]),
            ("munlock", libc::SYS_munlock, [start, length, 0, 0, 0, 0]),
            ("msync", libc::SYS_msync, [start, length, libc::MS_SYNC.into(), 0, 0, 0]),
            ("mbind", libc::SYS_mbind, [start, length, 2, mask, 2, 3]),
            ("migrate_pages", libc::SYS_migrate_pages, [0, 2, mask, mask, 0, 0]),
            ("pkey_mprotect", libc::SYS_pkey_mprotect, [start, length, 1, -1, 0, 0]),
            ("futex", libc::SYS_futex, [start, libc::FUTEX_WAKE.into(), 1, 0, 0, 0]),
            ("futex elsewhere", libc::SYS_futex, [start + 4096, 1, 1, 0, 0, 0]),
        ];
        for (name, number, [a, b, c, d, e, f]) in calls {
            // SAFETY: the calls are about the surface, or write to `residency`, which is as long.
            let returned = sys::checked(unsafe { libc::syscall(number, a, b, c, d, e, f) });
            println!("kind {kind}: {name}: {returned:?}");
            assert_unchanged(&surface, name);
        }
    }
}

/// Locks all memory of a process, also that of later surfaces.
#[test]
fn a_process_may_lock_its_memory() {
    let Some(_turn) = turn() else { return };
    let child = Child::start(|| {
        for kind in KINDS {
            let before = populated(kind);
            // SAFETY: the call changes no addresses and no contents.
            let locked = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
            println!("mlockall: {locked}");
            assert_unchanged(&before, "mlockall");
            let after = populated(kind);
            assert_unchanged(&after, "its mapping when all memory is locked");
            // SAFETY: as above.
            assert_eq!(unsafe { libc::munlockall() }, 0);
            assert_unchanged(&after, "munlockall");
            assert_unchanged(&before, "munlockall");
        }
        0
    });
    assert_eq!(child.wait(), End::Status(0));
}
