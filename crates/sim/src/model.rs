//! What a store has: the model of the first workload, and the changes of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use vellum::Store;

use crate::failure::{Failure, Outcome};

/// A value.
pub type Bytes = Arc<[u8]>;

/// The entries of a tree.
pub type Entries = BTreeMap<Vec<u8>, Bytes>;

/// A tree. Its number stays when it is renamed, and no other tree gets it.
#[derive(Clone, Debug, Default)]
pub struct TreeModel {
    /// The number of the tree.
    pub id: u64,
    /// Its entries.
    pub entries: Arc<Entries>,
}

/// The trees by name. A copy is cheap.
pub type Model = BTreeMap<String, TreeModel>;

/// A change that a crash leaves whole or undone.
#[derive(Clone, Debug)]
pub enum Change {
    /// A new tree, with its number.
    Create(String, u64),
    /// A new name of a tree.
    Rename(String, String),
    /// A tree goes.
    Drop(String),
    /// A new value.
    Put(String, Vec<u8>, Bytes),
    /// An entry goes, if it is there.
    Remove(String, Vec<u8>),
    /// New values, and removals of entries.
    Commit(Vec<(String, Vec<u8>, Option<Bytes>)>),
    /// All entries of a tree go.
    Clear(String),
    /// The entries of an empty tree.
    Load(String, Arc<Entries>),
}

impl Change {
    /// Makes the change in a model.
    pub fn apply(&self, model: &mut Model) {
        match self {
            Change::Create(name, id) => {
                let tree = TreeModel { id: *id, ..TreeModel::default() };
                model.insert(name.clone(), tree);
            }
            Change::Rename(old, new) => {
                if let Some(tree) = model.remove(old) {
                    model.insert(new.clone(), tree);
                }
            }
            Change::Drop(name) => drop(model.remove(name)),
            Change::Put(tree, key, value) => set(model, tree, key, Some(value)),
            Change::Remove(tree, key) => set(model, tree, key, None),
            Change::Commit(writes) => {
                for (tree, key, value) in writes {
                    set(model, tree, key, value.as_ref());
                }
            }
            Change::Clear(name) => {
                if let Some(tree) = model.get_mut(name) {
                    tree.entries = Arc::default();
                }
            }
            Change::Load(name, entries) => {
                if let Some(tree) = model.get_mut(name) {
                    tree.entries = entries.clone();
                }
            }
        }
    }

    /// Whether a crash within the change may leave pages that nothing refers to.
    pub fn may_lose_pages(&self) -> bool {
        matches!(self, Change::Drop(_) | Change::Clear(_))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entry =
            |f: &mut fmt::Formatter<'_>, tree: &str, key: &[u8], value: Option<&Bytes>| match value
            {
                Some(value) => write!(f, "put {tree:?} {key:02x?}, {} bytes", value.len()),
                None => write!(f, "remove {tree:?} {key:02x?}"),
            };
        match self {
            Change::Create(name, _) => write!(f, "create {name:?}"),
            Change::Rename(old, new) => write!(f, "rename {old:?} to {new:?}"),
            Change::Drop(name) => write!(f, "drop {name:?}"),
            Change::Put(tree, key, value) => entry(f, tree, key, Some(value)),
            Change::Remove(tree, key) => entry(f, tree, key, None),
            Change::Commit(writes) => {
                f.write_str("commit")?;
                writes.iter().try_for_each(|(tree, key, value)| {
                    f.write_str("; ")?;
                    entry(f, tree, key, value.as_ref())
                })
            }
            Change::Clear(name) => write!(f, "clear {name:?}"),
            Change::Load(name, entries) => write!(f, "load {} entries to {name:?}", entries.len()),
        }
    }
}

