//! The control socket of a store. A process that has a store open answers the commands of others
//! there, such as `vellum backup`, which cannot open the store themselves.
//!
//! The socket lies beside the store's file, as `NAME.control`. A request is a word and its fields,
//! each ended by a NUL: `backup`, with the file to make, the base of an increment or nothing,
//! letters for the options, and the limit of bytes in a second or nothing; `compact`; `stat`;
//! `resize-pool`, with the bytes. The answer is lines: `vellum` with [`VERSION`] and the identity
//! of the store's file, then `progress` with numbers now and then, and at the end `done` with the
//! report, `failed` with the error, [`CLOSED`], or [`DENIED`] with the reason. A client that sends
//! an end of file ends its request.
//!
//! Both sides ask the kernel who the other one is. The owner of the store serves its own user and
//! root; a client believes root, its own user, and the owner of the store's file.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf, absolute};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind,
    listen, recv, send, shutdown, socket_with,
};
use rustix::process::geteuid;
use vellum_log::OpeningProcess;
use vellum_pool::{Latency, PAGE_SIZE, PoolStats, Translation};

use crate::backup::{BackupOptions, BackupProgress, BackupReport};
use crate::error::{Error, Result};
use crate::peer::Peer;
use crate::store::compact::{CompactProgress, CompactReport};
use crate::store::core::{Requests, StoreCore};
use crate::store::header::{Header, HeaderPage};
use crate::store::{Store, StoreStat};
use crate::sync::lock;

/// The version of these messages.
const VERSION: u64 = 1;

/// The owner's answer once it is none: it has closed the store, or ends its socket.
const CLOSED: &str = "closed";

/// The first word of the owner's answer to a process that may not ask it.
const DENIED: &str = "denied";

/// How long one side waits for a message that the other one owes it, or for room to send one.
const PATIENCE: Duration = Duration::from_secs(10);

/// The time between two lines about the progress, and between two looks at the caller's function.
const PAUSE: Duration = Duration::from_millis(100);

/// The most requests at a time. Others are refused.
const MOST: usize = 8;

/// The most bytes of a request: three paths, and a little.
const REQUEST_MAX: u64 = 16 << 10;

/// The most bytes of a line: an error may have several paths.
const LINE_MAX: usize = 64 << 10;

