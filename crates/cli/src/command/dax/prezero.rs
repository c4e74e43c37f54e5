//! `vellum dax prezero`: keeps zeroed files ready for programs on the same file system.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use vellum_dax::{ZeroPool, ZeroPoolOptions, ZeroPoolStat};

use crate::error::{Failure, Outcome};
use crate::output::Output;
use crate::progress::{Progress, Unit, say};
use crate::{interrupt, size};

const HELP: &str = "\
Examples:
  vellum dax prezero /mnt/pmem/zeroed --files 64MiB:8 --files 2MiB:64
  vellum dax prezero /mnt/pmem/zeroed --rate 1GiB --once

A new block has to be zeroed before a mapping may show it. A program that opens the same folder with
ZeroPool::open (crate vellum-dax) takes files whose blocks are zeros already. This command zeroes
them in the background, until a signal ends it. The folder is made if it is not there, and belongs
to one user.

The files take their space all the time. When such a program needs it, the pool gives it back. To
remove a pool, end the command and remove the folder.";

/// Keep zeroed files ready for programs that write through mappings
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The pool's folder, on the file system of the files that programs make
    folder: PathBuf,

    /// So many files of this length are kept ready; may be given several times [default: 2MiB:32]
    #[arg(long, value_name = "LENGTH:COUNT", value_parser = files)]
    files: Vec<(u64, u32)>,

    /// Bytes a second that are zeroed at most
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = size::parse)]
    rate: u64,

    /// End when all files are ready
    #[arg(long)]
    once: bool,

    /// Machine-readable output at the end
    #[arg(long)]
    json: bool,
}

fn files(text: &str) -> Result<(u64, u32), String> {
    let complaint = || format!("'{text}' is not LENGTH:COUNT; write 2MiB:32 for 32 files of 2 MiB");
    let (length, count) = text.split_once(':').ok_or_else(complaint)?;
    Ok((size::parse(length)?, count.parse().map_err(|_| complaint())?))
}

/// Runs the command.
///
/// # Errors
/// When the folder cannot be a pool, or the files cannot be made.
pub fn run(arguments: &Arguments) -> Outcome {
    interrupt::watch()?;
    let mut options = ZeroPoolOptions { rate: arguments.rate, ..ZeroPoolOptions::default() };
    if !arguments.files.is_empty() {
        options.files.clone_from(&arguments.files);
    }
    let shown = arguments.folder.display();
    let failed = |error: vellum_dax::Error| Failure::message(format!("{shown}: {error}"));
    let pool = ZeroPool::fill(&arguments.folder, &options).map_err(failed)?;
    fill(&pool, &options, arguments.once)?;
    if !arguments.once && !interrupt::signal_came() {
        say(&format!("{shown}: {}; Ctrl-C ends this", about(&pool.stat().map_err(failed)?)));
        keep(&pool);
    }
    let stat = pool.stat().map_err(failed)?;
    let mut output = Output::new();
    output.line(&match arguments.json {
        true => to_json(&stat).to_string(),
        false => format!("{shown}: {}", about(&stat)),
    })?;
    output.finish()
}

/// Waits until the pool is full, and shows how far it is.
fn fill(pool: &ZeroPool, options: &ZeroPoolOptions, once: bool) -> Result<(), Failure> {
    let failed = |error: vellum_dax::Error| Failure::message(error.to_string());
    let wanted = options.files.iter().map(|(length, count)| length.saturating_mul((*count).into()));
    let wanted = wanted.fold(0_u64, u64::saturating_add);
    let progress = Progress::new("zeroing", Unit::Bytes, wanted);
    let start = Instant::now();
    while !pool.wait_until_full(Duration::from_millis(100)).map_err(failed)?
        && !interrupt::signal_came()
    {
        let stat = pool.stat().map_err(failed)?;
        progress.set(stat.ready_bytes);
        if !stat.is_filler && start.elapsed() > Duration::from_secs(2) {
            let told = "another process fills this pool";
            if once {
                return Err(Failure::message(format!("{told}; end it, or leave the pool to it")));
            }
            say(&format!("{told}; this one waits to take over"));
            break;
        }
    }
    progress.finish();
    Ok(())
}

/// Leaves the work to the pool's thread until a signal comes, and says why it fails.
fn keep(pool: &ZeroPool) {
    let mut told: Option<(String, Instant)> = None;
    while !interrupt::signal_came() {
        std::thread::sleep(Duration::from_millis(100));
        let failure = match pool.stat() {
            Ok(stat) => stat.failure,
            Err(error) => Some(error.to_string()),
        };
        let Some(failure) = failure else { continue };
        let is_new = told.as_ref().is_none_or(|(before, at)| {
            *before != failure || at.elapsed() > Duration::from_secs(60)
        });
        if is_new {
            say(&failure);
            told = Some((failure, Instant::now()));
        }
    }
}

fn about(stat: &ZeroPoolStat) -> String {
    let (files, bytes) = (stat.ready_files, size::show(stat.ready_bytes));
    let zeroed = size::show(stat.zeroed_bytes);
    format!(
        "{files} files are ready, {bytes}; {} zeroed by this command, {zeroed}",
        stat.zeroed_files
    )
}

fn to_json(stat: &ZeroPoolStat) -> serde_json::Value {
    json!({
        "ready_files": stat.ready_files,
        "ready_bytes": stat.ready_bytes,
        "zeroed_files": stat.zeroed_files,
        "zeroed_bytes": stat.zeroed_bytes,
        "filler": stat.is_filler,
        "failure": stat.failure,
    })
}
