//! Runs the real binary and checks its output.
// Each test file uses some of these. In tests, unwrap is the assertion.
#![allow(dead_code, clippy::unwrap_used)]

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub use vellum_testing::random::bytes as noise;

/// A command that is not started yet. In a guest of the lab it lies next to the test.
pub fn command<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    let built = PathBuf::from(env!("CARGO_BIN_EXE_vellum"));
    let beside = || std::env::current_exe().unwrap().with_file_name("vellum");
    let mut command = Command::new(if built.exists() { built } else { beside() });
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs the command to its end. It must not panic or be killed.
pub fn run<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    checked(command(arguments).output().unwrap())
}

/// As [`run`], with bytes on standard input.
pub fn run_with_input<S: AsRef<OsStr>>(arguments: &[S], input: &[u8]) -> Output {
    let mut command = command(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that fails early does not read all of its input.
    let _ = child.stdin.take().unwrap().write_all(input);
    checked(child.wait_with_output().unwrap())
}

/// Fails the test if the program panicked, or a signal killed it.
pub fn checked(output: Output) -> Output {
    let code = output.status.code();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(code, Some(0..=2)), "{:?}: {error}", output.status);
    assert!(!error.contains("panicked"), "{error}");
    output
}

/// Runs the command, expects success, and returns standard output.
#[track_caller]
pub fn ok<S: AsRef<OsStr>>(arguments: &[S]) -> Vec<u8> {
    succeeded(run(arguments))
}

/// As [`ok`], as text.
#[track_caller]
pub fn text<S: AsRef<OsStr>>(arguments: &[S]) -> String {
    String::from_utf8(ok(arguments)).unwrap()
}

/// Expects success and returns standard output.
#[track_caller]
pub fn succeeded(output: Output) -> Vec<u8> {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    output.stdout
}

/// Runs the command, expects exit code 1 and one line of error, and returns the line.
#[track_caller]
pub fn fails<S: AsRef<OsStr>>(arguments: &[S]) -> String {
    failed(run(arguments))
}

/// Expects exit code 1 and one line of error, and returns the line.
#[track_caller]
pub fn failed(output: Output) -> String {
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let lines: Vec<&str> = error.lines().filter(|line| line.starts_with("vellum: ")).collect();
    assert_eq!(lines.len(), 1, "{error}");
    lines[0].to_string()
}

/// A folder for one test.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A path in the folder, as an argument.
    pub fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_string()
    }
}

/// Files of many sizes below `root`: empty, small, of several chunks; links; odd names.
pub fn make_files(root: &Path) {
    for folder in 0..8 {
        let folder_path = root.join(format!("folder{folder}/inner"));
        std::fs::create_dir_all(&folder_path).unwrap();
        for file in 0..20_usize {
            let size = match file {
                0 => 0,
                1 => 4096,
                2 => 300_000,
                _ => file * file * 117 + folder,
            };
            let bytes = noise(size, (folder * 100 + file) as u64);
            std::fs::write(folder_path.join(format!("file{file}")), bytes).unwrap();
        }
        std::os::unix::fs::symlink("inner/file1", root.join(format!("folder{folder}/link")))
            .unwrap();
    }
    std::fs::write(root.join("large"), noise(2_500_000, 77)).unwrap();
    std::fs::write(root.join("new\nline"), b"odd").unwrap();
    let not_utf8: &OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"not-utf8-\xff");
    std::fs::write(root.join(not_utf8), b"odd").unwrap();
}
