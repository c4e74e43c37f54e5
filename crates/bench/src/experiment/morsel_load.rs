//! How fast several processes have one large file, all of it, and how much memory that takes.
//!
//! As figure 2 of the paper on Morsels, whose competitor is a file mapping that the kernel fills at
//! once; beside it stands what many programs do, reading the file into memory of their own. The
//! file is in the page cache, and the daemon has it: what is measured is the sharing.

use std::cell::Cell;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, ensure};
use vellum_morsel::{BackendChoice, BackendKind, Client, Daemon, DaemonOptions, Provider};

use super::{Context, Experiment};
use crate::measure::{Contestant, alternate};
use crate::report::{Outcome, Row};
use crate::worker::{Launcher, Way, Weight, Worker, make_file, warm_file};

/// The experiment.
pub const MORSEL_LOAD: Experiment = Experiment {
    name: "morsel-load",
    shows: "one file for several processes: each reads it, each maps it, the daemon hands it out",
    source: "DIMES'23, figure 2",
    run,
};

/// Processes that want the file.
const PROCESSES: usize = 4;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let bytes: u64 = context.pick(128 << 20, 1 << 30);
    let directory = context.make_directory("morsel-load")?;
    let path = directory.join("file");
    let sum = make_file(&path, bytes)?;
    let mut outcome = Outcome::default();
    let daemons = start_daemons(&directory, bytes, &mut outcome)?;
    for daemon in &daemons {
        outcome.rows.push(daemon.load(&path, bytes)?);
    }
    // The daemon has the kernel drop what it has read.
    warm_file(&path)?;
    let mut crew = Vec::new();
    for number in 0..PROCESSES {
        let name = format!("client {number}");
        crew.push(Worker::start(&Launcher::this_program()?, &name, None)?);
    }
    let mut ways = vec![
        ("each reads the file".to_owned(), Way::Read),
        ("each maps the file".to_owned(), Way::Map),
    ];
    ways.extend(daemons.iter().map(|daemon| {
        (format!("from the daemon, {}", daemon.backend), Way::Daemon(daemon.socket.clone()))
    }));
    let weights = vec![Cell::default(); ways.len()];
    let crew = std::cell::RefCell::new(crew);
    let contestants = ways.iter().zip(&weights).map(|((name, way), weight)| {
        let (crew, path) = (&crew, &path);
        Contestant::new(name, move || {
            let crew = &mut *crew.borrow_mut();
            let start = Instant::now();
            for worker in crew.iter_mut() {
                worker.begin_hold(way, path)?;
            }
            for worker in crew.iter_mut() {
                ensure!(worker.held()? == sum, "the bytes are not those of the file");
            }
            let seconds = start.elapsed().as_secs_f64();
            weight.set(weigh(crew)?);
            for worker in crew.iter_mut() {
                worker.let_go()?;
            }
            Ok(PROCESSES as f64 / seconds)
        })
    });
    let samples = alternate(context.rounds(), &context.progress, contestants.collect())?;
    for of_way in &samples {
        outcome.rows.push(Row::of(of_way, "loads/s").against(of_way, &samples[0]));
    }
    for ((name, way), weight) in ways.iter().zip(&weights) {
        let is_of_module = |daemon: &&Running| {
            daemon.backend == BackendKind::Kernel && *way == Way::Daemon(daemon.socket.clone())
        };
        // The module's memory is in no process' account.
        let apart = if daemons.iter().any(|daemon| is_of_module(&daemon)) { bytes } else { 0 };
        let Weight { memory, tables } = weight.get();
        let ratio = (memory + apart) as f64 / bytes as f64;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        outcome.rows.push(
            Row::count(format!("memory, {name}"), mib(memory + apart), "MiB")
                .with_ratio(ratio, "the file"),
        );
        outcome.rows.push(Row::count(format!("page tables, {name}"), mib(tables), "MiB"));
    }
    outcome.notes.push(format!(
        "{PROCESSES} processes at once, a file of {} MiB in the page cache. A load ends when a \
         word of each page has been read. Memory is that of all processes, shared pages counted \
         once; reading has the page cache's copy of the file besides.",
        bytes >> 20
    ));
    Ok(outcome)
}

/// What all processes together have in memory.
fn weigh(crew: &mut [Worker]) -> Result<Weight> {
    let mut all = Weight::default();
    for worker in crew {
        let weight = worker.weigh()?;
        all.memory += weight.memory;
        all.tables += weight.tables;
    }
    Ok(all)
}

/// A daemon of this process, which ends with the value.
struct Running {
    backend: BackendKind,
    socket: std::path::PathBuf,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(provider: Provider, directory: &Path, limit: u64) -> Result<Running> {
        let backend = provider.backend();
        let socket = directory.join(format!("{backend}.sock"));
        let options = DaemonOptions { socket: socket.clone(), mode: 0o600, limit, threads: 4 };
        let daemon = Daemon::bind(provider, &options)?;
        let (stop, stopped) = UnixStream::pair()?;
        let thread = thread::spawn(move || {
            // A daemon that cannot wait hangs up, and its clients say so.
            let _ = daemon.run(stopped);
        });
        Ok(Running { backend, socket, stop: Some(stop), thread: Some(thread) })
    }

    /// The first load, which the daemon does once for all.
    fn load(&self, path: &Path, bytes: u64) -> Result<Row> {
        warm_file(path)?;
        let file = std::fs::File::open(path)?;
        let start = Instant::now();
        let loaded = Client::new(&self.socket).load(&file, |_| {}).context("the first load")?;
        let seconds = start.elapsed().as_secs_f64();
        ensure!(!loaded.was_there, "the daemon had a file that it had never seen");
        let rate = bytes as f64 / seconds / f64::from(1 << 20);
        Ok(Row::count(format!("first load by the daemon, {}", self.backend), rate, "MiB/s"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has nothing more to say.
            let _ = thread.join();
        }
    }
}

/// A daemon for each backend that this machine has; a note for the others.
fn start_daemons(directory: &Path, bytes: u64, outcome: &mut Outcome) -> Result<Vec<Running>> {
    let mut daemons = Vec::new();
    for backend in BackendKind::ALL {
        match Provider::new(BackendChoice::Only(backend)) {
            Ok(provider) => daemons.push(Running::start(provider, directory, bytes)?),
            Err(error) => outcome.notes.push(format!("Left out: {error}.")),
        }
    }
    if daemons.is_empty() {
        return Err(anyhow!("this kernel has no sealed memfd"));
    }
    Ok(daemons)
}
