//! The calls of a log on a simulated disk: how each one ends, and what arrives of it.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::folder::{Folder, FolderFile};
use super::simulated_disk::{Change, Fate, PAGE, Planted, SECTOR, SimulatedDisk, State};
use super::simulated_disk::{ended, failure};
use crate::block::{STARTS, crc};
use crate::error::LogError;

impl SimulatedDisk {
    /// Opens the folder, and locks it.
    pub(crate) fn folder(&self) -> Result<Box<dyn Folder>, LogError> {
        let mut state = self.lock();
        if std::mem::replace(&mut state.locked, true) {
            return Err(LogError::InUse { path: Path::new("simulated").into() });
        }
        let process = state.process;
        drop(state);
        Ok(Box::new(SimulatedFolder { disk: self.clone(), process }))
    }
}

#[derive(Debug)]
struct SimulatedFolder {
    disk: SimulatedDisk,
    process: u64,
}

impl SimulatedFolder {
    /// Changes names, if the call does not fail and there is room.
    fn change(
        &self,
        needs_room: bool,
        change: impl FnOnce(&mut State) -> io::Result<Change>,
    ) -> io::Result<()> {
        let (mut state, fate) = self.disk.begin(self.process)?;
        if fate == Fate::Fails {
            return Err(failure());
        }
        if needs_room && state.used() >= state.room && state.below(2) == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if fate == Fate::Done || state.below(2) == 0 {
            let change = change(&mut state)?;
            state.change(change);
        }
        if fate == Fate::Done { Ok(()) } else { Err(ended()) }
    }
}

impl Folder for SimulatedFolder {
    fn file_system(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut state = self.disk.look(self.process)?;
        // Folders have no order.
        let mut names: Vec<_> = state.names.keys().cloned().collect();
        for at in (1..names.len()).rev() {
            names.swap(at, state.below(at as u64 + 1) as usize);
        }
        Ok(names)
    }

    fn open(&self, name: &str, direct: bool, create: bool) -> io::Result<Box<dyn FolderFile>> {
        if create {
            self.change(true, |state| {
                if state.names.contains_key(name) {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                let id = state.files.last_key_value().map_or(0, |(last, _)| last + 1);
                state.file(id).told = true;
                Ok(vec![(name.to_owned(), Some(id))])
            })?;
        }
        let mut state = self.disk.look(self.process)?;
        let file = *state.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        let stored = state.file(file);
        let known = if stored.told { stored.failures } else { stored.failures - 1 };
        Ok(Box::new(SimulatedFile {
            disk: self.disk.clone(),
            process: self.process,
            file,
            direct,
            known: AtomicU64::new(known),
            last: AtomicU8::new(NOTHING),
        }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.change(true, |state| {
            if state.habits.keeps_names && state.names.contains_key(to) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            let file = *state.names.get(from).ok_or(io::ErrorKind::NotFound)?;
            Ok(vec![(from.to_owned(), None), (to.to_owned(), Some(file))])
        })
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.change(false, |state| match state.names.contains_key(name) {
            true => Ok(vec![(name.to_owned(), None)]),
            false => Ok(Vec::new()),
        })
    }

    fn sync(&self) -> io::Result<()> {
        let (mut state, fate) = self.disk.begin(self.process)?;
        match fate {
            Fate::Done if state.planted != Some(Planted::FolderNotSynced) => state.commit_names(),
            Fate::Done => {}
            Fate::Fails => return Err(failure()),
            Fate::Ends => return Err(ended()),
        }
        Ok(())
    }

    fn sync_above(&self) -> io::Result<()> {
        let (mut state, fate) = self.disk.begin(self.process)?;
        match fate {
            Fate::Done => state.is_durable |= state.planted != Some(Planted::AboveNotSynced),
            Fate::Fails => return Err(failure()),
            Fate::Ends => return Err(ended()),
        }
        Ok(())
    }

    fn unlock(&self) {
        let mut state = self.disk.lock();
        if state.process == self.process {
            state.locked = false;
        }
    }
}

impl Drop for SimulatedFolder {
    fn drop(&mut self) {
        self.unlock();
    }
}

/// What a handle wrote last.
const NOTHING: u8 = 0;
const ZEROS: u8 = 1;
const HEAD: u8 = 2;
const BLOCKS: u8 = 3;

#[derive(Debug)]
struct SimulatedFile {
    disk: SimulatedDisk,
    process: u64,
    file: u64,
    direct: bool,
    /// Failures that this handle was told of.
    known: AtomicU64,
    last: AtomicU8,
}

impl SimulatedFile {
    /// Whether this handle is to be told of a write-back that failed.
    fn tell(&self, state: &mut State) -> io::Result<()> {
        let file = state.file(self.file);
        if self.known.swap(file.failures, Ordering::Relaxed) == file.failures {
            return Ok(());
        }
        file.told = true;
        state.faults += 1;
        Err(failure())
    }

    /// Makes sectors durable, or fails to.
    fn harden(&self, state: &mut State, fate: Fate, sectors: Range<usize>) -> io::Result<()> {
        match fate {
            Fate::Ends => Err(ended()),
            Fate::Done => {
                let told = self.tell(state);
                let file = state.file(self.file);
                file.settle(sectors);
                file.durable_len = file.len;
                if state.below(2) == 0 {
                    state.commit_names();
                }
                if told.is_err() && state.planted == Some(Planted::FailedSyncIgnored) {
                    state.faults -= 1;
                    return Ok(());
                }
                told
            }
            Fate::Fails => {
                state.lose(self.file, sectors, self.direct);
                let file = state.file(self.file);
                (file.failures, file.told) = (file.failures + 1, true);
                self.known.store(file.failures, Ordering::Relaxed);
                if state.planted == Some(Planted::FailedSyncIgnored) {
                    state.faults -= 1;
                    return Ok(());
                }
                match state.syncs_want_room {
                    true => Err(io::ErrorKind::StorageFull.into()),
                    false => Err(failure()),
                }
            }
        }
    }
}

impl FolderFile for SimulatedFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.lock().file(self.file).len)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut state = self.disk.look(self.process)?;
        let planted = state.planted;
        let file = state.file(self.file);
        if offset + bytes.len() as u64 > file.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let first = offset as usize / SECTOR;
        for (at, sector) in (first..).zip(bytes.chunks_mut(SECTOR)) {
            if file.bad.contains(&at) && !file.pending.contains_key(&at) {
                return Err(failure());
            }
            sector.copy_from_slice(&file.seen(at, self.direct));
        }
        bytes.chunks_mut(PAGE).for_each(|block| believe(planted, block));
        Ok(())
    }

