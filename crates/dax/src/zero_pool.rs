//! Files whose blocks are zeros before a program asks for them.
//!
//! A new block has to be zeroed before a mapping may show it, or the program would see what another
//! file has left there. So a file that is written through a mapping is written twice (DaxVM,
//! section III.B: 30 to 40 % of the time of an append). A [`ZeroPool`] zeroes in the background,
//! at a rate that leaves the storage to others (section IV.E). The paper changes the file system;
//! this pool is a folder of files on it, and blocks change their owner by `rename`:
//!
//! ```text
//! folder/lock            locked by the process that zeroes
//! folder/ready-BOOT/     zeroed files; BOOT is the kernel's boot_id
//! folder/used/           files that have to be zeroed, or are being made
//! ```
//!
//! The process that takes a file locks it before (`flock`), so no other process takes it too.
//!
//! A file is taken by one `rename`, which the storage learns of later than of the stores that
//! follow. If the machine stops in between, the file is in the pool again, with the program's
//! bytes. So files that an earlier boot has zeroed are zeroed again.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
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

/// How long the thread that zeroes sleeps when it has nothing to do. Takers of this process wake
/// it.
const IDLE: Duration = Duration::from_millis(500);

/// How long a file that was removed may be in use before its blocks are left to the file system.
/// The module keeps a detached file for 50 ms.
const BUSY: Duration = Duration::from_millis(60);

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
    /// Files that have to be zeroed.
    pub waiting_files: u64,
    /// Files of the pool that this handle has given out.
    pub taken: u64,
    /// Files that this handle had to zero in the foreground, as none was ready.
    pub missed: u64,
    /// Bytes that this handle has zeroed in the background.
    pub zeroed_bytes: u64,
    /// New files that this handle has made ready.
    pub made: u64,
    /// Removed files that this handle has made ready again.
    pub recycled: u64,
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
/// # drop(file);
/// pool.remove(&segment)?; // zeroed in the background, and ready again
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
    used: PathBuf,
    /// What this handle's thread keeps ready: lengths, and how many files of each.
    wanted: Vec<(u64, u32)>,
    /// Distinguishes names of this handle from those of all others of this boot.
    prefix: String,
    next: AtomicU64,
    taken: AtomicU64,
    missed: AtomicU64,
    zeroed: AtomicU64,
    made: AtomicU64,
    recycled: AtomicU64,
    is_filler: AtomicBool,
    state: Mutex<State>,
    /// There is something to zero, or the handle ends.
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Zeroed files, as far as this handle knows: length and name.
    known: BTreeSet<(u64, OsString)>,
    woken: bool,
    ends: bool,
    /// Until then no new files are made.
    rests_until: Option<Instant>,
    failure: Option<String>,
}

