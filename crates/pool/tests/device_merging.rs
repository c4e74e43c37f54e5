//! The device merges reads and writes of neighbouring pages. Each page still gets its own result.

#![cfg(not(feature = "model"))]
#![allow(unsafe_code, clippy::unwrap_used)]

mod device_support;

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use device_support::{
    Buffer, PATIENCE, Reads, assert_holds, ordinary_surface, range, release, surface, write_all,
};
use vellum_pool::device::{Device, FileDevice, FileOptions, ReadDone, ReadRange, Surface, Write};
use vellum_vm::{PAGE_SIZE, PageRange};

fn on_all_files(test: impl Fn(&FileDevice)) {
    device_support::on_all_files(|device| test(&device));
}

fn single_pages(pages: impl IntoIterator<Item = u64>) -> Vec<PageRange> {
    pages.into_iter().map(|page| range(page, 1)).collect()
}

/// Makes a page of the surface unusable, or usable again.
fn protect(surface: &Surface, page: u64, protection: i32) {
    let address = surface.address(page).as_ptr().cast();
    // SAFETY: a page of the surface, which no reference leads to.
    assert_eq!(unsafe { libc::mprotect(address, PAGE_SIZE, protection) }, 0);
}

#[test]
fn neighbours_in_any_order_and_lengths_are_read() {
    on_all_files(|device| {
        device.resize(1000).unwrap();
        write_all(device, &[range(0, 1000)], 1);
        let surface = surface(1000);
        let mut asked = single_pages((0..300).map(|number| number * 7 % 300));
        asked.extend([
            range(300, 3),
            range(303, 100),
            range(500, 1),
            range(501, 64),
            range(900, 1),
        ]);
        for _ in 0..12 {
            release(&surface, range(0, 1000));
            let mut reads = Reads::new();
            reads.start(device, &surface, &asked);
            reads.wait().into_iter().for_each(|result| result.unwrap());
            for &range in &asked {
                assert_holds(&surface, range, 1);
            }
        }
    });
}

/// Pages of the file that follow one another are read by one call into places that do not.
#[test]
fn neighbours_in_the_file_are_read_into_any_places() {
    on_all_files(|device| {
        device.resize(300).unwrap();
        write_all(device, &[range(0, 300)], 1);
        let surface = surface(1000);
        for round in 0..12 {
            let (sender, receiver) = mpsc::channel();
            // 7 has no factor in common with 1000.
            let place = |page: u64| (page * 7 + round) % 1000;
            let reads = (0..300).map(|page| {
                let sender = sender.clone();
                let done = ReadDone::new(move |result| sender.send(result).unwrap());
                (ReadRange { pages: range(page, 1), place: place(page) }, done)
            });
            device.start_reads(&surface, reads.collect());
            (0..300).for_each(|_| receiver.recv_timeout(PATIENCE).unwrap().unwrap());
            for page in 0..300 {
                let got = device_support::bytes(&surface, range(place(page), 1));
                assert_eq!(got, Buffer::of(range(page, 1), 1).bytes(), "page {page}");
            }
        }
    });
}

#[test]
fn an_end_of_file_among_neighbours_fails_only_the_pages_after_it() {
    on_all_files(|device| {
        device.resize(20).unwrap();
        write_all(device, &[range(0, 20)], 2);
        device.resize(10).unwrap();
        let path = device.info().path.unwrap();
        for torn in [false, true] {
            if torn {
                let file = OpenOptions::new().write(true).open(&path).unwrap();
                file.set_len(10 * PAGE_SIZE as u64 + 700).unwrap();
            }
            for _ in 0..8 {
                let surface = surface(20);
                let asked = single_pages(4..16);
                let mut reads = Reads::new();
                reads.start(device, &surface, &asked);
                for (result, asked) in reads.wait().into_iter().zip(asked) {
                    if asked.start < 10 {
                        result.unwrap();
                        assert_holds(&surface, asked, 2);
                    } else {
                        let error = result.unwrap_err();
                        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{asked:?}: {error}");
                    }
                }
            }
        }
    });
}

