//! Kills a process in the middle of its updates, several times, and verifies that every
//! acknowledged commit is there, and no commit by half.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use rustix::process::{Pid, Signal, kill_process};
use vellum::{Error, Options, Store};

use super::arguments::Arguments;
use super::figures::{Phase, RunningPhase};
use super::fingerprint::fingerprint;
use super::memory_watch::MemoryWatch;
use super::store_file::StoreFile;
use super::updates::{self, ChunkId, Generations};
use super::victim::{self, Chunk, Group};
use super::workload::every_chunk;
use crate::error::{AtStore, Doing, Failure, Outcome};
use crate::files::file_store::{FileStore, chunk_key};
use crate::files::listing::Found;
use crate::key_text::printable;
use crate::progress::say;
use crate::random::Random;
use crate::recovery;

/// So many processes are killed.
const LIVES: u32 = 3;

/// Chunks that a transaction updates. Each has up to a sixteenth of the pool, and a transaction may
/// have a quarter.
const TOGETHER: usize = 3;

/// The most groups of chunks that a process updates.
const GROUPS: usize = 1024;

/// How long the kernel may take to end what a killed process had begun, and with it the process'
/// lock on the file.
const PATIENCE: Duration = Duration::from_secs(60);

/// The data that the processes work on.
pub struct Kills<'a> {
    pub arguments: &'a Arguments,
    pub pool_bytes: u64,
    pub found: &'a [Found],
    /// Fingerprints of each file's chunks.
    pub prints: &'a [Vec<u64>],
    /// The store as the user knows it, for messages.
    pub name: &'a Path,
}

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Processes that were killed.
    pub kills: u32,
    /// Commits that they had acknowledged.
    pub acknowledged: u64,
    /// Commits that were there although the kill came before their acknowledgement.
    pub unacknowledged: u64,
    /// Time of the longest recovery.
    pub recovery: Duration,
}

