//! The backends of this machine, and files to fill from.

use std::fs::File;
use std::io::Write;

use vellum_morsel::{BackendChoice, BackendKind, Error, Provider};

pub const PAGE: u64 = 4096;

/// Runs a test once for each backend of this machine. Prints which backends it skips.
pub fn on_each(test: impl Fn(&Provider)) {
    for kind in BackendKind::ALL {
        match Provider::new(BackendChoice::Only(kind)) {
            Ok(provider) => {
                assert_eq!(provider.backend(), kind);
                test(&provider);
            }
            Err(Error::Unavailable { backend, reason }) => {
                assert!(kind == BackendKind::Kernel, "{kind}: {reason}");
                println!("skipped on the backend '{backend}': {reason}");
            }
            Err(error) => panic!("{kind}: {error}"),
        }
    }
}

/// As [`on_each`], but only on memfd, which every machine has.
pub fn on_memfd(test: impl Fn(&Provider)) {
    test(&Provider::new(BackendChoice::Only(BackendKind::Memfd)).unwrap());
}

/// Bytes in which neighbouring pages differ.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 4096 * 31 + at * 7) as u8).collect()
}

/// A file without a name, with these bytes.
pub fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}
