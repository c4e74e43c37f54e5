//! Finds the log that a store needs to recover, recovers the store from it, and gives a store a
//! log.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use vellum_log::{BLOCK_BYTES, Log, LogDevice, LogError, Lsn, Record, RecordRef};
use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, Pool, PoolError};

use crate::error::{Error, Result};
use crate::planted::{StoreBug, is_planted};
use crate::redo::files::{LOG_BYTES_MIN, LogFiles, log_options};
use crate::redo::log::{LogSetup, MapPlaces, OpenLog, RedoLog, ValuesFirst, bytes_per_change};
use crate::redo::pending::PendingPages;
use crate::redo::progress::RecoveryReport;
use crate::redo::record::RemovedValue;
use crate::redo::recover::{InMemory, Recovered, Recovery};
use crate::redo::redoer::{RedoLimits, RedonePages};
use crate::store::core::StoreCore;
use crate::store::cut;
use crate::store::file::StoreFile;
use crate::store::free_map::FileMap;
use crate::store::header::{AlignedPage, FORMAT_VERSION_PIECES, Header};
use crate::store::options::Options;
use crate::sync::lock;

/// Where a store has its log, if it has one.
#[derive(Clone, Debug)]
pub(crate) enum LogPlace {
    Device(Arc<dyn LogDevice>),
    Folder {
        path: PathBuf,
        /// The folder goes when the store is closed: the store chose its name.
        goes: bool,
    },
    /// There is no file to have a folder beside it.
    Nowhere,
}

impl LogPlace {
    /// For a store in `file`, if it has a path.
    pub(crate) fn of(options: &Options, file: Option<&Path>) -> LogPlace {
        match (&options.log, &options.log_folder, file.and_then(folder_beside)) {
            (Some(device), ..) => LogPlace::Device(device.clone()),
            (None, Some(folder), _) => LogPlace::Folder { path: folder.clone(), goes: false },
            (None, None, Some(path)) => LogPlace::Folder { path, goes: true },
            (None, None, None) => LogPlace::Nowhere,
        }
    }

    /// The log that a store in use needs.
    ///
    /// # Errors
    /// If the log is not there.
    fn find(
        &self,
        expected: u64,
        options: &Options,
    ) -> Result<(Arc<dyn LogDevice>, Option<LogFiles>)> {
        let no_log = |place| Err(Error::NoLog { place, expected });
        let (device, files) = match self {
            LogPlace::Device(device) => (device.clone(), None),
            LogPlace::Folder { path, goes } => {
                match LogFiles::open(path, *goes, options.log_bytes)? {
                    Some(files) => (files.device(), Some(files)),
                    None => return no_log(format!("{} has none", path.display())),
                }
            }
            LogPlace::Nowhere => return no_log("no folder is given".into()),
        };
        match device.identity() {
            found if found == expected => Ok((device, files)),
            found => Err(Error::OtherLog { found, expected, place: self.to_string() }),
        }
    }

    /// Removes what a process has left of the log of a store that is clean.
    pub(crate) fn remove_left(&self, header: &Header, options: &Options) {
        if let LogPlace::Folder { path, goes } = self {
            let log_bytes = options.log_bytes.max(LOG_BYTES_MIN);
            LogFiles::remove_left(path, *goes, header, log_bytes);
        }
    }

    /// Makes a new log for a store that is clean.
    ///
    /// # Errors
    /// If the folder has a log that another store, or another copy of this one, may need; what the
    /// system said.
    pub(crate) fn create(
        &self,
        header: &Header,
        file: &Arc<dyn Device>,
        options: &Options,
    ) -> Result<OpenLog> {
        let (device, files) = match self {
            LogPlace::Device(device) => (device.clone(), None),
            LogPlace::Folder { path, goes } => {
                let files = LogFiles::create(path, *goes, header, options.log_bytes);
                let files = files.map_err(|error| match error {
                    LogError::Full { .. } | LogError::Io { .. } => Error::NoPlaceForLog(error),
                    error => error.into(),
                })?;
                (files.device(), Some(files))
            }
            LogPlace::Nowhere => {
                return Err(Error::BadOption(
                    "this store has no folder beside it for a log: name one \
                     (Options::log_folder)"
                        .into(),
                ));
            }
        };
        let values = Arc::new(ValuesFirst::new(device, file.clone()));
        let (log, _) = open_log(&values, None, options, |_| Ok(()))?;
        Ok(OpenLog { log, values, files })
    }
}

