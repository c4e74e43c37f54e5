//! A disk in memory with one folder, whose power fails, for the simulation: what a file system
//! may do, from a seed.
//!
//! The model is as weak as POSIX and what ext4, XFS and btrfs do in fact allow:
//!
//! - *Contents.* A write goes to a cache, by sectors of 512 bytes. A loss of power leaves each
//!   sector that was not synced as any of its versions since it was durable last, in any order. A
//!   sync of the file, or a write with `RWF_DSYNC` (for its own bytes), makes them durable. The
//!   kernel may write back at any time.
//! - *Lengths.* A length that was not synced is lost or kept. Bytes that are within the length
//!   and never arrived are zeros.
//! - *Names.* A creation, a removal or a rename is atomic, and lost or kept until the folder is
//!   synced. Half of the seeds keep them in order, as ext4 and XFS, which write one journal; the
//!   others lose any of them, but for those that follow a lost one of the same name. A sync of a
//!   file may make names durable or not: ext4 does, POSIX promises nothing. The folder itself is
//!   lost unless the one above was synced.
//! - *Failed syncs*, as Linux: some of what was to be written arrives. The rest is clean in the
//!   page cache from then on, which shows it until it forgets it, and the next sync succeeds. An
//!   error of a write-back is told once to each handle, and to the first one that is opened later
//!   if none was told. Past the page cache a reader sees what the disk has.
//! - *Room.* Allocations, longer files, new names and renames fail without any. Some file systems
//!   need room to overwrite (btrfs), have no `fallocate`, or cannot keep a rename from replacing
//!   a file.
//! - *Bad sectors* cannot be read until they are written.
//!
//! Not modelled: sectors that are torn inside, a disk that says "durable" and lies, one that
//! changes what was durable (the driver does that), names that a failed sync of the folder loses,
//! more than one folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

/// What storage writes as a whole.
pub(super) const SECTOR: usize = 512;
/// What the page cache and direct I/O take.
pub(super) const PAGE: usize = 4096;

type Sector = [u8; SECTOR];

/// Names, and the files that they are given to.
pub(super) type Change = Vec<(String, Option<u64>)>;

/// A mistake of the log, made in its place: the log's calls arrive as if it had made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A new file gets its name, and its folder is not synced.
    FolderNotSynced,
    /// The folder above is not synced when the folder is created.
    AboveNotSynced,
    /// A head is not synced before blocks follow it.
    HeadNotSynced,
    /// A recycled file keeps its old head.
    OldHead,
    /// A flush does not sync.
    BlocksNotSynced,
    /// A write that shall be durable at once is not.
    WritesNotDurable,
    /// A sync that fails is taken for one that did not.
    FailedSyncIgnored,
    /// An opening does not sync what a killed process left.
    OpeningNotSynced,
    /// An opening asks the page cache after a failed sync.
    CacheBelieved,
    /// An opening believes torn blocks.
    ChecksumNotChecked,
    /// An opening believes blocks that an earlier opening left.
    IncarnationNotChecked,
    /// A trim takes the last durable block, too: the driver makes this one.
    TrimTakesAll,
}

/// A disk with one folder. Clones are the same disk.
#[derive(Clone)]
pub(crate) struct SimulatedDisk(Arc<Mutex<State>>);

impl fmt::Debug for SimulatedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimulatedDisk")
    }
}

/// What this file system does where several are possible.
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// Names become durable in order.
    ordered: bool,
    pub(super) allocates: bool,
    pub(super) keeps_names: bool,
    /// An overwrite needs room.
    pub(super) copies: bool,
    /// The kernel's write-back may fail.
    loses: bool,
    /// The kernel writes back, and writes are short, now and then.
    pub(super) restless: bool,
}

