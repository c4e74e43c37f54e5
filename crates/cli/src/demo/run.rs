//! The order of events in a demonstration.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vellum::{Options, Store};

use super::arguments::Arguments;
use super::figures::{Phase, RunningPhase};
use super::fingerprint::fingerprint;
use super::kills::{Kills, Seen};
use super::memory_watch::MemoryWatch;
use super::plan::Plan;
use super::report::{self, Report};
use super::store_file::StoreFile;
use super::updates::{self, Generations};
use super::workload::Workload;
use crate::command::import::drop_long_paths;
use crate::command::stat::reason;
use crate::error::{AtStore, Failure, Outcome};
use crate::files::compare::{Comparer, Verdict};
use crate::files::file_store::{FileStore, max_path};
use crate::files::importer::{Importer, Stored};
use crate::files::listing::{self, Found, Listing};
use crate::files::record::Kind;
use crate::files::workers;
use crate::key_text::printable;
use crate::options::PoolArguments;
use crate::progress::{Progress, Unit, say};
use crate::size::show;

/// The demonstration names so many mismatches, and counts the rest.
const NAMED_MAX: usize = 10;

/// The demonstration, once the files are listed.
struct Demo<'a> {
    arguments: &'a Arguments,
    plan: Plan,
    /// The store as the user knows it, for messages.
    name: PathBuf,
    threads: usize,
    watch: MemoryWatch,
    kills: Seen,
    phases: Vec<Phase>,
    changed: u64,
    unreadable: u64,
    compared: u64,
}

/// The files that are in the store, with the fingerprints of their chunks.
struct Imported {
    found: Vec<Found>,
    prints: Vec<Vec<u64>>,
}

/// The failure for a listing without bytes.
fn nothing_to_store(arguments: &Arguments, listing: &Listing) -> Failure {
    let (dir, limit) = (arguments.dir.display(), show(arguments.limit));
    let left_out = listing.left_out;
    Failure::message(match left_out.over_limit > 0 || left_out.ended_early {
        true => format!("no file in {dir} fits the limit of {limit}; raise --limit"),
        false => format!("{dir} has no files with anything in them; choose another with --dir"),
    })
}

/// Runs the whole demonstration.
///
/// # Errors
/// When something cannot be read or stored, a byte is not what it should be, or the pool held more
/// memory than it may.
pub fn run(arguments: &Arguments) -> Outcome {
    say(&format!("listing {}", arguments.dir.display()));
    let mut listing = listing::list(&arguments.dir, arguments.limit, &[])?;
    if listing.bytes == 0 {
        return Err(nothing_to_store(arguments, &listing));
    }
    let plan = Plan::new(&listing, arguments.pool);
    let mut place = StoreFile::choose(arguments.store.as_deref(), plan.disk_bytes)?;
    say(&format!(
        "{} in {} files; pool {}, seed {}",
        show(listing.bytes),
        listing.files.len(),
        show(plan.pool_bytes),
        arguments.seed
    ));
    let mut demo = Demo {
        arguments,
        plan,
        name: arguments.store.clone().unwrap_or_else(|| "the temporary store".into()),
        threads: arguments.threads,
        watch: MemoryWatch::new(),
        kills: Seen::default(),
        phases: Vec::new(),
        changed: 0,
        unreadable: 0,
        compared: 0,
    };
    let store = Store::create(place.path(), &demo.options()).at(&demo.name)?;
    place.created();
    let (imported, mut generations) = demo.until_closed(&store, &mut listing)?;
    store.close().at(&demo.name)?;
    demo.kill(&place, &imported, &mut generations)?;

    say("closed; opening again");
    let store = Store::open(place.path(), &demo.options()).at(&demo.name)?;
    let pages_checked = demo.after_reopening(&store, &imported, &generations)?;
    let report = demo.report(&store, &listing, &imported, pages_checked)?;
    store.close().at(&report.1)?;
    place.complete()?;
    report::print(&report.0)
}

