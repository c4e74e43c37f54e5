//! Compiles the C program that tests run, also in a guest, where no compiler is.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    println!("cargo::rerun-if-env-changed=CC");
    println!("cargo::rerun-if-changed=tests/maps.c");
    let mut command = Command::new(compiler);
    command.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    let status = command.arg("-o").arg(out.join("maps")).arg("tests/maps.c").status();
    assert!(status.is_ok_and(|status| status.success()), "tests/maps.c does not compile");
}
