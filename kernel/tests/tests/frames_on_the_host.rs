//! The pool of frames as a program of its own: real threads at full speed, under sanitizers. In the
//! emulator races are too rare to be found, so `make lab` leaves this out.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds `kernel/tests/host/frames.c` with the pool's own sources.
fn build(sanitizers: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let kernel = tests.parent().unwrap();
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("frames-{sanitizers}"));
    let sources =
        ["tests/host/frames.c", "core/frames.c", "core/frames_blocks.c", "core/frames_steal.c"];
    let built = Command::new("cc")
        .current_dir(kernel)
        .args(["-O1", "-g", "-Wall"])
        .args(["-Werror", "-I", "tests/host", "-I", ".", "-o"])
        .arg(&program)
        .arg(format!("-fsanitize={sanitizers}"))
        .args(sources)
        .args(["core/frames_kernel.c", "-lpthread"])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    program
}

fn run(sanitizers: &str) {
    let program = build(sanitizers);
    for design in ["0", "1", "2"] {
        for seed in ["1", "2"] {
            let ran = Command::new(&program).args([design, seed]).output().unwrap();
            let said = String::from_utf8_lossy(&ran.stderr);
            assert!(ran.status.success(), "design {design}, seed {seed}: {}\n{said}", ran.status);
        }
    }
}

#[test]
fn no_race_is_found() {
    run("thread");
}

#[test]
fn no_memory_is_misused() {
    run("address,undefined");
}
