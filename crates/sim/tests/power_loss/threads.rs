//! Threads that change a store, and what the store must have after a crash.
//!
//! Each thread makes steps, each of which is one transaction, from its number and the step's alone.
//! A thread has a tree of its own. All of them move money between the accounts of a shared tree,
//! note their steps there, and now and then what they have seen of the others' steps. So the steps
//! of each thread that a store has say all that it must have.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::thread;

use vellum::{Durability, Store, Transaction, TransactionOptions, Tree};
use vellum_testing::random::Random;

pub const THREADS: usize = 3;

/// So many steps of each thread.
pub type Steps = [u64; THREADS];

/// The accounts, whose balances are 0 at first.
const ACCOUNTS: u64 = 40;

/// The entry of a value that is written in pieces, and not in a transaction.
const STREAM: &[u8] = b"stream";

/// A change of a thread's own tree. Without a key it removes all entries.
#[derive(Clone, Debug)]
enum Change {
    Put { key: Vec<u8>, len: usize },
    Remove { key: Vec<u8> },
    RemoveAll,
}

/// What a step does.
#[derive(Debug)]
struct Step {
    /// The length of the value that it writes in pieces before its transaction.
    stream: Option<usize>,
    changes: Vec<Change>,
    /// Money that goes from the first account to the second.
    transfers: Vec<(u64, u64, i64)>,
    looks_around: bool,
    durability: Durability,
}

fn step(thread: usize, number: u64) -> Step {
    let random = &mut Random(number * THREADS as u64 + thread as u64);
    // The first ones are alike.
    random.next();
    let mut changes = Vec::new();
    for _ in 0..random.below(6) {
        let key = vec![b'k', random.below(80) as u8];
        changes.push(match random.once_in(4) {
            true => Change::Remove { key },
            false => Change::Put { key, len: random.pick(&[0, 20, 100, 700, 700, 5000, 40_000]) },
        });
    }
    if number % 41 == 40 {
        changes = vec![Change::RemoveAll];
    }
    let transfers = (0..random.below(3))
        .map(|_| (random.below(ACCOUNTS), random.below(ACCOUNTS), random.below(100) as i64));
    Step {
        transfers: transfers.collect(),
        stream: (number % 13 == 7).then(|| 1 + random.below(100_000) as usize),
        changes,
        looks_around: number % 4 == thread as u64,
        durability: match number % 10 {
            3 | 6 => Durability::Buffered,
            8 => Durability::None,
            _ => Durability::Synced,
        },
    }
}

/// The value that a step writes: no other step writes the same.
fn value(number: u64, len: usize) -> Vec<u8> {
    let mut value = number.to_le_bytes().to_vec();
    value.resize(8 + len, number as u8);
    value
}

fn row(thread: usize) -> Vec<u8> {
    format!("steps of {thread}").into_bytes()
}

fn seen(thread: usize) -> Vec<u8> {
    format!("seen by {thread}").into_bytes()
}

fn account(number: u64) -> Vec<u8> {
    format!("account {number:02}").into_bytes()
}

fn number(value: Option<&[u8]>) -> u64 {
    value.map_or(0, |value| u64::from_le_bytes(value[..8].try_into().unwrap()))
}

fn number_in(one: &Transaction, tree: &Tree, key: &[u8]) -> vellum::Result<u64> {
    Ok(number(one.get(tree, key)?.as_deref()))
}

/// The trees of a store.
#[derive(Debug)]
struct Trees {
    shared: Tree,
    own: Vec<Tree>,
}

fn own(thread: usize) -> String {
    format!("thread {thread}")
}

/// Makes the trees, durably.
pub fn make_trees(store: &Store) {
    (0..THREADS).for_each(|thread| drop(store.create_tree(&own(thread)).unwrap()));
    store.create_tree("shared").unwrap();
    store.sync().unwrap();
}

impl Trees {
    fn of(store: &Store) -> vellum::Result<Trees> {
        let own = (0..THREADS).map(|thread| store.tree(&own(thread)));
        Ok(Trees { shared: store.tree("shared")?, own: own.collect::<vellum::Result<_>>()? })
    }
}

/// Makes one step. Returns whether it waited until the step was durable.
fn make(store: &Store, trees: &Trees, thread: usize, number: u64) -> bool {
    let step = step(thread, number);
    let own = &trees.own[thread];
    if let Some(len) = step.stream {
        let mut writer = own.writer(STREAM).unwrap();
        writer.write_all(&value(number, len)).unwrap();
        writer.finish().unwrap();
    }
    let options = TransactionOptions::new().durability(step.durability);
    let run = |one: &mut Transaction| {
        for change in &step.changes {
            match change {
                Change::Put { key, len } => one.put(own, key, &value(number, *len))?,
                Change::Remove { key } => drop(one.remove(own, key)?),
                Change::RemoveAll => drop(one.remove_range(own, ..)?),
            }
        }
        for (from, to, amount) in &step.transfers {
            for (name, amount) in [(from, -amount), (to, *amount)] {
                let name = account(*name);
                let balance = number_in(one, &trees.shared, &name)?.wrapping_add_signed(amount);
                let mut value = balance.to_le_bytes().to_vec();
                // Some are on pages of their own.
                value.resize([8, 8, 300, 6000][(number % 4) as usize], 0);
                one.put(&trees.shared, &name, &value)?;
            }
        }
        if step.looks_around {
            let mut found = Vec::new();
            for other in 0..THREADS {
                found.extend(number_in(one, &trees.shared, &row(other))?.to_le_bytes());
            }
            one.put(&trees.shared, &seen(thread), &found)?;
        }
        one.put(&trees.shared, &row(thread), &(number + 1).to_le_bytes())
    };
    store.transact_with(options, run).unwrap();
    step.durability == Durability::Synced
}

