//! `cargo xtask`: set-up, tests, the project's rules and other chores.
//!
//! The Makefile and `.ci/run` only call this program, so that what a developer runs and what the
//! continuous integration runs cannot differ. It depends on little, so a fresh clone gets to its
//! first line of output fast.

mod artifacts;
mod bench;
mod deb;
mod demo;
mod emulator;
mod excerpt;
mod fuzz;
mod install;
mod jobs;
mod lab;
mod packages;
mod programs;
mod python;
mod setup;
mod sim;
mod steps;
mod testing;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Set-up, tests, rules and chores of the project", version)]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Install or name the missing tools for the build and the tests
    Setup,
    /// Run this after each change: format, rules, lints, tests, a short model check and, if it has
    /// changed, the module on one kernel
    Check {
        /// Show the output of every step, not only of those that fail
        #[arg(short, long)]
        verbose: bool,
    },
    /// Format, rules, lints, every test, the model check and the documentation
    Test {
        /// Show the output of every step, not only of those that fail
        #[arg(short, long)]
        verbose: bool,
    },
    /// The long tests: everything with VELLUM_SOAK=1, ignored tests included
    Soak {
        /// Show the output of every step, not only of those that fail
        #[arg(short, long)]
        verbose: bool,
    },
    /// Run the tests of all packages, several programs at a time
    Programs(programs::Options),
    /// Check the project's own rules over the files of the repository
    Tidy,
    /// Build the release binary and run `vellum demo` with the arguments given
    Demo {
        /// Passed on to `vellum demo`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Build the release binary with other engines and run `vellum bench` with the arguments given
    Bench {
        /// Also RocksDB: needs libclang, and takes twenty minutes to build
        #[arg(long)]
        rocksdb: bool,
        /// Passed on to `vellum bench`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Build the release binary with the simulator and run `vellum sim` with the arguments given
    Sim {
        /// Passed on to `vellum sim`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run tests on Debian kernels in an emulator, with the module
    Lab(Box<lab::Options>),
    /// Build the Debian package of the kernel module, for DKMS, and check it
    Deb,
    /// Build the release binary and the libraries, and install them with their other files
    Install(install::Options),
    /// Remove the installed files
    Uninstall(install::Destination),
    /// Build the package for Python, install it under target/, and run its tests
    Python {
        /// Only tests with these names
        names: Vec<String>,
    },
    /// Run the fuzz targets with cargo-fuzz, on a nightly toolchain
    Fuzz {
        /// Seconds for each target
        #[arg(long, default_value_t = 60)]
        seconds: u32,
        /// Only this target
        target: Option<String>,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let root = workspace::root();
    let outcome = match arguments.chore {
        Chore::Setup => setup::ensure(setup::Need::Tests),
        Chore::Check { verbose } => testing::check(&root, verbose),
        Chore::Programs(options) => programs::run(&root, options),
        Chore::Test { verbose } => testing::test(&root, verbose),
        Chore::Soak { verbose } => testing::soak(&root, verbose),
        Chore::Tidy => tidy::run(&root),
        Chore::Demo { arguments } => demo::run(&root, &arguments),
        Chore::Bench { rocksdb, arguments } => bench::run(&root, &arguments, rocksdb),
        Chore::Sim { arguments } => sim::run(&root, &arguments),
        Chore::Lab(options) => lab::run(&root, &options),
        Chore::Deb => deb::run(&root)
            .map(|package| println!("{}: lintian has found nothing", package.display())),
        Chore::Install(options) => install::run(&root, &options),
        Chore::Uninstall(place) => install::remove(&place),
        Chore::Python { names } => python::run(&root, &names),
        Chore::Fuzz { seconds, target } => fuzz::run(&root, seconds, target.as_deref()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}
