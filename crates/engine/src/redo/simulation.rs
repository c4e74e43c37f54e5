//! Stores that lose power at any operation of their file, with their logs: what was synced is there
//! after recovery, in order, and nothing else.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vellum_log::{SimulatedDevice, SimulatedOptions};
use vellum_pool::PAGE_SIZE;
use vellum_pool::device::{Device, DeviceInfo, MemoryDevice, PageRange, ReadDone, Surface, Write};
use vellum_testing::random::Random;

use crate::{Durability, Error, Options, Store, Transaction, TransactionOptions, Tree};

/// The part of a write that the device writes as a whole.
const SECTOR: usize = 512;

/// What a loss of power left, and what the store had done until then.
#[derive(Debug)]
struct Crash {
    file: Vec<u8>,
    log: SimulatedDevice,
    /// So many changes were durable, so many had begun.
    synced: usize,
    begun: usize,
}

#[derive(Clone, Debug)]
enum Unsynced {
    Write(usize, Vec<u8>),
    Resize(usize),
}

#[derive(Debug)]
struct State {
    random: Random,
    durable: Vec<u8>,
    unsynced: Vec<Unsynced>,
    synced: usize,
    begun: usize,
    crashes: Vec<Crash>,
}

/// A file in memory that notes what a loss of power would leave of it and of its log, now and then.
#[derive(Debug)]
struct CrashingFile {
    memory: MemoryDevice,
    log: Arc<SimulatedDevice>,
    /// Once in so many operations.
    every: u64,
    state: Mutex<State>,
}

impl CrashingFile {
    fn new(file: Vec<u8>, log: Arc<SimulatedDevice>, every: u64, seed: u64) -> CrashingFile {
        let state = State {
            random: Random(seed),
            durable: file.clone(),
            unsynced: Vec::new(),
            synced: 0,
            begun: 0,
            crashes: Vec::new(),
        };
        let memory = MemoryDevice::from_snapshot(file);
        CrashingFile { memory, log, every, state: Mutex::new(state) }
    }

    fn note(&self, synced: usize, begun: usize) {
        let mut state = self.state.lock().unwrap();
        (state.synced, state.begun) = (synced, begun);
    }

    fn take_crashes(&self) -> Vec<Crash> {
        std::mem::take(&mut self.state.lock().unwrap().crashes)
    }

    fn crash_now(&self) -> Crash {
        let mut state = self.state.lock().unwrap();
        let file = state.image();
        Crash { file, log: self.log.crash(), synced: state.synced, begun: state.begun }
    }

    fn perhaps_crash(&self) {
        let crashes = {
            let mut state = self.state.lock().unwrap();
            state.crashes.len() < 3 && state.random.once_in(self.every)
        };
        if crashes {
            let crash = self.crash_now();
            self.state.lock().unwrap().crashes.push(crash);
        }
    }
}

impl State {
    /// The file with some of what was not synced, some of it torn.
    fn image(&mut self) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        let (kept, torn_once_in) = (self.random.below(5), self.random.pick(&[2, 8]));
        for unsynced in &self.unsynced {
            if self.random.below(4) >= kept {
                continue;
            }
            match unsynced {
                Unsynced::Resize(len) => bytes.resize(*len, 0),
                Unsynced::Write(at, data) => {
                    let is_torn = self.random.once_in(torn_once_in);
                    bytes.resize(bytes.len().max(at + data.len()), 0);
                    for (number, sector) in data.chunks(SECTOR).enumerate() {
                        if !is_torn || self.random.once_in(2) {
                            bytes[at + number * SECTOR..][..sector.len()].copy_from_slice(sector);
                        }
                    }
                }
            }
        }
        bytes
    }
}

impl Device for CrashingFile {
    fn read(&self, surface: &Surface, range: PageRange) -> io::Result<()> {
        self.memory.read(surface, range)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(PageRange, ReadDone)>) {
        self.memory.start_reads(surface, reads);
    }

