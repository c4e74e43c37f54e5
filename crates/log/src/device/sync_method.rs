//! How a block gets durable on a file: four methods, and which is fastest here.

use std::fmt;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use zerocopy::IntoBytes as _;

use super::folder::{Folder, FolderFile};
use super::is_full;
use crate::block::{BLOCK_BYTES, Block};

/// How a block gets durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncMethod {
    /// `O_DIRECT`, and `RWF_DSYNC` with each write: with forced unit access, where the disk has it.
    DirectDsync,
    /// `O_DIRECT`, and `fdatasync` after the write.
    DirectSync,
    /// Through the page cache, and `RWF_DSYNC` with each write.
    BufferedDsync,
    /// Through the page cache, and `fdatasync` after the write.
    BufferedSync,
}

impl SyncMethod {
    /// All methods, the one first that is preferred among equals.
    pub const ALL: [SyncMethod; 4] = [
        SyncMethod::DirectDsync,
        SyncMethod::DirectSync,
        SyncMethod::BufferedDsync,
        SyncMethod::BufferedSync,
    ];

    /// Whether I/O goes past the page cache.
    pub fn is_direct(self) -> bool {
        matches!(self, SyncMethod::DirectDsync | SyncMethod::DirectSync)
    }

    /// Whether a write is durable when it returns.
    pub fn is_durable(self) -> bool {
        matches!(self, SyncMethod::DirectDsync | SyncMethod::BufferedDsync)
    }

    /// Opens a file of a folder for this method, or creates one that is not there.
    pub(super) fn open(
        self,
        folder: &dyn Folder,
        name: &str,
        create: bool,
    ) -> io::Result<Box<dyn FolderFile>> {
        folder.open(name, self.is_direct(), create)
    }

    /// Writes both parts at a place, all of them; durable when this returns, if the method is so.
    pub(super) fn write(
        self,
        file: &dyn FolderFile,
        offset: u64,
        parts: [&[Block]; 2],
    ) -> io::Result<()> {
        write_all(file, offset, parts, self.is_durable())
    }
}

/// Writes both parts at a place, all of them.
pub(super) fn write_all(
    file: &dyn FolderFile,
    mut offset: u64,
    parts: [&[Block]; 2],
    durable: bool,
) -> io::Result<()> {
    let mut parts = parts.map(<[Block]>::as_bytes);
    while parts.iter().any(|part| !part.is_empty()) {
        let written = file.write(offset, parts, durable)?;
        // A block that was written in part is written again: direct I/O wants whole ones.
        let mut whole = written / BLOCK_BYTES * BLOCK_BYTES;
        if whole == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        offset += whole as u64;
        for part in &mut parts {
            let taken = whole.min(part.len());
            *part = &part[taken..];
            whole -= taken;
        }
    }
    Ok(())
}

impl fmt::Display for SyncMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SyncMethod::DirectDsync => "O_DIRECT with RWF_DSYNC",
            SyncMethod::DirectSync => "O_DIRECT and fdatasync",
            SyncMethod::BufferedDsync => "page cache with RWF_DSYNC",
            SyncMethod::BufferedSync => "page cache and fdatasync",
        })
    }
}

/// The least writes of each method, and the most.
const PROBES_MIN: u64 = 2;
const PROBES_MAX: u64 = 16;

/// After this time no method gets more writes than the least: on storage that takes long, few tell
/// enough.
const PROBE_TIME: Duration = Duration::from_millis(8);

/// Writes at once that are tried.
const AT_ONCE: usize = 4;

/// The fastest method of a file system, and how many writes at once are worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) sync_method: SyncMethod,
    pub(super) in_flight: usize,
}

/// What was found before, by file system.
static KNOWN: Mutex<Vec<(u64, Choice)>> = Mutex::new(Vec::new());

/// The file that the probe writes to. No other program has one of this name.
pub(super) const PROBE: &str = "vellum-log-probe.tmp";

/// The method that a test has chosen for this process.
#[cfg(feature = "testing")]
static CHOSEN: Mutex<Option<SyncMethod>> = Mutex::new(None);

