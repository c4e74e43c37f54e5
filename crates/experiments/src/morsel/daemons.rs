//! Processes that get a file, and cache daemons that have it.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result, anyhow};
use vellum_morsel::{BackendChoice, BackendKind, Client, Daemon, DaemonOptions, Provider};

use vellum_bench::report::Outcome;
use vellum_bench::worker::{Launcher, Weight, Worker};

/// A file that processes get.
pub struct Source {
    pub path: PathBuf,
    pub bytes: u64,
    /// The sum of the first words of its pages.
    pub sum: u64,
}

/// Starts so many processes.
pub fn start_workers(processes: usize) -> Result<Vec<Worker>> {
    let launcher = Launcher::this_program()?;
    (0..processes)
        .map(|number| Worker::start(&launcher, &format!("client {number}"), None))
        .collect()
}

/// The memory of all processes together once they have the file, from a daemon if there is one.
pub fn weigh(workers: &mut [Worker], daemon: Option<&Running>, file: &Source) -> Result<Weight> {
    let mut all = Weight::default();
    for worker in workers {
        let weight = worker.weigh()?;
        all.memory += weight.memory;
        all.tables += weight.tables;
    }
    // The kernel counts the module's memory for no process.
    if daemon.is_some_and(|daemon| daemon.backend == BackendKind::Kernel) {
        all.memory += file.bytes;
    }
    Ok(all)
}

/// A daemon in this process, which ends when this is dropped.
pub struct Running {
    pub backend: BackendKind,
    pub socket: PathBuf,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(provider: Provider, directory: &Path, limit: u64) -> Result<Running> {
        let backend = provider.backend();
        let socket = directory.join(format!("{backend}.sock"));
        let threads = DaemonOptions::usual_threads();
        let options =
            DaemonOptions { socket: socket.clone(), mode: 0o600, limit, threads, keep: false };
        let daemon = Daemon::bind(provider, &options)?;
        let (stop, stopped) = UnixStream::pair()?;
        let thread = thread::spawn(move || {
            // A daemon with an error closes its connections, and its clients report that.
            let _ = daemon.run(stopped);
        });
        Ok(Running { backend, socket, stop: Some(stop), thread: Some(thread) })
    }

    /// Has the daemon load the file, unless it has it.
    pub fn load(&self, path: &Path) -> Result<()> {
        Client::new(&self.socket).load(&File::open(path)?, |_| {}).context("loading")?;
        Ok(())
    }

    /// Has the daemon forget the file, if it has it.
    pub fn forget(&self, path: &Path) -> Result<()> {
        Client::new(&self.socket).remove(&File::open(path)?).context("forgetting")?;
        Ok(())
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
pub fn start_daemons(directory: &Path, bytes: u64, outcome: &mut Outcome) -> Result<Vec<Running>> {
    // Daemons count whole pages.
    let limit = bytes.next_multiple_of(4096);
    let mut daemons = Vec::new();
    for backend in BackendKind::ALL {
        match Provider::new(BackendChoice::Only(backend)) {
            Ok(provider) => daemons.push(Running::start(provider, directory, limit)?),
            Err(error) => outcome.notes.push(format!("Left out: {error}.")),
        }
    }
    if daemons.is_empty() {
        return Err(anyhow!("this kernel has no sealed memfd"));
    }
    Ok(daemons)
}
