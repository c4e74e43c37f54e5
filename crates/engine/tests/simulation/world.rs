//! A store and its model. Every operation runs on both, and the results are compared.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Bound;
use std::sync::Arc;

use vellum::{Cursor, Device, Error, Options, Store, Tree};

use crate::support::{Keys, Random, Values};

pub type Entries = BTreeMap<Vec<u8>, Vec<u8>>;
pub type Model = BTreeMap<String, Entries>;

/// Every entry that was ever stored, for each tree by its name.
pub type Once = HashMap<String, HashSet<(Vec<u8>, Vec<u8>)>>;

/// Whether a tree had this entry at any time.
pub fn was_in(once: &Once, name: &str, key: &[u8], value: &[u8]) -> bool {
    let entry = (key.to_vec(), value.to_vec());
    once.get(name).is_some_and(|entries| entries.contains(&entry))
}

/// Names of trees.
const NAMES: [&str; 4] = ["", "a", "tree", "another tree with a name of some length"];

/// A store and its model.
pub struct World {
    pub store: Store,
    pub device: Arc<dyn Device>,
    pub options: Options,
    pub model: Model,
    /// The state at the last completed sync.
    pub synced: Model,
    /// The states at the syncs since the last look, in order.
    pub syncs: Vec<Model>,
    /// Whether no change has begun since then.
    pub is_clean: bool,
    pub once: Once,
    /// Whether errors of the device are valid results.
    pub tolerant: bool,
    /// Whether a tree was dropped while reads failed: its pages may be lost.
    has_dropped: bool,
    pub failures: u64,
    /// The store is closed: closing it failed because it was poisoned.
    pub dead: bool,
    pub keys: Keys,
    pub values: Values,
}

/// The store's error inside the error of a reader or writer.
pub fn inner(error: std::io::Error) -> Error {
    *error.into_inner().unwrap().downcast().unwrap()
}

fn len_of(value: &[u8]) -> u64 {
    value.len() as u64
}

type Entry = (Vec<u8>, Vec<u8>);

/// The next entry, its value of any length.
pub fn next_entry(tree: &Tree, cursor: &mut Cursor<'_>) -> Result<Option<Entry>, Error> {
    if !cursor.forward()? {
        return Ok(None);
    }
    let mut value = Vec::new();
    assert!(tree.get_into(cursor.key(), &mut value)?);
    Ok(Some((cursor.key().to_vec(), value)))
}

/// Whether the device, or what it did to the store, is the cause of this error.
pub fn is_fault(error: &Error) -> bool {
    matches!(
        error,
        Error::Io(_)
            | Error::Damaged { .. }
            | Error::DiskFull(_)
            | Error::PoolExhausted(_)
            | Error::Poisoned(_)
    )
}

impl World {
    pub fn new(device: Arc<dyn Device>, options: &Options, random: &mut Random) -> World {
        let store = Store::create_on(device.clone(), options).unwrap();
        let keys = Keys::new(random, store.limits().max_key);
        let values = Values::new(&store, [3, 12, 60][random.index(3)]);
        World {
            store,
            device,
            options: options.clone(),
            model: Model::new(),
            synced: Model::new(),
            syncs: Vec::new(),
            is_clean: true,
            once: Once::new(),
            tolerant: false,
            has_dropped: false,
            failures: 0,
            dead: false,
            keys,
            values,
        }
    }

