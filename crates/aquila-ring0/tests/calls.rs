//! System calls that read and fill memory of mapped files, whose pages are in the guest's page
//! tables alone. The tests need a KVM that runs guests, as those in `ring0.rs` do.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::ErrorKind::WouldBlock;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};

use common::{PAGE, machine};
use vellum_aquila_ring0::{Advice, Replacement};
use vellum_testing::own_process;

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

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap()
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

/// A message that is longer than what is copied at a time of a stream.
#[test]
fn a_long_message_is_sent_as_a_whole() {
    const MESSAGE: usize = (1 << 20) + 100;
    let Some(machine) = machine() else { return };
    let (mapped, bytes) = file();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&mapped).unwrap();
    let (from, to) = UnixDatagram::pair().unwrap();
    let room: libc::c_int = 8 << 20;
    let (at, length) = ((&raw const room).cast(), size_of_val(&room) as libc::socklen_t);
    let socket = from.as_raw_fd();
    // SAFETY: the call reads the number.
    let set =
        unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, at, length) };
    if set != 0 {
        return eprintln!("skipped: no right to such a message: {}", io::Error::last_os_error());
    }
    let sent = machine
        .run(|| {
            let all = &*bytes_at(mapping.as_ptr());
            // SAFETY: the bytes are there.
            unsafe { libc::write(socket, all.as_ptr().cast(), MESSAGE) }
        })
        .unwrap();
    assert_eq!(sent, MESSAGE as isize);
    let mut message = vec![0; 2 * MESSAGE];
    assert_eq!(to.recv(&mut message).unwrap(), MESSAGE);
    assert!(message[..MESSAGE] == bytes[..MESSAGE]);
}

/// A stream that takes little of it does not have all of it copied.
#[test]
fn a_full_socket_has_little_copied() {
    let Some(machine) = machine() else { return };
    let (mapped, bytes) = file();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&mapped).unwrap();
    // Each page that is copied is a fault.
    mapping.advise(Advice::Random);
    let (mut from, mut to) = UnixStream::pair().unwrap();
    from.set_nonblocking(true).unwrap();
    let mut sent = [0; 2];
    let before = machine.counts();
    machine
        .run(|| {
            let all = &*bytes_at(mapping.as_ptr());
            sent[0] = from.write(all).unwrap();
            let vectors = [IoSlice::new(&all[sent[0]..]), IoSlice::new(b"end")];
            assert_eq!(from.write_vectored(&vectors).unwrap_err().kind(), WouldBlock);
            // SAFETY: the bytes are there.
            let again = unsafe { libc::send(from.as_raw_fd(), all.as_ptr().cast(), LENGTH, 0) };
            assert_eq!(again, -1);
        })
        .unwrap();
    let faults = machine.counts().managed_faults - before.managed_faults;
    // Of each of the three, at most a part more than was taken.
    let most = (sent[0] + 3 * (256 << 10)) / PAGE + 100;
    assert!(faults < most as u64, "{faults} faults for {} bytes", sent[0]);
    drop(from);
    let mut received = Vec::new();
    to.read_to_end(&mut received).unwrap();
    assert!(received == bytes[..sent[0]]);
}

#[test]
fn calls_of_no_byte_are_the_kernel_s() {
    let Some(machine) = machine() else { return };
    let (mapped, _) = file();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&mapped).unwrap();
    let mut out = temporary();
    let (from, to) = UnixDatagram::pair().unwrap();
    machine
        .run(|| {
            let none = &mut bytes_at(mapping.as_ptr())[PAGE..PAGE];
            assert_eq!(out.write(none).unwrap(), 0);
            assert_eq!(out.read(none).unwrap(), 0);
            assert_eq!(from.send(none).unwrap(), 0);
            let vectors = [IoSlice::new(none), IoSlice::new(b"word"), IoSlice::new(none)];
            assert_eq!(out.write_vectored(&vectors).unwrap(), 4);
            // SAFETY: no bytes are there that the call could take.
            let many = unsafe { libc::write(out.as_raw_fd(), none.as_ptr().cast(), usize::MAX) };
            assert_eq!((many, errno()), (-1, libc::EFAULT));
        })
        .unwrap();
    assert_eq!(to.recv(&mut [0]).unwrap(), 0);
    assert_eq!(whole(&out), b"word");
}

#[test]
fn a_long_write_of_vectors_to_a_file_is_not_cut() {
    let Some(machine) = machine() else { return };
    let (mapped, bytes) = file();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&mapped).unwrap();
    let out = temporary();
    // More than is copied for one call, of parts that begin anywhere.
    let parts: Vec<(usize, usize)> = (0..40).map(|at| (at * 7, LENGTH - at * 9)).collect();
    let length: usize = parts.iter().map(|(_, length)| length - 300).sum();
    let written = machine
        .run(|| {
            let all = &*bytes_at(mapping.as_ptr());
            let part = |(at, length): &(usize, usize)| IoSlice::new(&all[*at..][..length - 300]);
            let vectors: Vec<IoSlice<'_>> = parts.iter().map(part).collect();
            let (at, count) = (vectors.as_ptr().cast(), vectors.len() as libc::c_int);
            // SAFETY: the vectors are there, with their bytes.
            unsafe { libc::pwritev(out.as_raw_fd(), at, count, 100) }
        })
        .unwrap();
    assert_eq!(written, length as isize);
    let mut place = 100;
    for (at, length) in parts {
        let mut found = vec![0; length - 300];
        out.read_exact_at(&mut found, place).unwrap();
        assert!(found == bytes[at..][..found.len()], "from {at}");
        place += found.len() as u64;
    }
}

/// The limit ends the call where it would end one call for all parts: after a whole part.
#[test]
fn a_write_up_to_the_longest_file_raises_no_signal() {
    const LIMIT: usize = 1 << 20;
    let Some(machine) = machine() else { return };
    if let Some(output) = own_process::run("a_write_up_to_the_longest_file_raises_no_signal") {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let (mapped, bytes) = file();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&mapped).unwrap();
    let outs = [temporary(), temporary()];
    let limit = libc::rlimit { rlim_cur: LIMIT as u64, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the structure is there during the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    let written = machine
        .run(|| {
            let all = &*bytes_at(mapping.as_ptr());
            let vectors = [IoSlice::new(&all[..3]), IoSlice::new(&all[3..])];
            [(&outs[0]).write(all), (&outs[1]).write_vectored(&vectors)]
        })
        .unwrap();
    assert_eq!(written.map(Result::unwrap), [LIMIT; 2]);
    assert!(outs.iter().all(|out| whole(out) == bytes[..LIMIT]));
}

#[test]
fn a_read_into_a_read_only_mapping_takes_nothing() {
    let Some(machine) = machine() else { return };
    let (mapped, _) = file();
    let read_only = File::open(format!("/proc/self/fd/{}", mapped.as_raw_fd())).unwrap();
    let cache = machine.cache(64, Replacement::Clock).unwrap();
    let mapping = cache.map(&read_only).unwrap();
    let (mut from, to) = UnixStream::pair().unwrap();
    let mut words = [0; 10];
    machine
        .run(|| {
            (&to).write_all(b"some words").unwrap();
            is_fault(from.read(&mut bytes_at(mapping.as_ptr())[..100]));
            from.read_exact(&mut words).unwrap();
        })
        .unwrap();
    assert_eq!(&words, b"some words");
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
