//! `vellum bench`: which experiments run, and where their results go.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use vellum_bench::engine::{Engines, Factory};
use vellum_bench::progress::Progress;
use vellum_bench::report::{Record, draw, html, json, text};
use vellum_bench::{machine, worker};

use crate::{ALL, Context, Experiment};

/// The default file of results.
const RESULTS: &str = "target/bench/results.json";

const AFTER_HELP: &str = "\
Examples:
  vellum bench list                       all experiments, with what they answer to
  vellum bench table2 --quick             one of them, in under 40 seconds
  vellum bench all --json results.json    all of them, collected in a file
  vellum bench report                     the collected results as one HTML file

Ratios are within one run: contestants alternate, figures are medians with the lowest and highest
sample. Run it on an idle machine. As root, the harness makes a RAM-backed block device (zram) for
the experiments that need fast storage, and memory cgroups for those that compare under a limit.
Peers (LMDB, redb, fjall, SQLite) are built in with: cargo run --release -p vellum-cli --features
peers -- bench ...; RocksDB with --features rocksdb.";

/// Measures: workloads, the papers' experiments, comparisons with other engines
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub struct Arguments {
    /// Experiments by name; 'list' lists them, 'all' runs all, 'report' renders the results
    #[arg(required = true)]
    names: Vec<String>,
    /// The short form of each: smaller data, fewer rounds, under 40 seconds
    #[arg(long)]
    quick: bool,
    /// Only these engines, where several are compared, such as vellum,lmdb
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    engines: Vec<String>,
    /// The file that collects results; a new result replaces that of the same experiment
    #[arg(long, value_name = "FILE", default_value = RESULTS)]
    json: PathBuf,
    /// The report, one self-contained file
    #[arg(long, value_name = "FILE", default_value = "target/bench/report.html")]
    html: PathBuf,
    /// A folder that gets each chart as an SVG file, for light and dark pages
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
    /// The folder for files under test, on the storage to measure
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    dir: PathBuf,
    /// The block device that exmap-read reads from: /dev/nullb0 or /dev/ram0 unless one is named
    #[arg(long, value_name = "DEVICE")]
    device: Option<PathBuf>,
    /// The file that processes load in morsel-start: a model in one of its formats, or any other
    /// file [default: a new one]
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Show no bar while an experiment runs
    #[arg(long)]
    no_progress: bool,
}

/// Runs the command with Vellum and `peers`.
///
/// # Errors
/// Unknown names, and the first experiment that fails; results of those before it are kept.
pub fn run(arguments: &Arguments, peers: &[Factory]) -> Result<()> {
    let engines = Engines::new(peers).only(&arguments.engines)?;
    if arguments.names == ["list"] {
        return show(&list(&engines));
    }
    if let Some(request) = arguments.names.first().filter(|name| *name == worker::NAME) {
        bail!("'{request}' is how this program calls itself; see --help for the experiments");
    }
    for experiment in &selected(&arguments.names)? {
        run_one(experiment, arguments, &engines)?;
    }
    let records = json::read(&arguments.json)?;
    if records.is_empty() {
        bail!("no results in {}; run an experiment first", arguments.json.display());
    }
    html::write(&arguments.html, &records)?;
    if let Some(folder) = &arguments.charts {
        let is_named = |name: &String| ["all", "report"].contains(&name.as_str());
        let wanted = |record: &&Record| {
            arguments.names.iter().any(|name| is_named(name) || *name == record.experiment)
        };
        draw::write(folder, records.iter().filter(wanted))?;
    }
    show(&format!("report: {}\n", arguments.html.display()))
}

/// Writes to standard output. It is no error if the reader has closed the pipe: the results are in
/// files, too.
fn show(text: &str) -> Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("writing the output"),
    }
}

fn list(engines: &Engines) -> String {
    let width = ALL.iter().map(|experiment| experiment.name.len()).max().unwrap_or(0);
    let lines = ALL.iter().map(|experiment| {
        let Experiment { name, shows, source, .. } = experiment;
        format!("{name:width$}  {shows} ({source})\n")
    });
    let mut text: String = lines.collect();
    text.push_str("\nEngines built in:\n");
    for factory in engines.all() {
        text.push_str(&format!("  {:8}  {}\n", factory.name, factory.about));
    }
    text
}

fn selected(names: &[String]) -> Result<Vec<Experiment>> {
    if names == ["all"] {
        return Ok(ALL.to_vec());
    }
    if names == ["report"] {
        return Ok(Vec::new());
    }
    let find = |name: &String| {
        ALL.iter()
            .find(|experiment| experiment.name == *name)
            .copied()
            .with_context(|| format!("no experiment '{name}'; 'vellum bench list' names them all"))
    };
    names.iter().map(find).collect()
}

fn run_one(experiment: &Experiment, arguments: &Arguments, engines: &Engines) -> Result<()> {
    std::fs::create_dir_all(&arguments.dir)
        .with_context(|| format!("cannot make {}", arguments.dir.display()))?;
    let scratch = Scratch(arguments.dir.join(format!("run-{}", std::process::id())));
    let context = Context {
        quick: arguments.quick,
        directory: scratch.0.clone(),
        device: arguments.device.clone(),
        model: arguments.model.clone(),
        engines,
        progress: match arguments.no_progress {
            true => Progress::hidden(),
            false => Progress::shown(experiment.name),
        },
    };
    let start = Instant::now();
    let mut outcome = (experiment.run)(&context);
    context.progress.end();
    if let (Ok(outcome), Some([lowest, median, highest])) =
        (&mut outcome, context.progress.distances())
    {
        outcome.notes.push(format!(
            "Between the samples a line of the cache went from one processor to another in \
             {lowest:.0} to {highest:.0} ns, median {median:.0}. Virtual processors move, and \
             figures of several threads depend on it."
        ));
    }
    let record = Record {
        experiment: experiment.name.to_owned(),
        shows: experiment.shows.to_owned(),
        source: experiment.source.to_owned(),
        quick: arguments.quick,
        machine: machine::describe(),
        command: format!(
            "vellum bench {}{}",
            experiment.name,
            if arguments.quick { " --quick" } else { "" }
        ),
        seconds: start.elapsed().as_secs_f64(),
        outcome: outcome.with_context(|| format!("experiment '{}'", experiment.name))?,
    };
    show(&text::render(&record))?;
    let mut records = json::read(&arguments.json)?;
    json::replace(&mut records, record);
    json::write(&arguments.json, &records)
}

/// A directory that is removed when its run ends, even by an error.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory that was never created, or is in use, stays.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
