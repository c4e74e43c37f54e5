//! Files whose blocks are zeros before a program asks for them.
//!
//! A new block has to be zeroed before a mapping may show it, or the program would see what another
//! file has left there. So a file that is written through a mapping is written twice (DaxVM,
//! section III.B: 30 to 40 % of the time of an append). A [`ZeroPool`] zeroes in the background,
//! at a rate that leaves the storage to others (section IV.E). The paper changes the file system;
//! this pool is a folder of files on it, which programs take by `rename`:
//!
//! ```text
//! folder/lock            marks the folder; locked by the process that zeroes
//! folder/ready-BOOT/     zeroed files; BOOT is the kernel's boot_id
//! folder/new/            files that are being made
//! ```
//!
//! The process that makes or takes a file locks it (`flock`), so no other process takes it too, and
//! what a killed process was making is not locked any more.
//!
//! A file is taken by one `rename`, which the storage learns of later than of the stores that
//! follow. If the machine stops in between, the file is in the pool again, with the program's
//! bytes. So files of an earlier boot are removed.
//!
//! The paper zeroes the blocks of files that were removed. The pool makes new files instead. From
//! outside the file system no program can tell that nothing leads to a removed file any more: a
//! pipe or a socket that still holds its pages, a descriptor that was opened with `O_PATH` and a
//! `link` under way keep neither a lease nor a count.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::ops::ControlFlow;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::backend;
use crate::error::{Error, Result};
use crate::file::{DaxFile, Options, write_zeros};
use crate::sys;

/// The kernel's name for this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The beginning of the file `lock`, by which a folder is known as a pool.
const MARK: &[u8] = b"This folder is a pool of zeroed files (vellum dax prezero).\n";

/// How long the thread that zeroes sleeps when it has nothing to do. Takers of this process wake
/// it.
const IDLE: Duration = Duration::from_millis(500);

/// How long no new files are made after a program has needed the space of those that were ready.
const REST: Duration = Duration::from_secs(10);

/// What a pool keeps ready, and how fast it zeroes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroPoolOptions {
    /// Lengths in bytes, and how many files of that length are kept ready.
    pub files: Vec<(u64, u32)>,
    /// Bytes a second that are zeroed at most. 64 MiB unless the program says otherwise, as in the
    /// paper (section V.C).
    pub rate: u64,
}

impl Default for ZeroPoolOptions {
    fn default() -> Self {
        Self { files: vec![(2 << 20, 32)], rate: 64 << 20 }
    }
}

/// A pool's figures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZeroPoolStat {
    /// Zeroed files.
    pub ready_files: u64,
    /// Bytes of these.
    pub ready_bytes: u64,
    /// Files of the pool that this handle has given out.
    pub taken: u64,
    /// Files that this handle had to zero in the foreground, as none was ready.
    pub missed: u64,
    /// Files that this handle has zeroed in the background.
    pub zeroed_files: u64,
    /// Bytes that this handle has zeroed in the background.
    pub zeroed_bytes: u64,
    /// This handle is the one that zeroes.
    pub is_filler: bool,
    /// Why the last attempt to zero a file failed; `None` if it did not.
    pub failure: Option<String>,
}

/// A folder of zeroed files, for new files on the same file system.
///
/// Any number of processes of one user use a folder at a time. One of those that were opened by
/// [`fill`](Self::fill) zeroes, and another takes over when it ends; `vellum dax prezero` is such
/// a process.
///
/// ```
/// use std::time::Duration;
/// use vellum_dax::{Access, Options, ZeroPool, ZeroPoolOptions};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let options = ZeroPoolOptions { files: vec![(1 << 20, 2)], ..ZeroPoolOptions::default() };
/// let pool = ZeroPool::fill(folder.join("zeroed"), &options)?;
/// pool.wait_until_full(Duration::from_secs(60))?;
///
/// let segment = folder.join("segment");
/// let file = pool.create(&segment, 1 << 20, &Options::default())?; // nothing is zeroed here
/// file.map(Access::ReadWrite)?.write_durably(0, b"first record")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ZeroPool {
    shared: Arc<Shared>,
    filler: Option<JoinHandle<()>>,
    /// The process that has started the thread.
    process: u32,
}

