//! A process that is killed while its threads change a store with a log, by single changes and by
//! transactions: what it has synced is there, each transaction as a whole, and nothing that it has
//! not written.
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
use vellum::{
    Durability, Error, Isolation, Options, Result, Store, Transaction, TransactionOptions, Tree,
};
use vellum_testing::patience::eventually;
use vellum_testing::random::Random;

/// Where the child finds the store, and how many changes or transactions of each thread were
/// acknowledged.
const STORE: &str = "VELLUM_TEST_STORE";
const ACKNOWLEDGED: &str = "VELLUM_TEST_ACKNOWLEDGED";

/// The threads that make single changes, each in a tree of its own.
const THREADS: usize = 3;
/// The threads that make transactions, all in the same two trees.
const CLERKS: usize = 3;
const ALL: usize = THREADS + CLERKS;
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

/// The trees of the clerks, and how many places each clerk has in each of them. A place of one
/// clerk lies between places of the others, so that clerks change the same leaves.
const LEDGERS: [&str; 2] = ["ledger 0", "ledger 1"];
const PLACES: u64 = 250;
/// The place that counts the transactions of a clerk, in both trees.
const COUNTER: u16 = 100;
/// The accounts of all clerks: they lie behind the places.
const ACCOUNTS: u64 = 6;

/// A step of a transaction, but for the counters.
#[derive(Clone, Copy, Debug)]
enum Step {
    Put {
        ledger: usize,
        place: u16,
        len: usize,
    },
    Remove {
        ledger: usize,
        place: u16,
    },
    /// Changes that the transaction takes back.
    Undone {
        ledger: usize,
        place: u16,
        len: usize,
    },
    /// Adds to an account of all clerks, and to the same account in the other ledger.
    Add {
        account: u16,
        amount: u64,
    },
}

/// The steps of a transaction: from the number of its clerk and its own alone.
fn steps(clerk: usize, number: u64) -> Vec<Step> {
    let random = &mut Random(!(number * CLERKS as u64 + clerk as u64));
    random.next();
    let count = random.pick(&[1, 3, 6, 12, 40]);
    (0..count)
        .map(|_| {
            let ledger = random.index(LEDGERS.len());
            // Places before the counter and behind it.
            let place = random.below(PLACES) as u16;
            let place = place + u16::from(place >= COUNTER);
            let len = match random.below(60) {
                0 => random.below(9_000),
                1..10 => random.below(1_500),
                _ => random.below(100),
            } as usize;
            match random.below(20) {
                0 => Step::Undone { ledger, place, len },
                1 => {
                    let account = random.below(ACCOUNTS) as u16;
                    Step::Add { account, amount: 1 + random.below(1_000) }
                }
                2..7 => Step::Remove { ledger, place },
                _ => Step::Put { ledger, place, len },
            }
        })
        .collect()
}

fn key_of(place: u16, clerk: usize) -> [u8; 3] {
    let [high, low] = place.to_be_bytes();
    [high, low, clerk as u8]
}

fn key_of_account(account: u16) -> [u8; 3] {
    key_of(1_000 + account, 0)
}

/// The value of a change that its transaction takes back: the store must never have it.
fn undone(len: usize) -> Vec<u8> {
    value(u64::MAX, len)
}

/// What a key of a ledger must have.
#[derive(Clone, Copy, Debug)]
enum Entry {
    /// The value of a transaction of this number and length.
    Value(u64, usize),
    Sum(u64),
}

impl Entry {
    fn bytes(self) -> Vec<u8> {
        match self {
            Entry::Value(number, len) => value(number, len),
            Entry::Sum(sum) => sum.to_le_bytes().to_vec(),
        }
    }
}

/// Both ledgers.
type Ledgers = [BTreeMap<[u8; 3], Entry>; 2];

/// What the ledgers have after so many transactions of each clerk: all else follows from that.
/// Clerks have places of their own, and sums do not depend on the order.
fn ledgers_after(counts: [u64; CLERKS]) -> Ledgers {
    let mut ledgers = Ledgers::default();
    for (clerk, count) in counts.into_iter().enumerate() {
        for number in 0..count {
            for step in steps(clerk, number) {
                match step {
                    Step::Put { ledger, place, len } => {
                        ledgers[ledger].insert(key_of(place, clerk), Entry::Value(number, len));
                    }
                    Step::Remove { ledger, place } => {
                        ledgers[ledger].remove(&key_of(place, clerk));
                    }
                    Step::Undone { .. } => {}
                    Step::Add { account, amount } => {
                        for ledger in &mut ledgers {
                            let sum =
                                ledger.entry(key_of_account(account)).or_insert(Entry::Sum(0));
                            let Entry::Sum(sum) = sum else { unreachable!("{sum:?}") };
                            *sum += amount;
                        }
                    }
                }
            }
        }
        for ledger in ledgers.iter_mut().filter(|_| count > 0) {
            ledger.insert(key_of(COUNTER, clerk), Entry::Value(count, 0));
        }
    }
    ledgers
}

