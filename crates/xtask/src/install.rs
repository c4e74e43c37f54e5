//! `cargo xtask install` and `uninstall`: the program, the libraries and their files, in a folder.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::artifacts::{Artifacts, BUILT};
use crate::setup;
use crate::workspace::Outcome;

/// The artifacts to build, and their packages.
pub const PACKAGES: [&str; 4] =
    ["vellum-cli", "vellum-capi", "vellum-preload", "vellum-aquila-ring0"];

/// The library that moves programs to ring 0. Cargo builds it as an example, in a folder for these.
const RING_0: &str = "libvellum_ring0.so";
/// What cargo builds of the packages.
const TARGETS: [&str; 4] = ["--lib", "--bins", "--example", "vellum_ring0"];

/// The names of the shared library for C: for the linker, for running programs, and with the whole
/// version.
const LIBRARY: &str = "libvellum.so";
const SONAME: &str = "libvellum.so.0";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Files that are installed unchanged, except for paths in them, and their destinations.
const FILES: [(&str, &str); 8] = [
    ("crates/capi/include/vellum.h", "include/vellum.h"),
    ("crates/capi/include/vellum_aquila.h", "include/vellum_aquila.h"),
    ("crates/capi/include/vellum_dax.h", "include/vellum_dax.h"),
    ("crates/capi/include/vellum_morsel.h", "include/vellum_morsel.h"),
    ("crates/morsel/systemd/vellum-morseld.service", "lib/systemd/system/vellum-morseld.service"),
    ("crates/morsel/systemd/vellum.conf", "lib/sysusers.d/vellum.conf"),
    ("crates/morsel/systemd/vellum-tmpfiles.conf", "lib/tmpfiles.d/vellum.conf"),
    ("kernel/debian/run-vellum-morsels.mount", "lib/systemd/system/run-vellum-morsels.mount"),
];

/// The installed files, for their removal: folders, and the prefixes and suffixes of the files'
/// names. This includes files of other versions.
const INSTALLED: [(&str, &str, &str); 10] = [
    ("bin", "vellum", ""),
    ("lib", "libvellum.", ""),
    ("lib/vellum", "libvellum_preload.so", ""),
    ("lib/vellum", RING_0, ""),
    ("lib/pkgconfig", "vellum.pc", ""),
    ("share/man/man1", "vellum.1", ""),
    ("share/man/man1", "vellum-", ".1"),
    ("share/bash-completion/completions", "vellum", ""),
    ("share/zsh/site-functions", "_vellum", ""),
    ("share/fish/vendor_completions.d", "vellum.fish", ""),
];

/// The steps that remain on a machine whose programs are to find the installed files.
const REMAINING_STEPS: &str = "\
remaining steps, as root, if wanted:
  ldconfig                                    for programs that use libvellum
  systemd-sysusers && systemd-tmpfiles --create
  systemctl daemon-reload
  systemctl enable --now vellum-morseld       for the cache daemon";

/// The destination.
#[derive(clap::Args)]
pub struct Destination {
    /// The folder from which users run the program
    #[arg(long, value_name = "FOLDER", default_value = "/usr/local")]
    prefix: PathBuf,
    /// A folder that stands for the root of the file system, for building packages
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    destdir: PathBuf,
}

impl Destination {
    /// The folder of the files.
    fn folder(&self) -> Outcome<PathBuf> {
        let prefix = self.prefix.strip_prefix("/");
        let prefix = prefix.map_err(|_| "the prefix must begin with '/'".to_owned())?;
        Ok(self.destdir.join(prefix))
    }
}

/// The files, and where they go.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    destination: Destination,
    /// Install the debug build, which builds fast and runs slowly
    #[arg(long)]
    dev: bool,
}

