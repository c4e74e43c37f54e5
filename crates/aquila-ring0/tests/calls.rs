//! System calls that read and fill memory of mapped files, whose pages are in the guest's page
//! tables alone. The tests need a KVM that runs guests, as those in `ring0.rs` do.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};

use common::{PAGE, machine};
use vellum_aquila_ring0::Replacement;

/// More than is copied at a time, and not a multiple of a page.
const LENGTH: usize = (2 << 20) + 12_345;

/// A file without a name, open for reading and writing, and what is in it.
fn file() -> (File, Vec<u8>) {
    let path = std::env::temp_dir().join(format!("calls-{}-{:p}", std::process::id(), &LENGTH));
    let path = path.with_extension(std::thread::current().name().unwrap().replace("::", "-"));
    let byte = |at: usize| (at.wrapping_mul(2_654_435_761) >> 13) as u8;
    let bytes: Vec<u8> = (0..LENGTH).map(byte).collect();
    std::fs::write(&path, &bytes).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    (file, bytes)
}

fn temporary() -> File {
    let (file, _) = file();
    file.set_len(0).unwrap();
    file
}

fn whole(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// The bytes of a mapping, which begins at this address. Ring 0 only.
fn bytes_at<'a>(start: *mut u8) -> &'a mut [u8] {
    // SAFETY: the mapping has the bytes, and the caller has one such slice at a time.
    unsafe { std::slice::from_raw_parts_mut(start, LENGTH) }
}

#[track_caller]
fn is_fault<T>(result: io::Result<T>) {
    assert_eq!(result.err().and_then(|error| error.raw_os_error()), Some(libc::EFAULT));
}

#[test]
fn writes_send_what_is_mapped() {
    let Some(machine) = machine() else { return };
    let (mapped, bytes) = file();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&mapped).unwrap();
    let mut out = temporary();
    machine
        .run(|| {
            let all = &*bytes_at(mapping.as_ptr());
            // One call writes all, although it is copied in parts.
            assert_eq!(out.write(all).unwrap(), LENGTH);
            assert_eq!(out.write_at(&all[1..5000], LENGTH as u64).unwrap(), 4999);
            assert_eq!(out.write_at(&all[7..], 3 << 20).unwrap(), LENGTH - 7);
        })
        .unwrap();
    let written = whole(&out);
    assert!(written[..LENGTH] == bytes && written[LENGTH..][..4999] == bytes[1..5000]);
    assert!(written[3 << 20..] == bytes[7..]);
    // Vectors of both kinds of memory, in one call.
    let mut out = temporary();
    machine
        .run(|| {
            let all = &*bytes_at(mapping.as_ptr());
            let parts = [&b"head"[..], &all[100..9000], b"", b"middle", &all[LENGTH - 99..]];
            let vectors = parts.map(IoSlice::new);
            let length: usize = parts.iter().map(|part| part.len()).sum();
            assert_eq!(out.write_vectored(&vectors).unwrap(), length);
        })
        .unwrap();
    let expected = [b"head", &bytes[100..9000], b"middle", &bytes[LENGTH - 99..]].concat();
    assert!(whole(&out) == expected);
}

#[test]
fn messages_are_sent_as_a_whole() {
    const MESSAGE: usize = 60_000;
    let Some(machine) = machine() else { return };
    let (mapped, bytes) = file();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&mapped).unwrap();
    let (from, to) = UnixDatagram::pair().unwrap();
    machine.run(|| from.send(&bytes_at(mapping.as_ptr())[PAGE / 2..][..MESSAGE]).unwrap()).unwrap();
    let mut message = vec![0; 2 * MESSAGE];
    assert_eq!(to.recv(&mut message).unwrap(), MESSAGE);
    assert!(message[..MESSAGE] == bytes[PAGE / 2..][..MESSAGE]);
}

#[test]
fn reads_fill_what_is_mapped() {
    let Some(machine) = machine() else { return };
    let (mapped, mut bytes) = file();
    let (other, _) = file();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&mapped).unwrap();
    let (mut from, to) = UnixStream::pair().unwrap();
    machine
        .run(|| {
            let all = bytes_at(mapping.as_ptr());
            other.read_exact_at(&mut all[10..LENGTH - 10], 500).unwrap_err();
            other.read_exact_at(&mut all[10..LENGTH - 1000], 500).unwrap();
            (&to).write_all(b"some words").unwrap();
            // A read of a stream takes what is there.
            assert_eq!(from.read(&mut all[PAGE - 4..][..PAGE * 3]).unwrap(), 10);
        })
        .unwrap();
    mapping.close().unwrap();
    bytes.copy_within(500.., 10);
    let rest = LENGTH - 500 + 10;
    let (_, original) = file();
    bytes[rest..].copy_from_slice(&original[rest..]);
    bytes[PAGE - 4..][..10].copy_from_slice(b"some words");
    assert!(whole(&mapped) == bytes);
}

#[test]
fn what_cannot_be_accessed_is_efault() {
    let Some(machine) = machine() else { return };
    let (mapped, _) = file();
    let read_only = File::open(format!("/proc/self/fd/{}", mapped.as_raw_fd())).unwrap();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&read_only).unwrap();
    let mut out = temporary();
    let before = machine.counts();
    machine
        .run(|| {
            let start = mapping.as_ptr();
            is_fault(mapped.read_at(&mut bytes_at(mapping.as_ptr())[..100], 0));
            // SAFETY: the kernel is to refuse the addresses.
            let beyond = |at, length| unsafe { std::slice::from_raw_parts(start.add(at), length) };
            is_fault(out.write(beyond(LENGTH + (1 << 30), 10)));
            is_fault(out.write_vectored(&[IoSlice::new(beyond(LENGTH + (1 << 30), 10))]));
            let vectors = std::ptr::without_provenance::<libc::iovec>(8);
            // SAFETY: as above.
            let written = unsafe { libc::writev(out.as_raw_fd(), vectors, 1) };
            is_fault(if written < 0 { Err(io::Error::last_os_error()) } else { Ok(written) });
            // And afterwards all is as it was.
            assert_eq!(out.write(&bytes_at(mapping.as_ptr())[..10]).unwrap(), 10);
        })
        .unwrap();
    let steps = machine.counts().native_steps - before.native_steps;
    assert_eq!(steps, 0, "a copy that fails is no signal");
}