#[derive(Clone, Debug)]
pub(super) struct State {
    random: u64,
    pub(super) habits: Habits,
    pub(super) planted: Option<Planted>,
    pub(super) files: BTreeMap<u64, Stored>,
    pub(super) names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    /// Changes of names that are not durable.
    changes: Vec<Change>,
    pub(super) is_durable: bool,
    pub(super) locked: bool,
    /// Handles of an earlier one are those of a process that has ended.
    pub(super) process: u64,
    has_ended: bool,
    ends_in: Option<u64>,
    fails_in: Option<u64>,
    /// A sync of a file that fails says that there is no room.
    pub(super) syncs_want_room: bool,
    pub(super) room: u64,
    pub(super) faults: u64,
}

/// One file.
#[derive(Clone, Debug, Default)]
pub(super) struct Stored {
    disk: BTreeMap<usize, Sector>,
    /// Bytes that there are, and those that are so durably.
    pub(super) len: u64,
    pub(super) durable_len: u64,
    /// What was written and is not durable, oldest first.
    pub(super) pending: BTreeMap<usize, Vec<Sector>>,
    /// What the page cache has as clean, and the disk has not.
    pub(super) lies: BTreeMap<usize, Sector>,
    pub(super) bad: BTreeSet<usize>,
    /// Write-backs that failed, and whether a handle was told of the last one.
    pub(super) failures: u64,
    pub(super) told: bool,
}

/// How a call ends.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Fate {
    Done,
    Fails,
    /// The process is killed, or the power fails, meanwhile.
    Ends,
}

pub(super) fn failure() -> io::Error {
    Errno::IO.into()
}

pub(super) fn ended() -> io::Error {
    io::Error::other("the process has ended")
}

impl SimulatedDisk {
    /// A disk whose habits come from the seed.
    pub(crate) fn new(seed: u64, planted: Option<Planted>) -> SimulatedDisk {
        let disk = SimulatedDisk::quiet(seed);
        let mut state = disk.lock();
        state.planted = planted;
        state.habits = Habits {
            ordered: state.below(2) == 0,
            allocates: state.below(4) > 0,
            keeps_names: state.below(4) > 0,
            copies: state.below(4) == 0,
            loses: state.below(2) == 0,
            restless: true,
        };
        drop(state);
        disk
    }

    /// A disk that does nothing of its own accord.
    pub(crate) fn quiet(seed: u64) -> SimulatedDisk {
        let state = State {
            random: seed,
            habits: Habits {
                ordered: true,
                allocates: true,
                keeps_names: true,
                copies: false,
                loses: false,
                restless: false,
            },
            planted: None,
            files: BTreeMap::new(),
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            changes: Vec::new(),
            is_durable: false,
            locked: false,
            process: 0,
            has_ended: false,
            ends_in: None,
            fails_in: None,
            syncs_want_room: false,
            room: u64::MAX,
            faults: 0,
        };
        SimulatedDisk(Arc::new(Mutex::new(state)))
    }

    /// A disk of its own with the same contents.
    pub(crate) fn copy(&self) -> SimulatedDisk {
        SimulatedDisk(Arc::new(Mutex::new(self.lock().clone())))
    }

    /// A number below `limit`, from the seed.
    pub(crate) fn random_below(&self, limit: u64) -> u64 {
        self.lock().below(limit)
    }

    /// The call after so many more fails.
    pub(crate) fn fail_after(&self, calls: u64) {
        self.lock().fails_in = Some(calls);
    }

    /// The call after so many more fails. If it is a sync of a file, it says that there is no room.
    pub(crate) fn run_full_after(&self, calls: u64) {
        let mut state = self.lock();
        (state.fails_in, state.syncs_want_room) = (Some(calls), true);
    }

    /// The process ends within the call after so many more.
    pub(crate) fn end_after(&self, calls: u64) {
        self.lock().ends_in = Some(calls);
    }

    /// Whether it has.
    pub(crate) fn has_ended(&self) -> bool {
        self.lock().has_ended
    }

