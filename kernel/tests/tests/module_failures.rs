//! Failing allocations of the kernel. A call whose allocation fails does no harm, and frees what it
//! has allocated before.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::counters::{assert_exmaps_are_sound, assert_morsels_are_sound};
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::{DEVICE, Exmap, Morsel, PAGE, access, morsel, morsel_turn, sys, turn};
use vellum_uapi::exmap::{self, Create, Entry, Move};
use vellum_uapi::morsel::{self as uapi, extent};

/// The file that says which of this thread's allocations fails.
const FAIL_NTH: &str = "/proc/thread-self/fail-nth";

/// The most allocations of a sequence of a few calls.
const MOST: u32 = 20_000;

/// Has one of this thread's allocations fail.
struct Injection {
    /// Open all the time, because opening it also allocates memory.
    file: File,
}

impl Injection {
    /// Has every kind of allocation fail. `None`, and a printed line, if the kernel cannot inject
    /// failures.
    fn new() -> Option<Self> {
        let Ok(file) = OpenOptions::new().read(true).write(true).open(FAIL_NTH) else {
            eprintln!("skipped: this kernel injects no failures; the debug kernel does");
            return None;
        };
        for folder in ["failslab", "fail_page_alloc"] {
            let folder = Path::new("/sys/kernel/debug").join(folder);
            for (name, value) in [("ignore-gfp-wait", "N"), ("min-order", "0"), ("verbose", "0")] {
                let path = folder.join(name);
                if path.exists() {
                    fs::write(path, value).expect("fault injection");
                }
            }
        }
        Some(Self { file })
    }

    /// The nth allocation from now on fails; none if it is 0.
    fn fail(&self, nth: u32) {
        let text = nth.to_string();
        assert_eq!(rustix::io::pwrite(&self.file, text.as_bytes(), 0), Ok(text.len()));
    }

    /// Whether an allocation has failed. From now on none fails.
    fn has_failed(&self) -> bool {
        let mut text = [0; 16];
        let read = rustix::io::pread(&self.file, &mut text[..], 0);
        self.fail(0);
        assert!(read.is_ok_and(|length| length > 0), "{read:?}");
        text[0] == b'0'
    }
}

/// Repeats an operation, each time with another failing allocation, until all have failed once. The
/// lab finds leaks at the end (kmemleak). Free memory says little here, because this kernel keeps
/// freed memory for a while.
fn with_each_failure(what: &str, mut work: impl FnMut() -> Result<(), Errno>) {
    let Some(injection) = Injection::new() else { return };
    assert_eq!(work(), Ok(()), "{what}, while nothing fails");
    for nth in 1..MOST {
        injection.fail(nth);
        let outcome = work();
        let has_failed = injection.has_failed();
        assert_exmaps_are_sound();
        assert_morsels_are_sound();
        if !has_failed {
            println!("{what}: {} allocations", nth - 1);
            assert_eq!(outcome, Ok(()), "{what}, while nothing fails");
            return;
        }
    }
    panic!("{what} has more than {MOST} allocations");
}

fn number(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

/// A few calls, up to the first one that fails.
fn use_exmap(flags: u64, backing: i32) -> Result<(), Errno> {
    let file = OpenOptions::new().read(true).write(true).open(DEVICE).map_err(number)?;
    let exmap = Exmap::from(OwnedFd::from(file));
    let blocks = u32::from(flags & exmap::HUGE != 0);
    exmap.create(&Create { backing, blocks, ..plan(6, 2, flags) })?;
    let mapping = exmap.map(1100)?;
    let vector = exmap.vector(1)?;
    let private = exmap.private()?;
    for (command, page, count) in [
        (exmap::ALLOC, 3, 1),
        (exmap::ALLOC, 1090, 2),
        (exmap::ALLOC, 512, 512),
        (exmap::READ, 700, 1),
        (exmap::WRITE, 1090, 2),
        (exmap::FREE, 600, 3),
        (exmap::FREE, 512, 512),
    ] {
        vector.set(0, Entry::new(page, count));
        vector.run(&private, command, 1)?;
    }
    // A page may not have got its frame.
    let _ = access::store(mapping.page(3), 1);
    let request = Move { size: size_of::<Move>() as u32, interface: 0, from: 3, to: 4, count: 1 };
    exmap.pass(exmap::MOVE, std::ptr::from_ref(&request).expose_provenance())?;
    exmap.command(exmap::RESIZE, 12)?;
    exmap.command(exmap::RESIZE, 4)?;
    exmap.stat().map(drop)
}

#[test]
fn every_failure_in_an_exmap_is_harmless() {
    let Some(_turn) = turn() else { return };
    let backing = Backing::cached(1100);
    for flags in
        [0, exmap::PINNABLE, exmap::READS_ZEROS, exmap::HUGE, exmap::STEALING, exmap::NO_POOL]
    {
        let what = format!("an exmap with flags {flags:#x}");
        with_each_failure(&what, || use_exmap(flags, backing.file.as_raw_fd()));
    }
}

/// The same for a Morsel: it is written, read through a mapping for reading, and punched.
fn use_morsel((order, flags): (u32, u64), source: &File) -> Result<(), Errno> {
    let morsel = Morsel::nameless_in(Path::new(morsel::FOLDER)).map_err(number)?;
    morsel.create(&morsel::plan(order, extent(order), flags))?;
    let (view, reader) = (morsel.map(sys::READ_WRITE)?, morsel.map(libc::PROT_READ)?);
    let last = extent(order) / PAGE as u64 - 1;
    for page in [0, last] {
        // An access whose page has no memory gets a signal.
        let _ = access::store(view.page(page), 1);
        let _ = access::load(reader.page(page));
    }
    // With entries of 2 MiB one entry and some pages; otherwise each page is an allocation.
    let pages = if flags & uapi::HUGE != 0 { 520 } else { 20 };
    morsel.populate(0, extent(order).min(pages * PAGE as u64))?;
    morsel.punch(0, PAGE as u64)?;
    morsel.fill(source, 0, 0, PAGE as u64).1?;
    sys::mprotect(view.start(), view.length(), libc::PROT_READ)?;
    let _ = access::load(view.page(last));
    drop((view, reader));
    morsel.seal(uapi::SEAL_CONTENT)?;
    morsel.revoke()
}

#[test]
fn every_failure_in_a_morsel_is_harmless() {
    let Some(_turn) = morsel_turn() else { return };
    let source = Backing::cached(1);
    for kind in [(0, 0), (1, uapi::PINNABLE), (2, 0), (2, uapi::HUGE), (3, uapi::INHERIT)] {
        let what = format!("a Morsel of order {}, flags {:#x}", kind.0, kind.1);
        with_each_failure(&what, || use_morsel(kind, &source.file));
    }
}
