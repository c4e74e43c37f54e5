//! A process that is killed while its threads change a store with a log: what it has synced is
//! there, and nothing that it has not written.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use tempfile::tempdir;
use vellum::{Error, Options, Store, Tree};
use vellum_testing::patience::eventually;
use vellum_testing::random::Random;

/// Where the child finds the store, and how many changes of each thread were acknowledged.
const STORE: &str = "VELLUM_TEST_STORE";
const ACKNOWLEDGED: &str = "VELLUM_TEST_ACKNOWLEDGED";

const THREADS: usize = 3;
/// More changes than a thread makes in one life.
const MOST_CHANGES: u64 = 1 << 20;

/// What a thread does in its tree: from its number and the number of the change alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Put { key: u8, len: usize },
    Stream { key: u8, len: usize },
    Remove { key: u8 },
    Clear,
}

fn change(thread: usize, number: u64) -> Change {
    let random = &mut Random(number * THREADS as u64 + thread as u64);
    // The first ones are alike.
    random.next();
    let key = random.below(100) as u8;
    match random.below(400) {
        0 => Change::Clear,
        1..100 => Change::Remove { key },
        100..110 => Change::Stream { key, len: random.below(200_000) as usize + 1 },
        110..130 => Change::Put { key, len: random.below(60_000) as usize },
        130..180 => Change::Put { key, len: random.below(6_000) as usize },
        _ => Change::Put { key, len: random.below(400) as usize },
    }
}

/// The value that a change writes: no other change writes the same.
fn value(number: u64, len: usize) -> Vec<u8> {
    let mut value = number.to_le_bytes().to_vec();
    value.resize(8 + len, number as u8);
    value
}

fn make(tree: &Tree, thread: usize, number: u64) {
    match change(thread, number) {
        Change::Put { key, len } => drop(tree.upsert(&[key], &value(number, len)).unwrap()),
        Change::Stream { key, len } => {
            let mut writer = tree.writer(&[key]).unwrap();
            writer.write_all(&value(number, len)).unwrap();
            writer.finish().unwrap();
        }
        Change::Remove { key } => drop(tree.remove(&[key]).unwrap()),
        Change::Clear => tree.clear().unwrap(),
    }
}

/// For each key, the change that wrote its value.
type State = BTreeMap<u8, u64>;

fn apply(state: &mut State, thread: usize, number: u64) {
    match change(thread, number) {
        Change::Put { key, .. } | Change::Stream { key, .. } => drop(state.insert(key, number)),
        Change::Remove { key } => drop(state.remove(&key)),
        Change::Clear => state.clear(),
    }
}

fn name(thread: usize) -> String {
    format!("thread {thread}")
}

/// What the tree of a thread has. Each value must be one that the thread has written.
fn state(store: &Store, thread: usize) -> State {
    let tree = store.tree_or_create(&name(thread)).unwrap();
    let mut state = State::new();
    for entry in tree.range(..) {
        let key = entry.unwrap().0;
        let mut found = Vec::new();
        tree.get_into(&key, &mut found).unwrap();
        let number = u64::from_le_bytes(found[..8].try_into().unwrap());
        let (Change::Put { key: of, len } | Change::Stream { key: of, len }) =
            change(thread, number)
        else {
            panic!("change {number} of thread {thread} writes no value");
        };
        assert!(key == [of] && found == value(number, len), "thread {thread}, change {number}");
        state.insert(of, number);
    }
    state
}

/// Asserts that the tree of a thread is as after some change that follows all acknowledged ones.
/// Returns how many changes it has.
fn changes_of(store: &Store, thread: usize, acknowledged: u64) -> u64 {
    let found = state(store, thread);
    let mut expected = State::new();
    (0..acknowledged).for_each(|number| apply(&mut expected, thread, number));
    let last = found.values().max().map_or(0, |last| last + 1);
    // A tree that was cleared has no value that tells how far the thread was.
    let most = acknowledged.max(last) + 4000;
    for number in acknowledged..MOST_CHANGES {
        if found == expected && number >= last {
            return number;
        }
        assert!(number < most, "thread {thread} has lost one of {acknowledged} changes");
        apply(&mut expected, thread, number);
    }
    unreachable!("{found:?}");
}

fn options() -> Options {
    Options::new().pool_bytes(2 << 20).log(true).log_bytes(1 << 20)
}