/// What the handle and its thread share.
#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    ready: PathBuf,
    new: PathBuf,
    /// What this handle's thread keeps ready: how many files of each length.
    wanted: BTreeMap<u64, usize>,
    /// The mode of a new file of this process, as it was when the pool was opened.
    mode: u32,
    /// With the process and a number, distinguishes the names that handles give.
    since: u128,
    next: AtomicU64,
    taken: AtomicU64,
    missed: AtomicU64,
    zeroed_files: AtomicU64,
    zeroed_bytes: AtomicU64,
    is_filler: AtomicBool,
    state: Mutex<State>,
    /// A file was taken, or the handle ends.
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Zeroed files, as far as this handle knows: length and name.
    known: BTreeSet<(u64, OsString)>,
    /// How many files the filler has added to the known ones.
    added: u64,
    woken: bool,
    ends: bool,
    failure: Option<String>,
}

impl State {
    fn add(&mut self, length: u64, name: OsString) {
        self.known.insert((length, name));
        self.added += 1;
    }
}

impl ZeroPool {
    /// Opens a pool, and makes the folder if it is not there. This handle takes files; another one
    /// has to zero them.
    ///
    /// # Errors
    /// [`Error::NotAPool`] the folder does not belong to this user alone, or has other files; what
    /// the system said.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let shared = Arc::new(Shared::new(folder.as_ref(), BTreeMap::new())?);
        Ok(Self { shared, filler: None, process: std::process::id() })
    }

    /// Opens a pool, and keeps files ready by a thread in the background, until the handle is
    /// dropped. If another process does so already, this one takes over when that one ends.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Error::NotAPool`] a length of the options is 0 or longer than a
    /// file can be, or the rate is 0.
    pub fn fill(folder: impl AsRef<Path>, options: &ZeroPoolOptions) -> Result<Self> {
        let folder = folder.as_ref();
        let mut wanted = BTreeMap::new();
        for (length, count) in &options.files {
            if *length == 0 || *length > MAX_LENGTH {
                let reason = format!("no file can have {length} bytes and be kept ready");
                return Err(not_a_pool(folder, reason));
            }
            *wanted.entry(*length).or_default() += *count as usize;
        }
        if options.rate == 0 {
            return Err(not_a_pool(folder, "a rate of 0 bytes a second fills nothing".to_owned()));
        }
        let shared = Arc::new(Shared::new(folder, wanted)?);
        let filler = Filler { shared: Arc::clone(&shared), rate: options.rate };
        let thread = std::thread::Builder::new().name("vellum-zero".to_owned());
        let thread = thread.spawn(move || filler.run()).map_err(|error| opening(&error))?;
        Ok(Self { shared, filler: Some(thread), process: std::process::id() })
    }

    /// Makes a file of zeros, of exactly that length. If the pool has one that is long enough,
    /// nothing is zeroed here; what it is too long for goes back to the file system. If the pool
    /// has none, the file is zeroed here. Other processes see the file when it is whole.
    ///
    /// Its mode is that of a new file, by the umask that the process had when it opened the pool.
    /// What the folder of the path hands down (its group, access lists, quotas of projects) is not
    /// its own. A file of the pool was made earlier than now.
    ///
    /// # Errors
    /// `EEXIST` there is such a file; `EFBIG` no file can be that long;
    /// [`Error::OtherFileSystem`]; [`Error::NoSpace`], also without the files that the pool keeps
    /// ready, which are removed before; what the system said.
    pub fn create(
        &self,
        path: impl AsRef<Path>,
        length: u64,
        options: &Options,
    ) -> Result<DaxFile> {
        let path = path.as_ref();
        if fs::symlink_metadata(path).is_ok() {
            return Err(Error::of(MAKING, Errno::EXIST));
        }
        self.make(path, length, options, RenameFlags::NOREPLACE)
    }

    /// As [`create`](Self::create), but a file that is there already is replaced, in one step for
    /// other processes. Processes that have it open keep it.
    ///
    /// # Errors
    /// As [`create`](Self::create), without `EEXIST`.
    pub fn replace(
        &self,
        path: impl AsRef<Path>,
        length: u64,
        options: &Options,
    ) -> Result<DaxFile> {
        self.make(path.as_ref(), length, options, RenameFlags::empty())
    }

    fn make(
        &self,
        path: &Path,
        length: u64,
        options: &Options,
        flags: RenameFlags,
    ) -> Result<DaxFile> {
        let shared = &self.shared;
        if length > MAX_LENGTH {
            return Err(Error::of(MAKING, Errno::FBIG));
        }
        let device = |folder| fs::metadata(folder).map(|about| about.dev());
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let devices = device(parent.unwrap_or(Path::new(".")))
            .and_then(|of_path| Ok((of_path, device(&shared.folder)?)));
        let (of_path, of_pool) = devices.map_err(|error| making(&error))?;
        if of_path != of_pool {
            return Err(Error::OtherFileSystem { folder: shared.folder.clone() });
        }
        let (found, counter) = match shared.take(length)? {
            Some(found) => (found, &shared.taken),
            None => (shared.new_file()?, &shared.missed),
        };
        let made = self.put(&found, path, length, options, flags);
        match &made {
            Ok(_) => _ = counter.fetch_add(1, Ordering::Relaxed),
            // It may have another length than its name says.
            Err(_) => drop(fs::remove_file(&found.path)),
        }
        shared.wake();
        made
    }

    /// Gives a file of zeros its length, its mode and its path.
    fn put(
        &self,
        found: &Locked,
        path: &Path,
        length: u64,
        options: &Options,
        flags: RenameFlags,
    ) -> Result<DaxFile> {
        let shared = &self.shared;
        let failed = |error: io::Error| making(&error);
        let file = found.file.try_clone().map_err(failed)?;
        let has = file.metadata().map_err(failed)?.len();
        if has > length {
            file.set_len(length).map_err(failed)?;
        }
        file.set_permissions(Permissions::from_mode(shared.mode)).map_err(failed)?;
        let file = DaxFile::from_file(file, options)?;
        let lacks = length.saturating_sub(has);
        if lacks > 0 {
            // What cannot fit does not fill the disk first.
            let free = shared.free_bytes()?;
            if lacks > free {
                shared.look()?;
                if lacks > free.saturating_add(shared.ready_bytes()) {
                    return Err(Error::of(MAKING, Errno::NOSPC));
                }
            }
            match file.extend(length) {
                Err(Error::NoSpace { .. }) if shared.remove_ready() => file.extend(length),
                extended => extended,
            }?;
        }
        rename(&found.path, path, flags).map_err(|errno| match errno {
            Errno::XDEV => Error::OtherFileSystem { folder: shared.folder.clone() },
            errno => Error::of(MAKING, errno),
        })?;
        unlock(&found.file);
        Ok(file)
    }

    /// Waits until all files that the options of [`fill`](Self::fill) name are ready. Returns
    /// whether that came to be within the time. If another process fills the pool, with other
    /// lengths, it never does.
    ///
    /// # Errors
    /// [`Error::Background`] why this handle's thread failed; what the system said.
    pub fn wait_until_full(&self, patience: Duration) -> Result<bool> {
        let (shared, start) = (&self.shared, Instant::now());
        loop {
            let failure = shared.state().failure.clone();
            if let Some(failure) = failure {
                return Err(Error::Background { doing: ZEROING, failure });
            }
            shared.look()?;
            if shared.shortage().is_none() {
                return Ok(true);
            }
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(5).min(left));
        }
    }

    /// The pool's figures.
    ///
    /// # Errors
    /// What the system said.
    pub fn stat(&self) -> Result<ZeroPoolStat> {
        let shared = &self.shared;
        shared.look()?;
        let ready_bytes = shared.ready_bytes();
        let state = shared.state();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Ok(ZeroPoolStat {
            ready_files: state.known.len() as u64,
            ready_bytes,
            taken: count(&shared.taken),
            missed: count(&shared.missed),
            zeroed_files: count(&shared.zeroed_files),
            zeroed_bytes: count(&shared.zeroed_bytes),
            is_filler: shared.is_filler.load(Ordering::Relaxed),
            failure: state.failure.clone(),
        })
    }
}

