//! The power fails while threads write a store to a disk: what it acknowledged is there, and
//! nothing else.
//!
//! A kernel with `dm-log-writes` records the writes of a store that a process changes until it is
//! killed. Then the disk is made as it may have been after a flush, before it with some of the
//! writes that it was to make durable, or at an acknowledgement. The store that recovers there must
//! have all that was acknowledged, and each transaction as a whole. The store and its log are in
//! one ext4 file system, or the store is the raw disk's first half and its log in a file system on
//! the second.
//!
//! The kernels of the lab can do that (`make lab PACKAGE=vellum-sim`); other machines leave this
//! out. In `killed.rs` the whole machine dies.
#![allow(clippy::unwrap_used)]

mod disk;
mod killed;
mod mark;
mod mounted_store;
mod threads;

use std::env;
use std::io::{BufRead as _, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use disk::{BEGIN, END, Forced, Loop, Mapped, Moment, Records, is_possible, mark_of};
use mark::Marker;
use mounted_store::{DISK_BYTES, Layout, options};
use tempfile::{TempDir, tempdir_in};
use threads::Steps;
use vellum::{Store, StoreBug};
use vellum_log::{LogBug, SyncMethod};
use vellum_testing::random::Random;

/// Where the child makes its store and its log.
const STORE: &str = "VELLUM_TEST_STORE";
const LOG: &str = "VELLUM_TEST_LOG";

/// The name of the child's disk, whose writes are recorded.
const RECORDED: &str = "VELLUM_TEST_RECORDED";

/// How the child's log becomes durable, and the bug that its threads have.
const WAY: &str = "VELLUM_TEST_WAY";
const PLANTED: &str = "VELLUM_TEST_PLANTED";

const RECORDS_BYTES: u64 = 512 << 20;

/// The steps of each thread of the child.
const STEPS: u64 = 80;

/// A bug of the program that writes the store.
#[derive(Clone, Copy, Debug)]
enum Bug {
    Log(LogBug),
    Store(StoreBug),
}

/// Bugs that the losses of power must find.
const BUGS: [(&str, Bug); 6] = [
    ("early-ack", Bug::Log(LogBug::EarlyAcknowledgement)),
    ("no-image", Bug::Store(StoreBug::NoImage)),
    ("late-values", Bug::Store(StoreBug::LateValues)),
    ("early-reuse", Bug::Store(StoreBug::EarlyReuse)),
    ("early-header", Bug::Store(StoreBug::EarlyHeader)),
    ("early-trim", Bug::Store(StoreBug::EarlyTrim)),
];

/// Switches a bug on for this thread, by its name.
fn plant(name: &str) {
    match BUGS.iter().find(|(known, ..)| *known == name).unwrap().1 {
        Bug::Log(bug) => vellum_log::plant(Some(bug)),
        Bug::Store(bug) => vellum::plant(Some(bug)),
    }
}

/// Runs in the child, which ends by being killed.
#[test]
fn child() {
    let (Some(store), Some(log)) = (env::var_os(STORE), env::var_os(LOG)) else { return };
    let sync_method = env::var(WAY).unwrap();
    vellum_log::choose_sync_method(
        SyncMethod::ALL.into_iter().find(|known| format!("{known:?}") == sync_method),
    );
    let bug = env::var(PLANTED).ok();
    let mut options = options(log.into());
    if bug.is_some() {
        // The threads with the bug evict pages, and write checkpoints.
        options = options.evictors(0).cut_in_background(false);
    }
    let store = Store::create(store, &options).unwrap();
    threads::make_trees(&store);
    let marker = Marker::new(&env::var(RECORDED).unwrap());
    marker.mark(BEGIN);
    let begin = || bug.iter().for_each(|bug| plant(bug));
    let acknowledge = |thread, steps| marker.mark(&mark_of(thread, steps));
    threads::run_as(&store, (Steps::default(), STEPS), &begin, &acknowledge);
    // What the file system writes from now on belongs to no step.
    marker.mark(END);
    println!("\nall steps");
    loop {
        std::thread::park();
    }
}

/// The disk that the child changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Flushes alone make its writes durable.
    Flushed,
    /// It also has forced unit access.
    Forced,
}