    fn write(&self, offset: u64, parts: [&[u8]; 2], durable: bool) -> io::Result<usize> {
        let (mut state, fate) = self.disk.begin(self.process)?;
        let mut bytes = parts.concat();
        let is_head = offset == 0 && bytes.len() == PAGE;
        let is_zero = bytes.iter().all(|byte| *byte == 0);
        let last = if is_zero {
            ZEROS
        } else if is_head {
            HEAD
        } else {
            BLOCKS
        };
        self.last.store(last, Ordering::Relaxed);
        let before = state.file(self.file).seen(0, self.direct);
        if last == HEAD && before[8] != 0 && state.planted == Some(Planted::OldHead) {
            return Ok(bytes.len());
        }
        let (used, len) = (state.used(), state.file(self.file).len);
        let longer = (offset + bytes.len() as u64).saturating_sub(len);
        let missing = longer.saturating_sub(state.room.saturating_sub(used)) as usize;
        let wants = state.habits.copies && used >= state.room && state.below(4) == 0;
        let is_full = missing > 0 && missing.div_ceil(PAGE) * PAGE >= bytes.len() || wants;
        if is_full && fate != Fate::Fails {
            state.faults += u64::from(missing == 0 && last != ZEROS);
            return Err(io::ErrorKind::StorageFull.into());
        }
        bytes.truncate(bytes.len().saturating_sub(missing.div_ceil(PAGE) * PAGE));
        if fate == Fate::Ends || state.habits.restless && state.below(8) == 0 {
            let pages = 1 + state.below((bytes.len() / PAGE) as u64) as usize;
            bytes.truncate(pages * PAGE);
        }
        let sectors = offset as usize / SECTOR..(offset as usize + bytes.len()) / SECTOR;
        for (at, sector) in sectors.clone().zip(bytes.chunks(SECTOR)) {
            let mut whole = [0; SECTOR];
            whole.copy_from_slice(sector);
            if fate != Fate::Fails || durable || state.below(2) == 0 {
                state.file(self.file).put(at, whole);
            }
        }
        let file = state.file(self.file);
        file.len = file.len.max(offset + bytes.len() as u64);
        if durable && state.planted != Some(Planted::WritesNotDurable) {
            self.harden(&mut state, fate, sectors)?;
        } else if fate != Fate::Done {
            return Err(if fate == Fate::Fails { failure() } else { ended() });
        }
        Ok(bytes.len())
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let (mut state, fate) = self.disk.begin(self.process)?;
        if fate != Fate::Done {
            return Err(if fate == Fate::Fails { failure() } else { ended() });
        }
        if !state.habits.allocates {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if state.used() + len - state.file(self.file).len > state.room {
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.file(self.file).len = len;
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let (mut state, fate) = self.disk.begin(self.process)?;
        let skipped = match self.last.load(Ordering::Relaxed) {
            NOTHING => Some(Planted::OpeningNotSynced),
            HEAD => Some(Planted::HeadNotSynced),
            BLOCKS => Some(Planted::BlocksNotSynced),
            _ => None,
        };
        if skipped.is_some() && state.planted == skipped {
            return if fate == Fate::Ends { Err(ended()) } else { Ok(()) };
        }
        self.harden(&mut state, fate, 0..usize::MAX)
    }

    fn forget_cache(&self) -> io::Result<()> {
        let mut state = self.disk.look(self.process)?;
        if state.planted != Some(Planted::CacheBelieved) {
            state.file(self.file).lies.clear();
        }
        Ok(())
    }
}

/// A block as a log sees it that does not look closely.
fn believe(planted: Option<Planted>, block: &mut [u8]) {
    if block.len() < PAGE || block[4..8] != *b"VLOG" {
        return;
    }
    match planted {
        Some(Planted::ChecksumNotChecked) => {}
        Some(Planted::IncarnationNotChecked) if block[..4] == crc(&block[4..]).to_le_bytes() => {
            block[37] &= !STARTS;
            block[40..48].copy_from_slice(&1_u64.to_le_bytes());
        }
        _ => return,
    }
    let sum = crc(&block[4..]).to_le_bytes();
    block[..4].copy_from_slice(&sum);
}