/// Has each thread go on after its first steps, for so many more, and tells how many of its steps
/// are durable, after each for which it has waited.
pub fn run(store: &Store, steps: (Steps, u64), acknowledge: &(impl Fn(usize, u64) + Sync)) {
    run_as(store, steps, &|| (), acknowledge);
}

/// The same. Each thread calls `begin` first.
pub fn run_as(
    store: &Store,
    (first, count): (Steps, u64),
    begin: &(impl Fn() + Sync),
    acknowledge: &(impl Fn(usize, u64) + Sync),
) {
    let trees = Trees::of(store).unwrap();
    thread::scope(|scope| {
        for (thread, first) in first.into_iter().enumerate() {
            let trees = &trees;
            scope.spawn(move || {
                begin();
                for number in first..first.saturating_add(count) {
                    if make(store, trees, thread, number) {
                        acknowledge(thread, number + 1);
                    }
                    if thread == 0 && number % 24 == 12 {
                        store.compact(&mut |_| ControlFlow::Continue(())).unwrap();
                    }
                }
            });
        }
    });
}

fn read(tree: &Tree, key: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let mut found = Vec::new();
    match tree.get_into(key, &mut found) {
        Ok(is_there) => Ok(is_there.then_some(found)),
        Err(error) => Err(format!("{}: {error}", String::from_utf8_lossy(key))),
    }
}

/// For each key of a thread's tree, the step that wrote its value and the value's length.
type Own = BTreeMap<Vec<u8>, (u64, usize)>;

/// A thread's tree after so many steps.
fn own_after(thread: usize, steps: u64) -> Own {
    let mut entries = Own::new();
    for number in 0..steps {
        let step = step(thread, number);
        entries.extend(step.stream.map(|len| (STREAM.to_vec(), (number, len))));
        for change in step.changes {
            match change {
                Change::Put { key, len } => drop(entries.insert(key, (number, len))),
                Change::Remove { key } => drop(entries.remove(&key)),
                Change::RemoveAll => entries.clear(),
            }
        }
    }
    entries
}

/// What a thread's tree has.
fn own_found(thread: usize, tree: &Tree) -> Result<Own, String> {
    let mut entries = Own::new();
    for entry in tree.range(..) {
        let key = entry.map_err(|error| format!("thread {thread}: {error}"))?.0;
        let found = read(tree, &key)?.ok_or_else(|| format!("thread {thread}: no {key:?}"))?;
        if found.len() < 8 {
            return Err(format!("thread {thread}: {} bytes in {key:?}", found.len()));
        }
        let (number, len) = (number(Some(&found)), found.len() - 8);
        if found != value(number, len) {
            return Err(format!("thread {thread}: {key:?} has no value of step {number}"));
        }
        entries.insert(key, (number, len));
    }
    Ok(entries)
}

/// Compares a store that was recovered with what its threads have done. All acknowledged steps must
/// be there. Returns the steps that it has, or what is wrong.
pub fn found(store: &Store, acknowledged: Steps) -> Result<Steps, String> {
    let report = store.check(&mut |_| ()).map_err(|error| format!("check: {error}"))?;
    if !report.is_sound() {
        return Err(format!("{:?}", report.damage));
    }
    let trees = Trees::of(store).map_err(|error| format!("trees: {error}"))?;
    let mut steps = Steps::default();
    for (thread, steps) in steps.iter_mut().enumerate() {
        *steps = number(read(&trees.shared, &row(thread))?.as_deref());
        if *steps < acknowledged[thread] {
            let all = acknowledged[thread];
            return Err(format!("{steps} steps of thread {thread} instead of {all}"));
        }
    }
    let mut balances = [0_u64; ACCOUNTS as usize];
    for thread in 0..THREADS {
        let mut expected = own_after(thread, steps[thread]);
        let found = own_found(thread, &trees.own[thread])?;
        // The value that the next step writes before its transaction may be there.
        let next = step(thread, steps[thread]).stream.map(|len| (steps[thread], len));
        if next.is_some() && found.get(STREAM) == next.as_ref() {
            expected.extend(next.map(|next| (STREAM.to_vec(), next)));
        }
        if found != expected {
            return Err(format!("tree {thread} is not as after {steps:?} steps"));
        }
        for (from, to, amount) in
            (0..steps[thread]).flat_map(|number| step(thread, number).transfers)
        {
            let balance = &mut balances[from as usize];
            *balance = balance.wrapping_add_signed(-amount);
            let balance = &mut balances[to as usize];
            *balance = balance.wrapping_add_signed(amount);
        }
        let saw = read(&trees.shared, &seen(thread))?.unwrap_or_default();
        let is_later = |(other, saw): (usize, &[u8])| number(Some(saw)) > steps[other];
        if saw.chunks_exact(8).enumerate().any(is_later) {
            return Err(format!("thread {thread} has seen more than there is: {steps:?} steps"));
        }
    }
    for (name, balance) in (0..ACCOUNTS).zip(balances) {
        let found = number(read(&trees.shared, &account(name))?.as_deref());
        if found != balance {
            return Err(format!("account {name} has {found} instead of {balance}"));
        }
    }
    Ok(steps)
}