/// The control socket of a store that this process has open ([`Store::control_socket`]). Dropping
/// it ends the requests that are under way, waits for their ends, and removes the socket; in the
/// child of a fork it does nothing. A function that the store calls (the progress of a backup, the
/// function of an update) must not drop it: a request may wait for what the caller holds.
#[derive(Debug)]
pub struct ControlSocket {
    /// A child of a fork has the socket, too, and none of its threads.
    process: OpeningProcess,
    place: PathBuf,
    /// Of the socket's file: another process may have put its own there.
    identity: Identity,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the threads of a socket share.
#[derive(Debug)]
struct Shared {
    listener: UnixListener,
    /// It does not keep the store open.
    core: Weak<StoreCore>,
    /// Of the store's file, which may get another name, and its name to another file.
    file: Identity,
    ends: AtomicBool,
    /// Those whose requests are under way.
    clients: Mutex<Vec<Weak<UnixStream>>>,
}

/// The device and the number of a file.
type Identity = (u64, u64);

fn identity(file: &fs::Metadata) -> Identity {
    (file.dev(), file.ino())
}

impl Store {
    /// Lets other processes of the same user, and of root, have this one work for them while it has
    /// the store open: the commands `vellum backup`, `compact`, `stat` and `resize-pool`, and the
    /// functions [`request_backup`], [`request_compact`], [`request_stat`] and
    /// [`request_resize_pool`]. `path` is the path of the store's file; the socket is
    /// `PATH.control`. Threads of this process do the work, with its rights.
    ///
    /// [`Store::close`] does not wait until requests have done their work: it ends them. Nor do
    /// requests keep a store open whose handles are dropped, but for the moment until they notice;
    /// call `close` if the store must be closed by a certain time. Once the store is closed,
    /// requests fail. A second socket of the store takes the place of the first.
    ///
    /// # Examples
    /// ```
    /// # let folder = tempfile::tempdir()?;
    /// use vellum::{BackupOptions, Options, Store, request_backup};
    ///
    /// let path = folder.path().join("films");
    /// let store = Store::create(&path, &Options::new())?;
    /// let control = store.control_socket(&path)?;
    /// // Another process, or `vellum backup films sunday`:
    /// let (to, options) = (folder.path().join("sunday"), BackupOptions::new());
    /// request_backup(&path, &to, &options, &mut |_| std::ops::ControlFlow::Continue(()))?;
    /// # Store::open(&to, &Options::new())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ReadOnly`](Error::ReadOnly): other processes back such a store up themselves;
    /// [`BadOption`](Error::BadOption) if the file is not that of this store;
    /// [`Control`](Error::Control) if the socket cannot be made.
    pub fn control_socket(&self, path: impl AsRef<Path>) -> Result<ControlSocket> {
        let path = path.as_ref();
        self.core.pages.check_process()?;
        self.core.pages.check_writable()?;
        let store_id = self.core.pages.header().store_id;
        let failed = |source| {
            let doing = format!("making the control socket {}.control", path.display());
            Error::Control { doing, source }
        };
        let Some(file) = file_of_store(path, store_id).map_err(failed)? else {
            let what = format!("{} is not the file of this store", path.display());
            return Err(Error::BadOption(what));
        };
        ControlSocket::make(path, file, Arc::downgrade(&self.core)).map_err(failed)
    }
}

/// The file, if it has a header of this store, and is locked, as that of an open store is. So a
/// copy or a backup is another file, unless it is open as well.
fn file_of_store(path: &Path, store_id: u128) -> io::Result<Option<Identity>> {
    let mut pages = [[0; PAGE_SIZE]; 2];
    // A pipe by this name must not keep the caller waiting.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let is_unlocked = || flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
    let found = file.metadata()?;
    let kind = found.file_type();
    if !(kind.is_file() || kind.is_block_device()) || is_unlocked() {
        return Ok(None);
    }
    for (number, page) in (0..).zip(&mut pages) {
        match file.read_exact(page) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        // The other one may be under the pen of a checkpoint.
        if matches!(Header::decode(number, page), HeaderPage::Valid(it) if it.store_id == store_id)
        {
            return Ok(Some(identity(&found)));
        }
    }
    Ok(None)
}

/// Where the socket of the store in this file is.
fn place_of(path: &Path) -> io::Result<PathBuf> {
    let mut place = path.canonicalize()?.into_os_string();
    place.push(".control");
    Ok(place.into())
}

/// Calls a function with a short path of a socket: an address has room for some hundred bytes only.
fn by_short_path<T>(place: &Path, call: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    let (Some(folder), Some(name)) = (place.parent(), place.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    let number = folder.as_raw_fd();
    call(&Path::new(&format!("/proc/thread-self/fd/{number}")).join(name))
}

impl ControlSocket {
    fn make(path: &Path, file: Identity, core: Weak<StoreCore>) -> io::Result<ControlSocket> {
        let place = place_of(path)?;
        // The store holds the lock of its file. So no other process needs a socket that is there.
        match fs::symlink_metadata(&place) {
            Ok(found) if found.file_type().is_socket() => fs::remove_file(&place)?,
            Ok(_) => return Err(Errno::EXIST.into()),
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Err(_) => {}
        }
        // So no other user can connect. Not the only defence: the threads look at each client.
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        fchmod(&listener, Mode::RUSR | Mode::WUSR)?;
        by_short_path(&place, |short| Ok(bind(&listener, &SocketAddrUnix::new(short)?)?))?;
        listen(&listener, 2 * MOST as i32)?;
        let listener = UnixListener::from(listener);
        let identity = identity(&fs::symlink_metadata(&place)?);
        let (ends, clients) = (AtomicBool::new(false), Mutex::default());
        let shared = Arc::new(Shared { listener, core, file, ends, clients });
        let process = OpeningProcess::new();
        let mut socket = ControlSocket { process, place, identity, shared, thread: None };
        let shared = socket.shared.clone();
        let work = move || thread::scope(|scope| accept(&shared, scope));
        socket.thread = Some(Builder::new().name("vellum-control".into()).spawn(work)?);
        Ok(socket)
    }

    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.place
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if !self.process.is_here() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.ends.store(true, Ordering::Release);
        // Their threads wake up, and end the requests.
        let _ = shutdown(&self.shared.listener, Shutdown::Both);
        lock(&self.shared.clients).iter().filter_map(Weak::upgrade).for_each(|it| hang_up(&it));
        if let Some(thread) = self.thread.take() {
            // Panics of requests were caught.
            drop(thread.join());
        }
        let found = fs::symlink_metadata(&self.place);
        if found.is_ok_and(|found| identity(&found) == self.identity) {
            let _ = fs::remove_file(&self.place);
        }
    }
}

/// The other side may still read what is said.
fn hang_up(client: &UnixStream) {
    let _ = shutdown(client, Shutdown::Read);
}

/// Accepts clients until the socket ends. Each has a thread of its own.
fn accept<'s>(shared: &'s Shared, scope: &'s thread::Scope<'s, '_>) {
    while !shared.ends.load(Ordering::Acquire) {
        let Ok((client, _)) = shared.listener.accept() else {
            // The process may have too many files open for now.
            if !shared.ends.load(Ordering::Acquire) {
                thread::sleep(PAUSE);
            }
            continue;
        };
        let client = Arc::new(client);
        {
            let mut clients = lock(&shared.clients);
            clients.retain(|client| client.strong_count() > 0);
            if clients.len() >= MOST {
                let _ = say(&client, "failed too many requests at a time");
                continue;
            }
            clients.push(Arc::downgrade(&client));
        }
        // It may be too late for the thread that ends the socket to see it.
        if shared.ends.load(Ordering::Acquire) {
            hang_up(&client);
        }
        let work = move || {
            let served = catch_unwind(AssertUnwindSafe(|| serve(shared, &client)));
            let answer = served.unwrap_or_else(|_| Ok("failed its thread panicked".into()));
            // The client may ask again as soon as it has the answer: this request must not count
            // any more.
            lock(&shared.clients).retain(|other| other.as_ptr() != Arc::as_ptr(&client));
            if let Ok(answer) = answer {
                let _ = say(&client, &answer);
            }
        };
        // Without a thread the client sees its connection end.
        let _ = Builder::new().name("vellum-request".into()).spawn_scoped(scope, work);
    }
}