/// Has a child change a store on a new disk, and returns the records of that.
fn record(
    folder: &Path,
    (layout, kind): (Layout, Kind),
    sync_method: SyncMethod,
    bug: Option<&str>,
) -> Records {
    let records = folder.join("records");
    let id = std::process::id();
    let under = (kind == Kind::Flushed).then(|| Loop::new(&folder.join("disk"), DISK_BYTES));
    let forced =
        (kind == Kind::Forced).then(|| Forced::new(&format!("vellum-forced-{id}"), DISK_BYTES));
    let device = forced.as_ref().map(Forced::device);
    let device = device.or_else(|| under.as_ref().map(|under| under.device.clone())).unwrap();
    let log = Loop::new(&records, RECORDS_BYTES);
    let (sectors, of, to) = (DISK_BYTES / 512, device.display(), log.device.display());
    let name = format!("vellum-recorded-{id}");
    let recorded = Mapped::new(&name, &format!("0 {sectors} log-writes {of} {to}"));
    let mounted = layout.mount(&recorded.device(), &folder.join("mounted"), true);
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture"])
        .env(STORE, mounted.store())
        .env(LOG, mounted.log())
        .env(RECORDED, &name)
        .env(WAY, format!("{sync_method:?}"))
        .envs(bug.map(|bug| (PLANTED, bug)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ended = lines.any(|line| line.unwrap() == "all steps");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(ended, "the child has failed");
    drop((mounted, recorded));
    drop((under, forced, log));
    Records::read(&records, DISK_BYTES)
}

/// A disk on which stores recover.
#[derive(Debug)]
struct Restored {
    layout: Layout,
    disk: Mapped,
    _under: Loop,
    folder: TempDir,
}

impl Restored {
    fn new(layout: Layout) -> Restored {
        let folder = tempdir_in("/dev/shm").unwrap();
        let under = Loop::new(&folder.path().join("restored"), DISK_BYTES);
        let name = format!("vellum-restored-{}", std::process::id());
        let disk = Mapped::part(&name, &under.device, 0, DISK_BYTES);
        Restored { layout, disk, _under: under, folder }
    }

    /// Has the power fail at a moment. Returns the steps that the recovered store has, or what is
    /// wrong with it.
    fn fail_at(
        &self,
        records: &mut Records,
        moment: Moment,
        random: &mut Random,
    ) -> Result<Steps, String> {
        records.restore(moment, &self.disk.device(), random);
        let mounted = self.folder.path().join("mounted");
        let on_disk = self.layout.mount(&self.disk.device(), &mounted, false);
        let opened = Store::open(on_disk.store(), &options(on_disk.log()));
        let store = opened.map_err(|error| format!("open: {error}"))?;
        let steps = threads::found(&store, moment.acknowledged)?;
        // The store takes changes again.
        threads::run(&store, (steps, 1), &|_, _| ());
        store.close().map_err(|error| format!("close: {error}"))?;
        Ok(steps)
    }
}

/// The devices have the names of this process: one test at a time has some.
static ONE: Mutex<()> = Mutex::new(());

fn random() -> Random {
    Random(env::var("VELLUM_SEED").map_or(1, |seed| seed.parse().unwrap()))
}

const IMPOSSIBLE: &str =
    "left out: this kernel has no dm-log-writes, or this user no right to use it";

const LEFT_OUT: &str = "left out: it runs with VELLUM_SOAK alone";

fn is_long() -> bool {
    env::var_os("VELLUM_SOAK").is_some()
}

/// So many of the moments, in their order.
fn some(all: &[Moment], count: usize, random: &mut Random) -> Vec<Moment> {
    if all.len() <= count {
        return all.to_vec();
    }
    let mut chosen: Vec<usize> = (0..count).map(|_| random.index(all.len())).collect();
    chosen.sort_unstable();
    chosen.into_iter().map(|number| all[number]).collect()
}

/// Has the power fail at so many moments.
fn power_fails(layout: Layout, kind: Kind, sync_method: SyncMethod, count: usize) {
    if !is_possible() {
        return eprintln!("{IMPOSSIBLE}");
    }
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = tempdir_in("/dev/shm").unwrap();
    let mut records = record(folder.path(), (layout, kind), sync_method, None);
    let (all, mut random) = (records.moments(), random());
    let moments = some(&all, count, &mut random);
    let restored = Restored::new(layout);
    let mut steps = Vec::new();
    for moment in &moments {
        match restored.fail_at(&mut records, *moment, &mut random) {
            Ok(found) => steps.push(found.iter().sum::<u64>()),
            Err(fault) => panic!("{layout:?}, {kind:?}, {sync_method:?}, {moment:?}: {fault}"),
        }
    }
    let open = all.iter().filter(|moment| moment.open() > 1).count();
    let of = format!("{} moments of {}, {open} with open writes", moments.len(), all.len());
    let forced = records.forced();
    println!("{layout:?}, {kind:?}, {sync_method}: {of}; {forced} forced writes; {steps:?} steps");
    assert!(open > 0, "no moment has writes that may be lost");
    assert!(forced > 0 || kind == Kind::Flushed, "no write was forced");
    // A disk that loses what it has flushed is found out.
    let last = all.len() / 2..all.len();
    let is_found_out = (0..16).any(|_| {
        let moment = all[last.start + random.index(last.len())];
        let moment = records.with_lost_flushes(moment, 12);
        restored.fail_at(&mut records, moment, &mut random).is_err()
    });
    assert!(is_found_out, "no recovery notices that the disk has lost flushed writes");
}

/// All moments in a long run.
fn most() -> usize {
    match env::var_os("VELLUM_SHORT") {
        _ if is_long() => usize::MAX,
        Some(_) => 5,
        None => 10,
    }
}

#[test]
fn a_store_in_a_file_system_loses_nothing() {
    power_fails(Layout::FileSystem, Kind::Forced, SyncMethod::DirectDsync, most());
}

#[test]
fn a_store_on_a_raw_disk_loses_nothing() {
    power_fails(Layout::Raw, Kind::Flushed, SyncMethod::BufferedSync, most());
}

/// In a long run alone.
#[test]
fn a_store_loses_nothing_whichever_way_its_log_is_written() {
    if !is_long() {
        return eprintln!("{LEFT_OUT}");
    }
    for sync_method in SyncMethod::ALL {
        for kind in [Kind::Flushed, Kind::Forced] {
            power_fails(Layout::FileSystem, kind, sync_method, 20);
            power_fails(Layout::Raw, kind, sync_method, 20);
        }
    }
}

/// The number of a moment, of those that are tried, at which a bug is found.
fn moment_that_finds(bug: &str, most: usize) -> Option<(usize, String)> {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = tempdir_in("/dev/shm").unwrap();
    let disk = (Layout::FileSystem, Kind::Flushed);
    let mut records = record(folder.path(), disk, SyncMethod::BufferedSync, Some(bug));
    let (all, mut random) = (records.moments(), random());
    let restored = Restored::new(Layout::FileSystem);
    // Several times through the record, so that a bug that shows late is noticed soon.
    let some = some(&all, most, &mut random);
    let rounds = (0..8.min(some.len())).map(|first| some[first..].iter().step_by(8));
    let mut moments = rounds.flatten().copied().enumerate();
    moments.find_map(|(number, moment)| {
        let fails = || restored.fail_at(&mut records, moment, &mut random);
        let fault = match catch_unwind(AssertUnwindSafe(fails)) {
            Ok(fault) => fault.err(),
            Err(_) => Some("a panic".to_owned()),
        };
        fault.map(|fault| (number, fault))
    })
}

/// Asserts that a bug is found at one of so many moments.
fn bug_is_found(bug: &str, most: usize) {
    if !is_possible() {
        return eprintln!("{IMPOSSIBLE}");
    }
    let found = moment_that_finds(bug, most);
    println!("{bug}: {found:?}");
    assert!(found.is_some(), "{bug} is not found");
}

#[test]
fn an_acknowledgement_before_the_sync_is_noticed() {
    bug_is_found("early-ack", 100);
}

#[test]
fn values_that_are_synced_too_late_are_noticed() {
    bug_is_found("late-values", 200);
}

/// The other bugs take longer.
fn rare_bug_is_found(bug: &str) {
    if !is_long() {
        return eprintln!("{LEFT_OUT}");
    }
    bug_is_found(bug, usize::MAX);
}

#[test]
fn a_record_without_an_image_is_noticed() {
    rare_bug_is_found("no-image");
}

#[test]
fn a_place_that_is_reused_too_early_is_noticed() {
    rare_bug_is_found("early-reuse");
}

#[test]
fn a_header_before_its_pages_is_noticed() {
    rare_bug_is_found("early-header");
}

#[test]
fn a_log_that_is_trimmed_too_early_is_noticed() {
    rare_bug_is_found("early-trim");
}