fn ledger_trees(store: &Store) -> [Tree; 2] {
    LEDGERS.map(|name| store.tree_or_create(name).unwrap())
}

fn number_at(found: Option<&[u8]>) -> u64 {
    found.map_or(0, |value| u64::from_le_bytes(value[..8].try_into().unwrap()))
}

/// Asserts that each transaction is there whole or not at all: of each clerk the first ones, with
/// all acknowledged ones. Returns how many of each clerk there are.
fn transactions_of(store: &Store, acknowledged: [u64; CLERKS]) -> [u64; CLERKS] {
    let trees = ledger_trees(store);
    let mut counts = [0; CLERKS];
    for (clerk, count) in counts.iter_mut().enumerate() {
        let in_tree =
            |tree: &Tree| number_at(tree.get(&key_of(COUNTER, clerk)).unwrap().as_deref());
        let [one, other] = [in_tree(&trees[0]), in_tree(&trees[1])];
        assert_eq!(one, other, "half of a transaction of clerk {clerk}");
        let acknowledged = acknowledged[clerk];
        assert!(one >= acknowledged, "clerk {clerk} has {one} transactions of {acknowledged}");
        *count = one;
    }
    for (tree, expected) in trees.iter().zip(ledgers_after(counts)) {
        let mut expected = expected.into_iter();
        for entry in tree.range(..) {
            let (key, found) = entry.unwrap();
            let next = expected.next();
            let what = || format!("key {key:?} has {}, not {next:?}", number_at(Some(&found)));
            let (of, entry) = next.unwrap_or_else(|| panic!("{}", what()));
            assert!(*key == of && found[..] == entry.bytes(), "{}, counts {counts:?}", what());
        }
        let missing = expected.next();
        assert!(missing.is_none(), "{missing:?} is missing, counts {counts:?}");
    }
    counts
}

/// Makes the changes of a transaction.
fn enter(
    transaction: &mut Transaction,
    trees: &[Tree; 2],
    (clerk, number): (usize, u64),
) -> Result<()> {
    for tree in trees {
        let key = key_of(COUNTER, clerk);
        let before = number_at(transaction.get(tree, &key)?.as_deref());
        assert_eq!(before, number, "a transaction of clerk {clerk} is not seen by its next one");
        transaction.put(tree, &key, &value(number + 1, 0))?;
    }
    for step in steps(clerk, number) {
        match step {
            Step::Put { ledger, place, len } => {
                transaction.put(&trees[ledger], &key_of(place, clerk), &value(number, len))?;
            }
            Step::Remove { ledger, place } => {
                transaction.remove(&trees[ledger], &key_of(place, clerk))?;
            }
            Step::Undone { ledger, place, len } => {
                let savepoint = transaction.savepoint();
                transaction.put(&trees[ledger], &key_of(place, clerk), &undone(len))?;
                transaction.remove(&trees[1 - ledger], &key_of(place, clerk))?;
                transaction.put(&trees[1 - ledger], &key_of(place ^ 1, clerk), &undone(0))?;
                transaction.rollback_to(savepoint)?;
            }
            Step::Add { account, amount } => {
                for tree in trees {
                    let key = key_of_account(account);
                    let sum = number_at(transaction.get(tree, &key)?.as_deref());
                    transaction.put(tree, &key, &(sum + amount).to_le_bytes())?;
                }
            }
        }
    }
    Ok(())
}

/// A transaction that is given up, or dropped by an error, has changed nothing.
fn give_up(store: &Store, trees: &[Tree; 2], clerk: usize, random: &mut Random) {
    let spoil = |transaction: &mut Transaction, random: &mut Random| -> Result<()> {
        for tree in trees {
            transaction.put(tree, &key_of(COUNTER, clerk), &undone(0))?;
            transaction.remove(tree, &key_of_account(random.below(ACCOUNTS) as u16))?;
            let place = random.below(PLACES) as u16;
            transaction.put(tree, &key_of(place, clerk), &undone(random.below(6_000) as usize))?;
        }
        Ok(())
    };
    if random.once_in(2) {
        let mut transaction = store.begin().unwrap();
        spoil(&mut transaction, random).unwrap();
        transaction.abort();
    } else {
        let given_up = store.transact(|transaction| {
            spoil(transaction, random)?;
            Err::<(), _>(Error::KeyExists)
        });
        assert!(matches!(given_up, Err(Error::KeyExists)), "{given_up:?}");
    }
}