    /// Errors so far that were not for want of room.
    pub(crate) fn faults(&self) -> u64 {
        self.lock().faults
    }

    /// There is room for so many more bytes from now on.
    pub(crate) fn set_room(&self, bytes: u64) {
        let mut state = self.lock();
        state.room = state.used().saturating_add(bytes);
    }

    /// Whether the file system has `fallocate`.
    pub(crate) fn set_allocates(&self, allocates: bool) {
        self.lock().habits.allocates = allocates;
    }

    /// The next process: after a loss of power, or with all that this one wrote. No faults are
    /// planned then.
    pub(crate) fn restart(&self, powered_off: bool) {
        let mut state = self.lock();
        state.process += 1;
        (state.locked, state.has_ended) = (false, false);
        (state.ends_in, state.fails_in, state.room) = (None, None, u64::MAX);
        if powered_off {
            state.lose_power();
        }
    }

    /// The files of the folder as a reader sees them who asks the page cache.
    pub(crate) fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let state = self.lock();
        let content = |file: &Stored| {
            let sectors = (0..file.len as usize / SECTOR).map(|at| file.seen(at, false));
            sectors.flatten().collect()
        };
        state.names.iter().map(|(name, file)| (name.clone(), content(&state.files[file]))).collect()
    }

    /// A file is gone.
    pub(crate) fn remove(&self, name: &str) {
        let mut state = self.lock();
        state.names.remove(name);
        state.durable_names.remove(name);
    }

    /// The disk damages sectors of a file: new bytes, or none that can be read.
    pub(crate) fn damage(&self, name: &str, sector: usize, bytes: Option<Sector>) {
        let mut state = self.lock();
        let file = state.names[name];
        let Some(file) = state.files.get_mut(&file) else { return };
        file.pending.remove(&sector);
        file.lies.remove(&sector);
        match bytes {
            Some(bytes) => drop(file.disk.insert(sector, bytes)),
            None => drop(file.bad.insert(sector)),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call of a process begins that does not fail; but the process may end within it.
    pub(super) fn look(&self, process: u64) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        if state.process != process || state.has_ended {
            return Err(ended());
        }
        state.write_back();
        let State { ends_in, has_ended, .. } = &mut *state;
        if counts_down(ends_in) {
            *has_ended = true;
            return Err(ended());
        }
        Ok(state)
    }

    /// A call of a process begins.
    pub(super) fn begin(&self, process: u64) -> io::Result<(MutexGuard<'_, State>, Fate)> {
        let mut state = self.lock();
        if state.process == process && state.ends_in == Some(0) {
            (state.ends_in, state.has_ended) = (None, true);
            return Ok((state, Fate::Ends));
        }
        drop(state);
        let mut state = self.look(process)?;
        if counts_down(&mut state.fails_in) {
            state.faults += 1;
            return Ok((state, Fate::Fails));
        }
        Ok((state, Fate::Done))
    }
}

fn counts_down(left: &mut Option<u64>) -> bool {
    match left {
        Some(0) => left.take().is_some(),
        Some(left) => {
            *left -= 1;
            false
        }
        None => false,
    }
}