/// Has logs of this process whose options name no method take this one, if any, without a probe.
#[cfg(feature = "testing")]
pub fn choose_sync_method(sync_method: Option<SyncMethod>) {
    *CHOSEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = sync_method;
}

/// Tries all methods on a file in the folder, once for each file system and process.
pub(super) fn probe(folder: &dyn Folder) -> io::Result<Choice> {
    #[cfg(feature = "testing")]
    if let Some(sync_method) = *CHOSEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        let in_flight = if sync_method == SyncMethod::DirectDsync { AT_ONCE } else { 1 };
        return Ok(Choice { sync_method, in_flight });
    }
    let device = folder.file_system()?;
    let mut known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some((_, choice)) = known.iter().find(|(other, _)| *other == device) {
        return Ok(*choice);
    }
    // One that is there was left by a process that was killed: the folder is locked.
    folder.remove(PROBE)?;
    let choice = measure(folder);
    let removed = folder.remove(PROBE);
    let choice = match choice {
        // The log's own files are there: a full disk is no reason not to read them, or to trim.
        Err(error) if is_full(&error) => {
            tracing::warn!(%error, "no room to probe for the log");
            return Ok(Choice { sync_method: SyncMethod::BufferedSync, in_flight: 1 });
        }
        choice => choice?,
    };
    removed?;
    let Choice { sync_method, in_flight } = choice;
    tracing::debug!(%sync_method, in_flight, "probed for the log");
    known.push((device, choice));
    Ok(choice)
}

fn measure(folder: &dyn Folder) -> io::Result<Choice> {
    let file = SyncMethod::BufferedSync.open(folder, PROBE, true)?;
    let blocks = PROBES_MAX * AT_ONCE as u64;
    write_all(&*file, 0, [&vec![Block::ZERO; blocks as usize], &[]], false)?;
    file.sync()?;
    // A method that does not work here fails with its first write, which is not counted.
    let mut methods = Vec::new();
    for sync_method in SyncMethod::ALL {
        let opened = sync_method.open(folder, PROBE, false);
        if let Ok(file) = opened.and_then(|file| durable(sync_method, &*file, 0).map(|()| file)) {
            methods.push((sync_method, file, Duration::MAX));
        }
    }
    let (began, mut probes) = (Instant::now(), 0);
    while probes < PROBES_MIN || probes < PROBES_MAX && began.elapsed() < PROBE_TIME {
        for (sync_method, file, shortest) in &mut methods {
            let begin = Instant::now();
            durable(*sync_method, &**file, probes)?;
            // The shortest: what else the machine does makes others longer.
            *shortest = begin.elapsed().min(*shortest);
        }
        probes += 1;
    }
    let best = methods.iter().min_by_key(|(_, _, shortest)| *shortest);
    let Some((sync_method, file, alone)) = best else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    let several = *sync_method == SyncMethod::DirectDsync
        && at_once(*sync_method, &**file, probes)? < *alone * (probes * AT_ONCE as u64 / 2) as u32;
    Ok(Choice { sync_method: *sync_method, in_flight: if several { AT_ONCE } else { 1 } })
}

/// Time for the same number of writes in each of several threads.
fn at_once(sync_method: SyncMethod, file: &dyn FolderFile, probes: u64) -> io::Result<Duration> {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let write = |thread: u64| {
            let numbers = thread * probes..(thread + 1) * probes;
            move || numbers.into_iter().try_for_each(|number| durable(sync_method, file, number))
        };
        let threads: Vec<_> = (0..AT_ONCE as u64).map(|at| scope.spawn(write(at))).collect();
        let failed = |_| Err(io::Error::other("a probing thread panicked"));
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(failed))
    })?;
    Ok(begin.elapsed())
}

fn durable(sync_method: SyncMethod, file: &dyn FolderFile, number: u64) -> io::Result<()> {
    sync_method.write(file, number * BLOCK_BYTES as u64, [&[Block::ZERO], &[]])?;
    if sync_method.is_durable() { Ok(()) } else { file.sync() }
}