/// Builds everything and installs it.
///
/// # Errors
/// When the build fails, or a file cannot be written.
pub fn run(root: &Path, options: &Options) -> Outcome {
    setup::ensure(setup::Need::Build)?;
    let (folder, prefix) = (options.destination.folder()?, &options.destination.prefix);
    // What tests install is built already.
    let whole = std::env::var_os(BUILT).map(PathBuf::from).filter(|_| options.dev);
    let built = match whole {
        Some(_) => Artifacts::default(),
        None => Artifacts::build(root, &build(options.dev))?,
    };
    let artifact = |name: &str| match &whole {
        Some(built) if name == RING_0 => Ok(built.join("examples").join(name)),
        Some(built) => Ok(built.join(name)),
        None => built.find(name),
    };
    let program = folder.join("bin/vellum");
    copy(&artifact("vellum")?, &program, 0o755)?;
    write_manuals(&program, &folder.join("share"))?;
    let library = format!("{LIBRARY}.{VERSION}");
    copy(&artifact(LIBRARY)?, &folder.join("lib").join(&library), 0o644)?;
    link(&library, &folder.join("lib").join(SONAME))?;
    link(SONAME, &folder.join("lib").join(LIBRARY))?;
    let preloaded = "lib/vellum";
    for (name, below) in
        [("libvellum.a", "lib"), ("libvellum_preload.so", preloaded), (RING_0, preloaded)]
    {
        copy(&artifact(name)?, &folder.join(below).join(name), 0o644)?;
    }
    for (from, to) in FILES {
        let text = read(&root.join(from))?;
        let bin = prefix.join("bin");
        write(&folder.join(to), &text.replace("/usr/bin", &bin.to_string_lossy()))?;
    }
    write(&folder.join("lib/pkgconfig/vellum.pc"), &pkg_config(prefix))?;
    println!("installed in {}", folder.display());
    println!("{REMAINING_STEPS}");
    Ok(())
}

/// The arguments of the build.
fn build(dev: bool) -> Vec<&'static str> {
    let mut arguments = vec!["build"];
    arguments.extend(PACKAGES.iter().flat_map(|name| ["--package", *name]));
    arguments.extend(TARGETS);
    arguments.extend((!dev).then_some("--release"));
    arguments
}

/// Removes the files that [`run`] has installed, and only its own folders.
///
/// # Errors
/// When a file cannot be removed.
pub fn remove(destination: &Destination) -> Outcome {
    let folder = destination.folder()?;
    let mut removed = 0;
    for (name, begin, end) in INSTALLED {
        removed += remove_files(&folder.join(name), |file| match (begin, end) {
            (begin, "") if !begin.ends_with('.') => file == begin,
            (begin, end) => file.starts_with(begin) && file.ends_with(end),
        })?;
    }
    for (_, file) in FILES {
        let path = folder.join(file);
        let (parent, name) = (path.parent(), path.file_name());
        if let (Some(parent), Some(name)) = (parent, name) {
            removed += remove_files(parent, |file| name == file)?;
        }
    }
    // The folder may have other files.
    let _ = fs::remove_dir(folder.join("lib/vellum"));
    println!("{removed} files removed from {}", folder.display());
    Ok(())
}

/// Removes the files of a folder whose names are wanted, and returns how many.
fn remove_files(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Outcome<usize> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(0) };
    let mut removed = 0;
    for entry in entries.flatten() {
        if entry.file_name().to_str().is_some_and(&is_wanted) {
            let path = entry.path();
            fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Has the program write its manual pages and the completions of shells.
fn write_manuals(program: &Path, share: &Path) -> Outcome {
    let status = Command::new(program).arg("write-manuals").arg(share).status();
    match status.map_err(|error| format!("{} does not run: {error}", program.display()))? {
        status if status.success() => Ok(()),
        status => Err(format!("writing the manual pages: {status}")),
    }
}

/// The file that `pkg-config vellum` reads.
fn pkg_config(prefix: &Path) -> String {
    let prefix = prefix.display();
    format!(
        "prefix={prefix}\n\
         libdir=${{prefix}}/lib\n\
         includedir=${{prefix}}/include\n\
         \n\
         Name: vellum\n\
         Description: ordered maps in files larger than memory; memory that processes share\n\
         Version: {VERSION}\n\
         Cflags: -I${{includedir}}\n\
         Libs: -L${{libdir}} -lvellum\n\
         Libs.private: -lpthread -lm -ldl\n"
    )
}

/// Replaces a file that may be in use by a copy of a built file; processes that use the old file
/// keep it. The copy has only the symbols that linkers need.
fn copy(from: &Path, to: &Path, mode: u32) -> Outcome {
    let failed = |error: std::io::Error| format!("installing {}: {error}", to.display());
    clear(to).and_then(|()| fs::copy(from, to)).map_err(failed)?;
    let how = if to.extension().is_some_and(|end| end == "a") { "-g" } else { "--strip-unneeded" };
    match Command::new("strip").arg(how).arg(to).status() {
        Ok(status) if status.success() => {}
        Ok(status) => return Err(format!("stripping {}: {status}", to.display())),
        Err(error) => println!("{} is not stripped: strip: {error}", to.display()),
    }
    fs::set_permissions(to, Permissions::from_mode(mode)).map_err(failed)
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

/// Removes the old file, if there is one, and creates the folder.
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
        let script = read(&crate::workspace::root().join("crates/capi/build.rs")).unwrap();
        assert!(script.contains(&format!("-soname,{SONAME}\"")));
        assert!(SONAME.ends_with(VERSION.split_once('.').unwrap().0));
    }
}