#[test]
fn a_page_that_cannot_be_read_fails_alone() {
    on_all_files(|device| {
        device.resize(20).unwrap();
        write_all(device, &[range(0, 20)], 3);
        let surface = ordinary_surface(20);
        protect(&surface, 9, libc::PROT_NONE);
        let asked = single_pages(4..16);
        for _ in 0..2 {
            let mut reads = Reads::new();
            reads.start(device, &surface, &asked);
            for (result, &asked) in reads.wait().into_iter().zip(&asked) {
                if asked.start == 9 {
                    assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EFAULT));
                } else {
                    result.unwrap();
                    assert_holds(&surface, asked, 3);
                }
            }
        }
        protect(&surface, 9, libc::PROT_READ | libc::PROT_WRITE);
    });
}

#[test]
fn a_page_that_cannot_be_written_fails_alone() {
    on_all_files(|device| {
        device.resize(200).unwrap();
        write_all(device, &[range(0, 200)], 4);
        // The bytes of page 9 are not accessible.
        let surface = ordinary_surface(1);
        protect(&surface, 0, libc::PROT_NONE);
        // SAFETY: only the kernel gets this slice, and it checks the addresses.
        let bad = unsafe { std::slice::from_raw_parts(surface.address(0).as_ptr(), PAGE_SIZE) };
        let buffers: Vec<_> = (0..200).map(|page| Buffer::of(range(page, 1), 5)).collect();
        let contents = |page: u64| if page == 9 { bad } else { buffers[page as usize].bytes() };
        // A gap after page 99, and one entry in two parts.
        let pages = (0..100).chain(110..200);
        let mut writes: Vec<_> = pages
            .map(|page| match page {
                50 => Write::new(page, [&[], contents(page)]),
                _ => Write::new(page, [contents(page), &[]]),
            })
            .collect();
        device.write(&mut writes);
        for write in &writes {
            let failed = write.result.as_ref().err().and_then(|error| error.raw_os_error());
            assert_eq!(failed, (write.page == 9).then_some(libc::EFAULT), "page {}", write.page);
        }
        drop(writes);
        let read = device_support::surface(200);
        device.read(&read, range(0, 200).into()).unwrap();
        for page in 0..200 {
            let old = page == 9 || (100..110).contains(&page);
            assert_holds(&read, range(page, 1), if old { 4 } else { 5 });
        }
        protect(&surface, 0, libc::PROT_READ | libc::PROT_WRITE);
    });
}

/// If storage is in memory, the calling thread reads from it itself, once the device has noticed
/// that such reads do not sleep.
#[test]
fn reads_of_storage_that_never_sleeps_are_done_at_once() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: no /dev/shm here");
        return;
    };
    let device =
        FileDevice::create(directory.path().join("pages"), FileOptions::default()).unwrap();
    device.resize(64).unwrap();
    write_all(&device, &[range(0, 64)], 1);
    let surface = surface(64);
    let me = thread::current().id();
    let mut in_a_row = 0;
    for _ in 0..10_000 {
        let here = Arc::new(AtomicBool::new(true));
        let (sender, receiver) = mpsc::channel();
        let reads = (0..64).map(|page| {
            let (here, sender) = (here.clone(), sender.clone());
            let done = ReadDone::new(move |result| {
                here.fetch_and(thread::current().id() == me, Ordering::SeqCst);
                sender.send(result).unwrap();
            });
            (range(page, 1).into(), done)
        });
        device.start_reads(&surface, reads.collect());
        (0..64).for_each(|_| receiver.recv_timeout(PATIENCE).unwrap().unwrap());
        in_a_row = if here.load(Ordering::SeqCst) { in_a_row + 1 } else { 0 };
        if in_a_row > 50 {
            return;
        }
    }
    panic!("the device did not notice that tmpfs never sleeps");
}
