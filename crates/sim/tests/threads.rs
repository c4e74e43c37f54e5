//! Threads that change a store which loses power. How they interleave is not from a seed, so these
//! are tests, and no seeds of the simulator.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vellum::{Durability, Options, Store, Transaction, TransactionOptions, Tree};
use vellum_log::{SimulatedDevice, SimulatedOptions};
use vellum_sim::{Crash, End, Machine};
use vellum_testing::random::Random;

fn machine(seed: u64) -> Arc<Machine> {
    let segments =
        SimulatedOptions { seed, segments: 256, segment_blocks: 16, ..Default::default() };
    Machine::new(SimulatedDevice::new(segments), seed)
}

/// In so small a pool, most nodes leave memory between two changes.
fn options(machine: &Arc<Machine>) -> Options {
    let options = Options::new().pool_bytes(384 << 10).log_bytes(32 << 10);
    options.log_device(machine.log_device()).recovery_bytes(64 << 10)
}

/// Recovers a store, and checks that it is sound.
fn recovered(crash: Crash, seed: u64) -> Store {
    let machine = Machine::restarted(crash, seed);
    let store = Store::open_on(machine.clone(), &options(&machine).pool_bytes(4 << 20)).unwrap();
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty(), "seed {seed}: {:?}", report.damage);
    assert_eq!(report.lost_pages, 0, "seed {seed}");
    store
}

/// Sets a flag when it is dropped, by a panic, too.
struct SetInTheEnd<'a>(&'a AtomicBool);

impl Drop for SetInTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Compacts the store, and returns whether other threads are done.
fn compact(store: &Store, is_done: &AtomicBool) -> bool {
    store.compact(&mut |_| ControlFlow::Continue(())).unwrap();
    is_done.load(Ordering::SeqCst)
}

/// Threads change a tree, sync, and write cuts for each other. Then the power fails.
#[test]
fn threads_find_their_changes_after_a_loss_of_power() {
    for seed in 1..40 {
        let machine = machine(seed);
        let options = options(&machine).cut_in_background(seed % 2 == 0);
        let store = Store::create_on(machine.clone(), &options).unwrap();
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
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let one = &one;
            let threads = [0, 1, 2, 3].map(|thread| scope.spawn(move || one(thread)));
            scope.spawn(|| while seed % 3 == 0 && !compact(&store, &is_done) {});
            let _done = SetInTheEnd(&is_done);
            threads.into_iter().for_each(|thread| model.extend(thread.join().unwrap()));
        });
        let store = recovered(machine.crash_now(End::PowerLoss), seed);
        let tree = store.tree("tree").unwrap();
        let found = tree.range(..).map(|entry| {
            let (key, value) = entry.unwrap();
            (key, value.to_vec())
        });
        assert!(found.collect::<BTreeMap<_, _>>() == model, "seed {seed}");
    }
}

/// The change of a thread with this number, from 1 on: the key, and the length of its value if it
/// is not removed.
fn numbered_change(number: u64) -> (u64, Option<usize>) {
    let key = number * 7919 % 2000;
    (key, (!number.is_multiple_of(3)).then_some(8 + (number % 5 * 150) as usize))
}

/// What the thread's tree has after so many changes.
fn after(changes: u64) -> BTreeMap<u64, u64> {
    let mut model = BTreeMap::new();
    for number in 1..=changes {
        match numbered_change(number) {
            (key, Some(_)) => drop(model.insert(key, number)),
            (key, None) => drop(model.remove(&key)),
        }
    }
    model
}

/// Whether the crashed store has what a thread had at some time, and no damage.
fn check_prefixes(crash: Crash, seed: u64) {
    let store = recovered(crash, seed);
    for thread in ["0", "1", "2"] {
        let Ok(tree) = store.tree(thread) else { continue };
        let found = tree.range(..).map(|entry| {
            let (key, value) = entry.unwrap();
            let number = |bytes: &[u8]| u64::from_be_bytes(bytes[..8].try_into().unwrap());
            (number(&key), number(&value))
        });
        let found: BTreeMap<u64, u64> = found.collect();
        // Removals may follow the newest value.
        let newest = found.values().max().copied().unwrap_or(0);
        let is_there = (newest..newest + 3).any(|changes| after(changes) == found);
        assert!(is_there, "seed {seed}: thread {thread}: {newest}: {found:?}");
    }
}

