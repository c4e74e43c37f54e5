//! Dumps that a build has written are loaded by every later one, and a dump of that is the same
//! again, byte for byte.
//!
//! They lie in `crates/cli/tests/files`, in a folder for each version of the format, and are dumps
//! of a store that is kept, too (`crates/engine/tests/kept_files`). `VELLUM_KEEP=dump-N cargo test
//! -p vellum-cli --test kept_dumps make -- --ignored` writes those of a new version.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use support::{Folder, ok};

/// The encodings, and the arguments of `dump` for them.
const ENCODINGS: &[(&str, &[&str])] = &[("bytevalue", &[]), ("print", &["-p"])];

fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files")
}

/// A copy of the store that the dumps are of.
fn kept_store(folder: &Folder) -> String {
    let kept = "../engine/tests/files/format-1/closed-1.store";
    let copy = folder.name("kept.store");
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join(kept), &copy).unwrap();
    copy
}

fn dump(store: &str, arguments: &[&str]) -> Vec<u8> {
    ok(&[&["dump", store], arguments].concat())
}

#[test]
fn kept_dumps_are_loaded_and_written_again() {
    let mut count = 0;
    for kept in fs::read_dir(files()).unwrap() {
        let kept = kept.unwrap().path();
        for (encoding, arguments) in ENCODINGS {
            let path = kept.join(format!("{encoding}.dump"));
            let folder = Folder::new();
            let loaded = folder.name("loaded.store");
            ok(&["load", &loaded, path.to_str().unwrap()]);
            ok(&["check", &loaded]);
            // Only those of the present version are written the same.
            let stored = kept_store(&folder);
            for (_, arguments) in ENCODINGS {
                assert!(dump(&loaded, arguments) == dump(&stored, arguments), "{encoding}");
            }
            if kept.ends_with("dump-3") {
                assert!(dump(&loaded, arguments) == fs::read(&path).unwrap(), "{encoding}");
            }
            count += 1;
        }
    }
    assert!(count > 0);
}

#[test]
#[ignore = "makes files to be kept"]
fn make() {
    let name = std::env::var("VELLUM_KEEP").expect("VELLUM_KEEP names the folder: dump-N");
    let to = files().join(name);
    fs::create_dir_all(files()).unwrap();
    fs::create_dir(&to).expect("files that are kept are never made again");
    let folder = Folder::new();
    let store = kept_store(&folder);
    for (encoding, arguments) in ENCODINGS {
        fs::write(to.join(format!("{encoding}.dump")), dump(&store, arguments)).unwrap();
    }
}
