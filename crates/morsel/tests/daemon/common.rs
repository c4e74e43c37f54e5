//! A daemon in this process, files for it, and clients in other processes.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::{self, JoinHandle};

use vellum_morsel::{
    Access, BackendChoice, BackendKind, Client, Daemon, DaemonOptions, Error, Provider,
};
pub use vellum_testing::patience::eventually;

/// A daemon that ends when this is dropped.
pub struct Running {
    pub client: Client,
    pub folder: tempfile::TempDir,
    pub backend: BackendKind,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub fn start(provider: Provider, limit: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = options(&folder.path().join("socket"), limit);
        let backend = provider.backend();
        let daemon = Daemon::bind(provider, &options).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let thread = thread::spawn(move || daemon.run(stopped).unwrap());
        let client = Client::new(&options.socket);
        Self { client, folder, backend, stop: Some(stop), thread: Some(thread) }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// A file of these bytes.
    pub fn file(&self, name: &str, bytes: &[u8]) -> (PathBuf, File) {
        let path = self.folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        (path.clone(), File::open(path).unwrap())
    }

    /// A sparse file of zeros, so large that a client gets progress before its load ends.
    pub fn endless_file(&self) -> (PathBuf, File) {
        let path = self.folder.path().join("endless");
        File::create(&path).unwrap().set_len(16 << 30).unwrap();
        (path.clone(), File::open(path).unwrap())
    }

    pub fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A test that has already failed must not panic again.
            let _ = thread.join();
        }
    }
}

pub fn options(socket: &Path, limit: u64) -> DaemonOptions {
    DaemonOptions { socket: socket.into(), mode: 0o666, limit, threads: 2, keep: false }
}

/// Runs a test with a daemon on each backend of this machine. Prints which backends it skips.
pub fn on_each(limit: u64, test: impl Fn(&mut Running)) {
    for kind in BackendKind::ALL {
        match Provider::new(BackendChoice::Only(kind)) {
            Ok(provider) => test(&mut Running::start(provider, limit)),
            Err(Error::Unavailable { backend, reason }) => {
                assert!(kind == BackendKind::Kernel, "{kind}: {reason}");
                println!("skipped on the backend '{backend}': {reason}");
            }
            Err(error) => panic!("{kind}: {error}"),
        }
    }
}

/// Bytes in which neighbouring pages differ.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 4096 * 31 + at * 7) as u8).collect()
}

/// Loads a file and returns the Morsel's bytes, and whether the daemon had it.
pub fn load(client: &Client, file: &File) -> (Vec<u8>, bool) {
    let loaded = client.load(file, |_| {}).unwrap();
    let mapping = loaded.morsel.map(Access::Read).unwrap();
    (mapping.view().unwrap().to_vec(), loaded.was_there)
}

/// The variable that makes a process a client, with the task, the socket and the file.
const CLIENT: &str = "VELLUM_TEST_CLIENT";

/// A client in its own process.
pub fn client_process(does: &str, socket: &Path, file: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let words = [does, socket.to_str().unwrap(), file.to_str().unwrap()].join(" ");
    command.args(["common::a_client_in_its_own_process", "--exact", "--ignored", "--nocapture"]);
    command.env(CLIENT, words).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// A client process whose load is running.
pub struct Loading {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Loading {
    /// Starts a client, and waits until it gets the first progress of its load.
    pub fn start(socket: &Path, file: &Path) -> Self {
        let mut child = client_process("load", socket, file).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut loading = Self { child, lines };
        loading.done();
        loading
    }

    /// The loaded bytes of the next progress message.
    pub fn done(&mut self) -> u64 {
        let mut words = self.lines.by_ref().map_while(Result::ok);
        let done = words.find_map(|line| line.strip_prefix("progress ")?.parse().ok());
        done.expect("the load was over")
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
#[ignore = "other tests start this as a process"]
fn a_client_in_its_own_process() {
    let words = std::env::var(CLIENT).unwrap();
    let words: Vec<&str> = words.split(' ').collect();
    let client = Client::new(words[1]);
    match words[0] {
        "load" => {
            let file = File::open(words[2]).unwrap();
            let loaded =
                client.load(&file, |progress| println!("progress {}", progress.done)).unwrap();
            let mapping = loaded.morsel.map(Access::Read).unwrap();
            let sum: u64 = mapping.view().unwrap().iter().map(|byte| u64::from(*byte)).sum();
            println!("loaded sum={sum} was_there={}", loaded.was_there);
        }
        "list" => {
            for object in client.list().unwrap() {
                println!("listed {}", object.name);
            }
        }
        other => panic!("{other}"),
    }
}
