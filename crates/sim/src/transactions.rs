//! Transactions and snapshots that are open while the store changes, and what they must see.
//!
//! A transaction that is serializable must have read, of the parts of trees that it has passed,
//! what the store has at its commit. With snapshot isolation, the entries that it changes must be
//! as they were when it began.

use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds};

use vellum::{Durability, Isolation, Savepoint, Snapshot, Transaction, Tree};
use vellum_testing::random::Random;

use crate::failure::{Outcome, ensure};
use crate::model::{Bytes, Entries, Model};

/// A range of keys.
pub type KeyRange = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// New values and removals, by the numbers of their trees.
pub type Writes = BTreeMap<(u64, Vec<u8>), Option<Bytes>>;

/// A tree with its number.
pub type NumberedTree = (u64, Tree);

/// The entries of the tree with this number.
pub fn entries_of(model: &Model, id: u64) -> Option<&Entries> {
    model.values().find(|tree| tree.id == id).map(|tree| &*tree.entries)
}

/// A snapshot, and what it must see.
#[derive(Debug)]
pub struct OpenSnapshot {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// The store when it began.
    pub began: Model,
    /// The trees of then.
    pub trees: Vec<NumberedTree>,
}

impl OpenSnapshot {
    /// Compares what the snapshot sees of these keys, and between the first and the last of them.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub(crate) fn check_keys(&self, keys: &[Vec<u8>]) -> Outcome<vellum::Result<()>> {
        let (Some(first), Some(last)) = (keys.iter().min(), keys.iter().max()) else {
            return Ok(Ok(()));
        };
        for (id, tree) in &self.trees {
            let Some(expected) = entries_of(&self.began, *id) else { continue };
            let read = || -> vellum::Result<(Vec<Option<Bytes>>, Entries)> {
                let names: Vec<_> = keys.iter().map(|key| &key[..]).collect();
                let values = self.snapshot.multi_get(tree, &names)?;
                let values = values.into_iter().map(|value| Some(value?.to_vec().into())).collect();
                let mut entries = Entries::new();
                for entry in self.snapshot.range(tree, first.clone()..=last.clone())?.rev() {
                    let (key, value) = entry?;
                    entries.insert(key, value.to_vec().into());
                }
                Ok((values, entries))
            };
            let (values, entries) = match read() {
                Ok(found) => found,
                Err(error) => return Ok(Err(error)),
            };
            let is_right =
                keys.iter().map(|key| expected.get(key)).eq(values.iter().map(Option::as_ref));
            ensure!(is_right, "a snapshot sees other values of {:?} by their keys", tree.name());
            let is_right = expected.range(first.clone()..=last.clone()).eq(&entries);
            ensure!(is_right, "a snapshot sees another range of {:?}", tree.name());
        }
        Ok(Ok(()))
    }

    /// Compares all that the snapshot sees.
    ///
    /// # Errors
    /// What is wrong. Inside is an error of the store, for the caller to judge.
    pub fn check(&self) -> Outcome<vellum::Result<()>> {
        for (id, tree) in &self.trees {
            let Some(expected) = entries_of(&self.began, *id) else { continue };
            let mut found = Entries::new();
            let mut read = || -> vellum::Result<()> {
                for entry in self.snapshot.entries(tree)? {
                    let (key, value) = entry?;
                    found.insert(key, value.to_vec().into());
                }
                Ok(())
            };
            if let Err(error) = read() {
                return Ok(Err(error));
            }
            ensure!(
                found == *expected,
                "a snapshot sees {} entries of {:?} and not the {} of when it began",
                found.len(),
                tree.name(),
                expected.len()
            );
        }
        Ok(Ok(()))
    }
}

/// A transaction, and what it must see.
#[derive(Debug)]
pub struct OpenTransaction {
    /// The transaction.
    pub transaction: Transaction,
    /// Its isolation.
    pub isolation: Isolation,
    /// Whether its commit is durable when it returns, or soon.
    pub durability: Durability,
    /// The store when it began.
    pub began: Model,
    /// The number of changes when it began.
    pub began_at: usize,
    /// The trees of then.
    pub trees: Vec<NumberedTree>,
    /// Its changes.
    pub writes: Writes,
    savepoints: Vec<(Savepoint, Writes)>,
    passed: Vec<(u64, KeyRange)>,
}