    /// The value, or `None` for an error that the device may have caused.
    pub fn accept<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) if self.tolerant && is_fault(&error) => {
                self.failures += 1;
                None
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    /// The store holds exactly what the model does.
    pub fn assert_same(&self) {
        let lost_max = if self.has_dropped { u64::MAX } else { 0 };
        if let Some(difference) = difference_unless_lost(&self.store, &self.model, lost_max) {
            panic!("{difference}");
        }
    }

    /// One operation, chosen at random.
    pub fn step(&mut self, random: &mut Random) {
        match random.below(100) {
            0 => self.drop_or_create(random),
            1..=3 => self.sync(),
            4 => self.reopen(),
            _ => {
                let name = NAMES[random.index(NAMES.len())];
                if !self.model.contains_key(name) {
                    return self.create(name);
                }
                let tree = self.store.tree(name);
                let Some(tree) = self.accept(tree) else { return };
                self.tree_step(name, &tree, random);
            }
        }
    }

    /// One change, which happens as a whole or not at all.
    pub fn change(&mut self, random: &mut Random) {
        let name = NAMES[random.index(NAMES.len())];
        if !self.model.contains_key(name) {
            return self.create(name);
        }
        let tree = self.store.tree(name).unwrap();
        match random.below(20) {
            0 => {
                self.is_clean = false;
                self.store.drop_tree(name).unwrap();
                self.model.remove(name);
            }
            1..3 => {
                let (key, value) = (self.keys.any(random), self.values.streamed(random));
                self.is_clean = false;
                self.ever(name, &key, &value);
                let mut writer = tree.writer(&key).unwrap();
                writer.write_all(&value).unwrap();
                if !random.once_in(4) {
                    writer.finish().unwrap();
                    self.model.get_mut(name).unwrap().insert(key, value);
                }
            }
            3..12 => self.put(name, &tree, random),
            _ => self.remove(name, &tree, random),
        }
    }

    fn tree_step(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        match random.below(100) {
            0..34 => self.put(name, tree, random),
            34..40 => self.stream(name, tree, random),
            40..65 => self.remove(name, tree, random),
            65..67 => self.remove_range(name, tree, random),
            67..76 => self.get(name, tree, random),
            76..80 => self.read_stream(name, tree, random),
            80..84 => self.multi_get(name, tree, random),
            84..94 => self.walk(name, tree, random),
            94..97 => self.prefix(name, tree, random),
            _ => self.bulk_load(name, tree, random),
        }
    }

    /// The value, or `None` for an error that the device may have caused, or that is due because a
    /// value of this length cannot be returned as a whole.
    fn accept_whole<T>(&mut self, result: Result<T, Error>, len: Option<usize>) -> Option<T> {
        match result {
            Err(Error::NeedsReader { len: found, .. })
                if len.is_some_and(|len| len as u64 == found && found > self.values.max) =>
            {
                None
            }
            result => self.accept(result),
        }
    }

    /// Records an entry before it is stored.
    pub fn ever(&mut self, name: &str, key: &[u8], value: &[u8]) {
        let entries = self.once.entry(name.into()).or_default();
        entries.insert((key.to_vec(), value.to_vec()));
    }

    fn create(&mut self, name: &str) {
        self.is_clean = false;
        let created = self.store.create_tree(name).map(drop);
        if self.accept(created).is_some() {
            self.model.insert(name.into(), Entries::new());
        }
    }

    fn drop_or_create(&mut self, random: &mut Random) {
        let name = NAMES[random.index(NAMES.len())];
        self.is_clean = false;
        if !self.model.contains_key(name) {
            let error = self.store.drop_tree(name).unwrap_err();
            assert!(matches!(error, Error::NoSuchTree(_)) || is_fault(&error), "{error}");
            return self.create(name);
        }
        if !self.tolerant {
            let error = self.store.create_tree(name).unwrap_err();
            assert!(matches!(error, Error::TreeExists(_)), "{error}");
        }
        let Some(old) = self.accept(self.store.tree(name)) else { return };
        self.has_dropped |= self.tolerant;
        let dropped = self.store.drop_tree(name);
        if self.accept(dropped).is_none() {
            // The tree is still there.
            return;
        }
        self.model.remove(name);
        assert!(matches!(old.get(b""), Err(Error::NoSuchTree(_))));
        assert!(matches!(old.upsert(b"", b""), Err(Error::NoSuchTree(_))));
        if random.once_in(2) {
            self.create(name);
            assert!(matches!(old.get(b""), Err(Error::NoSuchTree(_))));
        }
    }

    pub fn sync(&mut self) {
        let synced = self.store.sync();
        if self.accept(synced).is_some() {
            self.synced = self.model.clone();
            self.syncs.push(self.synced.clone());
            self.is_clean = true;
        }
    }

    /// Closes the store, opens it again and compares everything.
    pub fn reopen(&mut self) {
        self.is_clean = false;
        let closed = self.store.clone().close();
        if self.accept(closed).is_none() {
            // The store stays open, unless it is poisoned.
            self.dead = matches!(self.store.sync(), Err(Error::Closed));
            return;
        }
        self.synced = self.model.clone();
        self.is_clean = true;
        assert!(matches!(self.store.sync(), Err(Error::Closed)));
        for _ in 0..1000 {
            match Store::open_on(self.device.clone(), &self.options) {
                Ok(store) => {
                    self.store = store;
                    if !self.tolerant {
                        self.assert_same();
                    }
                    return;
                }
                // With read faults in the headers, opening can return any error.
                Err(error) => assert!(self.tolerant, "{error:?}"),
            }
        }
        panic!("it does not open");
    }

    fn put(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let (key, value) = (self.keys.any(random), self.values.next(random));
        self.is_clean = false;
        self.ever(name, &key, &value);
        let there = self.model[name].contains_key(&key);
        let replaced = match random.below(3) {
            0 => match tree.insert(&key, &value) {
                Err(Error::KeyExists) => {
                    assert!(there);
                    return;
                }
                other => other.map(|()| false),
            },
            1 => tree.upsert(&key, &value),
            _ => tree.upsert_with(&key, value.len(), |target| {
                assert!(target.iter().all(|byte| *byte == 0));
                target.copy_from_slice(&value);
                Ok(())
            }),
        };
        if let Some(replaced) = self.accept(replaced) {
            assert_eq!(replaced, there);
            self.model.get_mut(name).unwrap().insert(key, value);
        }
    }

    /// Writes a value as a stream while other operations run. Sometimes writes only a part of it.
    fn stream(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let (key, value) = (self.keys.any(random), self.values.streamed(random));
        self.is_clean = false;
        self.ever(name, &key, &value);
        let Some(mut writer) = self.accept(tree.writer(&key)) else { return };
        let mut rest = &value[..];
        while !rest.is_empty() {
            let (bit, behind) = rest.split_at(random.index(9000).min(rest.len()));
            let written = writer.write_all(bit).map_err(inner);
            self.is_clean &= bit.is_empty();
            if self.accept(written).is_none() {
                assert!(writer.finish().is_err());
                return;
            }
            rest = behind;
            match random.below(30) {
                0 => self.sync(),
                1 => self.put(name, tree, random),
                2 => self.remove(name, tree, random),
                // The writer is dropped, and the key keeps its old value.
                3 => return,
                _ => {}
            }
        }
        self.is_clean = false;
        let there = self.model[name].contains_key(&key);
        let replaced = writer.finish();
        if let Some(replaced) = self.accept(replaced) {
            assert_eq!(replaced, there);
            self.model.get_mut(name).unwrap().insert(key, value);
        }
    }

    /// Reads a value piece by piece while other operations run.
    fn read_stream(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let key = self.keys.any(random);
        let Some(reader) = self.accept(tree.reader(&key)) else { return };
        let expected = self.model[name].get(&key).cloned();
        assert_eq!(reader.as_ref().map(|reader| reader.len()), expected.as_deref().map(len_of));
        let (Some(mut reader), Some(expected)) = (reader, expected) else { return };
        let mut bit = vec![0; 1 + random.index(9000)];
        loop {
            let at = reader.stream_position().unwrap() as usize;
            let read = reader.read(&mut bit).map_err(inner);
            let Some(count) = self.accept(read) else { return };
            assert!(expected[at..].starts_with(&bit[..count]), "{key:?} at {at}");
            match random.below(20) {
                0 => drop(reader.seek(SeekFrom::Start(random.below(len_of(&expected))))),
                1 => self.sync(),
                2 => self.put(name, tree, random),
                3 => self.stream(name, tree, random),
                4 => {
                    self.is_clean = false;
                    let removed = tree.remove(&key);
                    if self.accept(removed).is_some() {
                        self.model.get_mut(name).unwrap().remove(&key);
                    }
                }
                _ if count == 0 => return,
                _ => {}
            }
        }
    }

    fn remove(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let key = match self.model[name].range(self.keys.any(random)..).next() {
            Some((key, _)) if !random.once_in(4) => key.clone(),
            _ => self.keys.any(random),
        };
        self.is_clean = false;
        let removed = tree.remove(&key);
        if let Some(removed) = self.accept(removed) {
            let expected = self.model.get_mut(name).unwrap().remove(&key);
            assert_eq!(removed, expected.is_some());
        }
    }

    fn remove_range(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let (from, most) = (self.keys.any(random), random.index(80));
        let keys = self.model[name].range(from..).take(most);
        let keys: Vec<_> = keys.map(|(key, _)| key.clone()).collect();
        self.is_clean = false;
        for key in keys {
            let removed = tree.remove(&key);
            if let Some(removed) = self.accept(removed) {
                assert!(removed);
                self.model.get_mut(name).unwrap().remove(&key);
            }
        }
    }

    fn get(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let key = self.keys.any(random);
        let expected = self.model[name].get(&key).cloned();
        let expected = expected.as_deref();
        match random.below(4) {
            0 => {
                let mut value = Vec::new();
                let found = tree.get_into(&key, &mut value);
                if let Some(found) = self.accept(found) {
                    assert!(found.then_some(&value[..]) == expected, "{key:?}");
                }
            }
            1 => {
                let found = tree.contains(&key);
                if let Some(found) = self.accept(found) {
                    assert_eq!(found, expected.is_some());
                }
            }
            2 => {
                let found = tree.with(&key, <[u8]>::to_vec);
                if let Some(found) = self.accept_whole(found, expected.map(<[u8]>::len)) {
                    assert!(found.as_deref() == expected, "{key:?}");
                }
            }
            _ => {
                let found = tree.get(&key);
                if let Some(found) = self.accept_whole(found, expected.map(<[u8]>::len)) {
                    assert!(found.as_deref() == expected, "{key:?}");
                }
            }
        }
    }

    fn multi_get(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let mut keys: Vec<_> = (0..random.below(12)).map(|_| self.keys.any(random)).collect();
        let model = &self.model[name];
        // The lookup pins all blobs at once: look up only as many as fit into the smallest pool.
        let is_long = |key: &Vec<u8>| model.get(key).is_some_and(|value| value.len() > 900);
        keys.retain(|key| !is_long(key) || model[key].len() < 5000 && key.len() % 3 == 0);
        if keys.iter().filter(|key| is_long(key)).count() > 1 {
            keys.retain(|key| !is_long(key));
        }
        let found = tree.multi_get(&keys.iter().map(|key| &key[..]).collect::<Vec<_>>());
        if let Some(found) = self.accept(found) {
            assert_eq!(found.len(), keys.len());
            for (key, value) in keys.iter().zip(found) {
                assert!(value.as_deref() == self.model[name].get(key).map(|value| &value[..]));
            }
        }
    }

    /// Moves a cursor from a random place some steps in either direction.
    fn walk(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let (from, forward) = (self.keys.any(random), random.once_in(2));
        let steps = random.index(40);
        let mut cursor = tree.cursor().read_ahead(random.index(5));
        let bounds = match forward {
            true => (Bound::Included(from.clone()), Bound::Unbounded),
            false => (Bound::Unbounded, Bound::Included(from.clone())),
        };
        let expected = self.model[name].range(bounds);
        let expected: Vec<_> = match forward {
            true => expected.take(steps).map(|(k, v)| (k.clone(), v.clone())).collect(),
            false => expected.rev().take(steps).map(|(k, v)| (k.clone(), v.clone())).collect(),
        };
        let mut there = match forward {
            true => cursor.seek(&from),
            false => cursor.seek_back(&from),
        };
        for (key, value) in expected {
            let Some(found) = self.accept(there) else { return };
            assert!(found, "{key:?} is missing");
            assert_eq!(cursor.key(), key);
            assert_eq!(cursor.value_len(), value.len() as u64);
            if let Some(found) = self.accept_whole(cursor.value(), Some(value.len())) {
                assert!(found.as_deref() == Some(&value[..]), "{key:?}");
            }
            there = if forward { cursor.forward() } else { cursor.backward() };
        }
    }

    fn prefix(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        let key = self.keys.any(random);
        let prefix = &key[..random.index(key.len() + 1)];
        let mut expected =
            self.model[name].range(prefix.to_vec()..).filter(|(key, _)| key.starts_with(prefix));
        for entry in tree.prefix(prefix) {
            match entry {
                Ok((key, value)) => {
                    let expected = expected.next().map(|(key, value)| (&key[..], &value[..]));
                    assert!(Some((&key[..], &value[..])) == expected, "{key:?}");
                }
                Err(Error::NeedsReader { len, .. }) => {
                    assert_eq!(expected.next().map(|(_, value)| len_of(value)), Some(len));
                    assert!(len > self.values.max);
                    return;
                }
                Err(error) => {
                    assert!(self.tolerant && is_fault(&error), "{error}");
                    self.failures += 1;
                    return;
                }
            }
        }
        assert!(expected.next().is_none());
    }

    fn bulk_load(&mut self, name: &str, tree: &Tree, random: &mut Random) {
        self.is_clean = false;
        let mut entries = Entries::new();
        for _ in 0..random.below(200) {
            entries.insert(self.keys.any(random), self.values.next(random));
        }
        for (key, value) in &entries {
            self.ever(name, key, value);
        }
        let (empty, unsorted) = (self.model[name].is_empty(), random.once_in(4));
        let mut sorted: Vec<_> = entries.iter().collect();
        if unsorted && sorted.len() > 1 {
            sorted.push(sorted[random.index(sorted.len())]);
        }
        match tree.bulk_load(sorted.iter().map(|(key, value)| (&key[..], &value[..]))) {
            Err(Error::NotEmpty) => assert!(!empty || self.tolerant),
            Err(Error::NotSorted { entry, .. }) => assert_eq!(entry, sorted.len() as u64 - 1),
            loaded => {
                if let Some(count) = self.accept(loaded) {
                    assert!(
                        empty && count == entries.len() as u64 && sorted.len() == entries.len()
                    );
                    self.model.insert(name.into(), entries);
                }
            }
        }
    }
}

