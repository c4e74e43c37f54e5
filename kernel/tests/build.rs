//! Compiles the C programs that tests run in a guest, which has no compiler.

use std::path::PathBuf;
use std::process::Command;

const PROGRAMS: [&str; 1] = ["published"];

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    println!("cargo::rerun-if-env-changed=CC");
    for name in PROGRAMS {
        let source = format!("programs/{name}.c");
        println!("cargo::rerun-if-changed={source}");
        let mut command = Command::new(&compiler);
        command.args(["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-pthread"]);
        let status = command.arg("-o").arg(out.join(name)).arg(&source).status();
        assert!(status.is_ok_and(|status| status.success()), "{source} does not compile");
    }
}