impl OpenTransaction {
    /// A transaction that begins now.
    pub fn new(
        transaction: Transaction,
        (isolation, durability): (Isolation, Durability),
        (began, began_at): (Model, usize),
        trees: Vec<NumberedTree>,
    ) -> OpenTransaction {
        OpenTransaction {
            transaction,
            isolation,
            durability,
            began,
            began_at,
            trees,
            writes: Writes::new(),
            savepoints: Vec::new(),
            passed: Vec::new(),
        }
    }

    /// Takes one step. Returns an error of the store, for the caller to judge.
    pub fn step(
        &mut self,
        random: &mut Random,
        key: Vec<u8>,
        value: Bytes,
    ) -> Outcome<vellum::Result<()>> {
        if self.trees.is_empty() {
            return Ok(Ok(()));
        }
        let (id, tree) = self.trees[random.index(self.trees.len())].clone();
        match random.below(16) {
            0..4 => self.read(id, &tree, key),
            4..7 => self.scan(random, id, &tree, key),
            7..12 => {
                let put = self.transaction.put(&tree, &key, &value);
                if put.is_ok() {
                    self.writes.insert((id, key), Some(value));
                }
                Ok(put)
            }
            12..14 => self.remove(id, &tree, key),
            14 => {
                let savepoint = self.transaction.savepoint();
                self.savepoints.push((savepoint, self.writes.clone()));
                Ok(Ok(()))
            }
            _ => self.roll_back(random),
        }
    }

    fn own(&self, id: u64, key: &[u8]) -> Option<&Option<Bytes>> {
        self.writes.get(&(id, key.to_vec()))
    }

    /// What the transaction must find for a key.
    fn expected(&self, id: u64, key: &[u8]) -> Option<Bytes> {
        match self.own(id, key) {
            Some(own) => own.clone(),
            None => entries_of(&self.began, id).and_then(|entries| entries.get(key).cloned()),
        }
    }

    fn pass_key(&mut self, id: u64, key: &[u8]) {
        if self.own(id, key).is_none() {
            let range = (Bound::Included(key.to_vec()), Bound::Included(key.to_vec()));
            self.passed.push((id, range));
        }
    }

    fn read(&mut self, id: u64, tree: &Tree, key: Vec<u8>) -> Outcome<vellum::Result<()>> {
        let found: Option<Bytes> = match self.transaction.get(tree, &key) {
            Ok(found) => found.map(|value| value.to_vec().into()),
            Err(error) => return Ok(Err(error)),
        };
        self.pass_key(id, &key);
        ensure!(
            found == self.expected(id, &key),
            "a transaction reads another value of {key:02x?} in {:?} than when it began",
            tree.name()
        );
        Ok(Ok(()))
    }

    fn remove(&mut self, id: u64, tree: &Tree, key: Vec<u8>) -> Outcome<vellum::Result<()>> {
        let was_there = self.expected(id, &key).is_some();
        match self.transaction.remove(tree, &key) {
            Ok(removed) => {
                ensure!(removed == was_there, "a removal in a transaction says {removed}");
                self.pass_key(id, &key);
                if removed {
                    self.writes.insert((id, key), None);
                }
                Ok(Ok(()))
            }
            Err(error) => Ok(Err(error)),
        }
    }

