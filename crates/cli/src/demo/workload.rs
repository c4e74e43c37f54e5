//! The phases in which several threads look up, read, scan and update, and verify each operation.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vellum::Store;

use super::figures::{Phase, RunningPhase};
use super::fingerprint::fingerprint;
use super::updates::{self, ChunkId, Generations, TRAILER};
use crate::error::{AtStore, Failure, Outcome};
use crate::files::file_store::{FileStore, chunk_key};
use crate::files::listing::Found;
use crate::files::workers;
use crate::key_text::printable;
use crate::random::Random;

/// The data that the phases work on.
pub struct Workload<'a> {
    pub store: &'a Store,
    pub files: &'a FileStore,
    /// The files in the store, in the order of their paths.
    pub found: &'a [Found],
    /// Fingerprints of each file's chunks, taken when the import read the files.
    pub prints: &'a [Vec<u64>],
    /// The store as the user knows it, for messages.
    pub name: &'a Path,
    pub threads: usize,
    pub time: Duration,
    pub seed: u64,
}

/// One in so many updates removes the chunk and inserts it again.
const REINSERT_ONE_IN: usize = 8;

impl Workload<'_> {
    /// Point lookups of records.
    ///
    /// # Errors
    /// When the store fails or a record is not what it should be.
    pub fn look_up(&self) -> Outcome<Phase> {
        self.phase("look up records", |random, _| {
            let index = random.below(self.found.len());
            let found = &self.found[index];
            let record = self.files.record(&found.path).at(self.name)?;
            let right = record.is_some_and(|record| {
                record.stamp == found.stamp && record.chunks as usize == self.prints[index].len()
            });
            if right { Ok(0) } else { Err(self.wrong(found, "the record is wrong")) }
        })
    }

    /// Reads of whole chunks.
    ///
    /// # Errors
    /// When the store fails or a chunk is not what it should be.
    pub fn read(&self) -> Outcome<Phase> {
        let chunks = every_chunk(self.prints);
        self.phase("read chunks", |random, _| {
            let (index, chunk) = chunks[random.below(chunks.len())];
            let found = &self.found[index];
            let value = self.files.chunk(&found.path, chunk).at(self.name)?;
            match value {
                Some(bytes) if fingerprint(&bytes) == self.prints[index][chunk as usize] => {
                    Ok(bytes.len() as u64)
                }
                Some(_) => Err(self.wrong(found, &format!("chunk {chunk} is wrong"))),
                None => Err(self.wrong(found, &format!("chunk {chunk} is missing"))),
            }
        })
    }

    /// Scans of all paths with a prefix. A scan must find exactly the paths that the listing has.
    ///
    /// # Errors
    /// When the store fails, or a path is missing or too many.
    pub fn scan(&self) -> Outcome<Phase> {
        self.phase("scan folders", |random, _| {
            let path = &self.found[random.below(self.found.len())].path;
            let end = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
            // For a file in the top folder the prefix is its own path: a scan of the top would have
            // all.
            let prefix = if end == 0 { &path[..] } else { &path[..end] };
            let first = self.found.partition_point(|found| found.path.as_slice() < prefix);
            let mut expected =
                self.found[first..].iter().take_while(|found| found.path.starts_with(prefix));
            let mut bytes = 0;
            for entry in self.files.meta.prefix(prefix) {
                let (key, value) = entry.at(self.name)?;
                bytes += (key.len() + value.len()) as u64;
                if expected.next().is_none_or(|found| found.path != key) {
                    let prefix = printable(prefix);
                    let key = printable(&key);
                    return Err(Failure::message(format!(
                        "scan of '{prefix}': unexpected '{key}'"
                    )));
                }
            }
            match expected.next() {
                None => Ok(bytes),
                Some(found) => Err(self.wrong(found, "a scan did not find it")),
            }
        })
    }

    /// Updates of chunks. Each update first verifies what the update before it has written. Each
    /// thread has its own chunks; neighbours in the tree belong to different threads, so the
    /// threads contend for its pages.
    ///
    /// # Errors
    /// When the store fails or a chunk is not what it should be.
    pub fn update(&self) -> Outcome<(Phase, Generations)> {
        let chunks = every_chunk(self.prints);
        let all = Mutex::new(Generations::new());
        let states: Vec<Mutex<Generations>> = (0..self.threads).map(|_| Mutex::default()).collect();
        let phase = self.phase("update chunks", |random, thread| {
            let own = chunks.len().saturating_sub(thread).div_ceil(self.threads);
            if own == 0 {
                std::thread::yield_now();
                return Ok(0);
            }
            let id = chunks[random.below(own) * self.threads + thread];
            // No other thread takes this lock. It only lets the thread change its own table.
            let mut generations = lock(&states[thread]);
            let before = generations.get(&id).copied().unwrap_or(0);
            let bytes = self.update_one(id, before, random.below(REINSERT_ONE_IN) == 0)?;
            generations.insert(id, before + 1);
            Ok(bytes)
        })?;
        for state in &states {
            lock(&all).extend(lock(state).drain());
        }
        let generations = std::mem::take(&mut *lock(&all));
        Ok((phase, generations))
    }

    fn update_one(&self, id: ChunkId, before: u64, reinsert: bool) -> Outcome<u64> {
        let (found, key) = (&self.found[id.0], chunk_key(&self.found[id.0].path, id.1));
        let mut content = Vec::new();
        let there = self.files.content.get_into(&key, &mut content).at(self.name)?;
        let print = self.prints[id.0][id.1 as usize];
        if !there || !updates::undo(&mut content, before) || fingerprint(&content) != print {
            let what = format!("chunk {} is not what update {before} left", id.1);
            return Err(self.wrong(found, &what));
        }
        updates::apply(&mut content, before + 1);
        if reinsert {
            self.files.content.remove(&key).at(self.name)?;
            self.files.content.insert(&key, &content).at(self.name)?;
        } else if !self.files.content.upsert(&key, &content).at(self.name)? {
            return Err(self.wrong(found, "an update found nothing to replace"));
        }
        Ok(content.len() as u64)
    }

    /// Reads each updated chunk and compares it with what the last update has written.
    ///
    /// # Errors
    /// When the store fails or a chunk is not what it should be.
    pub fn verify_updates(&self, generations: &Generations) -> Outcome<Phase> {
        let running = RunningPhase::start("verify updates", self.store);
        let bytes = AtomicU64::new(0);
        let updated: Vec<(&ChunkId, &u64)> = generations.iter().collect();
        workers::for_each(self.threads, updated.len(), |index| {
            let (id, generation) = updated[index];
            let found = &self.found[id.0];
            let value = self.files.chunk(&found.path, id.1).at(self.name)?;
            let Some(value) = value else {
                return Err(self.wrong(found, &format!("chunk {} is missing", id.1)));
            };
            let mut content = value.to_vec();
            let undone = updates::undo(&mut content, *generation);
            if !undone || fingerprint(&content) != self.prints[id.0][id.1 as usize] {
                return Err(self.wrong(found, &format!("chunk {}: an update was lost", id.1)));
            }
            bytes.fetch_add((content.len() + TRAILER) as u64, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(running.end(self.store, updated.len() as u64, bytes.into_inner()))
    }

    /// Has all threads run `operation` until the time is over. `operation` returns the bytes that
    /// it handled.
    fn phase(
        &self,
        name: &'static str,
        operation: impl Fn(&mut Random, usize) -> Outcome<u64> + Sync,
    ) -> Outcome<Phase> {
        let running = RunningPhase::start(name, self.store);
        let deadline = Instant::now() + self.time;
        let (operations, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        workers::each_thread(self.threads, |thread, stop: &AtomicBool| {
            let mut random = Random::new(self.seed, thread as u64);
            let (mut count, mut handled) = (0, 0);
            // Each thread runs at least one operation, however short the time.
            loop {
                handled += operation(&mut random, thread)?;
                count += 1;
                if stop.load(Ordering::Relaxed) || Instant::now() >= deadline {
                    break;
                }
            }
            operations.fetch_add(count, Ordering::Relaxed);
            bytes.fetch_add(handled, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(running.end(self.store, operations.into_inner(), bytes.into_inner()))
    }

    fn wrong(&self, found: &Found, what: &str) -> Failure {
        Failure::message(format!("MISMATCH: {}: {what}", printable(&found.path)))
    }
}

/// Every chunk of every file, from the fingerprints of each file's chunks.
pub fn every_chunk(prints: &[Vec<u64>]) -> Vec<ChunkId> {
    let of_file = |(index, prints): (usize, &Vec<u64>)| {
        (0..prints.len()).map(move |chunk| (index, chunk as u32))
    };
    prints.iter().enumerate().flat_map(of_file).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