/// Serves one client, and returns the last line for it. An error is the client's end.
fn serve(shared: &Shared, client: &UnixStream) -> io::Result<String> {
    client.set_write_timeout(Some(PATIENCE))?;
    let peer = Peer::of(client)?;
    if ![0, geteuid().as_raw()].contains(&peer.user) || !peer.is_known() {
        let what = "only the user of the process that has the store open and root may ask it";
        return Ok(format!("{DENIED} {what}"));
    }
    let (device, number) = shared.file;
    say(client, &format!("vellum {}", to_words(&[VERSION, device, number])))?;
    let request = match Request::read(client) {
        Ok(request) => request,
        Err(_) if shared.ends.load(Ordering::Acquire) => return Ok(CLOSED.into()),
        Err(error) => return Ok(format!("failed {error}")),
    };
    Ok(match shared.core.upgrade() {
        // Handles keep the memory of a store that was closed by another one.
        Some(core) if core.pages.check_open().is_ok() => {
            perform(shared, client, &Store { core }, request)
        }
        _ => CLOSED.into(),
    })
}

/// Does what a client has asked for, and returns the answer.
fn perform(shared: &Shared, client: &UnixStream, store: &Store, request: Request) -> String {
    let core = &store.core;
    let _under_way = core.requests.begin();
    let (mut told, mut closes) = (None::<Instant>, false);
    let mut tell = |numbers: &[u64]| {
        // If only requests have the store, it is to close.
        closes |= core.closing.load(Ordering::Acquire) || !Requests::has_others(core);
        if closes || shared.ends.load(Ordering::Acquire) {
            return ControlFlow::Break(());
        }
        if told.is_some_and(|told| told.elapsed() < PAUSE) {
            return ControlFlow::Continue(());
        }
        told = Some(Instant::now());
        match say_if_room(client, &format!("progress {}", to_words(numbers))) {
            Ok(()) if !has_hung_up(client) => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    };
    let done = match request {
        Request::Backup { file, options } => store
            .backup(&file, &options, &mut |BackupProgress { bytes_done, bytes_total }| {
                tell(&[bytes_done, bytes_total])
            })
            .map(|report| {
                backup_to_words(
                    &report,
                    fs::metadata(file).map_or((0, 0), |found| identity(&found)),
                )
            }),
        Request::Compact => store
            .compact(&mut |CompactProgress { pass, pages_seen, pages_total, pages_moved }| {
                tell(&[u64::from(pass), pages_seen, pages_total, pages_moved])
            })
            .map(|report| compaction_to_words(&report)),
        Request::Stat => store
            .stat()
            .map(|stat| stat_to_words(&stat, &store.pool_stats(), store.pool().translation())),
        Request::ResizePool { bytes } => {
            store.resize_pool(bytes).map(|()| core.pages.pool_bytes().to_string())
        }
    };
    match done {
        Ok(words) => format!("done {words}"),
        Err(Error::Cancelled) if closes => format!("failed {}", Error::Closed),
        Err(error) => format!("failed {error}"),
    }
}

/// Whether the other side has sent its end of file.
fn has_hung_up(client: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(recv(client, &mut [0_u8; 1][..], flags), Ok((_, 0)))
}

/// Sends a line if the socket has room for it. A client that does not read misses some.
fn say_if_room(stream: &UnixStream, line: &str) -> io::Result<()> {
    let line = line.to_owned() + "\n";
    // The kernel takes a short message as a whole, or not at all.
    match send(stream, line.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Sends a line.
fn say(stream: &UnixStream, line: &str) -> io::Result<()> {
    send_all(stream, (line.replace('\n', " ") + "\n").as_bytes())
}

/// Sends bytes. The other side may be gone, which must not kill this process.
fn send_all(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// What a client asks for.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Backup { file: PathBuf, options: BackupOptions },
    Compact,
    Stat,
    ResizePool { bytes: u64 },
}

impl Request {
    /// The request for a backup as bytes. Relative paths are those of this process.
    fn backup_to_bytes(file: &Path, options: &BackupOptions) -> io::Result<Vec<u8>> {
        let file = absolute(file)?;
        let since = options.since.as_ref().map(absolute).transpose()?.unwrap_or_default();
        let letter = |yes: bool, letter| if yes { letter } else { "" };
        let letters = [
            letter(options.replace, "r"),
            letter(options.check, "c"),
            letter(options.read_all, "a"),
        ]
        .concat();
        let rate = options.bytes_per_second.map(|rate| rate.to_string()).unwrap_or_default();
        let paths = [file.as_os_str().as_bytes(), since.as_os_str().as_bytes()];
        if paths.iter().any(|path| path.contains(&0)) {
            return Err(ErrorKind::InvalidInput.into());
        }
        let fields = [b"backup", paths[0], paths[1], letters.as_bytes(), rate.as_bytes()];
        Ok(fields.map(|field| [field, &[0]].concat()).concat())
    }

    /// The request that a client sends.
    ///
    /// # Errors
    /// What is wrong with it; the client has ended, or sends nothing for too long.
    fn read(client: &UnixStream) -> io::Result<Request> {
        let until = Instant::now() + PATIENCE;
        let mut input = BufReader::new(Timed { client, until }.take(REQUEST_MAX));
        let mut next = || {
            let mut field = Vec::new();
            input.read_until(0, &mut field)?;
            match field.pop() {
                Some(0) => Ok(field),
                _ => Err(io::Error::other("the request is cut off, or too long")),
            }
        };
        match &next()?[..] {
            b"compact" => Ok(Request::Compact),
            b"stat" => Ok(Request::Stat),
            b"resize-pool" => match number(&next()?) {
                Some(bytes) => Ok(Request::ResizePool { bytes }),
                None => Err(io::Error::other("the size is no number")),
            },
            b"backup" => Self::backup_of_fields(&[next()?, next()?, next()?, next()?])
                .map_err(io::Error::other),
            word => {
                let word = String::from_utf8_lossy(word);
                Err(io::Error::other(format!("it knows no request '{word}'")))
            }
        }
    }

    /// The backup that these fields ask for, or what is wrong with them.
    fn backup_of_fields(fields: &[Vec<u8>; 4]) -> Result<Request, String> {
        let [file, since, letters, rate] = fields;
        let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
        let has = |letter| letters.contains(&letter);
        let (replace, check) = (has(b'r'), has(b'c'));
        let mut options = BackupOptions::new().replace(replace).check(check).read_all(has(b'a'));
        if let Some(letter) = letters.iter().find(|letter| !b"rca".contains(letter)) {
            return Err(format!("it knows no option '{}'", char::from(*letter)));
        }
        if !since.is_empty() {
            options = options.since(path(since));
        }
        if !rate.is_empty() {
            options = options.bytes_per_second(number(rate).ok_or("the limit is no number")?);
        }
        match path(file) {
            file if file.is_absolute() => Ok(Request::Backup { file, options }),
            _ => Err("the file has no absolute path".into()),
        }
    }
}

/// Reads from a client until a moment.
struct Timed<'c> {
    client: &'c UnixStream,
    until: Instant,
}

impl io::Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        // No time at all would mean any time.
        self.client.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        self.client.read(bytes)
    }
}