    /// Passes a part of a range, from one end.
    fn scan(
        &mut self,
        random: &mut Random,
        id: u64,
        tree: &Tree,
        key: Vec<u8>,
    ) -> Outcome<vellum::Result<()>> {
        let mut end = key.clone();
        let last = end.pop().unwrap_or(0);
        end.push(last.saturating_add(random.pick(&[3, 20, 255])));
        let range = (Bound::Included(key.clone()), Bound::Excluded(end.clone()));
        let (limit, is_backwards) = (random.pick(&[1, 5, 1000]), random.once_in(3));
        let mut expected = match entries_of(&self.began, id) {
            Some(entries) if key < end => entries.range(range.clone()).collect(),
            _ => Vec::new(),
        };
        let own: Vec<_> = self
            .writes
            .iter()
            .filter(|((tree, own), _)| *tree == id && *own >= key && *own < end)
            .collect();
        expected.retain(|(key, _)| self.own(id, key).is_none());
        for ((_, key), value) in own {
            expected.extend(value.as_ref().map(|value| (key, value)));
        }
        expected.sort();
        if is_backwards {
            expected.reverse();
        }
        let is_cut = expected.len() > limit;
        expected.truncate(limit);
        let mut entries = match self.transaction.range(tree, key.clone()..end.clone()) {
            Ok(entries) => entries,
            Err(error) => return Ok(Err(error)),
        };
        let mut last = None;
        for number in 0..limit {
            let next = if is_backwards { entries.next_back() } else { entries.next() };
            let found = match next {
                None => {
                    ensure!(number == expected.len(), "a range in a transaction ends early");
                    break;
                }
                Some(Ok((key, value))) => (key, Bytes::from(value.to_vec())),
                Some(Err(error)) => return Ok(Err(error)),
            };
            let is_expected = expected
                .get(number)
                .is_some_and(|(key, value)| **key == found.0 && **value == found.1);
            ensure!(is_expected, "a range in a transaction has another entry at {:02x?}", found.0);
            last = Some(found.0);
        }
        drop(entries);
        let passed = match last {
            Some(last) if is_cut && is_backwards => (Bound::Included(last), range.1),
            Some(last) if is_cut => (range.0, Bound::Included(last)),
            _ if limit == expected.len() && !is_cut && last.is_some() => {
                // The scan has not looked behind its last entry.
                let last = last.unwrap_or_default();
                match is_backwards {
                    true => (Bound::Included(last), range.1),
                    false => (range.0, Bound::Included(last)),
                }
            }
            _ => range,
        };
        if key < end {
            self.passed.push((id, passed));
        }
        Ok(Ok(()))
    }

    /// Removes the entries from one key to another.
    pub(crate) fn remove_range(
        &mut self,
        random: &mut Random,
        (from, to): (Vec<u8>, Vec<u8>),
    ) -> Outcome<vellum::Result<()>> {
        if self.trees.is_empty() {
            return Ok(Ok(()));
        }
        let (id, tree) = self.trees[random.index(self.trees.len())].clone();
        let range = (Bound::Included(from), Bound::Included(to));
        let mut keys: Vec<_> = match entries_of(&self.began, id) {
            Some(entries) => entries.range(range.clone()).map(|(key, _)| key.clone()).collect(),
            None => Vec::new(),
        };
        let own = self.writes.keys().filter(|(tree, key)| *tree == id && range.contains(key));
        keys.extend(own.map(|(_, key)| key.clone()));
        keys.sort();
        keys.dedup();
        keys.retain(|key| self.expected(id, key).is_some());
        let removed = match self.transaction.remove_range(&tree, range.clone()) {
            Ok(removed) => removed,
            Err(error) => return Ok(Err(error)),
        };
        let must = keys.len() as u64;
        ensure!(removed == must, "a transaction removes {removed} entries of a range, not {must}");
        self.passed.push((id, range));
        self.writes.extend(keys.into_iter().map(|key| ((id, key), None)));
        Ok(Ok(()))
    }

    fn roll_back(&mut self, random: &mut Random) -> Outcome<vellum::Result<()>> {
        if self.savepoints.is_empty() {
            return Ok(Ok(()));
        }
        let at = random.index(self.savepoints.len());
        self.savepoints.truncate(at + 1);
        let (savepoint, writes) = self.savepoints[at].clone();
        self.writes = writes;
        Ok(self.transaction.rollback_to(savepoint))
    }

    /// Whether the transaction may commit in a store that is like the model.
    pub fn check_commit(&self, now: &Model) -> Outcome {
        match self.isolation {
            Isolation::Serializable => {
                for (id, range) in &self.passed {
                    let (then, now) = (entries_of(&self.began, *id), entries_of(now, *id));
                    // A drop of a tree conflicts with no transaction.
                    let (Some(then), Some(now)) = (then, now) else { continue };
                    let is_same = then.range(range.clone()).eq(now.range(range.clone()));
                    ensure!(is_same, "a commit depends on a read in {range:02x?} that has changed");
                }
            }
            Isolation::Snapshot => {
                for (id, key) in self.writes.keys() {
                    let (then, now) = (entries_of(&self.began, *id), entries_of(now, *id));
                    let (Some(then), Some(now)) = (then, now) else { continue };
                    let is_same = then.get(key) == now.get(key);
                    ensure!(is_same, "a commit overwrites {key:02x?}, which has changed");
                }
            }
        }
        Ok(())
    }
}