impl Drop for ZeroPool {
    fn drop(&mut self) {
        // A forked child has no such thread, and may have inherited a lock that the thread held.
        if self.process != std::process::id() {
            return;
        }
        self.shared.state().ends = true;
        self.shared.work.notify_all();
        if let Some(filler) = self.filler.take() {
            // A thread that has panicked has said so.
            let _ = filler.join();
        }
    }
}

/// Bytes that a file can have at most.
const MAX_LENGTH: u64 = i64::MAX as u64;

const OPENING: &str = "opening a pool of zeroed files";
const MAKING: &str = "making a file";
const ZEROING: &str = "zeroing files in the background";

/// A file in the pool that no other process takes or removes.
struct Locked {
    file: File,
    path: PathBuf,
}

impl Shared {
    fn new(folder: &Path, wanted: BTreeMap<u64, usize>) -> Result<Self> {
        let boot = fs::read_to_string(BOOT_ID)
            .map_err(|error| not_a_pool(folder, format!("{BOOT_ID} cannot be read: {error}")))?;
        make_folder(folder)?;
        // The program may change its working directory.
        let folder = folder.canonicalize().map_err(|error| opening(&error))?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let shared = Self {
            ready: folder.join(format!("ready-{}", boot.trim())),
            new: folder.join("new"),
            folder,
            wanted,
            mode: 0o666 & !umask(),
            since: since.as_nanos(),
            next: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            zeroed_files: AtomicU64::new(0),
            zeroed_bytes: AtomicU64::new(0),
            is_filler: AtomicBool::new(false),
            state: Mutex::default(),
            work: Condvar::new(),
        };
        shared.mark()?;
        for folder in [&shared.folder, &shared.ready, &shared.new] {
            make_folder(folder)?;
            shared.check_owner(folder)?;
        }
        shared.look()?;
        Ok(shared)
    }

