//! The power fails while a store is written to a disk: what it acknowledged is there, and nothing
//! else.
//!
//! A kernel with `dm-log-writes` records the writes of a store that a process changes until it is
//! killed. Then the disk is made as it was at a flush, or at an acknowledgement without some of
//! the writes that no flush had made durable. The store that recovers there must have a prefix of
//! the changes, with all that were acknowledged. The store and its log are in one ext4 file system,
//! or the store is the raw disk's first half and its log in a file system on the second.
//!
//! The kernels of the lab can do that (`make lab PACKAGE=vellum`); other machines leave this out.
#![allow(clippy::unwrap_used)]

mod disk;

use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use disk::{Loop, Mapped, Moment, Mounted, Records, is_possible, make_file_system, mark};
use tempfile::tempdir_in;
use vellum::{Durability, Options, Store, TransactionOptions, Tree};
use vellum_testing::random::Random;

/// Where the child makes its store and its log.
const STORE: &str = "VELLUM_TEST_STORE";
const LOG: &str = "VELLUM_TEST_LOG";

/// The name of the child's disk, whose writes are recorded.
const RECORDED: &str = "VELLUM_TEST_RECORDED";

const DISK_BYTES: u64 = 32 << 20;
const RECORDS_BYTES: u64 = 512 << 20;

/// The changes that the child makes.
const STEPS: u64 = 150;

const TREES: [&str; 2] = ["a", "b"];

/// The entry that says how many steps there were.
const STEP: &[u8] = b"step";

/// Trees by their names.
type Model = BTreeMap<&'static str, BTreeMap<Vec<u8>, Vec<u8>>>;

/// How the store lies on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    FileSystem,
    Raw,
}

/// The places of a store that is on a disk, while they are mounted. Fields are dropped in order.
#[derive(Debug)]
struct Place {
    mounted: Mounted,
    parts: Vec<Mapped>,
}

impl Layout {
    /// Mounts what is on a disk; makes it first if `is_new`.
    fn mount(self, disk: &Path, folder: &Path, is_new: bool) -> Place {
        let parts = match self {
            Layout::FileSystem => Vec::new(),
            Layout::Raw => {
                let name = disk.file_name().unwrap().to_str().unwrap();
                let half = DISK_BYTES / 512 / 2;
                let part = |part: &str, start: u64| {
                    let table = format!("0 {half} linear {} {start}", disk.display());
                    Mapped::new(&format!("{name}-{part}"), &table)
                };
                vec![part("store", 0), part("log", half)]
            }
        };
        let file_system = parts.last().map_or(disk.to_owned(), Mapped::device);
        if is_new {
            make_file_system(&file_system);
        }
        Place { mounted: Mounted::new(&file_system, folder), parts }
    }
}

impl Place {
    fn store(&self) -> PathBuf {
        self.parts.first().map_or_else(|| self.mounted.folder.join("store"), Mapped::device)
    }

    fn log(&self) -> PathBuf {
        self.mounted.folder.join("log")
    }
}

fn options(log: PathBuf) -> Options {
    Options::new().pool_bytes(1 << 20).log_bytes(2 << 20).log_folder(log)
}

