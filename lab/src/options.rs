//! The lab's command line.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};

use crate::crash::Crash;
use crate::guest::{Equipment, Notes, Test};
use crate::machine::Machine;

/// Bytes of the persistent memory.
const PMEM: u64 = 256 << 20;

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "lab", about = "Boots Debian kernels in an emulator and runs tests inside")]
pub struct Arguments {
    /// The folder that keeps kernels between runs
    #[arg(long, default_value = "target/lab", global = true)]
    pub cache: PathBuf,
    /// Kernels by series, such as 6.1, or 'debug'; both stock ones if none is named
    #[arg(long = "kernel", value_name = "SERIES", global = true)]
    pub kernels: Vec<String>,
    /// Processors of the machine; several numbers are several runs
    #[arg(long, default_value = "2", value_delimiter = ',', global = true)]
    pub processors: Vec<u32>,
    /// Levels of its page tables; if none is named, 4 with kernel 6.1 and 5 with others
    #[arg(long, value_parser = clap::value_parser!(u32).range(4..=5), global = true)]
    levels: Option<u32>,
    /// Memory of the machine in MiB
    #[arg(long, default_value_t = 3072, global = true)]
    memory: u32,
    /// Emulate all processors by one thread, in turn: for machines that run at the same time
    #[arg(long, global = true)]
    in_turn: bool,
    /// Count instructions: the guest's clock advances by a nanosecond for each one; slow
    #[arg(long, global = true)]
    count_instructions: bool,
    /// Persistent memory of 256 MiB, mounted for DAX at /pmem; with FILE, its contents are in that
    /// file
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, global = true)]
    pmem: Option<Option<PathBuf>>,
    /// So many GiB of persistent memory instead, in a sparse file
    #[arg(long, value_name = "GIB", requires = "pmem", global = true)]
    pmem_gib: Option<u64>,
    /// Start Xen first, which the lab fetches: the kernel is its first domain, a PV domain
    #[arg(long, global = true)]
    pub xen: bool,
    /// More of the kernel's modules to load, such as kvm-amd
    #[arg(long = "module", value_name = "NAME", global = true)]
    modules: Vec<String>,
    /// Build the modules of this folder, load them before the tests, unload them after
    #[arg(long, value_name = "FOLDER", global = true)]
    build: Option<PathBuf>,
    /// Only build them: the programs find them in /modules
    #[arg(long, requires = "build", global = true)]
    unloaded: bool,
    /// Parameters for the modules that are built, such as 'level=2 trace=1'
    #[arg(long, default_value = "", allow_hyphen_values = true, global = true)]
    module_parameters: String,
    /// More for the kernel's command line, such as 'pti=on'
    #[arg(long, default_value = "", allow_hyphen_values = true, global = true)]
    boot: String,
    /// A variable in the environment of the programs
    #[arg(long = "variable", value_name = "NAME=VALUE", value_parser = variable, global = true)]
    variables: Vec<String>,
    /// A file, such as a library, to put into the folder of the programs, with the libraries it
    /// needs
    #[arg(long = "file", value_name = "NAME=PATH", value_parser = file, global = true)]
    files: Vec<(String, PathBuf)>,
    /// Distinguishes this lab from others that run at the same time: it keeps the kernel's messages
    /// in messages-SERIES-NAME
    #[arg(long, global = true)]
    name: Option<String>,
    /// The folder at which the guest's disk is mounted
    #[arg(long, default_value = "/mnt", global = true)]
    scratch: PathBuf,
    /// What is to be done.
    #[command(subcommand)]
    pub chore: Chore,
}

/// What is to be done.
#[derive(Debug, Subcommand)]
pub enum Chore {
    /// Run test programs, each given as NAME=PROGRAM, and print 'N passed, N failed'
    Run {
        /// Give up when a program, the start or the end takes this many seconds; slow machines get
        /// several times that
        #[arg(long, default_value_t = 600)]
        patience: u64,
        /// Arguments for every program, such as the names of tests
        #[arg(long, allow_hyphen_values = true)]
        arguments: Vec<String>,
        /// The programs, each with its own arguments if they are in the same word
        #[arg(required = true, value_name = "NAME=PROGRAM")]
        tests: Vec<String>,
    },
    /// Kill the machine while programs run, then have others check its persistent memory, or a disk
    Crash(Crash),
    /// A shell in the guest
    Shell,
    /// A shell in the guest, whose kernel waits for gdb
    Gdb,
    /// Only fetch the kernels
    Fetch,
    /// Build the modules of a folder with a Kbuild file for each kernel, and print their paths
    Build {
        /// The folder
        folder: PathBuf,
    },
    /// Check the C files of a folder with a Kbuild file by `checkpatch.pl --strict` and by sparse
    Style {
        /// The folder
        folder: PathBuf,
    },
}