    /// Marks a folder that is empty as a pool, and refuses others that are not marked.
    fn mark(&self) -> Result<()> {
        self.check_owner(&self.folder)?;
        let lock = self.folder.join("lock");
        let read = |mut file: File| {
            let mut text = vec![0; MARK.len()];
            file.read_exact(&mut text).map(|()| text == MARK)
        };
        if !lock.exists() {
            let mut names = names_in(&self.folder)?.into_iter();
            let has_others = names.any(|name| !name.as_encoded_bytes().starts_with(b"mark-"));
            // Another process may just have marked it.
            if has_others && !lock.exists() {
                let reason = "it has other files; name a folder that is empty or not there";
                return Err(not_a_pool(&self.folder, reason.to_owned()));
            }
            // Whole, when others see it.
            let name = self.folder.join(self.new_name("mark"));
            let mut file = File::create_new(&name).map_err(|error| opening(&error))?;
            file.write_all(MARK).map_err(|error| opening(&error))?;
            // No program has needed space yet.
            file.set_modified(UNIX_EPOCH).map_err(|error| opening(&error))?;
            match rename(&name, &lock, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => fs::remove_file(name).map_err(|error| opening(&error))?,
                renamed => renamed.map_err(|errno| Error::of(OPENING, errno))?,
            }
        }
        match File::open(&lock).and_then(read) {
            Ok(true) => Ok(()),
            _ => {
                let reason = "its file 'lock' is not that of a pool; name another folder";
                Err(not_a_pool(&self.folder, reason.to_owned()))
            }
        }
    }