fn set(model: &mut Model, tree: &str, key: &[u8], value: Option<&Bytes>) {
    let Some(tree) = model.get_mut(tree) else { return };
    match value {
        Some(value) => {
            Arc::make_mut(&mut tree.entries).insert(key.to_vec(), value.clone());
        }
        None if tree.entries.contains_key(key) => {
            Arc::make_mut(&mut tree.entries).remove(key);
        }
        None => {}
    }
}

/// The trees of a store with their entries, read through the trees themselves.
pub fn contents(store: &Store) -> vellum::Result<BTreeMap<String, Entries>> {
    let mut found = BTreeMap::new();
    for name in store.trees()? {
        let tree = store.tree(&name)?;
        let mut entries = Entries::new();
        for entry in tree.range(..) {
            let (key, value) = entry?;
            entries.insert(key, value.to_vec().into());
        }
        found.insert(name, entries);
    }
    Ok(found)
}

/// Whether the store has what the model says.
pub fn is_same(model: &Model, found: &BTreeMap<String, Entries>) -> bool {
    model.len() == found.len()
        && model.iter().zip(found).all(|((name, tree), (found_name, entries))| {
            name == found_name && *tree.entries == *entries
        })
}

/// The first difference between what the model says and what the store has.
pub fn difference(model: &Model, found: &BTreeMap<String, Entries>) -> String {
    for (name, tree) in model {
        let Some(entries) = found.get(name) else {
            return format!("the tree {name:?} is missing");
        };
        let keys = tree.entries.keys().chain(entries.keys());
        let differs = |key: &&Vec<u8>| tree.entries.get(*key) != entries.get(*key);
        if let Some(key) = keys.into_iter().find(differs) {
            let show = |value: Option<&Bytes>| match value {
                None => "nothing".to_string(),
                Some(value) => {
                    let begin = &value[..value.len().min(8)];
                    format!("{} bytes that begin with {begin:02x?}", value.len())
                }
            };
            let (must, has) = (show(tree.entries.get(key)), show(entries.get(key)));
            return format!("{name:?} must have {must} for the key {key:02x?}, and has {has}");
        }
    }
    match found.keys().find(|name| !model.contains_key(*name)) {
        Some(name) => format!("there is a tree {name:?} that should not be"),
        None => "there is none".into(),
    }
}

/// The changes since a state that was durable, and how many of them must be there.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The state before the changes.
    pub base: Model,
    /// The number of changes before `base`.
    pub base_at: usize,
    /// The changes since, in their order.
    pub changes: Vec<Change>,
}

impl History {
    /// The number of all changes.
    pub fn len(&self) -> usize {
        self.base_at + self.changes.len()
    }

    /// Forgets the changes from this number on.
    pub fn truncate(&mut self, len: usize) {
        self.changes.truncate(len - self.base_at);
    }

    /// The first `at` changes are durable, and no crash from before is looked at any more.
    pub fn advance(&mut self, at: usize) {
        for change in self.changes.drain(..at - self.base_at) {
            change.apply(&mut self.base);
        }
        self.base_at = at;
    }

    /// The state after so many changes.
    pub fn state(&self, at: usize) -> Model {
        let mut model = self.base.clone();
        self.changes[..at - self.base_at].iter().for_each(|change| change.apply(&mut model));
        model
    }

    /// Compares what a store has with the states from `synced` to `begun` changes. Returns how many
    /// it has.
    pub fn find(
        &self,
        found: &BTreeMap<String, Entries>,
        (synced, begun): (usize, usize),
    ) -> Outcome<usize> {
        let begun = begun.min(self.len());
        let mut model = self.state(synced.min(begun));
        let first = difference(&model, found);
        for at in synced.min(begun)..=begun {
            if is_same(&model, found) {
                return Ok(at);
            }
            if at < begun {
                self.changes[at - self.base_at].apply(&mut model);
            }
        }
        let last = difference(&model, found);
        Err(Failure::new(format!(
            "the store has none of the states after {synced} to {begun} changes; compared with the \
             first: {first}; with the last: {last}"
        )))
    }
}
