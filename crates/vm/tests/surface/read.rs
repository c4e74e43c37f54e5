//! Reading files into surfaces, on every backend that the kernel has.

use std::fs::{File, OpenOptions};
use std::io::{Seek, Write};
use std::os::unix::fs::OpenOptionsExt;

use crate::common::{Own, entries};
use vellum_vm::{BackendKind, END_OF_FILE, Errno, PAGE_SIZE};

on_every_backend!(
    ranges_are_read_to_their_places,
    an_offset_moves_page_zero,
    the_end_of_the_file_is_an_error_of_its_own,
    a_direct_read_past_an_unaligned_end,
    errors_are_per_entry,
    offsets_that_do_not_fit,
    large_reads_from_a_direct_file,
);

/// A file whose page `n` holds bytes of value `n + 1`, plus `extra` bytes.
fn file(pages: u64, extra: usize) -> (tempfile::TempDir, File) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    let mut file = File::options().create_new(true).read(true).write(true).open(path).unwrap();
    for page in 0..pages {
        file.write_all(&[value(page); PAGE_SIZE]).unwrap();
    }
    file.write_all(&vec![value(pages); extra]).unwrap();
    file.rewind().unwrap();
    file.sync_all().unwrap();
    (directory, file)
}

fn value(page: u64) -> u8 {
    (page % 255) as u8 + 1
}

fn ranges_are_read_to_their_places(backend: BackendKind) {
    let (_directory, file) = file(64, 0);
    let own = Own::new(64, backend);
    own.fill(5, 0xFF);
    assert_eq!(own.read(&file, 0, &mut entries([(3, 4), (63, 1), (20, 1), (30, 0)])), 0);
    assert_eq!(own.resident(), 6);
    for page in 0..64 {
        let read = (3..7).contains(&page) || page == 63 || page == 20;
        assert!(own.holds(page, if read { value(page) } else { 0 }), "page {page}");
    }
}

fn an_offset_moves_page_zero(backend: BackendKind) {
    let (_directory, file) = file(8, 0);
    let own = Own::new(8, backend);
    assert_eq!(own.read(&file, 2 * PAGE_SIZE as u64, &mut entries([(1, 2)])), 0);
    assert!(own.holds(1, value(3)) && own.holds(2, value(4)));
}

fn the_end_of_the_file_is_an_error_of_its_own(backend: BackendKind) {
    let (_directory, file) = file(3, 100);
    let own = Own::new(8, backend);
    let mut batch = entries([(2, 2), (4, 1), (0, 2), (3, 1)]);
    assert_eq!(own.read(&file, 0, &mut batch), 3);
    let results: Vec<_> = batch.iter().map(|entry| entry.result).collect();
    assert_eq!(results, [Err(END_OF_FILE), Err(END_OF_FILE), Ok(()), Err(END_OF_FILE)]);
    assert!(own.holds(0, value(0)) && own.holds(1, value(1)) && own.holds(2, value(2)));
    assert_eq!(own.copy(3)[..100], [value(3); 100]);
    // The kernel reads to the end of the file. The rest of the page is as in a fresh page.
    if own.surface.fresh_pages_are_zeroed() {
        assert_eq!(own.copy(3)[100..], [0; PAGE_SIZE - 100]);
    }
}

fn a_direct_read_past_an_unaligned_end(backend: BackendKind) {
    let (directory, _) = file(3, 100);
    let Some(file) = direct(&directory) else { return };
    let own = Own::new(8, backend);
    let mut batch = entries([(2, 2), (0, 3), (5, 1)]);
    assert_eq!(own.read(&file, 0, &mut batch), 2);
    let results: Vec<_> = batch.iter().map(|entry| entry.result).collect();
    assert_eq!(results, [Err(END_OF_FILE), Ok(()), Err(END_OF_FILE)]);
}

fn errors_are_per_entry(backend: BackendKind) {
    let (directory, file) = file(4, 0);
    let own = Own::new(4, backend);
    let mut batch = entries([(0, 1), (3, 2), (u64::MAX, 1), (3, 1)]);
    assert_eq!(own.read(&file, 0, &mut batch), 2);
    assert_eq!(batch[1].result, Err(Errno::INVAL));
    assert_eq!(batch[2].result, Err(Errno::INVAL));
    assert!(own.holds(0, value(0)) && own.holds(3, value(3)));
    let folder = File::open(directory.path()).unwrap();
    let mut batch = entries([(0, 1), (1, 1)]);
    assert_eq!(own.read(&folder, 0, &mut batch), 2);
    assert_eq!(batch[0].result, Err(Errno::ISDIR));
    let unreadable = File::options().write(true).open(directory.path().join("data")).unwrap();
    assert_eq!(own.read(&unreadable, 0, &mut batch), 2);
    assert_eq!(batch[1].result, Err(Errno::BADF));
}

fn offsets_that_do_not_fit(backend: BackendKind) {
    let (_directory, file) = file(1, 0);
    let own = Own::new(4, backend);
    let mut batch = entries([(0, 1), (1, 1)]);
    assert_eq!(own.read(&file, u64::MAX - 10, &mut batch), 2);
    assert_eq!(batch[0].result, Err(Errno::OVERFLOW));
    assert_eq!(batch[1].result, Err(Errno::OVERFLOW));
}

/// The file opened for direct I/O; `None` if the file system does not support that.
fn direct(directory: &tempfile::TempDir) -> Option<File> {
    let path = directory.path().join("data");
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    match opened {
        Ok(file) => Some(file),
        Err(error) => {
            eprintln!("skipped: no direct I/O on the file system of temporary files: {error}");
            None
        }
    }
}

fn large_reads_from_a_direct_file(backend: BackendKind) {
    let (directory, _) = file(2_000, 0);
    let Some(file) = direct(&directory) else { return };
    let own = Own::new(2_000, backend);
    assert_eq!(own.read(&file, 0, &mut entries([(0, 1), (1, 1_500), (1_999, 1)])), 0);
    assert!((0..1_501).all(|page| own.holds(page, value(page))));
    assert!(own.holds(1_999, value(1_999)) && own.holds(1_501, 0));
}