    /// Refuses what is no folder, or not this user's alone.
    fn check_owner(&self, folder: &Path) -> Result<()> {
        let about = fs::symlink_metadata(folder).map_err(|error| opening(&error))?;
        let is_own = about.uid() == rustix::process::geteuid().as_raw();
        if about.is_dir() && is_own && about.mode() & 0o077 == 0 {
            return Ok(());
        }
        let folder = folder.display();
        let reason =
            format!("{folder} is not a folder that belongs to this user alone (chmod 700)");
        Err(not_a_pool(&self.folder, reason))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look for something to do.
    fn wake(&self) {
        self.state().woken = true;
        self.work.notify_all();
    }

    /// A name that hardly any other file of this boot has had. A forked child has its parent's
    /// numbers.
    fn new_name(&self, first: impl std::fmt::Display) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{first}-{}-{:x}-{number}", std::process::id(), self.since)
    }

    /// The length of the longest files of which not enough are ready.
    fn shortage(&self) -> Option<u64> {
        let state = self.state();
        let ready = |of| state.known.iter().filter(|(length, _)| *length == of).count();
        let mut wanted = self.wanted.iter().rev();
        wanted.find(|(length, count)| ready(**length) < **count).map(|(length, _)| *length)
    }

    /// Finds out which files are ready. Reads the folder again if the filler has added a file
    /// meanwhile: else that file would not be known, and the filler would zero another one.
    fn look(&self) -> Result<()> {
        let mut added = self.state().added;
        loop {
            let names = names_in(&self.ready)?;
            let mut state = self.state();
            if state.added == added {
                let known = names.into_iter().filter_map(|name| Some((length_in(&name)?, name)));
                state.known = known.collect();
                return Ok(());
            }
            added = state.added;
        }
    }

    fn ready_bytes(&self) -> u64 {
        self.state().known.iter().map(|(length, _)| length).sum()
    }

    fn free_bytes(&self) -> Result<u64> {
        let found = rustix::fs::statvfs(&self.folder);
        let found = found.map_err(|errno| Error::of(MAKING, errno))?;
        // A file system in memory may have no bound.
        Ok(if found.f_blocks == 0 { u64::MAX } else { found.f_bavail * found.f_frsize })
    }

    /// Takes a zeroed file: the shortest that is long enough, or the longest.
    fn take(&self, length: u64) -> Result<Option<Locked>> {
        if length == 0 {
            return Ok(None);
        }
        let mut has_looked = false;
        loop {
            let found = {
                let mut state = self.state();
                let start = (length, OsString::new());
                let found = state.known.range(start..).next().or(state.known.last()).cloned();
                found.inspect(|found| _ = state.known.remove(found))
            };
            let Some((wanted, name)) = found else {
                // Another process may have made some ready.
                if has_looked {
                    return Ok(None);
                }
                self.look()?;
                has_looked = true;
                continue;
            };
            let path = self.ready.join(name);
            // A file that another process has taken is not here any more, or is locked.
            let Ok(Some(file)) = open_and_lock(&path) else { continue };
            let about = file.metadata().map_err(|error| making(&error))?;
            if about.is_file() && about.len() == wanted && about.nlink() == 1 {
                return Ok(Some(Locked { file, path }));
            }
            // Its taker was killed, or a user has changed it.
            let _ = fs::remove_file(&path);
        }
    }

    /// A new file without bytes.
    fn new_file(&self) -> Result<Locked> {
        loop {
            let path = self.new.join(self.new_name("file"));
            let mut how = OpenOptions::new();
            let file = match how.read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                file => file.map_err(|error| making(&error))?,
            };
            let locked = rustix::fs::flock(&file, FlockOperation::LockExclusive);
            locked.map_err(|errno| Error::of(MAKING, errno))?;
            // The filler may have removed it before it was locked.
            if is_at(&file, &path) {
                return Ok(Locked { file, path });
            }
        }
    }

    /// Gives the blocks of all zeroed files back to the file system, but of those that a process is
    /// taking. Returns whether there were any.
    fn remove_ready(&self) -> bool {
        // The mark's time tells all processes.
        let now = SystemTime::now();
        let _ = self.open_lock().and_then(|lock| lock.set_modified(now).map_err(|e| making(&e)));
        let mut has_removed = false;
        while let Ok(Some(Locked { path, .. })) = self.take(1) {
            has_removed |= fs::remove_file(path).is_ok();
        }
        has_removed
    }

    fn open_lock(&self) -> Result<File> {
        let mut how = OpenOptions::new();
        let file = how.read(true).write(true).open(self.folder.join("lock"));
        file.map_err(|error| opening(&error))
    }
}

