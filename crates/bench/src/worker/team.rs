//! Several workers with the same data, alive at the same time.

use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use super::cache_size::{pool_for, pool_with_old_values};
use super::{Setup, Worker, cache_bytes};
use crate::engine::{Engines, Factory, Setting, TRANSACTIONS, VELLUM};
use crate::machine::{MemoryCgroup, page_cache};
use crate::progress::Progress;
use crate::workload::{Plan, Workload};

/// A member of a team.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its name in rows.
    pub name: String,
    /// Its engine.
    pub engine: Factory,
    /// Bytes of the engine's cache; by default as much as the limit leaves.
    pub cache_bytes: Option<u64>,
    /// Options of this engine alone.
    pub options: BTreeMap<String, String>,
}

impl Member {
    /// An engine under its own name, without options.
    pub fn plain(engine: &Factory) -> Member {
        Member {
            name: engine.name.to_owned(),
            engine: *engine,
            cache_bytes: None,
            options: BTreeMap::new(),
        }
    }

    /// All engines of a run, under their own names.
    pub fn all(engines: &Engines) -> Vec<Member> {
        engines.all().iter().map(Member::plain).collect()
    }

    /// An engine with an option, which is part of its name.
    pub fn with_option(engine: &Factory, name: &str, value: &str) -> Member {
        let mut member = Member::plain(engine);
        member.name = match value.parse::<u64>() {
            Ok(number) => format!("{} {name} {number}", engine.name),
            Err(_) => format!("{} {value}", engine.name),
        };
        member.options.insert(name.to_owned(), value.to_owned());
        member
    }

    /// An engine with options, under a name of its own.
    pub fn with_options(engine: &Factory, name: &str, options: &[(&str, &str)]) -> Member {
        let mut member = Member { name: name.to_owned(), ..Member::plain(engine) };
        let options = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        member.options.extend(options);
        member
    }

    /// Gives all members with Vellum the largest pool within `limit` bytes, for `data` bytes of
    /// keys and values.
    pub fn fill_limit(members: &mut [Member], limit: u64, data: u64) {
        for member in members.iter_mut().filter(|member| member.engine.name == VELLUM.name) {
            let pool = pool_for(limit, data);
            let is_transactional = member.options.contains_key(TRANSACTIONS);
            let pool = if is_transactional { pool_with_old_values(pool) } else { pool };
            member.cache_bytes = Some(pool);
        }
    }
}

/// The settings that all members of a team share.
#[derive(Debug)]
pub struct Terms<'a> {
    /// The setup: storage and launcher.
    pub setup: &'a Setup,
    /// The memory limit of each in bytes; `None` if the experiment does not limit memory.
    pub limit: Option<u64>,
    /// Their data.
    pub workload: &'a Workload,
    /// A run before the measurement, which brings the engine to a steady state.
    pub warm_up: Plan,
    /// Whether engines are reopened, and cached pages dropped, between loading and warming up.
    pub cold: bool,
}

/// Workers with open and filled engines.
#[derive(Debug)]
pub struct Team {
    seats: Vec<Seat>,
    limit: Option<u64>,
    notes: Vec<String>,
}

#[derive(Debug)]
struct Seat {
    member: Member,
    setting: Setting,
    worker: RefCell<Worker>,
    /// Why the member has failed, if it has.
    failed: RefCell<Option<String>>,
    /// Bytes of its files after the load.
    stored: u64,
    /// Dropped after the worker, which has the files open.
    _files: Files,
}

/// A directory that is removed on drop, with all its files.
#[derive(Debug)]
struct Files(PathBuf);

impl Drop for Files {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("vellum bench: cannot remove {}: {error}", self.0.display());
        }
    }
}

