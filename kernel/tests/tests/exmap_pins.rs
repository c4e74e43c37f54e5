//! Direct I/O and other calls that pin pages of a surface. They are refused, unless the surface is
//! pinnable. Then FREE does not free a page while it is pinned.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::cell::Cell;
use std::fs::{self, File, OpenOptions};
use std::io::{PipeReader, PipeWriter, Read as _, pipe};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::counters::Memory;
use vellum_kernel_tests::threads::{Deadline, wait_until};
use vellum_kernel_tests::{Mapping, Outcome, PAGE, Plan, Surface, access, sys, turn};
use vellum_uapi::exmap;

fn pinnable(frames: u64) -> Surface {
    Plan::new(2000, frames).flags(exmap::PINNABLE).make()
}

/// A file for direct I/O, on the guest's disk.
fn direct_file(name: &str) -> (PathBuf, File) {
    let folder = fs::read_to_string("/scratch").unwrap();
    let path = PathBuf::from(folder.trim()).join(name);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    let file = options.open(&path).unwrap();
    (path, file)
}

#[test]
fn pages_cannot_be_pinned_unless_the_surface_is_pinnable() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(2000, 16).make();
    surface.alloc(0, &[(5, 2)]);
    surface.stamp(5, 5);
    let (path, file) = direct_file("refused");
    let at = surface.mapping.page(5);
    assert_eq!(sys::pwrite(file.as_fd(), at, PAGE, 0), Err(Errno::FAULT));
    // A file with data, because reading a hole would pin no page.
    let ordinary = Mapping::anonymous(None, PAGE).unwrap();
    access::store(ordinary.start(), 1).unwrap();
    assert_eq!(sys::pwrite(file.as_fd(), ordinary.start(), PAGE, 0), Ok(PAGE as u64));
    assert_eq!(sys::pread(file.as_fd(), at, PAGE, 0), Err(Errno::FAULT));
    let own = std::process::id() as i32;
    assert_eq!(sys::process_vm_readv(own, at, &mut [0; 8]), Err(Errno::FAULT));
    let (_reader, writer) = pipe().unwrap();
    assert_eq!(hold(&writer, at), Err(Errno::FAULT));
    surface.assert_stamped(5, 5);
    assert_eq!(surface.free(0, &[(5, 2)]), [(0, 2)]);
    fs::remove_file(path).unwrap();
}

/// Frees pages that direct I/O has just used. The kernel first wakes the thread that waits for the
/// I/O, and then unpins the pages.
#[track_caller]
fn free_after_io(surface: &Surface, range: (u64, u64)) -> Outcome {
    let outcome = Cell::new((0, 0));
    wait_until(|| {
        outcome.set(surface.free(0, &[range])[0]);
        outcome.get() != (-libc::EBUSY, 0)
    });
    outcome.get()
}

#[test]
fn a_pinnable_page_is_the_memory_of_direct_io() {
    let Some(_turn) = turn() else { return };
    let surface = pinnable(600);
    let (path, file) = direct_file("direct");
    assert_eq!(surface.alloc(0, &[(0, 530)]), [(0, 530)]);
    for page in [0, 500, 529] {
        surface.stamp(page, page);
    }
    let length = 530 * PAGE;
    assert_eq!(sys::pwrite(file.as_fd(), surface.mapping.start(), length, 0), Ok(length as u64));
    assert_eq!(free_after_io(&surface, (0, 530)), (0, 530));
    assert_eq!(surface.alloc(0, &[(1000, 530)]), [(0, 530)]);
    let to = surface.mapping.page(1000);
    assert_eq!(sys::pread(file.as_fd(), to, length, 0), Ok(length as u64));
    for page in [0, 500, 529] {
        surface.assert_stamped(1000 + page, page);
    }
    // One of the pages is absent.
    assert_eq!(free_after_io(&surface, (1003, 1)), (0, 1));
    let short = sys::pread(file.as_fd(), to, 8 * PAGE, 0);
    assert!(short == Err(Errno::FAULT) || short == Ok(3 * PAGE as u64), "{short:?}");
    let own = std::process::id() as i32;
    let mut bytes = vec![0; PAGE];
    assert_eq!(sys::process_vm_readv(own, to, &mut bytes), Ok(PAGE as u64));
    assert_eq!(bytes, access::stamped(0));
    let missing = surface.mapping.page(1003);
    assert_eq!(sys::process_vm_readv(own, missing, &mut bytes), Err(Errno::FAULT));
    assert_eq!(free_after_io(&surface, (1000, 530)), (0, 529));
    fs::remove_file(path).unwrap();
}

/// Pins a page: the pipe has the page itself, not a copy, until it is read.
fn hold(pipe: &PipeWriter, at: usize) -> Result<u64, Errno> {
    let part = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(at), iov_len: PAGE };
    // SAFETY: the kernel checks the address.
    sys::checked(unsafe { libc::vmsplice(pipe.as_raw_fd(), &raw const part, 1, 0) } as i64)
}

