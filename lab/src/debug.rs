//! The lab's debug kernel, which checks itself: built from Debian's source with `debug.config`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};

use crate::build::{self, COMPILER};
use crate::kernel::Kernel;
use crate::lock::lock;
use crate::packages::{Packages, finish, starting};
use crate::stock::BACKPORTS;

/// Its name in the lab.
pub const NAME: &str = "debug";

/// The package with its source; the source's folder has the same name.
const SOURCE: &str = "linux-source-6.12";

/// The options that are on. All others are off.
const CONFIG: &str = include_str!("../debug.config");

/// Functions that modules may call in this kernel, with the file of each. A module that uses only a
/// stock kernel's exports would not load here otherwise, because inline functions of page tables
/// call other functions in this configuration.
///
/// - With lockdep the lock of a page table is allocated apart when a table is made.
/// - Without Xen the highest entries are not written by an indirect call, but on the spot, with the
///   copy for user space (page-table isolation).
const EXPORTED: [(&str, &str); 3] = [
    ("mm/memory.c", "ptlock_alloc"),
    ("mm/memory.c", "ptlock_free"),
    ("arch/x86/mm/pti.c", "__pti_set_user_pgtbl"),
];

/// The kernel. Builds it below `cache` unless `cache` has it, built from the same source and
/// configuration.
///
/// # Errors
/// If the source cannot be fetched or the build fails.
pub fn fetch(cache: &Path) -> Result<Kernel> {
    let folder = cache.join(NAME);
    let _alone = lock(&folder)?;
    // The build writes both at its end, the release last.
    let (release_stamp, stamp) = (folder.join("release"), folder.join("made-of"));
    let made_of = format!("{EXPORTED:?}\n{CONFIG}");
    let is_same = fs::read_to_string(&stamp).is_ok_and(|before| before == made_of);
    if !is_same || !release_stamp.exists() {
        fs::remove_file(&release_stamp).ok();
        let workshop = Workshop::new(&folder)?;
        let release = workshop.build()?;
        fs::write(&stamp, made_of)?;
        fs::write(&release_stamp, release)?;
        workshop.clear()?;
    }
    let release = fs::read_to_string(&release_stamp)?;
    let root = folder.join("root");
    Ok(Kernel {
        name: NAME,
        image: root.join(format!("boot/vmlinuz-{release}")),
        modules: root.join(format!("lib/modules/{release}")),
        headers: root.join(format!("usr/src/linux-headers-{release}")),
        folder,
        release,
        is_debug: true,
        hypervisor: None,
    })
}

/// The folder of the build. An interrupted build continues.
#[derive(Debug)]
struct Workshop {
    folder: PathBuf,
    source: PathBuf,
    tree: PathBuf,
    root: PathBuf,
    log: PathBuf,
}

impl Workshop {
    fn new(folder: &Path) -> Result<Workshop> {
        let (tree, root) = (folder.join("tree"), folder.join("root"));
        fs::create_dir_all(&tree)?;
        build::forget(folder)?;
        if root.exists() {
            fs::remove_dir_all(&root)?;
        }
        fs::create_dir_all(root.join("boot"))?;
        let (source, log) = (folder.join(SOURCE), folder.join("log"));
        fs::write(&log, "")?;
        Ok(Workshop { folder: folder.to_path_buf(), source, tree, root, log })
    }

    /// Builds and installs the kernel from scratch; returns the release.
    fn build(&self) -> Result<String> {
        println!("fetching the source of the debug kernel");
        self.unpack()?;
        self.export()?;
        self.configure()?;
        println!("building the debug kernel, 10 to 60 minutes; see {}", self.log.display());
        let jobs = thread::available_parallelism().map_or(1, usize::from);
        self.make(&[&format!("-j{jobs}"), "bzImage", "modules"])?;
        self.install()
    }

    /// Removes the files that only the build needed.
    fn clear(&self) -> Result<()> {
        fs::remove_dir_all(&self.source)?;
        fs::remove_dir_all(&self.tree)?;
        Ok(())
    }

    fn unpack(&self) -> Result<()> {
        let packages = Packages::open(&self.folder.join("apt"), &[BACKPORTS])?;
        let package = self.folder.join("package");
        fs::create_dir_all(&package)?;
        packages.unpack(SOURCE, &package)?;
        let archive = package.join(format!("usr/src/{SOURCE}.tar.xz"));
        finish(Command::new("tar").arg("-C").arg(&self.folder).arg("-xf").arg(archive))?;
        fs::remove_dir_all(&package)?;
        Ok(())
    }