/// The number that a field of a request has.
fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn to_words(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

/// The numbers of a line, if these are so many.
fn of_words<const N: usize>(words: &str) -> Option<[u64; N]> {
    let numbers: Option<Vec<u64>> = words.split(' ').map(|word| word.parse().ok()).collect();
    numbers?.try_into().ok()
}

fn to_micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// A report, and which file the backup is.
fn backup_to_words(report: &BackupReport, file: Identity) -> String {
    let BackupReport { store_id, lsn, file_bytes, read_bytes, used_bytes, changes, duration } =
        *report;
    let (high, low) = ((store_id >> 64) as u64, store_id as u64);
    let micros = to_micros(duration);
    let (device, number) = file;
    to_words(&[high, low, lsn, file_bytes, read_bytes, used_bytes, changes, micros, device, number])
}

fn backup_of_words(words: &str) -> Option<(BackupReport, Identity)> {
    let [high, low, lsn, file_bytes, read_bytes, used_bytes, changes, micros, device, number] =
        of_words(words)?;
    let report = BackupReport {
        store_id: u128::from(high) << 64 | u128::from(low),
        lsn,
        file_bytes,
        read_bytes,
        used_bytes,
        changes,
        duration: Duration::from_micros(micros),
    };
    Some((report, (device, number)))
}

fn compaction_to_words(report: &CompactReport) -> String {
    let CompactReport { bytes_before, bytes_after, pages_moved, pages_left, .. } = *report;
    let (is_complete, micros) = (u64::from(report.is_complete), to_micros(report.duration));
    to_words(&[bytes_before, bytes_after, pages_moved, pages_left, is_complete, micros])
}

fn compaction_of_words(words: &str) -> Option<CompactReport> {
    let [bytes_before, bytes_after, pages_moved, pages_left, is_complete, micros] =
        of_words(words)?;
    let (is_complete, duration) = (is_complete == 1, Duration::from_micros(micros));
    Some(CompactReport {
        bytes_before,
        bytes_after,
        pages_moved,
        pages_left,
        is_complete,
        duration,
    })
}

/// The state of a store, as words `name=number`. A program of another version may know others: it
/// ignores those that it does not know, and takes 0 for those that are missing.
fn stat_to_words(store: &StoreStat, pool: &PoolStats, translation: Translation) -> String {
    let mut numbers = vec![
        ("store_id_high", (store.store_id >> 64) as u64),
        ("store_id_low", store.store_id as u64),
        ("format_version", store.format_version.into()),
        ("page_bytes", store.page_bytes.into()),
        ("file_pages", store.file_pages),
        ("used_pages", store.used_pages),
        ("free_pages", store.free_pages),
        ("pool_bytes", store.pool_bytes),
        ("trees", store.trees),
        ("clean", store.clean.into()),
        ("views", store.views),
        ("has_view", store.oldest_view.is_some().into()),
        ("oldest_view_micros", store.oldest_view.map_or(0, to_micros)),
        ("version_bytes", store.version_bytes),
        ("table", (translation == Translation::Table).into()),
    ];
    let mut pool = *pool;
    numbers.extend(pool_numbers(&mut pool).map(|(name, number)| (name, *number)));
    for (names, latency) in LATENCIES.into_iter().zip([pool.read_latency, pool.write_latency]) {
        let Latency { count, mean, p50, p99, p999, max } = latency;
        let times = [mean, p50, p99, p999, max].map(to_nanos);
        numbers.push((names[0], count));
        numbers.extend(names[1..].iter().copied().zip(times));
    }
    let words: Vec<_> = numbers.iter().map(|(name, number)| format!("{name}={number}")).collect();
    words.join(" ")
}

fn stat_of_words(words: &str, process: u32) -> Option<OwnerStat> {
    let numbers: Option<HashMap<&str, u64>> = words
        .split(' ')
        .map(|word| word.split_once('=').and_then(|(name, it)| Some((name, it.parse().ok()?))))
        .collect();
    let numbers = numbers?;
    let get = |name| numbers.get(name).copied().unwrap_or(0);
    let oldest_view = Duration::from_micros(get("oldest_view_micros"));
    let store = StoreStat {
        store_id: u128::from(get("store_id_high")) << 64 | u128::from(get("store_id_low")),
        format_version: u32::try_from(get("format_version")).ok()?,
        page_bytes: u32::try_from(get("page_bytes")).ok()?,
        file_pages: get("file_pages"),
        used_pages: get("used_pages"),
        free_pages: get("free_pages"),
        pool_bytes: get("pool_bytes"),
        trees: get("trees"),
        clean: get("clean") == 1,
        views: get("views"),
        oldest_view: (get("has_view") == 1).then_some(oldest_view),
        version_bytes: get("version_bytes"),
    };
    let mut pool = PoolStats::default();
    for (name, number) in pool_numbers(&mut pool) {
        *number = get(name);
    }
    [pool.read_latency, pool.write_latency] = LATENCIES.map(|[count, times @ ..]| {
        let [mean, p50, p99, p999, max] = times.map(|name| Duration::from_nanos(get(name)));
        Latency { count: get(count), mean, p50, p99, p999, max }
    });
    let translation = if get("table") == 1 { Translation::Table } else { Translation::Mmu };
    Some(OwnerStat { process, store, pool, translation })
}

/// The names of a pool's counters in a report.
fn pool_numbers(pool: &mut PoolStats) -> [(&'static str, &mut u64); 17] {
    [
        ("capacity_frames", &mut pool.capacity_frames),
        ("resident_frames", &mut pool.resident_frames),
        ("resident_frames_peak", &mut pool.resident_frames_peak),
        ("hits", &mut pool.hits),
        ("misses", &mut pool.misses),
        ("prefetches", &mut pool.prefetches),
        ("evictions", &mut pool.evictions),
        ("evictions_inline", &mut pool.evictions_inline),
        ("release_batches", &mut pool.release_batches),
        ("write_backs", &mut pool.write_backs),
        ("restarts", &mut pool.restarts),
        ("starvations", &mut pool.starvations),
        ("lock_waits", &mut pool.lock_waits),
        ("frame_waits", &mut pool.frame_waits),
        ("allocations", &mut pool.allocations),
        ("frees", &mut pool.frees),
        ("repairs", &mut pool.repairs),
    ]
}

/// The names of a pool's latencies in a report: the number of operations, then the times.
const LATENCIES: [[&str; 6]; 2] = [
    ["reads", "read_mean", "read_p50", "read_p99", "read_p999", "read_max"],
    ["writes", "write_mean", "write_p50", "write_p99", "write_p999", "write_max"],
];

fn to_nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Has the process that has the store in the file `store` open back it up, as [`Store::backup`]
/// does there. It must answer requests ([`Store::control_socket`]). The backup belongs to its user.
/// This process may end the backup by `progress`, and ends it when it ends itself.
///
/// # Errors
/// [`Control`](Error::Control) if no process answers requests for this store, with
/// [`NotFound`](ErrorKind::NotFound) or [`ConnectionRefused`](ErrorKind::ConnectionRefused), if
/// this one may not ask it, with [`PermissionDenied`](ErrorKind::PermissionDenied), or if it ends;
/// [`Owner`](Error::Owner) with what it says, if the backup fails; [`Cancelled`](Error::Cancelled).
pub fn request_backup(
    store: impl AsRef<Path>,
    path: impl AsRef<Path>,
    options: &BackupOptions,
    progress: &mut dyn FnMut(BackupProgress) -> ControlFlow<()>,
) -> Result<BackupReport> {
    let (store, path) = (store.as_ref(), path.as_ref());
    let request = Request::backup_to_bytes(path, options).map_err(|error| failed(store, error))?;
    let mut shown = BackupProgress { bytes_done: 0, bytes_total: 0 };
    let (_, done) = ask(store, &request, None, &mut |words| {
        if let Some([bytes_done, bytes_total]) = words.and_then(of_words) {
            shown = BackupProgress { bytes_done, bytes_total };
        }
        progress(shown)
    })?;
    // The other process may have other folders by these names, as in a container.
    match backup_of_words(&done) {
        Some((report, file)) if path.metadata().is_ok_and(|found| identity(&found) == file) => {
            Ok(report)
        }
        Some(_) => {
            let what = "it has made the backup, and this process does not find it there";
            Err(failed(store, io::Error::other(what)))
        }
        None => Err(bad_report(store, &done)),
    }
}

/// A store that another process has open ([`request_stat`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OwnerStat {
    /// The number of that process; 0 if it is in another namespace of processes, as of another
    /// container.
    pub process: u32,
    /// What [`Store::stat`] returns there.
    pub store: StoreStat,
    /// What [`Store::pool_stats`] returns there.
    pub pool: PoolStats,
    /// How it finds the memory of a tree page that becomes resident now.
    pub translation: Translation,
}

/// Asks the process that has the store in the file `store` open for the state of the store there.
/// It must answer requests ([`Store::control_socket`]).
///
/// # Errors
/// As for [`request_backup`], except that nothing is cancelled: a process that does not answer
/// within ten seconds is a [`Control`](Error::Control) error,
/// [`TimedOut`](ErrorKind::TimedOut).
pub fn request_stat(store: impl AsRef<Path>) -> Result<OwnerStat> {
    let store = store.as_ref();
    let until = Some(Instant::now() + PATIENCE);
    let (owner, done) = ask(store, b"stat\0", until, &mut |_| ControlFlow::Continue(()))?;
    stat_of_words(&done, owner.process).ok_or_else(|| bad_report(store, &done))
}

/// Has the process that has the store in the file `store` open change the size of its pool, in
/// bytes, as [`Store::resize_pool`] does there. It must answer requests
/// ([`Store::control_socket`]). Returns the size that the pool has then: whole pages.
///
/// # Errors
/// As for [`request_backup`], except that nothing is cancelled. After an
/// [`Owner`](Error::Owner) error the pool has its old size.
pub fn request_resize_pool(store: impl AsRef<Path>, bytes: u64) -> Result<u64> {
    let (store, request) = (store.as_ref(), format!("resize-pool\0{bytes}\0"));
    let go_on = &mut |_: Option<&str>| ControlFlow::Continue(());
    let (_, done) = ask(store, request.as_bytes(), None, go_on)?;
    done.parse().map_err(|_| bad_report(store, &done))
}

/// Has the process that has the store in the file `store` open compact it, as [`Store::compact`]
/// does there. It must answer requests ([`Store::control_socket`]). This process may end the
/// compaction by `progress`, and ends it when it ends itself. What has moved stays where it is.
///
/// # Errors
/// As for [`request_backup`].
pub fn request_compact(
    store: impl AsRef<Path>,
    progress: &mut dyn FnMut(CompactProgress) -> ControlFlow<()>,
) -> Result<CompactReport> {
    let store = store.as_ref();
    let mut shown = CompactProgress { pass: 0, pages_seen: 0, pages_total: 0, pages_moved: 0 };
    let (_, done) = ask(store, b"compact\0", None, &mut |words| {
        if let Some([pass, pages_seen, pages_total, pages_moved]) = words.and_then(of_words) {
            shown = CompactProgress { pass: pass as u32, pages_seen, pages_total, pages_moved };
        }
        progress(shown)
    })?;
    compaction_of_words(&done).ok_or_else(|| bad_report(store, &done))
}

fn failed(store: &Path, source: io::Error) -> Error {
    Error::Control {
        doing: format!("asking the process that has {} open", store.display()),
        source,
    }
}

fn bad_report(store: &Path, report: &str) -> Error {
    failed(store, io::Error::other(format!("its report is '{report}'")))
}

/// Asks the process that has the store open, and returns which it is and its report. Calls `tell`
/// with the progress when there is news, and now and then without. Waits for the end of the work,
/// or `until` a moment.
fn ask(
    store: &Path,
    request: &[u8],
    until: Option<Instant>,
    tell: &mut dyn FnMut(Option<&str>) -> ControlFlow<()>,
) -> Result<(Peer, String)> {
    let failed = |error| failed(store, error);
    let (peer, stream) = connect(store).map_err(failed)?;
    let file = fs::metadata(store).map(|found| identity(&found)).map_err(failed)?;
    let mut owner = Owner { lines: BufReader::new(&stream), line: Vec::new() };
    let (began, mut is_greeted, mut cancelled) = (Instant::now(), false, None::<Instant>);
    loop {
        let line = match owner.says() {
            // It need not report any more.
            Err(_) if cancelled.is_some() => return Err(Error::Cancelled),
            Err(error) if !is_greeted && has_ended(error.kind()) => {
                return Err(failed(io::Error::new(ErrorKind::ConnectionRefused, error)));
            }
            line => line.map_err(failed)?,
        };
        let is_late = until.is_some_and(|until| Instant::now() > until);
        if is_late || (!is_greeted && began.elapsed() > PATIENCE) {
            return Err(failed(ErrorKind::TimedOut.into()));
        }
        let news = match line.as_deref().map(|line| line.split_once(' ').unwrap_or((line, ""))) {
            Some(("vellum", words)) if !is_greeted => {
                check_greeting(words, file).map_err(failed)?;
                is_greeted = true;
                send_all(&stream, request).map_err(failed)?;
                None
            }
            None => None,
            Some(("progress", words)) if is_greeted => Some(words),
            Some(("done", words)) if is_greeted => return Ok((peer, words.into())),
            Some(("failed", _)) if cancelled.is_some() => return Err(Error::Cancelled),
            Some(("failed", what)) => return Err(Error::Owner(what.into())),
            Some((DENIED, what)) => {
                return Err(failed(io::Error::new(ErrorKind::PermissionDenied, what)));
            }
            Some((CLOSED, _)) => {
                let what = "it has closed the store";
                return Err(failed(io::Error::new(ErrorKind::ConnectionRefused, what)));
            }
            Some((word, _)) => return Err(failed(io::Error::other(format!("it says '{word}'")))),
        };
        match cancelled {
            None if tell(news).is_continue() => {}
            None if !is_greeted => return Err(Error::Cancelled),
            // What it has done so far, it reports.
            None => {
                cancelled = Some(Instant::now());
                let _ = shutdown(&stream, Shutdown::Write);
            }
            Some(since) if since.elapsed() > PATIENCE => return Err(Error::Cancelled),
            Some(_) => {}
        }
    }
}

/// Checks that the owner has the file open that is meant.
fn check_greeting(words: &str, file: Identity) -> io::Result<()> {
    let (kind, what) = match of_words(words) {
        Some([VERSION, device, number]) if (device, number) == file => return Ok(()),
        Some([VERSION, ..]) => (ErrorKind::ConnectionRefused, "it has another file open"),
        _ => (ErrorKind::Other, "it has another version of Vellum"),
    };
    Err(io::Error::new(kind, what))
}

/// Connects to the process that has a store open, if that is one to believe.
fn connect(store: &Path) -> io::Result<(Peer, UnixStream)> {
    let stream = by_short_path(&place_of(store)?, |short| UnixStream::connect(short))?;
    stream.set_read_timeout(Some(PAUSE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let peer = Peer::of(&stream)?;
    let users = [0, geteuid().as_raw(), fs::metadata(store)?.uid()];
    if !users.contains(&peer.user) || !peer.is_known() {
        let what = "the control socket belongs to another user than the store";
        return Err(io::Error::new(ErrorKind::PermissionDenied, what));
    }
    Ok((peer, stream))
}

/// What the owner of the store says.
struct Owner<'s> {
    lines: BufReader<&'s UnixStream>,
    /// A line of which a part has come.
    line: Vec<u8>,
}

impl Owner<'_> {
    /// Its next line; none if that is not complete within a moment. Control characters become
    /// spaces, because a terminal may show the line.
    fn says(&mut self) -> io::Result<Option<String>> {
        use ErrorKind::{Interrupted, TimedOut, UnexpectedEof, WouldBlock};
        let part = match self.lines.fill_buf() {
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut | Interrupted) => {
                return Ok(None);
            }
            part => part?,
        };
        if part.is_empty() {
            return Err(io::Error::new(UnexpectedEof, "it has ended"));
        }
        let end = part.iter().position(|byte| *byte == b'\n');
        self.line.extend_from_slice(&part[..end.unwrap_or(part.len())]);
        let used = end.map_or(part.len(), |end| end + 1);
        self.lines.consume(used);
        if self.line.len() > LINE_MAX {
            return Err(io::Error::other("it says too much in one line"));
        }
        Ok(end.map(|_| {
            let line = String::from_utf8_lossy(&self.line).replace(char::is_control, " ");
            self.line.clear();
            line
        }))
    }
}