fn let_go(pipe: &mut PipeReader) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    pipe.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_page_that_is_held_is_not_freed() {
    let Some(_turn) = turn() else { return };
    let surface = pinnable(8);
    let (mut reader, writer) = pipe().unwrap();
    for round in 1..=3 {
        assert_eq!(surface.alloc(0, &[(4, 3)]), [(0, 3)]);
        surface.stamp(5, round);
        assert_eq!(hold(&writer, surface.mapping.page(5)), Ok(PAGE as u64));
        let busy = -libc::EBUSY;
        assert_eq!(surface.free(0, &[(5, 1), (4, 3)]), [(busy, 0), (busy, 0)]);
        let stat = surface.stat();
        assert_eq!((stat.resident, stat.busy), (3, 2 * round), "no page of a range is freed");
        surface.assert_stamped(5, round);
        assert_eq!(surface.free(0, &[(4, 1), (6, 1)]), [(0, 1), (0, 1)]);
        // All other frames are in use, and none of them is the held one.
        assert_eq!(surface.alloc(0, &[(100, 8)]), [(-libc::ENOMEM, 7)]);
        (100..107).for_each(|page| surface.stamp(page, 99));
        surface.assert_stamped(5, round);
        assert!(let_go(&mut reader) == access::stamped(round), "the held page has changed");
        assert_eq!(surface.free(0, &[(5, 1), (100, 7)]), [(0, 1), (0, 7)]);
    }
    assert_eq!(surface.stat().resident, 0);
}

/// If a page is unpinned this soon after FREE begins, FREE waits for it: half of its patience.
const SOON: Duration = Duration::from_micros(500);

/// The end of I/O unpins pages with such a delay.
#[test]
fn a_page_that_is_unpinned_soon_is_freed() {
    let Some(_turn) = turn() else { return };
    let surface = pinnable(8);
    let (mut reader, writer) = pipe().unwrap();
    let deadline = Deadline::after_ms(10_000);
    let (mut rounds, mut busy) = (0, 0);
    while rounds < 50 && !deadline.is_over() {
        surface.alloc(0, &[(4, 3)]);
        assert_eq!(hold(&writer, surface.mapping.page(5)), Ok(PAGE as u64));
        let (is_there, begins) = (AtomicBool::new(false), AtomicBool::new(false));
        let (begun, is_busy, let_go) = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                is_there.store(true, Ordering::Relaxed);
                wait_until(|| begins.load(Ordering::Relaxed));
                let time = Instant::now();
                while time.elapsed() < Duration::from_micros(200) {
                    std::hint::spin_loop();
                }
                let_go(&mut reader);
                Instant::now()
            });
            wait_until(|| is_there.load(Ordering::Relaxed));
            begins.store(true, Ordering::Relaxed);
            let begun = Instant::now();
            let outcome = surface.free(0, &[(4, 1), (5, 1), (6, 1)])[1];
            (begun, outcome.0 == -libc::EBUSY, other.join().unwrap())
        });
        surface.free(0, &[(4, 3)]);
        // If a thread has lost its processor, the page was let go before FREE began, or too late.
        if let_go > begun && let_go < begun + SOON {
            rounds += 1;
            busy += u32::from(is_busy);
        }
    }
    println!("{busy} of {rounds} times it was waited for in vain");
    assert!(busy <= rounds / 4);
    assert_eq!(surface.stat().resident, 0);

    // If many pages stay pinned, the module waits only for the first.
    surface.alloc(0, &[(5, 1)]);
    assert_eq!(hold(&writer, surface.mapping.page(5)), Ok(PAGE as u64));
    let all = || {
        let time = Instant::now();
        assert_eq!(surface.free(0, &[(5, 1); 512]), [(-libc::EBUSY, 0); 512]);
        time.elapsed()
    };
    // The thread may lose its processor for as long as the module may wait for all, but not each
    // time.
    let least = (0..100).map(|_| all()).find(|time| *time < 512 * SOON);
    assert!(least.is_some(), "the module waits for each page");
    let_go(&mut reader);
}

#[test]
fn a_page_may_be_held_longer_than_the_surface_lives() {
    let Some(_turn) = turn() else { return };
    let before = Memory::now();
    for round in 0..20 {
        let (mut reader, writer) = pipe().unwrap();
        let surface = pinnable(512);
        assert_eq!(surface.alloc(0, &[(100, 512)]), [(0, 512)]);
        surface.stamp(300, round);
        assert_eq!(hold(&writer, surface.mapping.page(300)), Ok(PAGE as u64));
        let Surface { vectors, mapping, exmap } = surface;
        match round % 2 {
            0 => drop((mapping, vectors, exmap)),
            _ => drop((exmap, vectors, mapping)),
        }
        // New memory does not have the held page.
        let other = pinnable(512);
        assert_eq!(other.alloc(0, &[(0, 512)]), [(0, 512)]);
        (0..512).for_each(|page| other.stamp(page, 77));
        assert!(let_go(&mut reader) == access::stamped(round), "the held page has changed");
    }
    before.assert_back();
}

#[test]
fn a_page_may_be_held_longer_than_its_process_lives() {
    let Some(_turn) = turn() else { return };
    let before = Memory::now();
    for round in 0..10 {
        let (mut reader, writer) = pipe().unwrap();
        let child = Child::start(|| {
            let surface = pinnable(512);
            surface.alloc(0, &[(100, 512)]);
            surface.stamp(300, round);
            assert_eq!(hold(&writer, surface.mapping.page(300)), Ok(PAGE as u64));
            std::mem::forget(surface);
            0
        });
        assert_eq!(child.wait(), End::Status(0));
        let other = pinnable(512);
        assert_eq!(other.alloc(0, &[(0, 512)]), [(0, 512)]);
        (0..512).for_each(|page| other.stamp(page, 77));
        assert!(let_go(&mut reader) == access::stamped(round), "the held page has changed");
    }
    before.assert_back();
}