impl std::fmt::Display for LogPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LogPlace::Folder { path, .. } => path.display().fmt(f),
            LogPlace::Device(_) | LogPlace::Nowhere => f.write_str("the device"),
        }
    }
}

/// The folder beside a file: the file's name with `.log` behind it. A block device has none, since
/// files beside it are not on a disk.
fn folder_beside(file: &Path) -> Option<PathBuf> {
    let found = fs::metadata(file);
    if found.is_ok_and(|found| found.file_type().is_block_device()) {
        return None;
    }
    // Whatever name the file is opened by, the folder lies beside the file itself.
    let parent = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let of_new = || Some(fs::canonicalize(parent).ok()?.join(file.file_name()?));
    // Nothing else says where a file is whose path goes through folders that may not be searched.
    let as_given = || file.to_path_buf();
    let resolved = fs::canonicalize(file).ok().or_else(of_new);
    let mut path = resolved.unwrap_or_else(as_given).into_os_string();
    path.push(".log");
    Some(path.into())
}

fn open_log(
    device: &Arc<ValuesFirst>,
    from: Option<Lsn>,
    options: &Options,
    visit: impl FnMut(RecordRef<'_>) -> Result<()>,
) -> Result<(Log, Lsn)> {
    let (device, log_options) = (device.clone(), log_options(options.log_bytes));
    #[cfg(feature = "testing")]
    if options.is_single_threaded {
        let opened = Log::open_without_thread(device, &log_options, from, visit);
        return opened.map(|(log, end)| (log, end.lsn));
    }
    let opened = Log::open(device, &log_options, from, visit);
    opened.map(|(log, end)| (log, end.lsn))
}

/// Of the memory that recovery may use for pages, this part is for the lists of where the records
/// of the others are, and for the pages that are made together later.
const LATER_PART: usize = 4;

/// The memory that recovery may use for pages: half of what the pool will have. The simulation has
/// so little that most pages do not fit.
fn recovery_bytes(options: &Options) -> Result<usize> {
    if let Some(bytes) = options.recovery_bytes {
        return Ok(bytes);
    }
    Ok(usize::try_from(options.pool.frames()? / 2).unwrap_or(usize::MAX).saturating_mul(PAGE_SIZE))
}

/// How a recovery has left a store.
pub(crate) enum RecoveryOutcome {
    /// The file is clean, with this header. No tree refers to these values in pieces.
    Clean(Header, RecoveryReport, Vec<RemovedValue>),
    /// The file needs the log. The pages that have changed are in memory, or pending.
    InMemory(Box<InMemory>),
}

/// Recovers a store that ended while it was in use with a log. `read` reads the page of its header,
/// and its free map. Returns the log, and how the store is now.
pub(crate) fn recover(
    file: &Arc<dyn Device>,
    header: Header,
    read: impl FnOnce() -> Result<(Box<AlignedPage>, FileMap)>,
    place: &LogPlace,
    options: &Options,
) -> Result<(OpenLog, RecoveryOutcome)> {
    let (device, files) = place.find(header.log.identity, options)?;
    let (page, map) = read()?;
    tracing::info!(log = %place, "the store was not closed: recovering it");
    let most = Lsn(device.scan().end * BLOCK_BYTES as u64);
    // The build that wrote an older header may not know the records that this one would append.
    let is_newest = header.is_newest_version(&page);
    let knows = header.version >= FORMAT_VERSION_PIECES && is_newest;
    let goes_on = options.wants_log(place) && knows && !options.recovers_to_file();
    let bytes = recovery_bytes(options)?;
    let list_bytes = goes_on.then_some(bytes / LATER_PART);
    let limits = RedoLimits { threads: options.recovery_threads(), bytes, list_bytes };
    let mut recovery = Recovery::new(header, map, most, limits, &options.on_recovery)?;
    if !is_newest {
        recovery.skip_outside();
    }
    let values = Arc::new(ValuesFirst::new(device, file.clone()));
    let from = Some(recovery.from());
    let mut before: Option<Record> = None;
    let (log, end) = open_log(&values, from, options, |record| {
        if !is_planted(StoreBug::LostRecord) {
            return recovery.add(record);
        }
        // One record late, so that the last one is never added.
        let late = before.replace(record.to_record());
        late.map_or(Ok(()), |Record { lsn, bytes }| recovery.add(RecordRef { lsn, bytes: &bytes }))
    })?;
    recovery.end_at(end)?;
    let outcome = match goes_on {
        true => {
            let store = recovery.into_memory(file, bytes / LATER_PART)?;
            RecoveryOutcome::InMemory(Box::new(store))
        }
        false => {
            let recovered = recovery.write(&page, file, &log)?;
            let Recovered { header, report, removed, .. } = recovered;
            RecoveryOutcome::Clean(header, report, removed)
        }
    };
    let report = match &outcome {
        RecoveryOutcome::Clean(_, report, _) => report,
        RecoveryOutcome::InMemory(store) => &store.report,
    };
    let RecoveryReport { records, pages, log_bytes, duration } = report;
    tracing::info!(records, pages, log_bytes, ?duration, "recovered the store");
    Ok((OpenLog { log, values, files }, outcome))
}

/// Has a store that was recovered in memory go on with its log, and with the pages that its file
/// does not have.
///
/// # Errors
/// If there is no memory for the pages.
pub(crate) fn resume_log(
    core: &mut StoreCore,
    log: OpenLog,
    pages: Vec<RedonePages>,
    pending: PendingPages,
    options: &Options,
) -> Result<()> {
    let header = core.pages.file.header();
    let setup = log_setup(core, options);
    let log = Arc::new(RedoLog::resume(log, header.log, pending, setup));
    // Before the pool has a page that it may write.
    core.pages.file.set_log(&log);
    let mut unfinished = Unfinished(Some(core.pages.file.clone()));
    let began = Instant::now();
    insert_redone(&core.pages.pool, pages)?;
    // The last process may not have given back the room of the records before the cut.
    log.trim(log.newest_cut())?;
    core.set_log(log, options.cut_in_background);
    core.recovery.iter_mut().for_each(|report| report.duration += began.elapsed());
    unfinished.0 = None;
    Ok(())
}

/// Puts the pages of each redoer into the pool, by a thread each: most of the time goes into memory
/// that the kernel has to clear first.
fn insert_redone(pool: &Pool, pages: Vec<RedonePages>) -> Result<()> {
    let lost = usize::from(is_planted(StoreBug::LostRedone));
    let insert = |pages: RedonePages| {
        let inserted = |(page, bytes)| pool.insert(page, bytes);
        Ok(pages.iter().skip(lost).try_for_each(inserted)?)
    };
    thread::scope(|scope| {
        let mut pages = pages.into_iter();
        let first = pages.next();
        let start = |pages| {
            let builder = thread::Builder::new().name("vellum-redo".to_owned());
            builder.spawn_scoped(scope, || insert(pages)).map_err(PoolError::Thread)
        };
        let threads: Vec<_> = pages.map(start).collect();
        let of_first = first.map_or(Ok(()), insert);
        let of_others = threads.into_iter().map(|thread| match thread?.join() {
            Ok(inserted) => inserted,
            Err(panic) => resume_unwind(panic),
        });
        of_others.fold(of_first, Result::and)
    })
}

/// The store lacks some of its pages until this has no file any more. Dropping it before that, also
/// in a panic, keeps a checkpoint from writing the others.
struct Unfinished(Option<Arc<StoreFile>>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            file.poison_for("the recovery failed");
            file.log().into_iter().for_each(RedoLog::stop);
        }
    }
}

