//! The files that the daemon has as Morsels: it loads each once, and evicts the one used longest
//! ago.
//!
//! Invariants: a version of a file is in `objects` at most once. `used` is the memory of these
//! objects and of the loads that still run; it never exceeds the limit. An object that is ready is
//! in the folder, if there is one and it has room.

use std::collections::{BTreeSet, HashMap};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::PAGE_SIZE;
use crate::daemon::folder::Folder;
use crate::daemon::load::{self, Course};
use crate::daemon::source::{Source, Version};
use crate::morsel::Morsel;
use crate::protocol::{DaemonStat, Object, Refusal};
use crate::provider::Provider;

/// How often waiting clients get the load's progress.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// The user that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asker {
    pub(super) uid: u32,
    /// Root, and the user that the daemon runs as.
    pub(super) sees_all: bool,
}

/// How much a cache may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) bytes: u64,
    /// Each has a descriptor.
    pub(super) objects: usize,
    /// Of one load.
    pub(super) threads: usize,
}

#[derive(Debug)]
pub(super) struct Cache {
    provider: Provider,
    bounds: Bounds,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    objects: HashMap<Version, Entry>,
    /// The folder in which files outlive the daemon.
    folder: Option<Folder>,
    used: u64,
    /// Counts uses, to tell which was longest ago.
    clock: u64,
    loads: u64,
    hits: u64,
    evictions: u64,
}

#[derive(Debug)]
enum Entry {
    Loading { load: Arc<Load>, waiting: usize },
    Ready(Ready),
}

/// A file in memory.
#[derive(Debug)]
struct Ready {
    morsel: Arc<Morsel>,
    /// `None`: no client has asked since the daemon found it again.
    name: Option<String>,
    uses: u64,
    last_use: u64,
    /// The users that have proved that they may read it.
    askers: BTreeSet<u32>,
}

impl Ready {
    fn mounts(&self) -> Option<u64> {
        self.morsel.stat().ok()?.mounts
    }
}

/// A file that is being loaded.
#[derive(Debug, Default)]
struct Load {
    course: Course,
    outcome: Mutex<Option<Result<Arc<Morsel>, Refusal>>>,
    ended: Condvar,
}

impl Cache {
    /// A cache with the files of the folder, as far as there is room.
    pub(super) fn new(provider: Provider, bounds: Bounds, folder: Option<Folder>) -> Self {
        let found = folder.as_ref().map_or_else(Vec::new, Folder::found);
        let mut state = State { folder, ..State::default() };
        for (version, morsel) in found {
            match state.make_room(memory(&version), &bounds) {
                Ok(()) => {
                    state.used += memory(&version);
                    state.insert(version, Arc::new(morsel), None);
                }
                Err(_) => state.remove_name(&version),
            }
        }
        Self { provider, bounds, state: Mutex::new(state) }
    }

    /// The Morsel of a file, and whether the cache had it. From time to time `tell` gets the number
    /// of bytes read. It returns whether the client is still connected.
    pub(super) fn get(
        self: &Arc<Self>,
        mut source: Source,
        asker: Asker,
        tell: impl FnMut(u64) -> bool,
    ) -> Result<(Arc<Morsel>, bool), Refusal> {
        source.settle()?;
        let version = source.version;
        let mut state = self.state();
        let load = match state.objects.get_mut(&version) {
            Some(Entry::Ready(ready)) => {
                ready.name.get_or_insert_with(|| source.name());
                state.hits += 1;
                return state.hand_out(&version, asker).map(|morsel| (morsel, true));
            }
            Some(Entry::Loading { load, waiting }) => {
                *waiting += 1;
                Arc::clone(load)
            }
            None => self.begin(&mut state, source)?,
        };
        drop(state);
        let Some(outcome) = load.wait(tell) else {
            self.leave(&version, &load);
            return Err(Refusal::GivenUp);
        };
        let morsel = outcome?;
        // Another thread may have evicted it meanwhile; a client that waited gets it all the same.
        let _ = self.state().hand_out(&version, asker);
        Ok((morsel, false))
    }

    /// Starts to load a file for one waiting client.
    fn begin(self: &Arc<Self>, state: &mut State, source: Source) -> Result<Arc<Load>, Refusal> {
        let version = source.version;
        // No client can ask for an older version of the file.
        state.forget(|other| other.file == version.file);
        state.make_room(memory(&version), &self.bounds)?;
        let load = Arc::new(Load::default());
        let (cache, own) = (Arc::clone(self), Arc::clone(&load));
        thread::Builder::new()
            .name("load".into())
            .spawn(move || cache.carry_out(&own, source))
            .map_err(|error| Refusal::Failed { reason: format!("starting a thread: {error}") })?;
        state.used += memory(&version);
        state.loads += 1;
        state.objects.insert(version, Entry::Loading { load: Arc::clone(&load), waiting: 1 });
        Ok(load)
    }