/// The thread that zeroes.
struct Filler {
    shared: Arc<Shared>,
    /// Bytes a second.
    rate: u64,
}

impl Filler {
    fn run(&self) {
        sys::block_signals();
        let (mut lock, mut looked) = (None, Instant::now());
        loop {
            let done = self.turn(&mut lock, &mut looked);
            let mut state = self.shared.state();
            state.failure = done.as_ref().err().map(Error::to_string);
            if state.ends {
                break;
            }
            if !done.unwrap_or(false) && !std::mem::take(&mut state.woken) {
                let waited = self.shared.work.wait_timeout(state, IDLE);
                waited.unwrap_or_else(PoisonError::into_inner).0.woken = false;
            }
        }
        // A child that was forked meanwhile has the descriptor, too.
        lock.inspect(unlock);
    }

    /// Makes at most one file ready. Returns whether there may be more to do.
    fn turn(&self, lock: &mut Option<File>, looked: &mut Instant) -> Result<bool> {
        // What takers of this process do is known; other processes take files, too.
        if looked.elapsed() >= IDLE {
            self.shared.look()?;
            *looked = Instant::now();
        }
        Ok(self.become_filler(lock)? && self.work()?)
    }

    /// Takes the lock, unless another process has it. The first time, removes what earlier boots
    /// and killed processes have left.
    fn become_filler(&self, lock: &mut Option<File>) -> Result<bool> {
        let shared = &self.shared;
        if lock.is_some() {
            return Ok(true);
        }
        let file = shared.open_lock()?;
        if !locks(&file) {
            return Ok(false);
        }
        for name in names_in(&shared.folder)? {
            let folder = shared.folder.join(&name);
            let is_of_boot = name.to_str().and_then(|name| name.strip_prefix("ready-"));
            if is_of_boot.is_some_and(is_boot_id) && folder != shared.ready {
                shared.check_owner(&folder)?;
                for name in names_in(&folder)?.into_iter().filter(|name| length_in(name).is_some())
                {
                    remove(&folder.join(name))?;
                }
                // A user's own files stay, and the folder then.
                let _ = fs::remove_dir(folder);
            }
        }
        for name in names_in(&shared.new)? {
            let path = shared.new.join(name);
            if let Ok(Some(_left)) = open_and_lock(&path) {
                remove(&path)?;
            }
        }
        shared.is_filler.store(true, Ordering::Relaxed);
        *lock = Some(file);
        Ok(true)
    }

    fn work(&self) -> Result<bool> {
        let shared = &self.shared;
        let Some(length) = shared.shortage() else { return Ok(false) };
        if !self.leaves_space(length)? {
            return Ok(false);
        }
        let found = shared.new_file()?;
        let zeroed = self.zero(&found, length);
        unlock(&found.file);
        match zeroed {
            Ok(Some(name)) => shared.state().add(length, name),
            failed => {
                let _ = fs::remove_file(&found.path);
                failed?;
            }
        }
        Ok(true)
    }

    /// Whether the file system keeps a sixteenth of its space, or 64 MiB, and of its inodes with a
    /// new file, and no program has just needed more.
    fn leaves_space(&self, length: u64) -> Result<bool> {
        let lock = self.shared.open_lock()?;
        let needed = lock.metadata().and_then(|about| about.modified());
        let needed = needed.map_err(|error| zeroing(&error))?;
        if needed.elapsed().is_ok_and(|since| since < REST) {
            return Ok(false);
        }
        let found = rustix::fs::statvfs(&self.shared.folder);
        let found = found.map_err(|errno| Error::of(ZEROING, errno))?;
        let spare = (found.f_blocks * found.f_frsize / 16).min(64 << 20);
        let has_inodes = found.f_files == 0 || found.f_favail > found.f_files / 16;
        Ok(has_inodes && self.shared.free_bytes()? >= spare.saturating_add(length))
    }