    fn write(&self, batch: &mut [Write<'_>]) {
        self.perhaps_crash();
        let mut state = self.state.lock().unwrap();
        for write in &*batch {
            let at = write.page as usize * PAGE_SIZE;
            state.unsynced.push(Unsynced::Write(at, write.parts.concat()));
        }
        drop(state);
        self.memory.write(batch);
        self.perhaps_crash();
    }

    fn sync(&self) -> io::Result<()> {
        self.perhaps_crash();
        let mut state = self.state.lock().unwrap();
        for unsynced in std::mem::take(&mut state.unsynced) {
            match unsynced {
                Unsynced::Resize(len) => state.durable.resize(len, 0),
                Unsynced::Write(at, data) => {
                    let len = state.durable.len().max(at + data.len());
                    state.durable.resize(len, 0);
                    state.durable[at..at + data.len()].copy_from_slice(&data);
                }
            }
        }
        drop(state);
        self.perhaps_crash();
        Ok(())
    }

    fn pages(&self) -> io::Result<u64> {
        self.memory.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.memory.resize(pages)?;
        let len = pages as usize * PAGE_SIZE;
        self.state.lock().unwrap().unsynced.push(Unsynced::Resize(len));
        Ok(())
    }

    fn info(&self) -> DeviceInfo {
        self.memory.info()
    }
}

/// A change that a crash leaves whole or undone.
#[derive(Clone, Debug)]
enum Change {
    CreateTree(String),
    Put(usize, Vec<u8>, Vec<u8>),
    Remove(usize, Vec<u8>),
    /// Puts, and removals of what is there.
    Transaction(Vec<(usize, Vec<u8>, Option<Vec<u8>>)>),
    // A crash of the next ones may lose pages: they have several records.
    Stream(usize, Vec<u8>, Vec<u8>),
    Clear(usize),
    Load(usize, u16),
}

/// The trees, and their contents.
type Model = BTreeMap<String, BTreeMap<Vec<u8>, Vec<u8>>>;

fn name(number: usize) -> String {
    format!("tree {number}")
}

/// Sorted entries, some of which have values with pages of their own.
fn loaded(count: u16) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    (0..count).map(|number| {
        let len = if number % 100 == 5 { 6000 } else { 30 };
        (number.to_be_bytes().to_vec(), vec![number as u8; len])
    })
}

/// A value of random length: some have pages of their own.
fn value(random: &mut Random) -> Vec<u8> {
    let len = match random.below(8) {
        0 if random.once_in(4) => random.below(40_000),
        0 => random.below(9_000),
        1..6 => random.below(900),
        _ => random.below(40),
    };
    vec![random.next() as u8; len as usize]
}

impl Change {
    fn random(random: &mut Random, trees: usize, may_lose: bool) -> Change {
        if trees == 0 || random.once_in(150) {
            return Change::CreateTree(name(trees));
        }
        let tree = random.index(trees);
        if may_lose && random.once_in(100) {
            return Change::Clear(tree);
        }
        if may_lose && random.once_in(60) {
            return Change::Load(tree, random.below(2000) as u16);
        }
        let mut key = vec![b'k'; random.pick(&[0, 1, 8, 60])];
        key.extend((random.below(600) as u16).to_be_bytes());
        if may_lose && random.once_in(20) {
            let len = random.below(300_000) as usize;
            return Change::Stream(tree, key, vec![random.next() as u8; len]);
        }
        if random.once_in(10) {
            // A commit in the smallest pool changes at most three leaves.
            let count = random.pick(&[1, 2, 3]);
            let one = |_| {
                let mut key = key.clone();
                key.push(random.below(40) as u8);
                (random.index(trees), key, (!random.once_in(3)).then(|| value(random)))
            };
            return Change::Transaction((0..count).map(one).collect());
        }
        match random.below(10) {
            0..3 => Change::Remove(tree, key),
            _ => Change::Put(tree, key, value(random)),
        }
    }

