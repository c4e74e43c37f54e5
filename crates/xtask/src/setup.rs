//! The tools that the build and the tests need, installed if that is possible. If nothing is
//! missing, this does nothing and prints nothing. As root it installs the missing Debian packages;
//! otherwise its message has the command that installs them.

use std::process::Command;

use crate::emulator;
use crate::packages::{apt_get, is_root, major_and_minor, on_path, succeeds};
use crate::workspace::Outcome;

/// The oldest compiler that builds the workspace (`rust-version` in Cargo.toml).
const OLDEST_RUST: (u32, u32) = (1, 90);

/// Programs that must be on the PATH, or files, and the Debian package that has each.
const PROGRAMS: &[(&str, &str)] = &[("cc", "build-essential"), ("git", "git")];

/// As above, for RocksDB. The compiler's package has the library that generates bindings.
const ROCKSDB_PROGRAMS: &[(&str, &str)] = &[("clang-14", "clang-14 libclang-14-dev")];

/// As above, for the kernel lab.
const LAB_PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("sqlite3", "sqlite3"),
    ("xz", "xz-utils"),
    ("depmod", "kmod"),
    ("ndctl", "ndctl"),
    ("dmsetup", "dmsetup"),
    // Modules are built with the compiler of their kernels, and checked by one of the kernel's
    // programs.
    ("gcc-12", "gcc-12"),
    ("/usr/include/libelf.h", "libelf-dev"),
    ("sparse", "sparse"),
];

/// As above, for the lab's debug kernel.
const KERNEL_PROGRAMS: &[(&str, &str)] = &[("flex", "flex"), ("bison", "bison"), ("bc", "bc")];

/// As above, for the package of the module.
const PACKAGE_PROGRAMS: &[(&str, &str)] =
    &[("dh", "debhelper"), ("dh_dkms", "dh-dkms"), ("lintian", "lintian")];

/// As above, for tests of the installed files.
const INSTALL_PROGRAMS: &[(&str, &str)] = &[("pkg-config", "pkg-config")];

/// As above, for the package for Python, and for tests that run Python.
const PYTHON_PROGRAMS: &[(&str, &str)] =
    &[("/usr/bin/python3", "python3"), ("/usr/share/doc/python3-venv/copyright", "python3-venv")];

/// The chore that needs the tools.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Compile and run the binaries.
    Build,
    /// Compile RocksDB as well, whose bindings are generated.
    RocksDb,
    /// Boot kernels in an emulator.
    Lab,
    /// As above, and build a debug kernel.
    KernelBuild,
    /// Build the Debian package of the module.
    Package,
    /// Build and test the package for Python.
    Python,
    /// Run all of `cargo xtask test`, with formatter and linter.
    Tests,
}

/// Makes sure that the machine has the tools for `need`.
///
/// # Errors
/// Names the missing tools and the command that installs them.
pub fn ensure(need: Need) -> Outcome {
    check_compiler()?;
    install_programs(PROGRAMS)?;
    if need == Need::RocksDb {
        install_programs(ROCKSDB_PROGRAMS)?;
    }
    if need == Need::Lab {
        emulator::ensure()?;
        install_programs(LAB_PROGRAMS)?;
    }
    if need == Need::KernelBuild {
        install_programs(KERNEL_PROGRAMS)?;
    }
    if need == Need::Package {
        install_programs(PACKAGE_PROGRAMS)?;
    }
    if need == Need::Python || need == Need::Tests {
        install_programs(PYTHON_PROGRAMS)?;
    }
    if need == Need::Tests {
        install_programs(INSTALL_PROGRAMS)?;
        check_component("fmt", "rustfmt")?;
        check_component("clippy", "clippy")?;
    }
    Ok(())
}

fn check_compiler() -> Outcome {
    let advice = format!(
        "get a toolchain >= {}.{} from https://rustup.rs (Debian's own is too old)",
        OLDEST_RUST.0, OLDEST_RUST.1
    );
    let output = Command::new("rustc")
        .arg("--version")
        .output()
        .map_err(|error| format!("rustc does not run ({error}); {advice}"))?;
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    match compiler_version(&line) {
        Some(version) if version >= OLDEST_RUST => Ok(()),
        _ => Err(format!("'{}' is not new enough; {advice}", line.trim())),
    }
}

/// Major and minor number of a line such as `rustc 1.95.0 (f2d3ce0bd 2026-03-21)`.
fn compiler_version(line: &str) -> Option<(u32, u32)> {
    major_and_minor(line.split_whitespace().nth(1)?)
}

fn install_programs(programs: &[(&str, &str)]) -> Outcome {
    let missing = programs.iter().filter(|(program, _)| !on_path(program));
    let mut packages: Vec<&str> = missing.flat_map(|entry| entry.1.split(' ')).collect();
    packages.dedup();
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    if !is_root() || !on_path("apt-get") {
        return Err(format!("missing packages; run: sudo apt-get install -y {list}"));
    }
    println!("installing {list}");
    apt_get(&["update"])?;
    let mut install = vec!["install", "-y", "--no-install-recommends"];
    install.extend(packages);
    apt_get(&install)
}

fn check_component(subcommand: &str, component: &str) -> Outcome {
    let present = || succeeds(Command::new("cargo").args([subcommand, "--version"]));
    if present() {
        return Ok(());
    }
    if on_path("rustup") {
        println!("installing the {component} component");
        if succeeds(Command::new("rustup").args(["component", "add", component])) && present() {
            return Ok(());
        }
    }
    Err(format!("cargo {subcommand} does not run; run: rustup component add {component}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiler_versions_are_compared_as_numbers() {
        let version = compiler_version("rustc 1.95.0 (f2d3ce0bd 2026-03-21)");
        assert_eq!(version, Some((1, 95)));
        assert!(compiler_version("rustc 1.9.0").unwrap() < OLDEST_RUST);
        assert!(compiler_version("rustc 2.0.0-nightly").unwrap() > OLDEST_RUST);
        assert_eq!(compiler_version("not a version"), None);
    }
}