/// A clerk's transactions, from a number on. One that was synced is acknowledged.
fn keep_ledgers(store: &Store, clerk: usize, first: u64) {
    let trees = ledger_trees(store);
    for number in first.. {
        let random = &mut Random(number * CLERKS as u64 + clerk as u64);
        random.next();
        if random.once_in(6) {
            give_up(store, &trees, clerk, random);
        }
        let durability = random.pick(&[
            Durability::Synced,
            Durability::Buffered,
            Durability::Buffered,
            Durability::None,
            Durability::None,
        ]);
        let isolation = random.pick(&[Isolation::Serializable, Isolation::Snapshot]);
        let options = TransactionOptions::new().durability(durability).isolation(isolation);
        let call = move |done: Result<()>| {
            done.unwrap();
            acknowledge(THREADS + clerk, number + 1);
        };
        let way = random.below(3);
        if way == 0 {
            let run = |transaction: &mut Transaction| enter(transaction, &trees, (clerk, number));
            store.transact_with(options, run).unwrap();
        } else {
            loop {
                let mut transaction = store.begin_with(options).unwrap();
                enter(&mut transaction, &trees, (clerk, number)).unwrap();
                let done = match (way, durability) {
                    (1, Durability::Synced) => transaction.commit_then(call),
                    _ => transaction.commit(),
                };
                match done {
                    Err(Error::Conflict) => {}
                    done => break done.unwrap(),
                }
            }
        }
        if way != 1 && durability == Durability::Synced {
            acknowledge(THREADS + clerk, number + 1);
        }
    }
}

/// Tells the parent that so many changes or transactions of a thread are durable.
fn acknowledge(thread: usize, count: u64) {
    let text = format!("\nack {thread} {count}\n");
    std::io::stdout().lock().write_all(text.as_bytes()).unwrap();
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
    let (of_threads, of_clerks) = acknowledged.split_at(THREADS);
    let store = open(Path::new(&path), &options());
    let transactions = transactions_of(&store, of_clerks.try_into().unwrap());
    thread::scope(|scope| {
        let store = &store;
        for (clerk, first) in transactions.into_iter().enumerate() {
            scope.spawn(move || keep_ledgers(store, clerk, first));
        }
        for (thread, acknowledged) in of_threads.iter().copied().enumerate() {
            scope.spawn(move || {
                let first = changes_of(store, thread, acknowledged);
                let tree = store.tree(&name(thread)).unwrap();
                for number in first.. {
                    make(&tree, thread, number);
                    if number % 7 == thread as u64 {
                        store.sync().unwrap();
                        acknowledge(thread, number + 1);
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
        // A commit may be acknowledged before a callback that is for an earlier one.
        assert!(acknowledged[thread] < count || thread >= THREADS, "{line}");
        acknowledged[thread] = acknowledged[thread].max(count);
        killer = killer.or_else(|| lives.take().map(kill));
    }
    let ended = killer.expect("the child has acknowledged nothing").join().unwrap();
    assert_eq!(ended.signal(), Some(libc::SIGKILL), "{ended}");
}

/// Kills so many processes that use one store. Returns how many of the stores that the parent
/// opened were not closed, and how many changes and transactions of each thread there are.
fn kill(rounds: u32, random: &mut Random) -> (u32, [u64; ALL]) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    Store::create(&path, &options()).unwrap().close().unwrap();
    let mut acknowledged = [0; ALL];
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
            let (of_threads, of_clerks) = acknowledged.split_at_mut(THREADS);
            for (thread, acknowledged) in of_threads.iter_mut().enumerate() {
                *acknowledged = changes_of(&store, thread, *acknowledged);
            }
            let found = transactions_of(&store, of_clerks.try_into().unwrap());
            of_clerks.copy_from_slice(&found);
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
    let (mut rounds, mut recoveries, mut changes, mut transactions) = (0, 0, 0, 0);
    for _ in 0..stores {
        let (recovered, made) = kill(60, &mut random);
        rounds += 60;
        recoveries += recovered;
        changes += made[..THREADS].iter().sum::<u64>();
        transactions += made[THREADS..].iter().sum::<u64>();
        println!(
            "{rounds} kills, {recoveries} recoveries here, {changes} changes, \
             {transactions} transactions"
        );
    }
    assert!(recoveries > rounds / 10, "{recoveries}");
    assert!(transactions > u64::from(rounds), "{transactions} transactions");
}