/// Whether the other side has ended, or has never taken the connection.
fn has_ended(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionReset | UnexpectedEof)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_it_was_sent() {
        let all = BackupOptions::new().replace(true).check(false).read_all(true);
        let all = all.since("/a base").bytes_per_second(u64::MAX);
        for options in [BackupOptions::new(), all] {
            let file = PathBuf::from(OsStr::from_bytes(b"/a folder/\xff\n"));
            let bytes = Request::backup_to_bytes(&file, &options).unwrap();
            let (one, other) = UnixStream::pair().unwrap();
            send_all(&one, &bytes).unwrap();
            assert_eq!(Request::read(&other).unwrap(), Request::Backup { file, options });
            send_all(&one, b"compact\0").unwrap();
            assert_eq!(Request::read(&other).unwrap(), Request::Compact);
            send_all(&one, b"stat\0").unwrap();
            assert_eq!(Request::read(&other).unwrap(), Request::Stat);
            send_all(&one, b"resize-pool\x0018446744073709551615\0").unwrap();
            let most = Request::ResizePool { bytes: u64::MAX };
            assert_eq!(Request::read(&other).unwrap(), most);
        }
    }

    #[test]
    fn a_bad_request_is_refused_and_named() {
        let refused = |bytes: &[u8], what: &str| {
            let (one, other) = UnixStream::pair().unwrap();
            send_all(&one, bytes).unwrap();
            drop(one);
            let said = Request::read(&other).unwrap_err().to_string();
            assert!(said.contains(what), "{said}");
        };
        refused(b"", "cut off");
        refused(b"backup\0/file\0\0c", "cut off");
        refused(&[b'x'; 20_000], "too long");
        refused(b"open\0", "no request 'open'");
        refused(b"resize-pool\0", "cut off");
        for size in ["", "-1", "1.5", " 1", "18446744073709551616"] {
            refused(format!("resize-pool\0{size}\0").as_bytes(), "no number");
        }
        refused(b"compact", "cut off");
        refused(b"backup\0file\0\0\0\0", "no absolute path");
        refused(b"backup\0\0\0\0\0", "no absolute path");
        refused(b"backup\0/file\0\0z\0\0", "no option 'z'");
        refused(b"backup\0/file\0\0\0-1\0", "no number");
    }

    #[test]
    fn a_report_is_read_as_it_was_sent() {
        let backup = BackupReport {
            store_id: u128::MAX - 7,
            lsn: 1,
            file_bytes: 2,
            read_bytes: 3,
            used_bytes: 4,
            changes: u64::MAX,
            duration: Duration::from_micros(6),
        };
        let words = backup_to_words(&backup, (7, 8));
        assert_eq!(backup_of_words(&words), Some((backup, (7, 8))));
        let compaction = CompactReport {
            bytes_before: 9,
            bytes_after: 8,
            pages_moved: 7,
            pages_left: 6,
            is_complete: true,
            duration: Duration::from_micros(5),
        };
        assert_eq!(compaction_of_words(&compaction_to_words(&compaction)), Some(compaction));
        for words in ["", "1", "1 2 3 4 5 x", "1 2 3 4 5 -6", "1 2 3 4 5 6 7"] {
            assert_eq!(compaction_of_words(words), None, "{words}");
        }
    }

    #[test]
    fn a_state_is_read_as_it_was_sent() {
        let store = StoreStat {
            store_id: u128::MAX - 7,
            format_version: 1,
            page_bytes: 2,
            file_pages: 3,
            used_pages: 4,
            free_pages: 5,
            pool_bytes: u64::MAX,
            trees: 7,
            clean: true,
            views: 8,
            oldest_view: Some(Duration::ZERO),
            version_bytes: 9,
        };
        let mut pool = PoolStats::default();
        for ((_, number), value) in pool_numbers(&mut pool).into_iter().zip(10..) {
            *number = value;
        }
        let latency = |first: u64| {
            let time = |at| Duration::from_nanos(first + at);
            let [mean, p50, p99, p999, max] = [1, 2, 3, 4, 5].map(time);
            Latency { count: first, mean, p50, p99, p999, max }
        };
        (pool.read_latency, pool.write_latency) = (latency(100), latency(200));
        for translation in [Translation::Table, Translation::Mmu] {
            let words = stat_to_words(&store, &pool, translation);
            let same = OwnerStat { process: 1, store, pool, translation };
            assert_eq!(stat_of_words(&words, 1), Some(same));
            // Of a later version.
            assert_eq!(stat_of_words(&(words + " newer=1"), 1), Some(same));
        }
        assert_eq!(stat_of_words("trees=7", 1).unwrap().store.trees, 7);
        for words in ["", "trees", "trees=", "trees=x", "7", "page_bytes=4294967296"] {
            assert_eq!(stat_of_words(words, 1), None, "{words}");
        }
    }

    #[test]
    fn paths_of_any_length_have_sockets() {
        let folder = tempfile::tempdir().unwrap();
        let deep = (0..8).fold(folder.path().to_path_buf(), |path, _| path.join("x".repeat(40)));
        fs::create_dir_all(&deep).unwrap();
        let listener = by_short_path(&deep.join("a"), |short| UnixListener::bind(short));
        drop(listener.unwrap());
        assert!(deep.join("a").exists());
        let error = by_short_path(&deep.join("y".repeat(200)), |short| UnixListener::bind(short));
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