impl State {
    /// SplitMix64.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % limit.max(1)
    }

    pub(super) fn used(&self) -> u64 {
        self.names.values().map(|file| self.files[file].len).sum()
    }

    /// The kernel writes a file back now and then, or forgets what it has in the page cache.
    fn write_back(&mut self) {
        if !self.habits.restless || self.below(24) > 0 {
            return;
        }
        let nth = self.below(self.files.len() as u64) as usize;
        let Some((&id, _)) = self.files.iter().nth(nth) else { return };
        if self.habits.loses && !self.file(id).pending.is_empty() && self.below(16) == 0 {
            self.lose(id, 0..usize::MAX, false);
            self.file(id).failures += 1;
            self.file(id).told = false;
        } else if self.below(2) == 0 {
            self.file(id).lies.clear();
        } else {
            self.file(id).settle(0..usize::MAX);
        }
    }

    pub(super) fn file(&mut self, id: u64) -> &mut Stored {
        self.files.entry(id).or_default()
    }

    /// Some of what was written to these sectors arrives, the rest does not, though the page cache
    /// believes so.
    pub(super) fn lose(&mut self, id: u64, sectors: Range<usize>, direct: bool) {
        let kept = self.below(11);
        let pending: Vec<_> = self.file(id).pending.range(sectors).map(|(at, _)| *at).collect();
        for at in pending {
            let arrives = self.below(10) < kept;
            let file = self.file(id);
            let Some(last) = file.pending.remove(&at).and_then(|mut all| all.pop()) else {
                continue;
            };
            if arrives {
                file.arrive(at, last);
            } else if !direct {
                file.lies.insert(at, last);
            }
        }
    }

    pub(super) fn change(&mut self, change: Change) {
        apply(&mut self.names, &change);
        self.changes.push(change);
    }

    pub(super) fn commit_names(&mut self) {
        self.durable_names = self.names.clone();
        self.changes.clear();
    }

    fn lose_power(&mut self) {
        let kept = self.below(11);
        let mut lost: BTreeSet<String> = BTreeSet::new();
        let mut all_lost = false;
        for change in std::mem::take(&mut self.changes) {
            let follows_lost = change.iter().any(|(name, _)| lost.contains(name));
            if all_lost || follows_lost || self.below(10) >= kept {
                all_lost |= self.habits.ordered;
                lost.extend(change.into_iter().map(|(name, _)| name));
            } else {
                apply(&mut self.durable_names, &change);
            }
        }
        if !self.is_durable && self.below(10) >= kept {
            self.durable_names.clear();
        }
        self.names = self.durable_names.clone();
        let names: BTreeSet<_> = self.names.values().copied().collect();
        self.files.retain(|id, _| names.contains(id));
        for id in names {
            if self.below(10) >= kept {
                self.file(id).len = self.file(id).durable_len;
            }
            for (at, versions) in std::mem::take(&mut self.file(id).pending) {
                let version = self.below(versions.len() as u64) as usize;
                if self.below(10) < kept {
                    self.file(id).arrive(at, versions[version]);
                }
            }
            let file = self.file(id);
            let end = file.len as usize / SECTOR;
            file.disk.retain(|at, _| *at < end);
            file.lies.clear();
            (file.durable_len, file.failures, file.told) = (file.len, 0, true);
        }
    }
}

fn apply(names: &mut BTreeMap<String, u64>, change: &[(String, Option<u64>)]) {
    for (name, file) in change {
        match file {
            Some(file) => names.insert(name.clone(), *file),
            None => names.remove(name),
        };
    }
}

impl Stored {
    /// What a reader sees.
    pub(super) fn seen(&self, at: usize, direct: bool) -> Sector {
        let newest = self.pending.get(&at).and_then(|versions| versions.last());
        let lie = self.lies.get(&at).filter(|_| !direct);
        newest.or(lie).or(self.disk.get(&at)).copied().unwrap_or([0; SECTOR])
    }

    pub(super) fn put(&mut self, at: usize, bytes: Sector) {
        self.pending.entry(at).or_default().push(bytes);
        self.lies.remove(&at);
    }

    /// A sector is on the disk.
    fn arrive(&mut self, at: usize, bytes: Sector) {
        self.disk.insert(at, bytes);
        self.bad.remove(&at);
    }

    /// What was written to these sectors is on the disk.
    pub(super) fn settle(&mut self, sectors: Range<usize>) {
        let all = std::mem::take(&mut self.pending);
        for (at, mut versions) in all {
            if !sectors.contains(&at) {
                self.pending.insert(at, versions);
            } else if let Some(last) = versions.pop() {
                self.arrive(at, last);
            }
        }
    }
}
