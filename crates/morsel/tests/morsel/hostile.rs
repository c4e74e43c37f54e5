//! Descriptors from an attacker who wants a process to read memory that changes or is missing.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use vellum_morsel::{Access, Error, Morsel};

/// A valid name of a Morsel.
const NAME: &str = "vellum-morsel-1:0:0:0";

fn memfd(name: &str, length: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let made = rustix::fs::memfd_create(name, flags).unwrap();
    rustix::fs::ftruncate(&made, length).unwrap();
    rustix::fs::fcntl_add_seals(&made, seals).unwrap();
    made
}

#[track_caller]
fn refused(descriptor: impl Into<OwnedFd>, why: &str) {
    let error = Morsel::from_descriptor(descriptor.into()).unwrap_err();
    assert!(matches!(error, Error::NotMorsel { .. }), "{error:?}");
    assert!(error.to_string().contains(why), "{error}");
}

const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

#[test]
fn files_and_sockets_are_no_morsels() {
    // The file system of the temporary folder may be the same as that of memfds.
    refused(tempfile::tempfile().unwrap(), "it ");
    refused(File::open("/dev/null").unwrap(), "memfd");
    refused(std::io::pipe().unwrap().0, "memfd");
    refused(File::open("/").unwrap(), "memfd");
}

#[test]
fn a_memfd_that_can_be_truncated_is_refused() {
    for seals in [SealFlags::empty(), SealFlags::WRITE, SealFlags::GROW] {
        refused(memfd(NAME, 4096, seals), "truncated");
    }
}

#[test]
fn a_memfd_with_another_name_is_refused() {
    refused(memfd("other", 4096, FIXED), "name");
    let name_only = tempfile::NamedTempFile::new().unwrap();
    let path = rustix::fs::open(name_only.path(), OFlags::PATH, Mode::empty()).unwrap();
    refused(path, "O_PATH");
}

#[test]
fn an_impossible_shape_is_refused() {
    let wrong = [
        (NAME, 4097),
        (NAME, 0),
        ("vellum-morsel-1:9:0:0", 4096),
        ("vellum-morsel-1:0:8:0", 4096),
        ("vellum-morsel-1:0:2:0", 4096),
    ];
    for (name, length) in wrong {
        let error = Morsel::from_descriptor(memfd(name, length, FIXED)).unwrap_err();
        assert!(matches!(error, Error::Shape { .. }), "{name}: {error:?}");
    }
    let bound = Morsel::from_descriptor(memfd("vellum-morsel-1:0:0:123", 4096, FIXED));
    assert!(matches!(bound, Err(Error::Address { .. })), "{bound:?}");
}

#[test]
fn a_memfd_that_only_looks_sealed_has_no_view() {
    // FUTURE_WRITE does not affect existing mappings for writing.
    let made = memfd(NAME, 4096, FIXED | SealFlags::FUTURE_WRITE);
    let morsel = Morsel::from_descriptor(made).unwrap();
    assert_eq!(morsel.map(Access::Read).unwrap().view(), Err(Error::NotSealed));
}

#[test]
fn a_sealed_memfd_with_a_valid_name_is_a_morsel() {
    let made = memfd(NAME, 4096, FIXED | SealFlags::WRITE);
    let morsel = Morsel::from_descriptor(made).unwrap();
    assert_eq!(morsel.map(Access::Read).unwrap().view().unwrap(), [0; 4096]);
}
