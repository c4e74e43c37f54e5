//! The cache daemon: it has files in memory as Morsels, and hands them to clients that may read
//! them (paper, section 3.1).
//!
//! A client names a file by a descriptor of it that is open for reading, so no client gets a file
//! that it could not read itself. The daemon never opens a path for a client.

mod admission;
mod cache;
mod connection;
mod error;
mod folder;
mod load;
mod socket;
mod source;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

use crate::backend::BackendKind;
use crate::protocol::Refusal;
use crate::provider::Provider;
use crate::sys;
pub use error::DaemonError;

use admission::{Admission, Ticket};
use cache::{Asker, Bounds, Cache};
use folder::Folder;
use socket::Socket;

/// How long to wait if a connection cannot be accepted for lack of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// The number of descriptors to assume if there is no limit.
const DESCRIPTORS: u64 = 1 << 20;

/// How a daemon is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonOptions {
    /// The path of its socket.
    pub socket: PathBuf,
    /// The mode of the socket, which says who may connect: 0o666 for all users.
    pub mode: u32,
    /// Bytes that it may keep.
    pub limit: u64,
    /// Threads that load one file: see [`usual_threads`](Self::usual_threads).
    pub threads: usize,
    /// Files stay when the daemon ends, for the next one at this socket: see [`Daemon::kept`].
    pub keep: bool,
}

impl DaemonOptions {
    /// As many threads for a load as this process may use processors, but at most 8: a load copies
    /// from the page cache, and a few threads use all the bandwidth of the memory.
    pub fn usual_threads() -> usize {
        thread::available_parallelism().map_or(1, |processors| processors.get().min(8))
    }
}

/// A daemon that listens. Dropping it removes its socket's file; clients keep their Morsels.
#[derive(Debug)]
pub struct Daemon {
    socket: Socket,
    cache: Arc<Cache>,
    admission: Arc<Admission>,
    backend: BackendKind,
    kept: Result<usize, String>,
}

impl Daemon {
    /// Listens, but accepts no connection yet. Takes over the files that another daemon has left
    /// for this one, or frees their memory if it shall keep none. Raises the number of descriptors
    /// that this process may have to its hard limit, because each file takes one.
    ///
    /// # Errors
    /// [`DaemonError::Running`] or [`DaemonError::Socket`].
    pub fn bind(provider: Provider, options: &DaemonOptions) -> Result<Self, DaemonError> {
        let backend = provider.backend();
        let bounds = Bounds {
            bytes: options.limit,
            objects: usize::try_from(raise_descriptors() / 2).unwrap_or(usize::MAX),
            threads: options.threads,
        };
        let socket = Socket::bind(&options.socket, options.mode)?;
        let folder = if options.keep {
            Folder::open(&provider, &options.socket)
        } else {
            Folder::clear(&provider, &options.socket);
            Err("it was asked not to keep them".into())
        };
        let why = folder.as_ref().err().cloned();
        let cache = Arc::new(Cache::new(provider, bounds, folder.ok()));
        let kept = why.map_or_else(|| Ok(cache.stat().objects as usize), Err);
        Ok(Self { socket, cache, admission: Arc::default(), backend, kept })
    }

    /// How many files it has from the daemon before it; or a sentence that says why it keeps none
    /// for the next one. Only with the module do Morsels have names by which a daemon can find them
    /// again.
    ///
    /// # Errors
    /// The words.
    pub fn kept(&self) -> Result<usize, &str> {
        self.kept.as_ref().copied().map_err(String::as_str)
    }

    /// The backend of its Morsels.
    pub fn backend(&self) -> BackendKind {
        self.backend
    }

    /// Serves clients until `stop` is readable, or its other end is closed.
    ///
    /// # Errors
    /// [`DaemonError::Wait`].
    pub fn run(&self, stop: impl AsFd) -> Result<(), DaemonError> {
        loop {
            let mut both = [
                PollFd::new(&self.socket.listener, PollFlags::IN),
                PollFd::new(&stop, PollFlags::IN),
            ];
            match poll(&mut both, None) {
                Err(Errno::INTR) => continue,
                result => result.map_err(DaemonError::Wait)?,
            };
            if !both[1].revents().is_empty() {
                return Ok(());
            }
            match self.socket.listener.accept() {
                Ok((stream, _)) => self.take(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The client has gone already, or a resource is short for the moment.
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    /// Serves a connection in a thread of its own, if the limits allow another one.
    fn take(&self, stream: UnixStream) {
        let Ok(uid) = sys::peer_user(stream.as_fd()) else { return };
        let asker = Asker { uid, sees_all: uid == 0 || uid == geteuid().as_raw() };
        let Some(ticket) = self.admission.admit(asker.uid) else {
            return connection::refuse(&stream, Refusal::Busy);
        };
        let cache = Arc::clone(&self.cache);
        let serve = move || {
            let _ticket: Ticket = ticket;
            connection::serve(&stream, asker, &cache);
        };
        // Without a thread the daemon closes the stream, which tells the client so.
        let _ = thread::Builder::new().name("client".into()).spawn(serve);
    }
}

/// Raises the limit of descriptors as far as this process may; returns the limit.
fn raise_descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let now = if setrlimit(Resource::Nofile, raised).is_ok() { raised } else { limit };
    now.current.unwrap_or(DESCRIPTORS)
}
