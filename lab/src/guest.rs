//! The contents of the guest: busybox, modules, and test programs with the libraries they need.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::archive::Archive;
use crate::build::{self, Built};
use crate::kernel::Kernel;
use crate::modules;
use crate::packages::{finish, starting};

/// The first process.
const INIT: &[u8] = include_bytes!("../guest/init");

/// A statically linked busybox: the guest's shell and tools.
const BUSYBOX: &str = "/bin/busybox";

/// Modules that every guest has. The second one loads the first by an alias that is in no list of
/// modules.
const MODULES: [&str; 8] =
    ["crc32c_generic", "ext4", "nvme", "null_blk", "brd", "loop", "vfio_iommu_type1", "vfio_pci"];

/// A program to run in the guest.
#[derive(Clone, Debug)]
pub struct Test {
    /// Its name in the guest.
    pub name: String,
    /// The program on this machine.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// Modules for persistent memory.
const PMEM_MODULES: [&str; 2] = ["nfit", "nd_pmem"];

/// Programs that set persistent memory up, with the package that has each.
const PMEM_PROGRAMS: [(&str, &str); 2] =
    [("/usr/bin/ndctl", "ndctl"), ("/sbin/mke2fs", "e2fsprogs")];

/// Modules for a virtio disk.
const DISK_MODULES: [&str; 2] = ["virtio_pci", "virtio_blk"];

/// What programs have noted in their guests, for the guests after these: `lab: note NAME VALUE`.
pub type Notes = BTreeMap<String, String>;

/// The parts of this guest that other guests need not have.
#[derive(Clone, Debug)]
pub struct Equipment {
    /// The mount point of its disk.
    pub scratch: PathBuf,
    /// Bytes of its persistent memory, which is set up for DAX, and mounted at `/pmem`.
    pub pmem: Option<u64>,
    /// Bytes of its virtio disk, `/dev/vda`, which may outlive it.
    pub disk: Option<u64>,
    /// The notes of earlier guests, which it has in `/notes`.
    pub notes: Notes,
    /// More of the kernel's modules, by name.
    pub modules: Vec<String>,
    /// A folder whose modules are built, loaded before the tests and unloaded after.
    pub folder: Option<PathBuf>,
    /// They are there, but not loaded.
    pub is_unloaded: bool,
    /// The parameters of those modules.
    pub parameters: String,
    /// Lines of a shell that set variables for the programs.
    pub variables: Vec<String>,
    /// Files in the folder of the programs, by their names there.
    pub files: Vec<(String, PathBuf)>,
}

/// What the guest does.
#[derive(Clone, Debug)]
pub enum Work {
    /// Runs these one after the other.
    Tests(Vec<Test>),
    /// Gives the user a shell.
    Shell,
}

/// The guest's first file system for this work, as an archive.
///
/// # Errors
/// If a program, a library or a module cannot be read, or a module does not build.
pub fn archive(kernel: &Kernel, work: &Work, equipment: &Equipment) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for folder in ["proc", "sys", "dev", "tmp", "mnt", "etc", "modules", "tests"] {
        archive.folder(folder);
    }
    archive.file("init", 0o755, INIT);
    let scratch = equipment.scratch.as_os_str().as_encoded_bytes();
    archive.file("scratch", 0o644, scratch);
    busybox(&mut archive)?;
    let mut wanted = MODULES.to_vec();
    if equipment.pmem.is_some() {
        wanted.extend(PMEM_MODULES);
        pmem(&mut archive)?;
    }
    if equipment.disk.is_some() {
        wanted.extend(DISK_MODULES);
    }
    let notes: String =
        equipment.notes.iter().map(|(name, value)| format!("{name} {value}\n")).collect();
    archive.file("notes", 0o644, notes.as_bytes());
    wanted.extend(equipment.modules.iter().map(String::as_str));
    let mut order = String::new();
    for module in modules::closure(kernel, &wanted)? {
        archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.contents);
        order.push_str(&module.name);
        order.push('\n');
    }
    archive.file("modules/order", 0o644, order.as_bytes());
    archive.file("variables", 0o644, equipment.variables.join("\n").as_bytes());
    if let Some(folder) = &equipment.folder {
        own_modules(&mut archive, &build::build(kernel, folder)?, equipment);
    }
    for (name, path) in &equipment.files {
        program(&mut archive, path, &format!("tests/{name}"))?;
    }
    match work {
        Work::Shell => archive.file("shell", 0o644, &[]),
        Work::Tests(tests) => programs(&mut archive, tests)?,
    }
    Ok(archive.finish())
}

fn own_modules(archive: &mut Archive, modules: &[Built], equipment: &Equipment) {
    let mut list = String::new();
    for module in modules {
        archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.contents);
        list.push_str(&module.name);
        list.push('\n');
    }
    if equipment.is_unloaded {
        return;
    }
    archive.file("modules/own", 0o644, list.as_bytes());
    archive.file("modules/parameters", 0o644, equipment.parameters.as_bytes());
}

fn busybox(archive: &mut Archive) -> Result<()> {
    archive.copy(Path::new(BUSYBOX), "bin/busybox").context("install busybox-static")?;
    let applets = finish(Command::new(BUSYBOX).arg("--list"))?;
    for applet in applets.lines().filter(|applet| *applet != "busybox") {
        archive.link(&format!("bin/{applet}"), "busybox");
    }
    Ok(())
}

fn pmem(archive: &mut Archive) -> Result<()> {
    archive.folder("pmem");
    for (path, package) in PMEM_PROGRAMS {
        let name = path.rsplit('/').next().unwrap_or(path);
        program(archive, Path::new(path), &format!("sbin/{name}"))
            .with_context(|| format!("install {package}"))?;
    }
    // Both programs read their configuration, even if it is empty.
    for file in ["/etc/mke2fs.conf", "/etc/ndctl.conf"] {
        if Path::new(file).exists() {
            archive.copy(Path::new(file), file.trim_start_matches('/'))?;
        }
    }
    Ok(())
}

/// A program and the libraries that it needs.
fn program(archive: &mut Archive, path: &Path, name: &str) -> Result<()> {
    match slim(path) {
        Some(contents) => archive.file(name, 0o755, &contents),
        None => archive.copy(path, name)?,
    }
    for library in libraries_of(path)? {
        archive.copy(&library, &library.to_string_lossy()[1..])?;
    }
    Ok(())
}

fn programs(archive: &mut Archive, tests: &[Test]) -> Result<()> {
    let mut list = String::new();
    for test in tests {
        program(archive, &test.program, &format!("tests/{}", test.name))?;
        list.push_str(&format!("{} {}\n", test.name, test.arguments.join(" ")));
    }
    archive.file("tests/list", 0o644, list.as_bytes());
    Ok(())
}

/// The program without its debugging sections, which are most of a test, because the guest's memory
/// must have room for it. `None` if it has none.
fn slim(program: &Path) -> Option<Vec<u8>> {
    let to = tempfile::NamedTempFile::new().ok()?;
    let mut strip = Command::new("strip");
    finish(strip.arg("--strip-debug").arg("-o").arg(to.path()).arg(program)).ok()?;
    fs::read(to.path()).ok()
}

/// The shared libraries of a program, the dynamic linker among them; none if it needs none.
fn libraries_of(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().with_context(|| starting("ldd"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("not a dynamic executable") {
        return Ok(Vec::new());
    }
    ensure!(output.status.success(), "ldd {}: {}", program.display(), said.trim_end());
    let text = String::from_utf8_lossy(&output.stdout);
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(text.lines().filter_map(path).collect())
}