/// Opens the store once the kernel has ended what a killed process had begun, and so its lock.
fn open(path: &Path, options: &Options) -> Store {
    let mut store = None;
    eventually("the store is in use no more", || {
        match Store::open(path, options) {
            Err(Error::InUse(_)) => {}
            opened => store = Some(opened.unwrap()),
        }
        store.is_some()
    });
    store.unwrap()
}

/// Runs in the child, which ends by being killed.
#[test]
fn child() {
    let Some(path) = env::var_os(STORE) else { return };
    // The other threads would go on, and the parent would see nothing.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::abort();
    }));
    let acknowledged = env::var(ACKNOWLEDGED).unwrap();
    let acknowledged: Vec<u64> =
        acknowledged.split(',').map(|count| count.parse().unwrap()).collect();
    let store = open(Path::new(&path), &options());
    thread::scope(|scope| {
        for (thread, acknowledged) in acknowledged.into_iter().enumerate() {
            let store = &store;
            scope.spawn(move || {
                let first = changes_of(store, thread, acknowledged);
                let tree = store.tree(&name(thread)).unwrap();
                for number in first.. {
                    make(&tree, thread, number);
                    if number % 7 == thread as u64 {
                        store.sync().unwrap();
                        let text = format!("\nack {thread} {}\n", number + 1);
                        std::io::stdout().lock().write_all(text.as_bytes()).unwrap();
                    }
                }
            });
        }
    });
}

/// The child's life: it is killed some time after its beginning, or after its first
/// acknowledgement. Notes what it has acknowledged.
fn live(mut child: Child, random: &mut Random, acknowledged: &mut [u64]) {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let most = random.pick(&[3_000, 30_000, 30_000, 200_000]);
    let micros = random.below(most);
    let kill = move |mut child: Child| {
        thread::spawn(move || {
            thread::sleep(Duration::from_micros(micros));
            child.kill().unwrap();
            child.wait().unwrap()
        })
    };
    let (mut killer, mut lives) = (None, Some(child));
    if random.once_in(4) {
        // Perhaps while it recovers the store.
        killer = lives.take().map(kill);
    }
    for line in lines {
        // The last line may be torn.
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        let ["ack", thread, count] = words[..] else { continue };
        let (Ok(thread), Ok(count)) = (thread.parse::<usize>(), count.parse()) else {
            panic!("{line}");
        };
        assert!(acknowledged[thread] < count, "{line}");
        acknowledged[thread] = count;
        killer = killer.or_else(|| lives.take().map(kill));
    }
    let ended = killer.expect("the child has acknowledged nothing").join().unwrap();
    assert_eq!(ended.signal(), Some(libc::SIGKILL), "{ended}");
}

/// Kills so many processes that use one store. Returns how many of the stores that the parent
/// opened were not closed, and how many changes of each thread there are.
fn kill(rounds: u32, random: &mut Random) -> (u32, [u64; THREADS]) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    Store::create(&path, &options()).unwrap().close().unwrap();
    let mut acknowledged = [0; THREADS];
    let mut recoveries = 0;
    for round in 0..rounds {
        let texts = acknowledged.map(|count| count.to_string());
        let child = Command::new(env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env(STORE, &path)
            .env(ACKNOWLEDGED, texts.join(","))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        live(child, random, &mut acknowledged);
        // In the other rounds the next child recovers the store.
        if round % 3 == 0 || round + 1 == rounds {
            let store = open(&path, &Options::new().pool_bytes(2 << 20));
            recoveries += u32::from(store.recovery().is_some());
            let report = store.check(&mut |_| ()).unwrap();
            assert!(report.is_sound(), "round {round}: {:?}", report.damage);
            for (thread, acknowledged) in acknowledged.iter_mut().enumerate() {
                *acknowledged = changes_of(&store, thread, *acknowledged);
            }
            store.close().unwrap();
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        }
    }
    (recoveries, acknowledged)
}

#[test]
fn what_a_killed_process_synced_is_there_and_nothing_else() {
    // Each look goes over all changes since the store was made.
    let stores = if env::var_os("VELLUM_SOAK").is_some() { 84 } else { 1 };
    let mut random = Random(env::var("VELLUM_SEED").map_or(1, |seed| seed.parse().unwrap()));
    let (mut rounds, mut recoveries, mut changes) = (0, 0, 0);
    for _ in 0..stores {
        let (recovered, made) = kill(60, &mut random);
        rounds += 60;
        recoveries += recovered;
        changes += made.iter().sum::<u64>();
        println!("{rounds} kills, {recoveries} recoveries here, {changes} changes");
    }
    assert!(recoveries > rounds / 10, "{recoveries}");
}
