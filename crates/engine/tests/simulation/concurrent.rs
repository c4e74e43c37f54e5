//! A few threads on a few keys in the smallest pools. For each key, the results must be possible in
//! some sequential order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum::{Error, Store, Tree};
use vellum_pool::device::MemoryDevice;

use crate::linear::{Call, Done, is_linearizable};
use crate::support::{Random, each_seed, options};
use crate::world::assert_same;

const HOT: u64 = 5;
const STABLE: u64 = 150;

/// Stable keys, which no thread changes, are between the hot keys, which all threads change, and
/// the private keys of one thread.
fn hot(number: u64) -> Vec<u8> {
    format!("key {:05} hot", number * 37 % STABLE).into_bytes()
}

fn stable(number: u64) -> Vec<u8> {
    format!("key {number:05}").into_bytes()
}

fn private(thread: usize, number: u64) -> Vec<u8> {
    format!("key {:05} of {thread} and long: {}", number, "x".repeat(number as usize * 3 % 400))
        .into_bytes()
}

/// A number as a value of some length. Long values are blobs.
fn value(number: u64) -> Vec<u8> {
    let len = match number % 11 {
        0 => 3000,
        rest => rest as usize * 30,
    };
    [&number.to_le_bytes()[..], &vec![number as u8; len]].concat()
}

fn number(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(*bytes.first_chunk().unwrap());
    assert!(bytes == value(number), "a value that nobody stored: {bytes:?}");
    number
}

/// One thread and its calls on the hot keys.
struct Worker<'a> {
    thread: usize,
    tree: &'a Tree,
    store: &'a Store,
    clock: &'a AtomicU64,
    random: Random,
    made: u64,
    calls: Vec<Vec<Call>>,
    private: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Worker<'_> {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn fresh(&mut self) -> u64 {
        self.made += 1;
        self.made * 4 + self.thread as u64 + 1
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..9 => self.touch(),
            9..17 => self.churn(),
            17 => self.scan(true),
            18 => self.scan(false),
            _ if self.random.once_in(4) => self.store.sync().unwrap(),
            _ => self.entries(),
        }
    }

    fn touch(&mut self) {
        let key = self.random.below(HOT);
        let (name, new) = (hot(key), self.fresh());
        let (tree, choice, called) = (self.tree, self.random.below(8), self.now());
        let done = match choice {
            0 => Done::Get(tree.get(&name).unwrap().map(|value| number(&value))),
            1 => {
                let mut found = Vec::new();
                let there = tree.get_into(&name, &mut found).unwrap();
                Done::Get(there.then(|| number(&found)))
            }
            2 => Done::Get(tree.with(&name, number).unwrap()),
            3 => Done::Contains(tree.contains(&name).unwrap()),
            4 => match tree.insert(&name, &value(new)) {
                Ok(()) => Done::Insert(new, true),
                Err(Error::KeyExists) => Done::Insert(new, false),
                Err(error) => panic!("{error}"),
            },
            5 | 6 => Done::Upsert(new, tree.upsert(&name, &value(new)).unwrap()),
            _ => Done::Remove(tree.remove(&name).unwrap()),
        };
        let returned = self.now();
        self.calls[key as usize].push(Call { called, returned, done });
    }

    /// Inserts and removes private keys, so that nodes around the other keys split and merge.
    fn churn(&mut self) {
        for _ in 0..1 + self.random.below(8) {
            let key = private(self.thread, self.random.below(200));
            if self.random.once_in(2) {
                let value = value(self.fresh() % 900 * 11 + 1);
                let replaced = self.tree.upsert(&key, &value).unwrap();
                assert_eq!(replaced, self.private.insert(key, value).is_some());
            } else {
                let removed = self.tree.remove(&key).unwrap();
                assert_eq!(removed, self.private.remove(&key).is_some());
            }
            let key = private(self.thread, self.random.below(200));
            let found = self.tree.get(&key).unwrap();
            assert!(found.as_deref() == self.private.get(&key).map(|value| &value[..]));
        }
    }

    /// Records that a cursor saw an entry between the call of its step and the return.
    fn saw(&mut self, key: &[u8], found: Option<u64>, called: u64) {
        if let Some(hot) = (0..HOT).find(|number| hot(*number) == key) {
            let (returned, done) = (self.now(), Done::Get(found));
            self.calls[hot as usize].push(Call { called, returned, done });
        }
    }

    /// Scans all entries. The scan must see each stable key once and in order.
    fn scan(&mut self, forward: bool) {
        let mut cursor = self.tree.cursor().read_ahead(2);
        let (mut before, mut fixed): (Option<Vec<u8>>, _) = (None, Vec::new());
        let mut own = 0;
        loop {
            let called = self.now();
            let there = if forward { cursor.forward() } else { cursor.backward() };
            if !there.unwrap() {
                break;
            }
            let key = cursor.key().to_vec();
            let ordered = |before: &Vec<u8>| if forward { *before < key } else { *before > key };
            assert!(before.as_ref().is_none_or(ordered), "{before:?}, then {key:?}");
            if !cursor.is_blob() {
                let found = number(&cursor.value().unwrap().unwrap());
                self.saw(&key, Some(found), called);
            }
            if key.len() == 9 {
                fixed.push(key.clone());
            }
            own += usize::from(self.private.contains_key(&key));
            before = Some(key);
        }
        if !forward {
            fixed.reverse();
        }
        assert!(fixed.into_iter().eq((0..STABLE).map(stable)));
        assert_eq!(own, self.private.len());
    }

    fn entries(&mut self) {
        let mut entries = self.tree.prefix(b"key 000");
        loop {
            let called = self.now();
            let Some(entry) = entries.next() else { break };
            let (key, value) = entry.unwrap();
            let found = number(&value);
            drop(value);
            self.saw(&key, Some(found), called);
        }
    }
}

