//! Calls that inspect a process' memory, and calls on any memory. They find the Morsel's pages, or
//! report none, and change nothing.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use vellum_kernel_tests::child::{Child, End, in_child};
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::morsel::kinds;
use vellum_kernel_tests::{Mapping, Morsel, PAGE, access, morsel_turn, sys};
use vellum_uapi::morsel::{self, extent};

/// A Morsel with its first and its last page, mapped for writing and for reading.
struct Shown {
    morsel: Morsel,
    mappings: [Mapping; 2],
    pages: [u64; 2],
}

impl Shown {
    fn new((order, flags): (u32, u64)) -> Self {
        let morsel = Morsel::of((order, flags));
        let mappings = [morsel.mapped(), morsel.map(libc::PROT_READ).unwrap()];
        let pages = [0, extent(order) / PAGE as u64 - 1];
        let shown = Self { morsel, mappings, pages };
        shown.stamp();
        shown
    }

    fn stamp(&self) {
        self.pages.iter().for_each(|page| self.mappings[0].stamp(*page, page + 7));
    }

    #[track_caller]
    fn assert_unchanged(&self, what: &str) {
        self.pages.iter().for_each(|page| self.morsel.assert_stamped(*page, page + 7));
        for mapping in &self.mappings {
            self.pages.iter().for_each(|page| mapping.assert_stamped(*page, page + 7));
        }
        assert!(access::store(self.mappings[1].start(), 1).is_err(), "{what}");
        self.stamp();
        assert_morsels_are_sound();
    }
}

#[test]
fn inspecting_memory_changes_nothing() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let shown = Shown::new(kind);
        let files = ["maps", "smaps", "smaps_rollup", "numa_maps", "status", "statm"];
        for name in files {
            // Some kernels do not have all of them.
            let text = fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
            println!("{name}: {} bytes", text.len());
            shown.assert_unchanged(name);
        }
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        for mapping in &shown.mappings {
            for page in shown.pages {
                let mut bytes = [0; 64];
                let at = mapping.page(page) / PAGE * 8;
                let _ = pagemap.read_at(&mut bytes, at as u64).unwrap();
                shown.assert_unchanged("pagemap");
            }
        }
        for what in 1..=5 {
            // 4 write-protects pages of ordinary memory, so that the kernel notes writes.
            let written = fs::write("/proc/self/clear_refs", what.to_string());
            println!("clear_refs {what}: {written:?}");
            shown.assert_unchanged("clear_refs");
        }
    }
}

#[test]
fn calls_about_memory_do_no_harm() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let shown = Shown::new(kind);
        for mapping in &shown.mappings {
            let (start, length) = (mapping.start() as i64, mapping.length() as i64);
            // Calls that would list too many pages, or populate them, only get the first pages.
            let few = length.min(1 << 30);
            let node: u64 = 1;
            let mask = (&raw const node).expose_provenance() as i64;
            let mut residency = vec![0_u8; few as usize / PAGE];
            let into = residency.as_mut_ptr().expose_provenance() as i64;
            let calls: [(&str, i64, [i64; 6]); 10] = [
                ("mincore", libc::SYS_mincore, [start, few, into, 0, 0, 0]),
                ("mlock of a part", libc::SYS_mlock, [start, 4096, 0, 0, 0, 0]),
                ("mlock2", libc::SYS_mlock2, [start, length.min(1 << 21), 1, 0, 0, 0]),
                ("munlock", libc::SYS_munlock, [start, length, 0, 0, 0, 0]),
                ("msync", libc::SYS_msync, [start, length, libc::MS_SYNC.into(), 0, 0, 0]),
                ("mbind", libc::SYS_mbind, [start, length, 2, mask, 2, 3]),
                ("migrate_pages", libc::SYS_migrate_pages, [0, 2, mask, mask, 0, 0]),
                ("remap_file_pages", libc::SYS_remap_file_pages, [start, 4096, 0, 0, 0, 0]),
                ("futex", libc::SYS_futex, [start, libc::FUTEX_WAKE.into(), 1, 0, 0, 0]),
                ("mseal of a part", 462, [start + 4096, 0, 0, 0, 0, 0]),
            ];
            for (name, number, [a, b, c, d, e, f]) in calls {
                // SAFETY: the calls are about the Morsel, or write to `residency`, as long as that.
                let returned = sys::checked(unsafe { libc::syscall(number, a, b, c, d, e, f) });
                println!("{kind:x?}: {name}: {returned:?}");
                shown.assert_unchanged(name);
            }
        }
    }
}

/// If pages may be pinned, a reader has its own leaves. The accessed bits that processors set in
/// them are no damage.
#[test]
fn references_may_be_cleared() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let shown = Shown::new(kind);
        in_child(|| {
            let reader = shown.morsel.map(libc::PROT_READ).unwrap();
            reader.assert_stamped(0, 7);
            fs::write("/proc/self/clear_refs", "1").unwrap();
            assert_morsels_are_sound();
            reader.assert_stamped(0, 7);
        });
        shown.assert_unchanged("clear_refs in a child");
    }
}

/// Locks all memory of a process, also that of later Morsels.
#[test]
fn a_process_may_lock_its_memory() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds().into_iter().filter(|(order, _)| *order < 2) {
        in_child(|| {
            let before = Shown::new(kind);
            // SAFETY: the call changes no addresses and no contents.
            let locked = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
            println!("mlockall: {locked}");
            before.assert_unchanged("mlockall");
            let after = Shown::new(kind);
            after.assert_unchanged("its mapping when all memory is locked");
            // SAFETY: as above.
            assert_eq!(unsafe { libc::munlockall() }, 0);
            after.assert_unchanged("munlockall");
            before.assert_unchanged("munlockall");
        });
    }
}

/// The core of a process that a signal has ended does not contain the Morsel. The Morsel does not
/// change.
#[test]
fn a_core_does_not_contain_it() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in kinds() {
        let shown = Shown::new((order, flags | morsel::INHERIT));
        let child = Child::start(|| {
            let unlimited = libc::RLIM_INFINITY;
            let limit = libc::rlimit { rlim_cur: unlimited, rlim_max: unlimited };
            // SAFETY: the structure is there.
            unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const limit) };
            let folder = format!("/tmp/core-{order}-{flags}");
            fs::create_dir_all(&folder).unwrap();
            std::env::set_current_dir(folder).unwrap();
            shown.assert_unchanged("in a child");
            // SAFETY: it ends this process.
            unsafe { libc::abort() };
        });
        let end = child.wait();
        assert_eq!(end, End::Signal(libc::SIGABRT));
        let folder = format!("/tmp/core-{order}-{flags}");
        for entry in fs::read_dir(&folder).unwrap() {
            let size = entry.unwrap().metadata().unwrap().len();
            assert!(size < 64 << 20, "a core of {size} bytes");
        }
        fs::remove_dir_all(folder).unwrap();
        shown.assert_unchanged("a child's end");
    }
}