/// The store holds exactly what the model does, and every page of it is sound.
pub fn assert_same(store: &Store, model: &Model) {
    if let Some(difference) = difference(store, model) {
        panic!("{difference}");
    }
}

/// How a store differs from a model, if it does.
pub fn difference(store: &Store, model: &Model) -> Option<String> {
    difference_unless_lost(store, model, 0)
}

/// The same, of a store that may have lost so many pages.
fn difference_unless_lost(store: &Store, model: &Model, lost_max: u64) -> Option<String> {
    let names = match store.trees() {
        Ok(names) => names,
        Err(error) => return Some(format!("the catalog: {error}")),
    };
    if !names.iter().eq(model.keys()) {
        return Some(format!("trees {names:?} instead of {:?}", model.keys()));
    }
    for (name, entries) in model {
        let tree = store.tree(name).unwrap();
        let mut expected = entries.iter();
        let mut cursor = tree.cursor();
        loop {
            let (key, value) = match next_entry(&tree, &mut cursor) {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                Err(error) => return Some(format!("tree {name:?}: {error}")),
            };
            if expected.next() != Some((&key, &value)) {
                return Some(format!("tree {name:?} differs at {key:?}"));
            }
        }
        if let Some((key, _)) = expected.next() {
            return Some(format!("tree {name:?} has lost {key:?}"));
        }
    }
    let report = store.check(&mut |_| {}).unwrap();
    if !report.is_sound() || report.lost_pages > lost_max {
        return Some(format!("{:?}, {} pages lost", report.damage, report.lost_pages));
    }
    None
}