impl Kills<'_> {
    /// Runs and kills the processes. `options` open the store; the store is closed before and
    /// afterwards. Brings `generations` up to date.
    ///
    /// # Errors
    /// When an acknowledged commit is missing or half of one is there; when a process ends by
    /// itself; when the store cannot be opened.
    pub fn run(
        &self,
        place: &StoreFile,
        options: &Options,
        watch: &mut MemoryWatch,
        generations: &mut Generations,
    ) -> Outcome<(Phase, Seen)> {
        let mut random = Random::new(self.arguments.seed, u64::MAX);
        let ids = self.choose(&mut random);
        place.make_log_folder()?;
        let options = match place.log_folder() {
            Some(folder) => options.clone().log_folder(folder),
            None => options.clone(),
        };
        let options = recovery::shown(options);
        let mut seen = Seen::default();
        let mut total: Option<Phase> = None;
        for life in 0..LIVES {
            say(&format!("update chunks in transactions; kill -9 comes ({} of {LIVES})", life + 1));
            let groups: Vec<Group> =
                ids.iter().map(|group| self.group(group, generations)).collect();
            let acknowledged = self.live_and_die(place, life, &groups, &mut random)?;
            let store = open(place.path(), &options).at(self.name)?;
            recovery::report(&store, self.name);
            let took = store.recovery().map_or(Duration::ZERO, |done| done.duration);
            seen.kills += 1;
            seen.recovery = seen.recovery.max(took);
            let running = RunningPhase::start("verify after kill", &store);
            let bytes =
                self.verify(&store, &ids, &groups, &acknowledged, generations, &mut seen)?;
            watch.at_rest(&store)?;
            let phase = running.end(&store, ids.iter().map(Vec::len).sum::<usize>() as u64, bytes);
            total = Some(total.map_or(phase, |total| total.and(&phase)));
            store.close().at(self.name)?;
        }
        place.remove_log_folder();
        let total = total.ok_or_else(|| Failure::message("no process was killed"))?;
        Ok((total, seen))
    }

    /// Groups of chunks that are updated together, chosen at random.
    fn choose(&self, random: &mut Random) -> Vec<Vec<ChunkId>> {
        let mut chunks = every_chunk(self.prints);
        let wanted = chunks.len().min(GROUPS * TOGETHER);
        for at in 0..wanted {
            let other = at + random.below(chunks.len() - at);
            chunks.swap(at, other);
        }
        chunks[..wanted].chunks(TOGETHER).map(<[_]>::to_vec).collect()
    }

    fn group(&self, ids: &[ChunkId], generations: &Generations) -> Group {
        let chunk = |id: &ChunkId| Chunk {
            key: chunk_key(&self.found[id.0].path, id.1),
            generation: generations.get(id).copied().unwrap_or(0),
            print: self.prints[id.0][id.1 as usize],
        };
        ids.iter().map(chunk).collect()
    }

    /// Starts a process, and kills it some time after its first commit. Returns how often each
    /// group was updated, as far as the process has acknowledged it.
    fn live_and_die(
        &self,
        place: &StoreFile,
        life: u32,
        groups: &[Group],
        random: &mut Random,
    ) -> Outcome<Vec<u64>> {
        let mut child = self.start(place, life)?;
        let mut input = child.stdin.take().ok_or_else(no_pipe)?;
        // A process that fails before it has read everything says why itself.
        let _ = input.write_all(&victim::request(groups));
        drop(input);
        let lines = BufReader::new(child.stdout.take().ok_or_else(no_pipe)?).lines();
        let longest = Duration::from_secs_f64(self.arguments.seconds) / LIVES;
        let pause = longest.mul_f64((1 + random.below(100)) as f64 / 100.0);
        let pid = Pid::from_child(&child);
        let mut acknowledged = vec![0; groups.len()];
        thread::scope(|scope| -> Outcome {
            let mut killer = None;
            for line in lines {
                let line = line.doing(|| "reading what was committed".into())?;
                let Some((number, generation)) = victim::acknowledgement(&line) else { continue };
                let count = acknowledged.get_mut(number).zip(groups.get(number));
                let Some((count, group)) = count else {
                    return Err(Failure::message(format!("MISMATCH: there is no group {number}")));
                };
                *count = generation - group[0].generation;
                killer.get_or_insert_with(|| {
                    scope.spawn(move || {
                        thread::sleep(pause);
                        kill_process(pid, Signal::KILL)
                    })
                });
            }
            Ok(())
        })?;
        let status = child.wait().doing(|| "waiting for the process".into())?;
        match status.signal() {
            Some(signal) if signal == Signal::KILL.as_raw() => Ok(acknowledged),
            _ => Err(Failure::message(format!(
                "the process that was to be killed ended before: {status}; its own message says why"
            ))),
        }
    }

    fn start(&self, place: &StoreFile, life: u32) -> Outcome<Child> {
        let program = std::env::current_exe().doing(|| "looking for this program".into())?;
        let mut command = Command::new(program);
        command.arg(victim::NAME).arg(place.path_for_others());
        if let Some(folder) = place.log_folder() {
            command.arg("--log-folder").arg(folder);
        }
        let backend = self.arguments.backend.to_possible_value();
        let backend = backend.ok_or_else(|| Failure::message("the backend has no name"))?;
        command.args(["--pool", &self.pool_bytes.to_string(), "--backend", backend.get_name()]);
        command.args(["--threads", &self.arguments.threads.to_string()]);
        command.args(["--seed", &self.arguments.seed.wrapping_add(u64::from(life)).to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().doing(|| "starting a process to kill".into())
    }

    /// Verifies that each group has what was acknowledged, or the commit after it, as a whole.
    /// Returns the bytes that were read.
    fn verify(
        &self,
        store: &Store,
        ids: &[Vec<ChunkId>],
        groups: &[Group],
        acknowledged: &[u64],
        generations: &mut Generations,
        seen: &mut Seen,
    ) -> Outcome<u64> {
        let files = FileStore::find(store).at(self.name)?;
        let files = files.ok_or_else(|| Failure::message("MISMATCH: the trees are gone"))?;
        let mut bytes = 0;
        for ((ids, group), acknowledged) in ids.iter().zip(groups).zip(acknowledged) {
            let mut more = None;
            for (id, chunk) in ids.iter().zip(group) {
                let mut content = Vec::new();
                files.content.get_into(&chunk.key, &mut content).at(self.name)?;
                bytes += content.len() as u64;
                let least = chunk.generation + acknowledged;
                let found = [least, least + 1].into_iter().find(|generation| {
                    let mut content = content.clone();
                    updates::undo(&mut content, *generation) && fingerprint(&content) == chunk.print
                });
                let Some(found) = found else {
                    return Err(self.wrong(id, &format!("acknowledged update {least} is missing")));
                };
                if *more.get_or_insert(found - least) != found - least {
                    return Err(self.wrong(id, "half of a transaction is there"));
                }
                generations.insert(*id, found);
            }
            seen.acknowledged += acknowledged;
            seen.unacknowledged += more.unwrap_or(0);
        }
        Ok(bytes)
    }

    fn wrong(&self, id: &ChunkId, what: &str) -> Failure {
        let path = printable(&self.found[id.0].path);
        Failure::message(format!("MISMATCH: {path}, chunk {}: {what}", id.1))
    }
}

fn no_pipe() -> Failure {
    Failure::message("the process that is to be killed has no pipe")
}

/// Opens the store as soon as the killed process is entirely gone.
fn open(path: &Path, options: &Options) -> vellum::Result<Store> {
    let end = Instant::now() + PATIENCE;
    loop {
        match Store::open(path, options) {
            Err(Error::InUse(_)) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            opened => return opened,
        }
    }
}