    fn make(&self, store: &Store) {
        match self {
            Change::CreateTree(name) => drop(store.create_tree(name).unwrap()),
            Change::Put(tree, key, value) => {
                store.tree(&name(*tree)).unwrap().upsert(key, value).map(drop).unwrap();
            }
            Change::Remove(tree, key) => {
                store.tree(&name(*tree)).unwrap().remove(key).map(drop).unwrap();
            }
            Change::Transaction(changes) => {
                let options = TransactionOptions::new().durability(Durability::None);
                let mut transaction = store.begin_with(options).unwrap();
                for (tree, key, value) in changes {
                    let tree = store.tree(&name(*tree)).unwrap();
                    match value {
                        Some(value) => transaction.put(&tree, key, value).unwrap(),
                        None => drop(transaction.remove(&tree, key).unwrap()),
                    }
                }
                transaction.commit().unwrap();
            }
            Change::Stream(tree, key, value) => {
                let tree = store.tree(&name(*tree)).unwrap();
                let mut writer = tree.writer(key).unwrap();
                io::Write::write_all(&mut writer, value).unwrap();
                writer.finish().map(drop).unwrap();
            }
            Change::Clear(tree) => store.tree(&name(*tree)).unwrap().clear().unwrap(),
            Change::Load(tree, count) => {
                let tree = store.tree(&name(*tree)).unwrap();
                match tree.bulk_load(loaded(*count)) {
                    Ok(_) | Err(Error::NotEmpty) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    fn apply(&self, model: &mut Model) {
        match self {
            Change::CreateTree(name) => drop(model.insert(name.clone(), BTreeMap::new())),
            Change::Put(tree, key, value) => {
                let tree = model.get_mut(&name(*tree)).unwrap();
                tree.insert(key.clone(), value.clone());
            }
            Change::Remove(tree, key) => {
                let _ = model.get_mut(&name(*tree)).unwrap().remove(key);
            }
            Change::Transaction(changes) => {
                for (tree, key, value) in changes {
                    let tree = model.get_mut(&name(*tree)).unwrap();
                    match value {
                        Some(value) => drop(tree.insert(key.clone(), value.clone())),
                        None => drop(tree.remove(key)),
                    }
                }
            }
            Change::Stream(tree, key, value) => {
                let tree = model.get_mut(&name(*tree)).unwrap();
                tree.insert(key.clone(), value.clone());
            }
            Change::Clear(tree) => model.get_mut(&name(*tree)).unwrap().clear(),
            Change::Load(tree, count) => {
                let tree = model.get_mut(&name(*tree)).unwrap();
                if tree.is_empty() {
                    tree.extend(loaded(*count));
                }
            }
        }
    }
}

fn contents(store: &Store) -> Model {
    let tree = |name: String| {
        let tree = store.tree(&name).unwrap();
        let entries = tree.range(..).map(|entry| {
            let (key, value) = entry.unwrap();
            (key, value.to_vec())
        });
        (name, entries.collect())
    };
    store.trees().unwrap().into_iter().map(tree).collect()
}

/// In the smaller pool, most nodes leave memory between two changes.
fn options(log: &Arc<SimulatedDevice>, log_bytes: u64, pool_bytes: u64) -> Options {
    let options = Options::new().pool_bytes(pool_bytes);
    // Each round is the same each time.
    let cut_in_background = false;
    Options { log: Some(log.clone()), log_bytes, evictors: 0, cut_in_background, ..options }
}

/// Recovers a store, sometimes through crashes of the recovery, and checks it. Returns how many of
/// the changes it has.
fn recover(crash: Crash, changes: &[Change], seed: u64, depth: u32) -> (Store, usize) {
    let (log, synced, begun) = (Arc::new(crash.log), crash.synced, crash.begun);
    let every = if depth == 0 { u64::MAX } else { 8 };
    let file = Arc::new(CrashingFile::new(crash.file, log.clone(), every, seed));
    file.note(synced, begun);
    let store = Store::open_on(file.clone(), &options(&log, 64 << 10, 4 << 20)).unwrap();
    for (number, crash) in file.take_crashes().into_iter().enumerate() {
        drop(recover(crash, changes, seed + number as u64, depth - 1));
    }

    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty(), "seed {seed}: {:?}", report.damage);
    let has_several = |change: &Change| {
        matches!(change, Change::Stream(..) | Change::Clear(_) | Change::Load(..))
    };
    if !changes[..begun].iter().any(has_several) {
        assert_eq!(report.lost_pages, 0, "seed {seed}");
    }
    let found = contents(&store);
    let mut model = Model::new();
    changes[..synced].iter().for_each(|change| change.apply(&mut model));
    let mut done = synced;
    while found != model {
        assert!(done < begun, "seed {seed}: the store has none of the states {synced}..={begun}");
        changes[done].apply(&mut model);
        done += 1;
    }
    (store, done)
}

fn live(seed: u64) {
    let random = &mut Random(seed);
    let segments =
        SimulatedOptions { seed, segments: 64, segment_blocks: 16, ..Default::default() };
    let log = Arc::new(SimulatedDevice::new(segments));
    let every = random.pick(&[8, 60, 400]);
    let file = Arc::new(CrashingFile::new(Vec::new(), log.clone(), every, seed));
    let page_frames = random.pick(&[1, 1, 2]);
    let log_bytes = random.pick(&[16 << 10, 100 << 10, 2 << 20]);
    let pool_bytes = random.pick(&[192 << 10, 192 << 10, 1 << 20]);
    let options = options(&log, log_bytes, pool_bytes).page_frames(page_frames);
    let store = Store::create_on(file.clone(), &options).unwrap();
    // A crash of the creation leaves no store.
    drop(file.take_crashes());
    let sync_once_in = random.pick(&[1, 5, 50]);
    let (mut changes, mut trees, mut synced, mut recoveries) = (Vec::new(), 0, 0, 40);
    for number in 0..random.pick(&[100, 1000, 3000]) {
        let change = Change::random(random, trees, seed.is_multiple_of(2));
        trees += usize::from(matches!(change, Change::CreateTree(_)));
        changes.push(change.clone());
        file.note(synced, changes.len());
        change.make(&store);
        if random.once_in(sync_once_in) {
            store.sync().unwrap();
            synced = changes.len();
            file.note(synced, synced);
        }
        // Most of the time goes into recoveries: not all of a long round.
        for crash in file.take_crashes().into_iter().take(recoveries) {
            drop(recover(crash, &changes, seed + number, 2));
            recoveries -= 1;
        }
    }
    let (_, done) = recover(file.crash_now(), &changes, seed, 2);
    assert!((synced..=changes.len()).contains(&done));

    // A closed store needs no log.
    store.close().unwrap();
    let plain = Options { log: None, ..options }.pool_bytes(4 << 20);
    let store = Store::open_on(file, &plain).unwrap();
    let mut model = Model::new();
    changes.iter().for_each(|change| change.apply(&mut model));
    assert!(contents(&store) == model);
}

#[test]
fn what_was_synced_survives_a_loss_of_power() {
    let rounds = std::env::var("VELLUM_ROUNDS").map_or(6, |rounds| rounds.parse().unwrap());
    let first = std::env::var("VELLUM_SEED").map_or(1, |seed| seed.parse().unwrap());
    (first..first + rounds).for_each(live);
}

/// A crash may come when the map of a cut is written and its header is not.
#[test]
fn the_map_of_a_cut_lies_elsewhere_than_that_of_the_cut_before() {
    let segments = SimulatedOptions { segments: 64, segment_blocks: 16, ..Default::default() };
    let log = Arc::new(SimulatedDevice::new(segments));
    let file = Arc::new(MemoryDevice::new());
    let store = Store::create_on(file, &options(&log, 16 << 10, 1 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    let mut maps = vec![store.core.pages.header().free_map];
    for number in 0..400_u16 {
        tree.insert(&number.to_be_bytes(), &[7; 300]).unwrap();
        let header = store.core.pages.header();
        assert!(!header.clean && header.log.identity != 0);
        if maps.last() != Some(&header.free_map) {
            maps.push(header.free_map);
        }
    }
    assert!(maps.len() > 5, "{maps:?}");
    assert!(maps.windows(3).skip(1).all(|maps| maps[0] == maps[2]), "{maps:?}");
    assert!(store.core.pages.redo_log.as_ref().unwrap().end() > 5 * (16 << 10));
}

/// Threads change a tree, sync, and write cuts for each other. Then the power fails.
#[test]
fn threads_find_their_changes_after_a_loss_of_power() {
    for seed in 1..40 {
        let segments =
            SimulatedOptions { seed, segments: 256, segment_blocks: 16, ..Default::default() };
        let log = Arc::new(SimulatedDevice::new(segments));
        let file = Arc::new(CrashingFile::new(Vec::new(), log.clone(), u64::MAX, seed));
        let cut_in_background = seed % 2 == 0;
        let options =
            Options { evictors: 1, cut_in_background, ..options(&log, 32 << 10, 384 << 10) };
        let store = Store::create_on(file.clone(), &options).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let one = |thread: u8| {
            let (random, mut model) = (&mut Random(seed * 10 + u64::from(thread)), BTreeMap::new());
            for _ in 0..600 {
                let key = [thread, random.below(80) as u8].to_vec();
                let len = random.pick(&[3, 30, 700, 5_000]);
                match random.below(4) {
                    0 => drop((tree.remove(&key).unwrap(), model.remove(&key))),
                    _ => {
                        let value = vec![random.next() as u8; len];
                        tree.upsert(&key, &value).unwrap();
                        model.insert(key, value);
                    }
                }
                if random.once_in(40) {
                    store.sync().unwrap();
                }
            }
            store.sync().unwrap();
            model
        };
        let mut model = BTreeMap::new();
        std::thread::scope(|scope| {
            let one = &one;
            let threads = [0, 1, 2, 3].map(|thread| scope.spawn(move || one(thread)));
            threads.into_iter().for_each(|thread| model.extend(thread.join().unwrap()));
        });
        let crash = file.crash_now();
        let (log, file) = (Arc::new(crash.log), Arc::new(MemoryDevice::from_snapshot(crash.file)));
        let options = Options { log: Some(log), ..options };
        let recovered = Store::open_on(file, &options).unwrap();
        let report = recovered.check(&mut |_| ()).unwrap();
        assert!(report.damage.is_empty(), "seed {seed}: {:?}", report.damage);
        assert_eq!(report.lost_pages, 0, "seed {seed}");
        assert!(contents(&recovered) == Model::from([("tree".to_string(), model)]), "seed {seed}");
    }
}

const ACCOUNTS: u64 = 40;
const EACH: u64 = 1000;

fn number_at(transaction: &Transaction, tree: &Tree, key: u64) -> u64 {
    let value = transaction.get(tree, &key.to_be_bytes()).unwrap();
    value.map_or(0, |value| u64::from_be_bytes(value[..8].try_into().unwrap()))
}

/// Moves money between two accounts, each in a tree of its own or not, and counts the transfer of
/// this thread. Some balances are on pages of their own.
fn transfer(one: &mut Transaction, trees: &[Tree; 2], thread: u64, random: &mut Random) {
    let (from, to) = (random.below(ACCOUNTS), random.below(ACCOUNTS));
    let tree_of = |account: u64| &trees[(account % 2) as usize];
    let balance = |number: u64, random: &mut Random| {
        let mut value = number.to_be_bytes().to_vec();
        value.resize(random.pick(&[8, 8, 300, 6000]), 0);
        value
    };
    let amount = random.below(20).min(number_at(one, tree_of(from), from));
    let left = number_at(one, tree_of(from), from) - amount;
    one.put(tree_of(from), &from.to_be_bytes(), &balance(left, random)).unwrap();
    let sum = number_at(one, tree_of(to), to) + amount;
    one.put(tree_of(to), &to.to_be_bytes(), &balance(sum, random)).unwrap();
    let count = number_at(one, &trees[0], 1000 + thread) + 1;
    one.put(&trees[0], &(1000 + thread).to_be_bytes(), &count.to_be_bytes()).unwrap();
}

/// Threads move money, and the power fails at any operation of the file: no money is lost or made,
/// and every transfer that was durable then has happened.
#[test]
fn transactions_are_whole_or_undone_after_a_loss_of_power() {
    for seed in 1..12 {
        let segments =
            SimulatedOptions { seed, segments: 256, segment_blocks: 16, ..Default::default() };
        let log = Arc::new(SimulatedDevice::new(segments));
        let file = Arc::new(CrashingFile::new(Vec::new(), log.clone(), 40, seed));
        let options = options(&log, 32 << 10, 384 << 10);
        let store = Store::create_on(file.clone(), &options).unwrap();
        let trees = ["even", "odd"].map(|name| store.create_tree(name).unwrap());
        for account in 0..ACCOUNTS {
            let tree = &trees[(account % 2) as usize];
            tree.upsert(&account.to_be_bytes(), &EACH.to_be_bytes()).unwrap();
        }
        store.sync().unwrap();
        drop(file.take_crashes());

        // The transfers of each thread that are durable.
        let durable = [(); 3].map(|()| AtomicU64::new(0));
        let mut recoveries = 0;
        let mut recovered = |crash: Crash, at_least: [u64; 3]| {
            let (log, image) = (Arc::new(crash.log), MemoryDevice::from_snapshot(crash.file));
            let options = Options { log: Some(log), ..options.clone() }.pool_bytes(4 << 20);
            let store = Store::open_on(Arc::new(image), &options).unwrap();
            let report = store.check(&mut |_| ()).unwrap();
            assert!(report.damage.is_empty(), "seed {seed}: {:?}", report.damage);
            let trees = ["even", "odd"].map(|name| store.tree(name).unwrap());
            let view = store.begin().unwrap();
            let account = |number: u64| number_at(&view, &trees[(number % 2) as usize], number);
            assert_eq!((0..ACCOUNTS).map(account).sum::<u64>(), ACCOUNTS * EACH, "seed {seed}");
            for (thread, least) in at_least.into_iter().enumerate() {
                let found = number_at(&view, &trees[0], 1000 + thread as u64);
                assert!(found >= least, "seed {seed}: thread {thread}: {found} of {least}");
            }
            recoveries += 1;
        };
        std::thread::scope(|scope| {
            for (thread, durable) in durable.iter().enumerate() {
                let (store, trees) = (&store, &trees);
                scope.spawn(move || {
                    let random = &mut Random(seed * 10 + thread as u64);
                    for number in 1..200 {
                        let how = random.pick(&[Durability::Synced, Durability::Buffered]);
                        let options = TransactionOptions::new().durability(how);
                        let run = |one: &mut Transaction| {
                            transfer(one, trees, thread as u64, &mut Random(seed + number));
                            Ok(())
                        };
                        store.transact_with(options, run).unwrap();
                        if how == Durability::Synced {
                            durable.store(number, Ordering::SeqCst);
                        }
                    }
                });
            }
            for _ in 0..40 {
                std::thread::sleep(std::time::Duration::from_millis(2));
                // In this order: the crash comes after these transfers were durable.
                let at_least =
                    [0, 1, 2].map(|thread: usize| durable[thread].load(Ordering::SeqCst));
                recovered(file.crash_now(), at_least);
                file.take_crashes().into_iter().for_each(|crash| recovered(crash, [0; 3]));
            }
        });
        recovered(
            file.crash_now(),
            [0, 1, 2].map(|thread: usize| durable[thread].load(Ordering::SeqCst)),
        );
        assert!(recoveries > 40);
    }
}