impl Arguments {
    /// The machine.
    pub fn machine(&self, processors: u32) -> Machine {
        Machine {
            processors,
            levels: self.levels,
            memory_mib: self.memory,
            takes_turns: self.in_turn,
            counts_instructions: self.count_instructions,
            boot: self.boot.clone(),
            name: self.name.clone(),
            waits_for_gdb: false,
        }
    }

    /// The contents of the guest.
    pub fn equipment(&self) -> Equipment {
        Equipment {
            scratch: self.scratch.clone(),
            pmem: self.pmem.as_ref().map(|_| self.pmem_gib.map_or(PMEM, |gib| gib << 30)),
            disk: None,
            notes: Notes::new(),
            modules: self.modules.iter().map(|name| name.replace('-', "_")).collect(),
            folder: self.build.clone(),
            is_unloaded: self.unloaded,
            parameters: self.module_parameters.clone(),
            variables: self.variables.clone(),
            files: self.files.clone(),
        }
    }

    /// The file that keeps the persistent memory.
    pub fn kept(&self) -> Option<&Path> {
        self.pmem.as_ref()?.as_deref()
    }
}

/// A file given as `NAME=PATH`.
fn file(given: &str) -> Result<(String, PathBuf)> {
    let (name, path) = given.split_once('=').context("it is not NAME=PATH")?;
    ensure!(Path::new(path).is_file(), "no file {path}");
    Ok((name.to_owned(), path.into()))
}

/// A variable given as `NAME=VALUE`, as a shell takes it.
fn variable(given: &str) -> Result<String> {
    let (name, value) = given.split_once('=').context("it is not NAME=VALUE")?;
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    ensure!(!name.is_empty() && name.chars().all(is_name), "'{name}' is no name of a variable");
    ensure!(!value.contains(['\'', '\n']), "'{value}' cannot be quoted");
    Ok(format!("export {name}='{value}'"))
}

/// Programs given as `NAME=PROGRAM`, with arguments of their own after a space and others that all
/// of them get.
///
/// # Errors
/// If an argument has another form, or a program does not exist.
pub fn tests(given: &[String], arguments: &[String]) -> Result<Vec<Test>> {
    let parse = |test: &String| {
        let parts = test.split_once('=');
        let (name, call) = parts.with_context(|| format!("'{test}' is not NAME=PROGRAM"))?;
        let mut words = call.split(' ');
        let program = words.next().unwrap_or_default();
        ensure!(Path::new(program).is_file(), "no program {program}");
        let arguments = words.map(str::to_owned).chain(arguments.iter().cloned()).collect();
        Ok(Test { name: name.to_owned(), program: program.into(), arguments })
    };
    given.iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn processors_are_a_list() {
        let arguments = Arguments::parse_from(["lab", "fetch", "--processors", "1,2,4"]);
        assert_eq!(arguments.processors, [1, 2, 4]);
        assert_eq!(Arguments::parse_from(["lab", "fetch"]).processors, [2]);
    }

    #[test]
    fn programs_have_names_and_arguments() {
        let found = tests(&["shell=/bin/sh".to_owned()], &["-c".to_owned()]).unwrap();
        assert_eq!(
            (&found[0].name[..], &found[0].arguments[..]),
            ("shell", &["-c".to_owned()][..])
        );
        assert_eq!(file("a/shell=/bin/sh").unwrap(), ("a/shell".to_owned(), "/bin/sh".into()));
        assert!(file("/bin/sh").is_err() && file("a=/nowhere/file").is_err());
        assert_eq!(variable("A_1=two words").unwrap(), "export A_1='two words'");
        assert!(variable("A").is_err() && variable("=1").is_err() && variable("A=it's").is_err());
        assert!(tests(&["/bin/sh".to_owned()], &[]).is_err());
        assert!(tests(&["a=/nowhere/program".to_owned()], &[]).is_err());
    }
}
