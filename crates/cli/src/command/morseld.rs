//! `vellum morseld`: the cache daemon.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use clap::ValueEnum;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use vellum_morsel::{BackendChoice, BackendKind, Daemon, DaemonOptions, Provider};
use vellum_vm::{PAGE_SIZE, memory_limit};

use crate::error::{Doing, Failure, Outcome};
use crate::options::threads;
use crate::progress::say;
use crate::size;

const HELP: &str = "\
Examples:
  vellum morseld                                       as root: for all users of this machine
  vellum morseld --socket ~/.morseld --mode 600        for yourself, without privileges
  VELLUM_MORSELD=~/.morseld vellum morsel load model.gguf

The daemon reads a file once and hands it to all programs that ask, as memory that no program can
change any more. A program names a file by an open descriptor, so it gets only files that it may
read anyway. If a file has changed, the daemon reads it again.

At the limit the daemon drops the file that was used longest ago. With the kernel module it keeps
files that a program has mapped. Without the module it cannot see mappings, and the memory of a
dropped file is freed when the last program that has it ends. SIGTERM ends the daemon; programs keep
their files.

With the kernel module the files outlive the daemon, and the next daemon of the same user at the
same socket takes them over. With --forget the daemon frees their memory instead.";

/// Keep files in memory once, for all programs that ask
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// Where to listen, in a folder that exists [default: $VELLUM_MORSELD, or
    /// /run/vellum/morseld.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Who may connect, as the mode of a file
    #[arg(long, value_name = "OCTAL", default_value = "666", value_parser = mode)]
    mode: u32,

    /// Memory for files [default: half of the memory that this process may use]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    limit: Option<u64>,

    /// Backend of the Morsels
    #[arg(long, value_enum, default_value = "auto")]
    backend: Backend,

    /// Keep no files for the next daemon, and remove those that an earlier one has left
    #[arg(long)]
    forget: bool,

    /// Threads that read one file [default: one for each processor, at most 8]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
}

/// The backend of the Morsels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// The best that this machine has
    Auto,
    /// Vellum's kernel module: mapping costs the same for every size
    Kernel,
    /// Sealed memfd, on every kernel
    Memfd,
}

impl Backend {
    fn choice(self) -> BackendChoice {
        match self {
            Self::Auto => BackendChoice::Auto,
            Self::Kernel => BackendChoice::Only(BackendKind::Kernel),
            Self::Memfd => BackendChoice::Only(BackendKind::Memfd),
        }
    }
}

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode @ 0..=0o777) => Ok(mode),
        _ => Err("write a mode in octal digits, such as 600 or 666".into()),
    }
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// When the daemon cannot be started.
pub fn run(arguments: &Arguments) -> Outcome {
    let failed = |error: &dyn std::fmt::Display| Failure::message(error.to_string());
    let limit = limit(arguments.limit)?;
    let socket = arguments.socket.clone().unwrap_or_else(vellum_morsel::usual_socket);
    let options = DaemonOptions {
        socket,
        mode: arguments.mode,
        limit,
        threads: arguments.threads.unwrap_or_else(DaemonOptions::usual_threads),
        keep: !arguments.forget,
    };
    let stop = stop_signals().doing(|| "waiting for signals".into())?;
    let provider = Provider::new(arguments.backend.choice()).map_err(|error| failed(&error))?;
    let daemon = Daemon::bind(provider, &options).map_err(|error| failed(&error))?;
    let (at, backend, limit) = (options.socket.display(), daemon.backend(), size::show(limit));
    say(&format!("listening at {at}, backend {backend}, limit {limit}"));
    say(&match daemon.kept() {
        Ok(files) => format!("took over {files} files from the previous daemon"),
        Err(why) => format!("the next daemon will load the files again: {why}"),
    });
    daemon.run(stop).map_err(|error| failed(&error))
}

/// Memory for files, in bytes.
fn limit(asked: Option<u64>) -> Outcome<u64> {
    let most = memory_limit::effective().doing(|| "reading the memory limit".into())?;
    match asked {
        None => Ok(most.bytes / 2),
        Some(bytes) if bytes < PAGE_SIZE as u64 => Err(Failure::message(format!(
            "a limit of {} keeps no file: choose at least {}",
            size::show(bytes),
            size::show(PAGE_SIZE as u64)
        ))),
        Some(bytes) if bytes > most.bytes => Err(Failure::message(format!(
            "a limit of {} is more than this process may use: {} has {} MiB; choose at most that",
            size::show(bytes),
            most.source.display(),
            most.bytes >> 20
        ))),
        Some(bytes) => Ok(bytes),
    }
}

/// A socket that becomes readable when SIGTERM or SIGINT asks this process to end.
fn stop_signals() -> std::io::Result<UnixStream> {
    let (stop, signalled) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        pipe::register(signal, signalled.try_clone()?)?;
    }
    Ok(stop)
}