impl ZeroPool {
    /// Opens a pool, and makes the folder if it is not there. This handle takes files and gives
    /// them back; another one has to zero them.
    ///
    /// # Errors
    /// [`Error::NotAPool`] the folder does not belong to this user alone; what the system said.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let shared = Arc::new(Shared::new(folder.as_ref(), Vec::new())?);
        Ok(Self { shared, filler: None, process: std::process::id() })
    }

    /// Opens a pool, and keeps files ready by a thread in the background, until the handle is
    /// dropped. If another process does so already, this one takes over when that one ends.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Error::NotAPool`] a length of the options is 0, or the rate is.
    pub fn fill(folder: impl AsRef<Path>, options: &ZeroPoolOptions) -> Result<Self> {
        let folder = folder.as_ref();
        if options.rate == 0 || options.files.iter().any(|(length, _)| *length == 0) {
            let reason = "files of no bytes, or a rate of no bytes a second, fill nothing";
            return Err(not_a_pool(folder, reason.to_owned()));
        }
        let mut wanted = options.files.clone();
        wanted.sort_unstable();
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
    /// A file of the pool has the mode that the pool's file `lock` has, and was made earlier than
    /// now. What the folder of the path hands down (access lists, quotas of projects) is not its
    /// own.
    ///
    /// # Errors
    /// `EEXIST` there is such a file; [`Error::OtherFileSystem`]; [`Error::NoSpace`], also without
    /// the files that the pool keeps ready, which are removed before; what the system said.
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
    /// other processes, and its blocks go to the pool. Processes that have it open keep it.
    ///
    /// # Errors
    /// As [`create`](Self::create), without `EEXIST`.
    pub fn replace(
        &self,
        path: impl AsRef<Path>,
        length: u64,
        options: &Options,
    ) -> Result<DaxFile> {
        let (path, shared) = (path.as_ref(), &self.shared);
        if is_plain_file(path) && shared.has_filler() {
            // The file has two names until the new one takes the first. If it never does, the
            // filler removes the second name and nothing else. Without the second name the blocks
            // go to the file system.
            let _ = fs::hard_link(path, shared.new_used());
        }
        self.make(path, length, options, RenameFlags::empty())
    }

    fn make(
        &self,
        path: &Path,
        length: u64,
        options: &Options,
        flags: RenameFlags,
    ) -> Result<DaxFile> {
        let shared = &self.shared;
        let device = |folder| fs::metadata(folder).map(|about| about.dev());
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let devices = device(parent.unwrap_or(Path::new(".")))
            .and_then(|of_path| Ok((of_path, device(&shared.folder)?)));
        let (of_path, of_pool) = devices.map_err(|error| Error::of_io(MAKING, &error))?;
        if of_path != of_pool {
            return Err(Error::OtherFileSystem { folder: shared.folder.clone() });
        }
        let (found, counter) = match shared.take(length)? {
            Some(found) => (found, &shared.taken),
            None => (shared.new_file()?, &shared.missed),
        };
        let made = self.put(&found, path, length, options, flags);
        match made.is_ok() {
            true => _ = counter.fetch_add(1, Ordering::Relaxed),
            // It may have another length than its name says. The filler looks at it.
            false => drop(fs::rename(&found.path, shared.new_used())),
        }
        shared.wake();
        made
    }

    /// Gives a file of zeros its length and its path.
    fn put(
        &self,
        found: &Locked,
        path: &Path,
        length: u64,
        options: &Options,
        flags: RenameFlags,
    ) -> Result<DaxFile> {
        let failed = |error: io::Error| Error::of_io(MAKING, &error);
        let file = found.file.try_clone().map_err(failed)?;
        if file.metadata().map_err(failed)?.len() > length {
            file.set_len(length).map_err(failed)?;
        }
        let file = DaxFile::from_file(file, options)?;
        match file.extend(length) {
            Err(Error::NoSpace { .. }) if self.shared.remove_ready() => file.extend(length),
            extended => extended,
        }?;
        let renamed = rustix::fs::renameat_with(CWD, &found.path, CWD, path, flags);
        renamed.map_err(|errno| match errno {
            Errno::XDEV => Error::OtherFileSystem { folder: self.shared.folder.clone() },
            errno => Error::of(MAKING, errno),
        })?;
        rustix::fs::flock(&found.file, FlockOperation::Unlock)
            .map_err(|errno| Error::of(MAKING, errno))?;
        Ok(file)
    }

    /// Removes a file. If a process fills the pool, the file's blocks are zeroed in the background
    /// and used again. A process that has the file open or mapped keeps what the file has, as with
    /// `unlink`, and its blocks go to the file system later. So close the file before.
    ///
    /// # Errors
    /// What the system said.
    pub fn remove(&self, path: impl AsRef<Path>) -> Result<()> {
        const DOING: &str = "removing a file";
        let (path, shared) = (path.as_ref(), &self.shared);
        let given = shared.new_used();
        if !is_plain_file(path) || !shared.has_filler() || fs::rename(path, &given).is_err() {
            return fs::remove_file(path).map_err(|error| Error::of_io(DOING, &error));
        }
        if fs::symlink_metadata(&given).is_ok_and(|found| found.is_dir()) {
            // A folder has taken the file's place in between.
            let _ = rustix::fs::renameat_with(CWD, &given, CWD, path, RenameFlags::NOREPLACE);
            return Err(Error::of(DOING, Errno::ISDIR));
        }
        shared.wake();
        Ok(())
    }

    /// Waits until all files that the options of [`fill`](Self::fill) name are ready, and no file
    /// waits to be zeroed. Returns whether that came to be within the time.
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
            if shared.is_full()? {
                return Ok(true);
            }
            if start.elapsed() >= patience {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(5).min(patience));
        }
    }

    /// The pool's figures.
    ///
    /// # Errors
    /// What the system said.
    pub fn stat(&self) -> Result<ZeroPoolStat> {
        let shared = &self.shared;
        shared.look()?;
        let waiting_files = names_in(&shared.used)?.len() as u64;
        let state = shared.state();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Ok(ZeroPoolStat {
            ready_files: state.known.len() as u64,
            ready_bytes: state.known.iter().map(|(length, _)| length).sum(),
            waiting_files,
            taken: count(&shared.taken),
            missed: count(&shared.missed),
            zeroed_bytes: count(&shared.zeroed),
            made: count(&shared.made),
            recycled: count(&shared.recycled),
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

const OPENING: &str = "opening a pool of zeroed files";
const MAKING: &str = "making a file";
const ZEROING: &str = "zeroing files in the background";

/// A file of zeros in the pool that no other process takes.
struct Locked {
    file: File,
    path: PathBuf,
}

impl Shared {
    fn new(folder: &Path, wanted: Vec<(u64, u32)>) -> Result<Self> {
        let boot = fs::read_to_string(BOOT_ID)
            .map_err(|error| not_a_pool(folder, format!("{BOOT_ID} cannot be read: {error}")))?;
        make_folder(folder)?;
        let about = fs::symlink_metadata(folder).map_err(|error| opening(&error))?;
        let is_own = about.uid() == rustix::process::geteuid().as_raw();
        if !about.is_dir() || !is_own || about.mode() & 0o077 != 0 {
            let reason = "it is not a folder that belongs to this user alone (chmod 700)";
            return Err(not_a_pool(folder, reason.to_owned()));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let shared = Self {
            ready: folder.join(format!("ready-{}", boot.trim())),
            used: folder.join("used"),
            folder: folder.to_owned(),
            wanted,
            prefix: format!("{}-{:x}", std::process::id(), since.as_nanos()),
            next: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            zeroed: AtomicU64::new(0),
            made: AtomicU64::new(0),
            recycled: AtomicU64::new(0),
            is_filler: AtomicBool::new(false),
            state: Mutex::default(),
            work: Condvar::new(),
        };
        make_folder(&shared.ready)?;
        make_folder(&shared.used)?;
        shared.open_lock()?;
        shared.look()?;
        Ok(shared)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look for something to do.
    fn wake(&self) {
        self.state().woken = true;
        self.work.notify_all();
    }

    /// A name that no file of this boot has had.
    fn new_name(&self) -> String {
        format!("{}-{}", self.prefix, self.next.fetch_add(1, Ordering::Relaxed))
    }

    fn new_used(&self) -> PathBuf {
        self.used.join(self.new_name())
    }

    fn open_lock(&self) -> Result<File> {
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).truncate(false);
        how.open(self.folder.join("lock")).map_err(|error| opening(&error))
    }

    /// Whether some process zeroes what is given to the pool.
    fn has_filler(&self) -> bool {
        self.open_lock().is_ok_and(|lock| !locks(&lock, FlockOperation::NonBlockingLockShared))
    }

    /// Whether all that is wanted is ready, and nothing waits.
    fn is_full(&self) -> Result<bool> {
        self.look()?;
        Ok(self.shortage().is_empty() && names_in(&self.used)?.is_empty())
    }

    /// The lengths of which not enough files are ready, the greatest first, and how many there are
    /// too few.
    fn shortage(&self) -> Vec<(u64, usize)> {
        let state = self.state();
        let ready = |wanted| state.known.iter().filter(|(length, _)| *length == wanted).count();
        let missing = self
            .wanted
            .iter()
            .rev()
            .map(|(length, count)| (*length, (*count as usize).saturating_sub(ready(*length))));
        missing.filter(|(_, missing)| *missing > 0).collect()
    }

    /// Finds out which files are ready.
    fn look(&self) -> Result<()> {
        let names = names_in(&self.ready)?;
        let known = names.into_iter().filter_map(|name| {
            let length = name.to_str()?.split('-').next()?.parse().ok()?;
            Some((length, name))
        });
        self.state().known = known.collect();
        Ok(())
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
            let about = file.metadata().map_err(|error| Error::of_io(MAKING, &error))?;
            if about.len() == wanted && about.nlink() == 1 {
                return Ok(Some(Locked { file, path }));
            }
            // Its taker was killed, or a user has changed it.
            let _ = fs::rename(&path, self.new_used());
        }
    }

    /// A new file without bytes.
    fn new_file(&self) -> Result<Locked> {
        loop {
            let path = self.new_used();
            let mut how = OpenOptions::new();
            let file = how.read(true).write(true).create_new(true).open(&path);
            let file = file.map_err(|error| Error::of_io(MAKING, &error))?;
            let locked = rustix::fs::flock(&file, FlockOperation::LockExclusive);
            locked.map_err(|errno| Error::of(MAKING, errno))?;
            // The filler removes what it finds before it is locked.
            if file.metadata().is_ok_and(|about| about.nlink() == 1) {
                return Ok(Locked { file, path });
            }
        }
    }

    /// Gives the blocks of all zeroed files back to the file system, but of those that a process is
    /// taking. Returns whether there were any.
    fn remove_ready(&self) -> bool {
        self.state().rests_until = Instant::now().checked_add(REST);
        let mut has_removed = false;
        while let Ok(Some(Locked { path, .. })) = self.take(1) {
            has_removed |= fs::remove_file(path).is_ok();
        }
        has_removed
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
        sys::block_signals_of_leases();
        let mut lock = None;
        loop {
            let done = match self.become_filler(&mut lock) {
                Ok(true) => self.work(),
                other => other.map(|_| false),
            };
            let mut state = self.shared.state();
            state.failure = done.as_ref().err().map(Error::to_string);
            if state.ends {
                return;
            }
            if !done.unwrap_or(false) && !std::mem::take(&mut state.woken) {
                let waited = self.shared.work.wait_timeout(state, IDLE);
                waited.unwrap_or_else(PoisonError::into_inner).0.woken = false;
            }
        }
    }

    /// Takes the lock, unless another process has it. The first time, takes over what earlier
    /// boots have left.
    fn become_filler(&self, lock: &mut Option<File>) -> Result<bool> {
        let shared = &self.shared;
        if lock.is_some() {
            return Ok(true);
        }
        let file = shared.open_lock()?;
        if !locks(&file, FlockOperation::NonBlockingLockExclusive) {
            return Ok(false);
        }
        for name in names_in(&shared.folder)? {
            let folder = shared.folder.join(&name);
            if name.to_string_lossy().starts_with("ready-") && folder != shared.ready {
                for name in names_in(&folder)? {
                    let _ = fs::rename(folder.join(name), shared.new_used());
                }
                let _ = fs::remove_dir(folder);
            }
        }
        shared.is_filler.store(true, Ordering::Relaxed);
        *lock = Some(file);
        Ok(true)
    }

    /// Removes what waits and is not wanted, and then zeroes one file that is, or a new one.
    /// Returns whether there may be more to do.
    fn work(&self) -> Result<bool> {
        let shared = &self.shared;
        shared.look()?;
        let (mut shortage, mut wanted) = (shared.shortage(), None);
        for name in names_in(&shared.used)? {
            let path = shared.used.join(name);
            let Some(file) =
                open_and_lock(&path).or_else(|error| not_found(error).map(|()| None))?
            else {
                continue;
            };
            let length = file.metadata().map_err(|error| zeroing(&error))?.len();
            let short =
                shortage.iter_mut().find(|(wanted, missing)| *wanted <= length && *missing > 0);
            let Some((length, missing)) = short else {
                remove_used(&path)?;
                continue;
            };
            *missing -= 1;
            wanted.get_or_insert((Locked { file, path }, *length));
        }
        if let Some((found, length)) = wanted {
            if !self.may_be_zeroed(&found.file)? {
                remove_used(&found.path)?;
            } else {
                self.zero(&found, length, &shared.recycled)?;
            }
            return Ok(true);
        }
        match shared.shortage().first() {
            Some((length, _)) if self.leaves_space(*length)? => {
                self.zero(&shared.new_file()?, *length, &shared.made)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Whether the file system keeps a sixteenth of its space, or 64 MiB, with a new file, and no
    /// program has just needed more.
    fn leaves_space(&self, length: u64) -> Result<bool> {
        if self.shared.state().rests_until.is_some_and(|end| Instant::now() < end) {
            return Ok(false);
        }
        let found = rustix::fs::statvfs(&self.shared.folder);
        let found = found.map_err(|errno| Error::of(ZEROING, errno))?;
        let spare = (found.f_blocks * found.f_frsize / 16).min(64 << 20);
        Ok(found.f_bavail * found.f_frsize >= spare.saturating_add(length))
    }

    /// Whether a file that a program has removed is as a new one, and no process can see it. Gives
    /// it the mode of a new one.
    fn may_be_zeroed(&self, file: &File) -> Result<bool> {
        let lock = self.shared.open_lock()?;
        let about = |file: &File| file.metadata().map_err(|error| zeroing(&error));
        let (new, found) = (about(&lock)?, about(file)?);
        // A list that does not fit differs from that of a new file.
        let attributes = |file: &File| {
            let mut names = [0; 1024];
            rustix::fs::flistxattr(file, &mut names).map(|_| names)
        };
        let is_like_new = found.is_file()
            && (found.uid(), found.gid()) == (new.uid(), new.gid())
            && attributes(file) == attributes(&lock)
            && sys::flags_of_users(file.as_fd()) == sys::flags_of_users(lock.as_fd());
        let is_unused =
            || file.metadata().is_ok_and(|found| found.nlink() == 1) && sys::is_alone(file.as_fd());
        if !is_like_new || !(is_unused() || self.pause(BUSY).is_continue() && is_unused()) {
            return Ok(false);
        }
        file.set_permissions(new.permissions()).map_err(|error| zeroing(&error))?;
        Ok(true)
    }

    /// Zeroes a file of `used`, makes it ready, and counts it. A handle that ends leaves the file
    /// to the next filler.
    fn zero(&self, found: &Locked, length: u64, counter: &AtomicU64) -> Result<()> {
        let shared = &self.shared;
        match self.write_zeros(&found.file, length) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => return Ok(()),
            Err(error) => {
                remove_used(&found.path)?;
                return Err(zeroing(&error));
            }
        }
        // The file's table is made here, too, and the module keeps it.
        let _ = backend::open_table(&found.file, 0);
        counter.fetch_add(1, Ordering::Relaxed);
        let name = format!("{length}-{}", shared.new_name());
        let renamed = fs::rename(&found.path, shared.ready.join(&name));
        renamed.map_err(|error| zeroing(&error))?;
        shared.state().known.insert((length, name.into()));
        Ok(())
    }

    /// Writes zeros over a file, no faster than the rate, and makes them durable.
    fn write_zeros(&self, file: &File, length: u64) -> io::Result<ControlFlow<()>> {
        let (start, shared) = (Instant::now(), &self.shared);
        file.set_len(length)?;
        let mut done = 0;
        let flow = write_zeros(file, 0, length, |bytes| {
            shared.zeroed.fetch_add(bytes, Ordering::Relaxed);
            done += bytes;
            self.pause(due(done, self.rate).saturating_sub(start.elapsed()))
        })?;
        if flow.is_continue() {
            file.sync_all()?;
        }
        Ok(flow)
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

fn not_a_pool(folder: &Path, reason: String) -> Error {
    Error::NotAPool { folder: folder.to_owned(), reason }
}

fn opening(error: &io::Error) -> Error {
    Error::of_io(OPENING, error)
}

fn zeroing(error: &io::Error) -> Error {
    Error::of_io(ZEROING, error)
}

/// Removes a file that waits to be zeroed. Its maker may have given it its path meanwhile.
fn remove_used(path: &Path) -> Result<()> {
    fs::remove_file(path).or_else(not_found)
}

/// A file that is not there is none that has to be removed.
fn not_found(error: io::Error) -> Result<()> {
    match error.kind() {
        ErrorKind::NotFound => Ok(()),
        _ => Err(zeroing(&error)),
    }
}

fn locks(file: &File, how: FlockOperation) -> bool {
    rustix::fs::flock(file, how).is_ok()
}

fn is_plain_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.nlink() == 1)
}

/// Opens a file of the pool, and not what a link leads to, and locks it. `None`: another process
/// has it. Only the process that holds the lock gives the file another path, so a file that has
/// left its path since it was opened belongs to a program.
fn open_and_lock(path: &Path) -> io::Result<Option<File>> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    if !locks(&file, FlockOperation::NonBlockingLockExclusive) {
        return Ok(None);
    }
    let is_here = fs::symlink_metadata(path).is_ok_and(|here| {
        file.metadata().is_ok_and(|file| (file.dev(), file.ino()) == (here.dev(), here.ino()))
    });
    Ok(is_here.then_some(file))
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