impl Team {
    /// Starts, fills and warms up all members, one after the other. Leaves out peers that fail,
    /// with a note.
    ///
    /// # Errors
    /// If Vellum fails.
    pub fn start(members: &[Member], terms: &Terms<'_>, progress: &Progress) -> Result<Team> {
        let mut team = Team { seats: Vec::new(), limit: terms.limit, notes: Vec::new() };
        if let Some(bytes) = terms.limit
            && let Err(error) = MemoryCgroup::create(bytes)
        {
            team.limit = None;
            team.notes.push(format!(
                "NO MEMORY LIMIT: {error:#}. Engines that rely on the page cache had all memory."
            ));
        }
        for (at, member) in members.iter().enumerate() {
            progress.at(at, members.len(), &format!("loading {}", member.name));
            match Seat::take(member, terms, team.limit, at) {
                Ok(seat) => team.seats.push(seat),
                Err(error) if member.engine.name != VELLUM.name => {
                    team.notes.push(format!("{} was left out: {error:#}.", member.name));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(team)
    }

    /// Names of the members, in their order.
    pub fn names(&self) -> Vec<&str> {
        let there = self.seats.iter().filter(|seat| seat.failed.borrow().is_none());
        there.map(|seat| &seat.member.name[..]).collect()
    }

    /// Runs `work` with a member. A peer that fails is left out from then on, with a note, and has
    /// no result.
    ///
    /// # Errors
    /// If Vellum fails, or there is no member of that name.
    pub fn with<T>(
        &self,
        name: &str,
        work: impl FnOnce(&mut Worker) -> Result<T>,
    ) -> Result<Option<T>> {
        let seat = self.seat(name)?;
        if seat.failed.borrow().is_some() {
            return Ok(None);
        }
        match work(&mut *self.worker(name)?) {
            Ok(result) => Ok(Some(result)),
            Err(error) if seat.member.engine.name != VELLUM.name => {
                *seat.failed.borrow_mut() = Some(format!("{error:#}"));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The worker of a member.
    ///
    /// # Errors
    /// If there is none of that name, or it is at work.
    pub fn worker(&self, name: &str) -> Result<RefMut<'_, Worker>> {
        let seat = self.seat(name)?;
        seat.worker.try_borrow_mut().with_context(|| format!("'{name}' is at work"))
    }

    /// The store of a Vellum member: the file that the device is measured with.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn store(&self, name: &str) -> Result<PathBuf> {
        Ok(self.seat(name)?.setting.directory.join("data.vellum"))
    }

    /// Notes for the reader: limits, caches, sizes of files, engines that were left out.
    pub fn notes(&self) -> Vec<String> {
        let mib = |bytes: u64| bytes >> 20;
        let mut notes = self.notes.clone();
        if let Some(limit) = self.limit {
            notes.push(format!(
                "Each engine in a process of its own within a memory cgroup of {} MiB, in which it \
                 also loaded its data.",
                mib(limit)
            ));
        }
        let seats = self.seats.iter().map(|seat| {
            format!(
                "{} (cache {} MiB, files {} MiB)",
                seat.member.name,
                mib(seat.setting.cache_bytes),
                mib(seat.stored)
            )
        });
        notes.push(format!("Engines: {}.", seats.collect::<Vec<_>>().join(", ")));
        notes.extend(self.seats.iter().filter_map(|seat| {
            let failed = seat.failed.borrow();
            Some(format!("{} is out: {}.", seat.member.name, failed.as_ref()?))
        }));
        notes
    }

    fn seat(&self, name: &str) -> Result<&Seat> {
        match self.seats.iter().find(|seat| seat.member.name == name) {
            Some(seat) => Ok(seat),
            None => bail!("'{name}' is not in the team: {}", self.names().join(", ")),
        }
    }
}

impl Seat {
    fn take(member: &Member, terms: &Terms<'_>, limit: Option<u64>, at: usize) -> Result<Seat> {
        let work = terms.workload.work();
        let directory = terms.setup.directory().join(format!("{at}-{}", member.engine.name));
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        let files = Files(directory.clone());
        let share = || cache_bytes(&member.engine, terms.limit.unwrap_or(1 << 30));
        let setting = Setting {
            cache_bytes: member.cache_bytes.unwrap_or_else(share),
            tables: work.tables(),
            options: member.options.clone(),
            ..Setting::new(&directory, 0)
        };
        let mut worker = Worker::start(terms.setup.launcher(), &member.name, limit)?;
        let engine = member.engine.name;
        worker.open(engine, &setting)?;
        worker.load(terms.workload)?;
        worker.settle()?;
        if terms.cold {
            worker.close()?;
            page_cache::drop_cached(&directory)?;
            worker.open(engine, &setting)?;
        }
        if terms.warm_up.seconds > 0.0 {
            worker.run(terms.workload, &terms.warm_up)?;
        }
        let stored = page_cache::bytes_stored(&directory)?;
        let (member, worker) = (member.clone(), RefCell::new(worker));
        let failed = RefCell::default();
        Ok(Seat { member, setting, worker, failed, stored, _files: files })
    }
}