/// Threads change trees, and never wait until that is durable. A thread of the store writes
/// checkpoints meanwhile, which leave out nodes that have changed since the cut. The power fails
/// at any operation.
#[test]
fn checkpoints_amid_changes_leave_nothing_out() {
    for seed in 1..21 {
        let machine = machine(seed);
        let options = options(&machine).pool_bytes(8 << 20).log_bytes(2 << 20).evictors(0);
        let store = Store::create_on(machine.clone(), &options).unwrap();
        let trees = ["0", "1", "2"].map(|thread| store.create_tree(thread).unwrap());
        store.sync().unwrap();
        machine.crash_once_in(60, &[End::PowerLoss]);
        let is_done = AtomicBool::new(false);
        // On a busy machine the thread of the checkpoints may begin late: the changes go on.
        let has_written = || store.pool_stats().write_backs > 100;
        std::thread::scope(|scope| {
            let has_written = &has_written;
            let threads = trees.map(|tree| {
                scope.spawn(move || {
                    for number in (1..60_000).take_while(|at| *at < 6000 || !has_written()) {
                        let (key, len) = numbered_change(number);
                        let mut value = number.to_be_bytes().to_vec();
                        match len {
                            Some(len) => {
                                value.resize(len, 0);
                                tree.upsert(&key.to_be_bytes(), &value).unwrap();
                            }
                            None => drop(tree.remove(&key.to_be_bytes()).unwrap()),
                        }
                    }
                })
            });
            scope.spawn(|| {
                while !is_done.load(Ordering::SeqCst) {
                    machine
                        .take_crashes()
                        .into_iter()
                        .for_each(|crash| check_prefixes(crash, seed));
                }
            });
            let _done = SetInTheEnd(&is_done);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        machine.take_crashes().into_iter().for_each(|crash| check_prefixes(crash, seed));
        assert!(has_written(), "seed {seed}: no checkpoint");
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

/// Whether no money is lost or made, and each thread has so many transfers at least.
fn check_accounts(crash: Crash, at_least: [u64; 3], seed: u64) {
    let store = recovered(crash, seed);
    let trees = ["even", "odd"].map(|name| store.tree(name).unwrap());
    let view = store.begin().unwrap();
    let account = |number: u64| number_at(&view, &trees[(number % 2) as usize], number);
    assert_eq!((0..ACCOUNTS).map(account).sum::<u64>(), ACCOUNTS * EACH, "seed {seed}");
    for (thread, least) in at_least.into_iter().enumerate() {
        let found = number_at(&view, &trees[0], 1000 + thread as u64);
        assert!(found >= least, "seed {seed}: thread {thread}: {found} of {least}");
    }
}

/// Threads move money, and the power fails at any operation of the file or of the log: no money is
/// lost or made, and every transfer that was durable then has happened.
#[test]
fn transactions_are_whole_or_undone_after_a_loss_of_power() {
    for seed in 1..12 {
        let machine = machine(seed);
        let options = options(&machine).evictors(0).cut_in_background(false);
        let store = Store::create_on(machine.clone(), &options).unwrap();
        let trees = ["even", "odd"].map(|name| store.create_tree(name).unwrap());
        for account in 0..ACCOUNTS {
            let tree = &trees[(account % 2) as usize];
            tree.upsert(&account.to_be_bytes(), &EACH.to_be_bytes()).unwrap();
        }
        store.sync().unwrap();
        machine.crash_once_in(40, &[End::PowerLoss]);

        // The transfers of each thread that are durable.
        let durable = [(); 3].map(|()| AtomicU64::new(0));
        let now = || [0, 1, 2].map(|thread: usize| durable[thread].load(Ordering::SeqCst));
        let (mut recoveries, is_done) = (0, AtomicBool::new(false));
        std::thread::scope(|scope| {
            for (thread, durable) in durable.iter().enumerate() {
                let (store, trees) = (&store, &trees);
                scope.spawn(move || {
                    for number in 1..200 {
                        let how = match number % 2 {
                            0 => Durability::Synced,
                            _ => Durability::Buffered,
                        };
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
            scope.spawn(|| while seed % 2 == 0 && !compact(&store, &is_done) {});
            let _done = SetInTheEnd(&is_done);
            for _ in 0..40 {
                std::thread::sleep(std::time::Duration::from_millis(2));
                // In this order: the crash comes after these transfers were durable.
                let at_least = now();
                check_accounts(machine.crash_now(End::PowerLoss), at_least, seed);
                for crash in machine.take_crashes() {
                    check_accounts(crash, [0; 3], seed);
                }
                recoveries += 1;
            }
        });
        check_accounts(machine.crash_now(End::PowerLoss), now(), seed);
        assert!(recoveries >= 40);
    }
}

/// A transaction that only reads, or whose changes change nothing, is acknowledged when what it has
/// read is durable, also if another transaction did not ask for that.
#[test]
fn a_crash_does_not_take_what_a_durable_transaction_has_read() {
    type Read = fn(&mut Transaction, &Tree) -> bool;
    let gets: Read = |one, tree| one.contains(tree, b"key").unwrap();
    let scans: Read = |one, tree| one.entries(tree).unwrap().count() == 1;
    let removes: Read = |one, tree| {
        one.put(tree, b"other", b"").unwrap();
        one.remove(tree, b"other").unwrap()
    };
    for (seed, (name, read)) in (1..).zip([("get", gets), ("scan", scans), ("remove", removes)]) {
        let machine = machine(seed);
        let store = Store::create_on(machine.clone(), &options(&machine)).unwrap();
        let tree = store.create_tree("tree").unwrap();
        store.sync().unwrap();
        let lazily = TransactionOptions::new().durability(Durability::None);
        store.transact_with(lazily, |one| one.put(&tree, b"key", b"value")).unwrap();
        let mut reader = store.begin().unwrap();
        assert!(read(&mut reader, &tree), "{name}");
        reader.commit().unwrap();
        let store = recovered(machine.crash_now(End::PowerLoss), seed);
        assert!(store.tree("tree").unwrap().contains(b"key").unwrap(), "{name}");
    }
}