/// What the log of a store has to know of it.
fn log_setup(core: &StoreCore, options: &Options) -> LogSetup {
    let newest = std::mem::take(&mut lock(&core.checkpoints).places);
    LogSetup {
        bytes_per_cut: options.log_bytes / 2,
        pauses: options.cut_pauses.unwrap_or(cut::PAUSES),
        page_frames: core.pages.page_frames,
        maps: MapPlaces { newest, next: Vec::new() },
    }
}

/// Has a clean store write its changes to a log from now on.
///
/// # Errors
/// A failed write or sync.
pub(crate) fn begin_log(core: &mut StoreCore, log: OpenLog, options: &Options) -> Result<()> {
    let file = core.pages.file.clone();
    // No program that knows no pieces reads the header of a store with a log.
    file.update(|header| header.version = FORMAT_VERSION_PIECES);
    let log = Arc::new(RedoLog::new(log, file.header().log, log_setup(core, options)));
    log.own(file.header().store_id)?;
    let named = Header { clean: false, log: log.point(log.cut_at_end()), ..file.header() };
    if let Err(error) = file.begin_log(&log, named) {
        log.stop();
        return Err(error);
    }
    // The records from before need no room any more. A checkpoint does not give it back: it trims
    // the log only after new records.
    if let Err(error) = log.trim(log.newest_cut()) {
        log.stop();
        return Err(error.into());
    }
    core.set_log(log, options.cut_in_background);
    Ok(())
}