    /// Loads a file and wakes the waiting clients.
    fn carry_out(&self, load: &Arc<Load>, source: Source) {
        let work = || load::load(&self.provider, &source, self.bounds.threads, &load.course);
        let panicked = || Refusal::Failed { reason: "the load panicked".into() };
        let outcome = panic::catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|_| Err(panicked()))
            .map(Arc::new);
        let mut state = self.state();
        let is_wanted = state.is_loading(&source.version, load);
        match &outcome {
            Ok(morsel) if is_wanted => {
                if let Some(folder) = &state.folder {
                    folder.keep(&source.version, morsel);
                }
                state.insert(source.version, Arc::clone(morsel), Some(source.name()));
            }
            _ => {
                state.used -= memory(&source.version);
                if is_wanted {
                    state.objects.remove(&source.version);
                }
            }
        }
        drop(state);
        *lock(&load.outcome) = Some(outcome);
        load.ended.notify_all();
    }

    /// A client no longer waits; without any other the load ends.
    fn leave(&self, version: &Version, load: &Arc<Load>) {
        let mut state = self.state();
        if !state.is_loading(version, load) {
            return;
        }
        if let Some(Entry::Loading { waiting, .. }) = state.objects.get_mut(version) {
            *waiting -= 1;
            if *waiting == 0 {
                load.course.given_up.store(true, Ordering::Relaxed);
                state.objects.remove(version);
            }
        }
    }

    /// Forgets all versions of a file; returns how many there were.
    pub(super) fn remove(&self, source: &Source) -> u64 {
        self.state().forget(|version| version.file == source.version.file)
    }

    /// The files that a user may see, most recently used first.
    pub(super) fn list(&self, asker: Asker) -> Vec<Object> {
        let state = self.state();
        let mut found: Vec<(u64, Object)> = Vec::new();
        for (version, entry) in &state.objects {
            let Entry::Ready(ready) = entry else { continue };
            if asker.sees_all || ready.askers.contains(&asker.uid) {
                let object = Object {
                    name: ready.name.clone().unwrap_or_else(|| version.file.to_string()),
                    length: version.length,
                    uses: ready.uses,
                    mounts: ready.mounts(),
                };
                found.push((ready.last_use, object));
            }
        }
        found.sort_by_key(|(last_use, _)| std::cmp::Reverse(*last_use));
        found.into_iter().map(|(_, object)| object).collect()
    }

    pub(super) fn stat(&self) -> DaemonStat {
        let state = self.state();
        let is_ready = |entry: &&Entry| matches!(entry, Entry::Ready(_));
        DaemonStat {
            backend: self.provider.backend().name().to_string(),
            limit: self.bounds.bytes,
            used: state.used,
            objects: state.objects.values().filter(is_ready).count() as u64,
            loads: state.loads,
            hits: state.hits,
            evictions: state.evictions,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    /// Adds a loaded file.
    fn insert(&mut self, version: Version, morsel: Arc<Morsel>, name: Option<String>) {
        self.clock += 1;
        let (uses, last_use, askers) = (0, self.clock, BTreeSet::new());
        let ready = Ready { morsel, name, uses, last_use, askers };
        self.objects.insert(version, Entry::Ready(ready));
    }

    fn remove_name(&self, version: &Version) {
        if let Some(folder) = &self.folder {
            folder.remove(version);
        }
    }

    /// Counts a use of a loaded file.
    fn hand_out(&mut self, version: &Version, asker: Asker) -> Result<Arc<Morsel>, Refusal> {
        let Some(Entry::Ready(ready)) = self.objects.get_mut(version) else {
            return Err(Refusal::GivenUp);
        };
        self.clock += 1;
        ready.last_use = self.clock;
        ready.uses += 1;
        ready.askers.insert(asker.uid);
        Ok(Arc::clone(&ready.morsel))
    }

    fn is_loading(&self, version: &Version, load: &Arc<Load>) -> bool {
        let entry = self.objects.get(version);
        matches!(entry, Some(Entry::Loading { load: found, .. }) if Arc::ptr_eq(found, load))
    }

    /// Forgets the loaded versions of some files. Processes that have one keep it and its memory.
    fn forget(&mut self, which: impl Fn(&Version) -> bool) -> u64 {
        let goes = |version: &Version, entry: &mut Entry| {
            matches!(entry, Entry::Ready(_)) && which(version)
        };
        let gone: Vec<Version> =
            self.objects.extract_if(goes).map(|(version, _)| version).collect();
        for version in &gone {
            self.remove_name(version);
            self.used -= memory(version);
        }
        gone.len() as u64
    }

    /// Evicts the files used longest ago until `bytes` fit; files that are known to be mapped stay,
    /// because evicting them would free no memory.
    fn make_room(&mut self, bytes: u64, bounds: &Bounds) -> Result<(), Refusal> {
        let limit = bounds.bytes;
        if bytes > limit {
            return Err(Refusal::TooLarge { bytes, limit });
        }
        while self.used + bytes > limit || self.objects.len() >= bounds.objects {
            let idle = |entry: &Entry| match entry {
                Entry::Ready(ready) if ready.mounts().unwrap_or(0) == 0 => Some(ready.last_use),
                _ => None,
            };
            let idle = self
                .objects
                .iter()
                .filter_map(|(version, entry)| idle(entry).map(|last_use| (last_use, *version)));
            let Some((_, oldest)) = idle.min_by_key(|(last_use, _)| *last_use) else {
                return Err(Refusal::Full { bytes, limit });
            };
            self.forget(|version| *version == oldest);
            self.evictions += 1;
        }
        Ok(())
    }
}

impl Load {
    /// Waits for the end of a load; `None` if `tell` says that the client has left.
    fn wait(&self, mut tell: impl FnMut(u64) -> bool) -> Option<Result<Arc<Morsel>, Refusal>> {
        loop {
            let outcome = lock(&self.outcome);
            let is_open = |outcome: &mut Option<_>| outcome.is_none();
            let waited = self.ended.wait_timeout_while(outcome, TELL_EVERY, is_open);
            let (outcome, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if let Some(outcome) = &*outcome {
                return Some(outcome.clone());
            }
            drop(outcome);
            if !tell(self.course.done.load(Ordering::Relaxed)) {
                return None;
            }
        }
    }
}

/// The memory that a file takes as a Morsel.
fn memory(version: &Version) -> u64 {
    version.length.next_multiple_of(PAGE_SIZE)
}

/// No step leaves the state under a lock half done, so the daemon goes on after a panic elsewhere.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