    /// Writes zeros into a new file, no faster than the rate, makes them durable, and moves it to
    /// the files that are ready. Returns its name there; `None` if the handle ends before.
    fn zero(&self, found: &Locked, length: u64) -> Result<Option<OsString>> {
        let (start, shared) = (Instant::now(), &self.shared);
        let mut done = 0;
        let flow = write_zeros(&found.file, 0, length, |bytes| {
            shared.zeroed_bytes.fetch_add(bytes, Ordering::Relaxed);
            done += bytes;
            self.pause(due(done, self.rate).saturating_sub(start.elapsed()))
        });
        if flow.map_err(|error| zeroing(&error))?.is_break() {
            return Ok(None);
        }
        found.file.sync_all().map_err(|error| zeroing(&error))?;
        // The file's table is made here, too, and the module keeps it.
        let _ = backend::open_table(&found.file, 0);
        shared.zeroed_files.fetch_add(1, Ordering::Relaxed);
        loop {
            let name = shared.new_name(length);
            match rename(&found.path, &shared.ready.join(&name), RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                renamed => {
                    renamed.map_err(|errno| Error::of(ZEROING, errno))?;
                    return Ok(Some(name.into()));
                }
            }
        }
    }

    /// Sleeps, but not longer than the handle lives.
    fn pause(&self, time: Duration) -> ControlFlow<()> {
        let work = &self.shared.work;
        let waited = work.wait_timeout_while(self.shared.state(), time, |state| !state.ends);
        match waited.unwrap_or_else(PoisonError::into_inner).0.ends {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

/// When so many bytes may have been zeroed, from the start on.
fn due(bytes: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate as f64)
}

/// The length that the name of a ready file begins with.
fn length_in(name: &OsStr) -> Option<u64> {
    name.to_str()?.split_once('-')?.0.parse().ok()
}

fn is_boot_id(text: &str) -> bool {
    text.len() == 36 && text.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

/// The permissions that this process gives to no new file.
fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok()).unwrap_or(0o077)
}

fn not_a_pool(folder: &Path, reason: String) -> Error {
    Error::NotAPool { folder: folder.to_owned(), reason }
}

fn opening(error: &io::Error) -> Error {
    Error::of_io(OPENING, error)
}

fn making(error: &io::Error) -> Error {
    Error::of_io(MAKING, error)
}

fn zeroing(error: &io::Error) -> Error {
    Error::of_io(ZEROING, error)
}

fn rename(from: &Path, to: &Path, flags: RenameFlags) -> Result<(), Errno> {
    rustix::fs::renameat_with(CWD, from, CWD, to, flags)
}

/// Removes a file that may be gone already.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(zeroing(&error)),
        _ => Ok(()),
    }
}

fn locks(file: &File) -> bool {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Ends the lock also for forked children, which share the descriptor.
fn unlock(file: &File) {
    // Of a descriptor that is open that cannot fail.
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}

/// Opens a file of the pool, and not what a link leads to, and locks it. `None`: another process
/// has it. Only the process that holds the lock gives the file another path, so a file that has
/// left its path since it was opened belongs to a program.
fn open_and_lock(path: &Path) -> io::Result<Option<File>> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    Ok((locks(&file) && is_at(&file, path)).then_some(file))
}

/// Whether the path leads to the file.
fn is_at(file: &File, path: &Path) -> bool {
    let place = |about: fs::Metadata| (about.dev(), about.ino());
    let found = fs::symlink_metadata(path).map(place);
    found.is_ok_and(|found| file.metadata().map(place).is_ok_and(|place| place == found))
}

fn make_folder(folder: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(opening(&error)),
        _ => Ok(()),
    }
}

fn names_in(folder: &Path) -> Result<Vec<OsString>> {
    let names = fs::read_dir(folder).and_then(|entries| {
        entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()
    });
    names.map_err(|error| Error::of_io("reading the folder of a pool", &error))
}