impl Demo<'_> {
    fn options(&self) -> Options {
        let pool =
            PoolArguments { pool: Some(self.plan.pool_bytes), backend: self.arguments.backend };
        // The files can be stored again. Only what is killed has a log.
        pool.options(None).log(false)
    }

    /// The phases before the store is closed for the first time.
    fn until_closed(
        &mut self,
        store: &Store,
        listing: &mut Listing,
    ) -> Outcome<(Imported, Generations)> {
        let longest = max_path(store.limits().max_key);
        self.unreadable += drop_long_paths(listing, longest);
        let files = FileStore::create(store).at(&self.name)?;
        let imported = self.import(store, &files, listing)?;
        self.compare("compare", store, &files, &imported, &Generations::new())?;

        let name = self.name.clone();
        let workload = Workload {
            store,
            files: &files,
            found: &imported.found,
            prints: &imported.prints,
            name: &name,
            threads: self.threads,
            time: Duration::from_secs_f64(self.arguments.seconds),
            seed: self.arguments.seed,
        };
        self.phase(store, || workload.look_up())?;
        self.phase(store, || workload.read())?;
        self.phase(store, || workload.scan())?;
        say("update chunks");
        let (phase, generations) = self.watch.during(|| workload.update())?;
        self.phases.push(phase);
        self.watch.at_rest(store)?;
        self.phase(store, || workload.verify_updates(&generations))?;
        Ok((imported, generations))
    }

    /// The phase in which processes are killed. The store is closed before and afterwards.
    fn kill(
        &mut self,
        place: &StoreFile,
        imported: &Imported,
        generations: &mut Generations,
    ) -> Outcome {
        let options = self.options();
        let kills = Kills {
            arguments: self.arguments,
            pool_bytes: self.plan.pool_bytes,
            found: &imported.found,
            prints: &imported.prints,
            name: &self.name,
        };
        let (phase, seen) = kills.run(place, &options, &mut self.watch, generations)?;
        self.phases.push(phase);
        self.kills = seen;
        Ok(())
    }

    /// The phases after the store is opened again; returns the number of pages checked.
    fn after_reopening(
        &mut self,
        store: &Store,
        imported: &Imported,
        generations: &Generations,
    ) -> Outcome<u64> {
        let running = RunningPhase::start("check", store);
        let pages = store.stat().at(&self.name)?.used_pages;
        let progress = Progress::new("check every page", Unit::Items, pages);
        let report = self.watch.during(|| store.check(&mut |state| progress.set(state.pages_done)));
        progress.finish();
        let report = report.at(&self.name)?;
        if let Some(damage) = report.damage.first() {
            let count = report.damage.len();
            return Err(Failure::message(format!("MISMATCH: {count} damaged places: {damage}")));
        }
        if report.lost_pages > 0 {
            let lost = report.lost_pages;
            return Err(Failure::message(format!("MISMATCH: nothing refers to {lost} pages")));
        }
        let bytes = report.pages_checked * 4096;
        self.phases.push(running.end(store, report.pages_checked, bytes));
        self.watch.at_rest(store)?;

        let files = FileStore::find(store).at(&self.name)?;
        let files = files.ok_or_else(|| Failure::message("MISMATCH: the trees are gone"))?;
        self.compare("compare again", store, &files, imported, generations)?;
        Ok(report.pages_checked)
    }

    fn phase(&mut self, store: &Store, work: impl FnOnce() -> Outcome<Phase>) -> Outcome {
        let phase = self.watch.during(work)?;
        say(&format!("{}: {} operations", phase.name, phase.operations));
        self.phases.push(phase);
        self.watch.at_rest(store)
    }

    fn import(&mut self, store: &Store, files: &FileStore, listing: &Listing) -> Outcome<Imported> {
        let running = RunningPhase::start("import", store);
        let root = &self.arguments.dir;
        let importer = Importer { files, root, chunk_bytes: self.plan.chunk_bytes };
        let progress = Progress::new("import", Unit::Bytes, listing.bytes);
        let results: Vec<Mutex<Option<Vec<u64>>>> =
            listing.files.iter().map(|_| Mutex::new(None)).collect();
        let (changing, unreadable) = (AtomicU64::new(0), AtomicU64::new(0));
        let work = |index: usize| {
            let mut prints = Vec::new();
            let stored = importer.store(&listing.files[index], &mut |_, bytes| {
                prints.push(fingerprint(bytes));
                progress.advance(bytes.len() as u64);
            });
            match stored.at(&self.name)? {
                Stored::Yes | Stored::Unchanged => {
                    let mut result =
                        results[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    *result = Some(prints);
                }
                Stored::Changing => _ = changing.fetch_add(1, Ordering::Relaxed),
                Stored::Unreadable => _ = unreadable.fetch_add(1, Ordering::Relaxed),
            }
            Ok(())
        };
        let outcome =
            self.watch.during(|| workers::for_each(self.threads, listing.files.len(), work));
        progress.finish();
        outcome?;
        self.changed += changing.into_inner();
        self.unreadable += unreadable.into_inner();
        let mut imported = Imported { found: Vec::new(), prints: Vec::new() };
        for (found, result) in listing.files.iter().zip(results) {
            if let Some(prints) =
                result.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
            {
                imported.found.push(found.clone());
                imported.prints.push(prints);
            }
        }
        if imported.prints.iter().all(Vec::is_empty) {
            return Err(Failure::message("no file could be read; choose others with --dir"));
        }
        self.phases.push(running.end(store, imported.found.len() as u64, imported.bytes()));
        self.watch.at_rest(store)?;
        Ok(imported)
    }

    /// Compares every byte of every file with the file system.
    fn compare(
        &mut self,
        label: &'static str,
        store: &Store,
        files: &FileStore,
        imported: &Imported,
        generations: &Generations,
    ) -> Outcome {
        let running = RunningPhase::start(label, store);
        let comparer = Comparer { files, root: &self.arguments.dir };
        let progress = Progress::new(label, Unit::Bytes, imported.bytes());
        let (same, changed) = (AtomicU64::new(0), AtomicU64::new(0));
        let different = Mutex::new(Vec::new());
        let work = |index: usize| {
            let found = &imported.found[index];
            let expected = |chunk: u32, content: &mut Vec<u8>| {
                let generation = generations.get(&(index, chunk)).copied().unwrap_or(0);
                updates::apply(content, generation);
            };
            let bytes = if found.kind == Kind::File { found.stamp.size } else { 0 };
            match comparer.compare(found, &expected).at(&self.name)? {
                Verdict::Same => _ = same.fetch_add(bytes, Ordering::Relaxed),
                Verdict::Changed => _ = changed.fetch_add(1, Ordering::Relaxed),
                Verdict::Different(what) => different
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner())
                    .push(format!("{}: {what}", printable(&found.path))),
            }
            progress.advance(bytes);
            Ok(())
        };
        let outcome =
            self.watch.during(|| workers::for_each(self.threads, imported.found.len(), work));
        progress.finish();
        outcome?;
        let different = different.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        for line in different.iter().take(NAMED_MAX) {
            say(&format!("MISMATCH: {line}"));
        }
        if !different.is_empty() {
            let count = different.len();
            return Err(Failure::message(format!("{label}: MISMATCH in {count} files")));
        }
        let same = same.into_inner();
        self.compared += same;
        // A file that has changed stays changed, so the last comparison counts all of them.
        self.changed = self.changed.max(changed.into_inner());
        self.phases.push(running.end(store, imported.found.len() as u64, same));
        self.watch.at_rest(store)
    }

    /// The report, and the name for the last messages.
    fn report(
        self,
        store: &Store,
        listing: &Listing,
        imported: &Imported,
        pages_checked: u64,
    ) -> Outcome<(Report, PathBuf)> {
        let links = imported.found.iter().filter(|found| found.kind == Kind::Link).count() as u64;
        let info = store.pool().device_info();
        let direct = match info.direct {
            Ok(()) => "direct".to_string(),
            Err(why) => format!("buffered: {why}"),
        };
        let choice = vellum_vm::probe::choice();
        let used = store.pool().backend();
        let backend = match used == choice.backend {
            true => format!("{used}: {}", choice.reason),
            false => format!("{used}, as asked"),
        };
        let report = Report {
            files: imported.found.len() as u64 - links,
            links,
            bytes: imported.bytes(),
            left_out: listing.left_out,
            unreadable: self.unreadable,
            changed: self.changed,
            file_bytes: store.stat().at(&self.name)?.file_pages * 4096,
            pool_bytes: self.plan.pool_bytes,
            backend,
            translation: reason(store.pool().translation()),
            device: format!("{}, {direct}", info.engine),
            watch: self.watch,
            kills: self.kills,
            phases: self.phases,
            compared: self.compared,
            pages_checked,
        };
        Ok((report, self.name))
    }
}

impl Imported {
    /// Sum of the files' sizes.
    fn bytes(&self) -> u64 {
        let files = self.found.iter().filter(|found| found.kind == Kind::File);
        files.map(|found| found.stamp.size).sum()
    }
}