impl Options {
    /// Whether a store with this place for a log gets one.
    pub(crate) fn wants_log(&self, place: &LogPlace) -> bool {
        let has_log = self.has_log.unwrap_or(!matches!(place, LogPlace::Nowhere));
        (has_log || self.log.is_some()) && !self.is_read_only()
    }

    /// Whether the options of the log make sense for a store with tree pages of this length, and
    /// with this place for a log.
    pub(crate) fn check_log(&self, page_frames: u32, place: &LogPlace) -> Result<()> {
        let page_bytes = u64::from(page_frames) * PAGE_SIZE as u64;
        // Half of the log is for two changes under way, or more if they fit.
        let min = LOG_BYTES_MIN.max(4 * bytes_per_change(page_bytes));
        match self.wants_log(place) && self.log.is_none() && self.log_bytes < min {
            true => Err(Error::BadOption(format!(
                "a log of {} bytes: the log of a store with tree pages of {page_bytes} bytes has \
                 at least {min} (Options::log_bytes)",
                self.log_bytes
            ))),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vellum_log::{SimulatedDevice, SimulatedOptions};
    use vellum_pool::device::MemoryDevice;

    use super::Unfinished;
    use crate::{Options, Store};

    #[test]
    fn a_store_that_lacks_recovered_pages_writes_nothing_when_it_is_dropped() {
        let segments = SimulatedOptions { segments: 64, segment_blocks: 16, ..Default::default() };
        let log = Arc::new(SimulatedDevice::new(segments));
        let memory = Arc::new(MemoryDevice::new());
        let options = Options::new().pool_bytes(1 << 20);
        let options = Options { log: Some(log.clone()), evictors: 0, ..options };
        let store = Store::create_on(memory.clone(), &options).unwrap();
        let tree = store.create_tree("tree").unwrap();
        (0..1000_u16).for_each(|number| drop(tree.upsert(&number.to_be_bytes(), &[7; 100])));
        store.sync().unwrap();
        let before = memory.snapshot();
        drop(Unfinished(Some(store.core.pages.file.clone())));
        drop((tree, store));
        assert!(memory.snapshot() == before);
        let store = Store::open_on(memory, &options).unwrap();
        assert!(store.recovery().is_some());
        assert_eq!(store.tree("tree").unwrap().entries().count(), 1000);
    }
}