    fn export(&self) -> Result<()> {
        for (file, function) in EXPORTED {
            let path = self.source.join(file);
            let text = fs::read_to_string(&path)?;
            let text = with_export(&text, function)
                .with_context(|| format!("no function {function} in {file}"))?;
            fs::write(&path, text)?;
        }
        Ok(())
    }

    fn configure(&self) -> Result<()> {
        let wanted = self.folder.join("wanted.config");
        fs::write(&wanted, CONFIG)?;
        self.make(&[&format!("KCONFIG_ALLCONFIG={}", wanted.display()), "allnoconfig"])?;
        let config = fs::read_to_string(self.tree.join(".config"))?;
        let missing = missing(CONFIG, &config);
        ensure!(missing.is_empty(), "the kernel's rules do not allow {}", missing.join(", "));
        Ok(())
    }

    /// Puts the kernel, its modules and the files to build other modules where the rest of the lab
    /// expects them.
    fn install(&self) -> Result<String> {
        let release = fs::read_to_string(self.tree.join("include/config/kernel.release"))?;
        let release = release.trim_end().to_owned();
        for (from, name) in [("arch/x86/boot/bzImage", "vmlinuz"), ("vmlinux", "vmlinux")] {
            let to = self.root.join(format!("boot/{name}-{release}"));
            fs::copy(self.tree.join(from), &to)
                .with_context(|| format!("copying to {}", to.display()))?;
        }
        let place = format!("INSTALL_MOD_PATH={}", self.root.display());
        self.make(&[&place, "INSTALL_MOD_STRIP=1", "modules_install"])?;
        let headers = self.root.join(format!("usr/src/linux-headers-{release}"));
        let gather = format!(
            "KBUILD_RUN_COMMAND=+{}/scripts/package/install-extmod-build {}",
            self.source.display(),
            headers.display()
        );
        self.make(&[&gather, "run-command"])?;
        fs::copy(self.tree.join(".config"), headers.join(".config"))?;
        Ok(release)
    }

    /// Runs the kernel's own make at low priority; its output is in the log.
    fn make(&self, arguments: &[&str]) -> Result<()> {
        let log = fs::File::options().append(true).open(&self.log)?;
        let mut make = Command::new("nice");
        make.args(["-n", "19", "make", "-C"]).arg(&self.source);
        make.arg(format!("O={}", self.tree.display()));
        make.args([format!("CC={COMPILER}"), format!("HOSTCC={COMPILER}")]).args(arguments);
        make.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).env("LC_ALL", "C");
        let status = make.status().with_context(|| starting("make"))?;
        if !status.success() {
            bail!("make {}: {status}; see {}", arguments.join(" "), self.log.display());
        }
        Ok(())
    }
}

/// The text with a line that exports the function, after its body, unless it has one already.
/// `None` if there is no such function.
fn with_export(text: &str, function: &str) -> Option<String> {
    let line = format!("EXPORT_SYMBOL_GPL({function});\n");
    if text.contains(&line) {
        return Some(text.to_owned());
    }
    let head = format!(" {function}(");
    let is_definition = |at: &usize| {
        let end = text[*at..].find('\n').map_or(text.len(), |length| at + length);
        !text[..*at].ends_with(char::is_whitespace) && text[end..].starts_with("\n{\n")
    };
    let start = text.match_indices(&head).map(|found| found.0).find(is_definition)?;
    let end = start + text[start..].find("\n}\n")? + "\n}\n".len();
    Some(format!("{}{line}{}", &text[..end], &text[end..]))
}

/// Lines of the wanted configuration that the kernel's own rules have removed.
fn missing<'a>(wanted: &'a str, config: &str) -> Vec<&'a str> {
    let is_option = |line: &&str| line.starts_with("CONFIG_") || line.starts_with("# CONFIG_");
    let is_missing = |line: &&str| !config.lines().any(|there| there == *line);
    wanted.lines().filter(is_option).filter(is_missing).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_exported_after_its_body() {
        let body = "{\n\tif (b) {\n\t}\n}\n\nint c;\n";
        let text = format!("\tif (a(1))\n\t\treturn;\nbool a(int b);\nbool a(int b)\n{body}");
        let exported = with_export(&text, "a").unwrap();
        assert!(exported.contains("\t}\n}\nEXPORT_SYMBOL_GPL(a);\n\nint c;\n"), "{exported}");
        assert_eq!(with_export(&exported, "a").unwrap(), exported);
        assert_eq!(with_export(&text, "d"), None);
    }

    #[test]
    fn removed_options_are_named() {
        let wanted = "# A comment.\nCONFIG_A=y\nCONFIG_B=y\n# CONFIG_C is not set\n";
        let config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=y\n";
        assert_eq!(missing(wanted, config), ["CONFIG_B=y", "# CONFIG_C is not set"]);
    }
}
