//! The installed files are complete: a C program compiles and runs with them alone.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PREFIX: &str = "opt/vellum";

/// A folder, removed when this is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // A test that has already failed must not panic again.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn installed_files_are_found_and_used() {
    let name = format!("install-{}", std::process::id());
    let folder = Folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name));
    let place = folder.0.join(PREFIX);
    let chore = |words: &[&str]| {
        let mut chore = Command::new(env!("CARGO_BIN_EXE_xtask"));
        chore.args(words).arg("--prefix").arg(Path::new("/").join(PREFIX));
        run(chore.arg("--destdir").arg(&folder.0))
    };
    chore(&["install", "--dev"]);
    // Installs again, over the installed files.
    let said = chore(&["install", "--dev"]);
    assert!(said.contains("\n  ldconfig ") && said.contains("systemctl enable"), "{said}");

    let preloaded = ["lib/vellum/libvellum_preload.so", "lib/vellum/libvellum_ring0.so"];
    for binary in ["bin/vellum", "lib/libvellum.so"].into_iter().chain(preloaded) {
        let mut sections = Command::new("readelf");
        let sections = run(sections.args(["--sections", "--wide"]).arg(place.join(binary)));
        assert!(sections.contains(".text") && !sections.contains(".debug_info"), "{binary}");
    }
    let page = fs::read_to_string(place.join("share/man/man1/vellum-put.1")).unwrap();
    assert!(page.contains("Store a value under a key"), "{page}");
    assert!(place.join("share/bash-completion/completions/vellum").exists());

    assert!(run(Command::new(place.join("bin/vellum")).arg("--version")).starts_with("vellum "));
    let preload = place.join("lib/vellum/libvellum_preload.so");
    assert_eq!(run(Command::new("echo").arg("fine").env("LD_PRELOAD", preload)), "fine\n");
    let unit = fs::read_to_string(place.join("lib/systemd/system/vellum-morseld.service")).unwrap();
    assert!(unit.contains("\nExecStart=/opt/vellum/bin/vellum morseld\n"), "{unit}");
    for file in ["systemd/system/run-vellum-morsels.mount", "sysusers.d/vellum.conf"] {
        assert!(place.join("lib").join(file).exists(), "{file}");
    }

    let mut asked = Command::new("pkg-config");
    asked.args(["--cflags", "--libs", "vellum"]).env("PKG_CONFIG_SYSROOT_DIR", &folder.0);
    let flags = run(asked.env("PKG_CONFIG_LIBDIR", place.join("lib/pkgconfig")));
    let program = folder.0.join("everything");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi/tests/everything.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-o"]);
    run(compiler.arg(&program).arg(source).args(flags.split_whitespace()));
    // Only linkers use this name. Running programs use the name with the number of the interface.
    fs::remove_file(place.join("lib/libvellum.so")).unwrap();
    assert_eq!(run(Command::new(program).env("LD_LIBRARY_PATH", place.join("lib"))), "ok\n");

    // Uninstalling removes all installed files, and no others.
    fs::write(place.join("bin/vellum-other"), "").unwrap();
    fs::remove_file(folder.0.join("everything")).unwrap();
    chore(&["uninstall"]);
    let mut find = Command::new("find");
    let left = run(find.arg(&folder.0).args(["(", "-type", "f", "-o", "-type", "l", ")"]));
    assert_eq!(left.trim_end(), place.join("bin/vellum-other").to_str().unwrap());
}