fn run(seed: u64, steps: u64) {
    let mut random = Random(seed);
    let threads = 2 + random.index(3);
    let page_frames = 1 + random.below(2) as u32;
    // Every thread may hold a few pages, which would exhaust a much smaller pool.
    let options = options([24, 32, 64][random.index(3)], page_frames).evictors(random.below(2));
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap();
    let tree = store.create_tree("t").unwrap();
    for fixed in 0..STABLE {
        tree.insert(&stable(fixed), &value(fixed * 11 + 1)).unwrap();
    }
    let clock = AtomicU64::new(0);
    let workers: Vec<Worker<'_>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (tree, store, clock) = (&tree, &store, &clock);
                let random = Random(random.next());
                let (calls, private) = (vec![Vec::new(); HOT as usize], BTreeMap::new());
                let made = 0;
                scope.spawn(move || {
                    let mut worker =
                        Worker { thread, tree, store, clock, random, made, calls, private };
                    for _ in 0..steps {
                        worker.step();
                    }
                    worker
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    for key in 0..HOT as usize {
        let calls: Vec<_> = workers.iter().map(|worker| worker.calls[key].clone()).collect();
        assert!(is_linearizable(&calls, None), "key {key}: {calls:#?}");
    }
    let mut model: BTreeMap<_, _> = (0..STABLE).map(|n| (stable(n), value(n * 11 + 1))).collect();
    workers.iter().for_each(|worker| model.extend(worker.private.clone()));
    for key in (0..HOT).map(hot) {
        if let Some(value) = tree.get(&key).unwrap() {
            model.insert(key, value.into_vec());
        }
    }
    drop(workers);
    store.sync().unwrap();
    assert_same(&store, &BTreeMap::from([("t".to_owned(), model)]));
}

#[test]
fn histories_are_linearizable() {
    each_seed(20, |seed| run(seed, 120));
}

#[test]
#[ignore = "long"]
fn histories_are_linearizable_for_long() {
    each_seed(2000, |seed| run(seed, 400));
}