/// A change of a tree, by its name: the key and the new value. Without a value it removes the
/// entry, without a key all entries.
type Change = (&'static str, Option<Vec<u8>>, Option<Vec<u8>>);

/// What a step changes: from its number alone.
fn changes(step: u64) -> Vec<Change> {
    let random = &mut Random(step);
    random.next();
    if step % 41 == 40 {
        return vec![("b", None, None)];
    }
    let count = 1 + random.below(8);
    let mut changes: BTreeMap<_, _> = BTreeMap::new();
    for _ in 0..count {
        let (tree, key) = (random.pick(&TREES), vec![b'k', random.below(120) as u8]);
        let len = random.pick(&[0, 20, 100, 700, 700, 5000, 40_000]);
        let value = (!random.once_in(4)).then(|| {
            let mut value = step.to_le_bytes().to_vec();
            value.resize(8 + len, step as u8);
            value
        });
        changes.insert((tree, key), value);
    }
    changes.into_iter().map(|((tree, key), value)| (tree, Some(key), value)).collect()
}

/// The trees after so many steps.
fn model(steps: u64) -> Model {
    let mut model: Model = TREES.map(|name| (name, BTreeMap::new())).into();
    for (tree, key, value) in (0..steps).flat_map(changes) {
        let tree = model.get_mut(tree).unwrap();
        match (key, value) {
            (None, _) => tree.clear(),
            (Some(key), None) => drop(tree.remove(&key)),
            (Some(key), Some(value)) => drop(tree.insert(key, value)),
        }
    }
    if steps > 0 {
        model.get_mut("a").unwrap().insert(STEP.to_vec(), steps.to_le_bytes().to_vec());
    }
    model
}

/// Makes the changes of a step. Returns whether it waited until they were durable.
fn make(store: &Store, trees: &[Tree; 2], step: u64) -> bool {
    let tree_of = |name: &str| &trees[TREES.iter().position(|tree| *tree == name).unwrap()];
    let is_synced = step % 5 != 3;
    let durability = if is_synced { Durability::Synced } else { Durability::Buffered };
    let options = TransactionOptions::new().durability(durability);
    let mut transaction = store.begin_with(options).unwrap();
    for (tree, key, value) in changes(step) {
        let tree = tree_of(tree);
        match (key, value) {
            (None, _) => drop(transaction.remove_range(tree, ..).unwrap()),
            (Some(key), None) => drop(transaction.remove(tree, &key).unwrap()),
            (Some(key), Some(value)) => transaction.put(tree, &key, &value).unwrap(),
        }
    }
    transaction.put(&trees[0], STEP, &(step + 1).to_le_bytes()).unwrap();
    transaction.commit().unwrap();
    is_synced
}

/// Runs in the child, which ends by being killed.
#[test]
fn child() {
    let (Some(store), Some(log)) = (env::var_os(STORE), env::var_os(LOG)) else { return };
    let recorded = env::var(RECORDED).unwrap();
    let store = Store::create(store, &options(log.into())).unwrap();
    let trees = TREES.map(|name| store.create_tree(name).unwrap());
    store.sync().unwrap();
    mark(&recorded, 0);
    for step in 0..STEPS {
        if make(&store, &trees, step) {
            mark(&recorded, step + 1);
        }
    }
    println!("\nall steps");
    loop {
        std::thread::park();
    }
}

/// Has a child change a store on a new disk, and returns the records of that.
fn record(folder: &Path, layout: Layout) -> Records {
    let records = folder.join("records");
    let (disk, log) =
        (Loop::new(&folder.join("disk"), DISK_BYTES), Loop::new(&records, RECORDS_BYTES));
    let (sectors, of, to) = (DISK_BYTES / 512, disk.device.display(), log.device.display());
    let name = format!("vellum-recorded-{layout:?}");
    let recorded = Mapped::new(&name, &format!("0 {sectors} log-writes {of} {to}"));
    let place = layout.mount(&recorded.device(), &folder.join("mounted"), true);
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture"])
        .env(STORE, place.store())
        .env(LOG, place.log())
        .env(RECORDED, &name)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ended = lines.any(|line| line.unwrap() == "all steps");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(ended, "the child has failed");
    // What the file system writes from now on belongs to no step.
    mark(&name, u64::MAX);
    drop((place, recorded));
    drop((disk, log));
    Records::read(&records)
}

/// What is wrong with a store that recovers on a disk, if anything is. `acknowledged` steps must
/// be there.
fn fault(layout: Layout, disk: &Path, folder: &Path, acknowledged: u64) -> Result<u64, String> {
    let place = layout.mount(disk, folder, false);
    let opened = Store::open(place.store(), &options(place.log()));
    let store = opened.map_err(|error| format!("open: {error}"))?;
    let report = store.check(&mut |_| ()).map_err(|error| format!("check: {error}"))?;
    if !report.is_sound() {
        return Err(format!("{:?}", report.damage));
    }
    let mut found = Model::new();
    for name in TREES {
        let tree = store.tree(name).map_err(|error| format!("tree {name}: {error}"))?;
        let entry = |entry: vellum::Result<_>| {
            entry.map(|(key, value): (Vec<u8>, vellum::Value<'_>)| (key, value.into_vec()))
        };
        let entries: Result<_, _> = tree.entries().map(entry).collect();
        found.insert(name, entries.map_err(|error| format!("tree {name}: {error}"))?);
    }
    let step =
        found["a"].get(STEP).map_or(0, |step| u64::from_le_bytes(step[..].try_into().unwrap()));
    if step < acknowledged {
        return Err(format!("{step} steps instead of {acknowledged}"));
    }
    if found != model(step) {
        return Err(format!("the trees are not as after step {step}"));
    }
    // The store takes changes again.
    let trees = TREES.map(|name| store.tree(name).unwrap());
    make(&store, &trees, step);
    store.close().map_err(|error| format!("close: {error}"))?;
    Ok(step)
}

fn power_fails(layout: Layout) {
    if !is_possible() {
        eprintln!("left out: this kernel has no dm-log-writes, or this user no right to use it");
        return;
    }
    let folder = tempdir_in("/dev/shm").unwrap();
    let mut records = record(folder.path(), layout);
    let all: Vec<Moment> =
        records.moments().into_iter().filter(|moment| moment.marked <= STEPS).collect();
    let mut random = Random(env::var("VELLUM_SEED").map_or(1, |seed| seed.parse().unwrap()));
    let count = if env::var_os("VELLUM_SHORT").is_some() { 5 } else { 15 };
    let moments: Vec<Moment> = match env::var_os("VELLUM_SOAK") {
        Some(_) => all.clone(),
        None => (0..count).map(|_| random.pick(&all)).collect(),
    };
    let restored = Loop::new(&folder.path().join("restored"), DISK_BYTES);
    let mounted = folder.path().join("restored-mounted");
    let table = format!("0 {} linear {} 0", DISK_BYTES / 512, restored.device.display());
    let disk = Mapped::new(&format!("vellum-restored-{layout:?}"), &table);
    let mut found = Vec::new();
    for moment in &moments {
        records.restore(*moment, 0, DISK_BYTES, &restored.device, &mut random);
        match fault(layout, &disk.device(), &mounted, moment.marked) {
            Ok(step) => found.push(step),
            Err(fault) => panic!("{layout:?}, {moment:?}: {fault}"),
        }
    }
    println!("{layout:?}: {} moments of {}, {found:?} steps", moments.len(), all.len());
    // A disk that loses what it has flushed is found out.
    let acknowledgements: Vec<Moment> =
        all.into_iter().filter(|moment| !moment.is_flushed && moment.marked > 20).collect();
    let is_found_out = (0..4).any(|_| {
        let moment = random.pick(&acknowledgements);
        records.restore(moment, 6, DISK_BYTES, &restored.device, &mut random);
        fault(layout, &disk.device(), &mounted, moment.marked).is_err()
    });
    assert!(is_found_out, "no recovery notices that the disk has lost flushed writes");
}

#[test]
fn a_store_in_a_file_system_loses_nothing() {
    power_fails(Layout::FileSystem);
}

#[test]
fn a_store_on_a_raw_disk_loses_nothing() {
    power_fails(Layout::Raw);
}
