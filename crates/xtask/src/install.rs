//! `cargo xtask install`: the program, the libraries and what belongs to them, in a folder.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::artifacts::Artifacts;
use crate::{Outcome, setup};

/// What is built, and the packages that have it.
const PACKAGES: [&str; 3] = ["vellum-cli", "vellum-capi", "vellum-preload"];

/// The shared library for C: as the linker, as programs that run, and as people look for it.
const LIBRARY: &str = "libvellum_morsel.so";
const SONAME: &str = "libvellum_morsel.so.0";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Files that are installed as they are, but for paths in them; with where they go.
const FILES: [(&str, &str); 5] = [
    ("crates/capi/include/vellum_morsel.h", "include/vellum_morsel.h"),
    ("crates/morsel/systemd/vellum-morseld.service", "lib/systemd/system/vellum-morseld.service"),
    ("crates/morsel/systemd/vellum.conf", "lib/sysusers.d/vellum.conf"),
    ("crates/morsel/systemd/vellum-tmpfiles.conf", "lib/tmpfiles.d/vellum.conf"),
    ("kernel/debian/run-vellum-morsels.mount", "lib/systemd/system/run-vellum-morsels.mount"),
];

/// Where things go.
#[derive(clap::Args)]
pub struct Options {
    /// Where it is to be found by those who use it
    #[arg(long, value_name = "FOLDER", default_value = "/usr/local")]
    prefix: PathBuf,
    /// A folder that stands for the root of the file system, for those who build packages
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    destdir: PathBuf,
    /// What is built fast and runs slowly
    #[arg(long)]
    dev: bool,
}

/// Builds everything and installs it.
///
/// # Errors
/// When the build fails, or a file cannot be written.
pub fn run(root: &Path, options: &Options) -> Outcome {
    setup::ensure(setup::Need::Build)?;
    let prefix = options.prefix.strip_prefix("/");
    let prefix = prefix.map_err(|_| "the prefix must begin with '/'".to_owned())?;
    let place = options.destdir.join(prefix);
    let mut arguments: Vec<&str> = PACKAGES.iter().flat_map(|name| ["--package", *name]).collect();
    arguments.extend((!options.dev).then_some("--release"));
    let built = Artifacts::build(root, &arguments)?;
    let artifact = |name: &str| built.find(name);
    copy(&artifact("vellum")?, &place.join("bin/vellum"), 0o755)?;
    let library = format!("{LIBRARY}.{VERSION}");
    copy(&artifact(LIBRARY)?, &place.join("lib").join(&library), 0o644)?;
    link(&library, &place.join("lib").join(SONAME))?;
    link(SONAME, &place.join("lib").join(LIBRARY))?;
    for (name, folder) in [("libvellum_morsel.a", "lib"), ("libvellum_preload.so", "lib/vellum")] {
        copy(&artifact(name)?, &place.join(folder).join(name), 0o644)?;
    }
    for (from, to) in FILES {
        let text = read(&root.join(from))?;
        let bin = options.prefix.join("bin");
        write(&place.join(to), &text.replace("/usr/bin", &bin.to_string_lossy()))?;
    }
    write(&place.join("lib/pkgconfig/vellum_morsel.pc"), &pkg_config(&options.prefix))?;
    println!("installed in {}", place.display());
    Ok(())
}

/// What `pkg-config vellum_morsel` says.
fn pkg_config(prefix: &Path) -> String {
    let prefix = prefix.display();
    format!(
        "prefix={prefix}\n\
         libdir=${{prefix}}/lib\n\
         includedir=${{prefix}}/include\n\
         \n\
         Name: vellum_morsel\n\
         Description: memory that processes mount as a whole\n\
         Version: {VERSION}\n\
         Cflags: -I${{includedir}}\n\
         Libs: -L${{libdir}} -lvellum_morsel\n\
         Libs.private: -lpthread -lm -ldl\n"
    )
}

/// Copies a file to where there may be one in use: that stays as it is for who has it.
fn copy(from: &Path, to: &Path, mode: u32) -> Outcome {
    let done = clear(to)
        .and_then(|()| fs::copy(from, to))
        .and_then(|_| fs::set_permissions(to, Permissions::from_mode(mode)));
    done.map_err(|error| format!("installing {}: {error}", to.display()))
}

fn write(to: &Path, text: &str) -> Outcome {
    let done = clear(to)
        .and_then(|()| fs::write(to, text))
        .and_then(|()| fs::set_permissions(to, Permissions::from_mode(0o644)));
    done.map_err(|error| format!("installing {}: {error}", to.display()))
}

fn link(target: &str, to: &Path) -> Outcome {
    let done = clear(to).and_then(|()| symlink(target, to));
    done.map_err(|error| format!("installing {}: {error}", to.display()))
}

/// Makes room for a file, and the folder for it.
fn clear(to: &Path) -> std::io::Result<()> {
    to.parent().map_or(Ok(()), fs::create_dir_all)?;
    match fs::remove_file(to) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn read(path: &Path) -> Outcome<String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soname_is_the_one_that_the_library_gets() {
        let script = read(&crate::root().join("crates/capi/build.rs")).unwrap();
        assert!(script.contains(&format!("-soname,{SONAME}\"")));
        assert!(SONAME.ends_with(VERSION.split_once('.').unwrap().0));
    }
}
