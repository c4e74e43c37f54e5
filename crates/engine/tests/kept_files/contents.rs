//! What the kept files have: steps, which a generator takes on a store and a test in a model.
//!
//! The files in the repository depend on these steps, so they do not change. New files may have
//! steps of their own.

use std::collections::BTreeMap;

pub type Entries = BTreeMap<Vec<u8>, Vec<u8>>;
/// The entries of each tree.
pub type Trees = BTreeMap<String, Entries>;

/// One change of a store.
#[derive(Clone, Debug)]
pub enum Step {
    Create(&'static str),
    Drop(&'static str),
    /// Stores a value in one call.
    Put(&'static str, Vec<u8>, Vec<u8>),
    /// Stores a value as a stream, and so in pieces.
    Stream(&'static str, Vec<u8>, Vec<u8>),
    Remove(&'static str, Vec<u8>),
}

use Step::{Create, Drop, Put, Remove, Stream};

/// A value with bytes that follow from its seed and its length.
fn value(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| ((at / 64 * 7 + at % 3 + seed) % 251) as u8).collect()
}

fn key(name: &str, number: usize) -> Vec<u8> {
    format!("{name} {number:04}").into_bytes()
}

/// Several trees, one without entries, one that is dropped again; short and long values; free
/// space. Formats before version 2 have no values in pieces.
pub fn base(version: u32) -> Vec<Step> {
    let mut steps = vec![Create("short"), Create("dropped"), Create("long"), Create("empty")];
    for number in 0..160 {
        steps.push(Put("short", key("entry", number), value(number, number * 7 % 60)));
        if number % 4 == 0 {
            steps.push(Put("dropped", key("entry", number), value(number, 150)));
        }
    }
    steps.extend((0..160).step_by(9).map(|number| Remove("short", key("entry", number))));
    for (number, len) in [1500, 4040, 9000, 3000].into_iter().enumerate() {
        steps.push(Put("long", key("value", number), value(number, len)));
    }
    steps.push(Remove("long", key("value", 2)));
    steps.push(Put("long", key("value", 3), value(77, 5000)));
    if version >= 2 {
        steps.push(Create("pieces"));
        steps.push(Stream("pieces", b"several pieces".into(), value(5, 40_000)));
        steps.push(Stream("pieces", b"one piece".into(), value(6, 3000)));
    }
    steps.push(Drop("dropped"));
    steps
}

/// Few changes of one leaf.
pub fn few() -> Vec<Step> {
    vec![
        Put("short", key("few", 1), value(1, 33)),
        Put("short", key("entry", 5), b"replaced".into()),
        Remove("short", key("entry", 7)),
    ]
}

/// Changes of each kind.
pub fn more() -> Vec<Step> {
    let mut steps = few();
    steps.extend((0..60).map(|number| Put("short", key("more", number), value(number, 90))));
    steps.extend((10..40).map(|number| Remove("short", key("entry", number))));
    steps.push(Put("long", key("more", 1), value(8, 6000)));
    steps.push(Put("long", key("value", 0), value(9, 10)));
    steps.push(Remove("long", key("value", 1)));
    steps.push(Stream("pieces", b"several pieces".into(), value(10, 20_000)));
    steps.push(Create("later"));
    steps.push(Put("later", b"".into(), b"".into()));
    steps.push(Create("passing"));
    steps.push(Put("passing", b"k".into(), value(11, 100)));
    steps.push(Drop("passing"));
    steps.push(Drop("empty"));
    steps
}

/// Changes of each kind, and then values of which some bytes change.
pub fn altered() -> Vec<Step> {
    let mut steps = more();
    for (number, len) in (0..60).zip([90, 90, 300, 700].into_iter().cycle()) {
        let mut value = value(number, len);
        for change in 0..3 {
            let at = change * len / 3;
            value[at..at + 5].fill(change as u8 + 1);
            value[len - 1] = number as u8;
            steps.push(Put("later", key("altered", number), value.clone()));
        }
    }
    steps
}

/// Runs of entries in both orders, with long keys, so that leaves are split and the nodes above
/// them.
pub fn splits() -> Vec<Step> {
    let long_key = |number: usize| [&[b'p'; 100][..], &key("run", number)].concat();
    let numbers = (3000..3700).chain((2900..3000).rev());
    let put = |number| Put("runs", long_key(number), value(number, 100));
    [Create("runs")].into_iter().chain(numbers.map(put)).collect()
}

/// The steps of transactions, one after the other.
pub fn transactions() -> Vec<Vec<Step>> {
    let pair = |number: usize| {
        let amount = (number as u64 * 3).to_le_bytes();
        vec![
            Put("short", key("account", number % 5), amount.to_vec()),
            Put("long", key("note", number), value(number, 20 + number * 300)),
            Remove("short", key("entry", 50 + number)),
        ]
    };
    (0..12).map(pair).collect()
}

/// Takes steps in a model.
pub fn apply(steps: &[Step], trees: &mut Trees) {
    for step in steps {
        match step {
            Create(name) => drop(trees.insert((*name).into(), Entries::new())),
            Drop(name) => drop(trees.remove(*name)),
            Put(name, key, value) | Stream(name, key, value) => {
                tree(trees, name).insert(key.clone(), value.clone());
            }
            Remove(name, key) => drop(tree(trees, name).remove(key)),
        }
    }
}

fn tree<'t>(trees: &'t mut Trees, name: &str) -> &'t mut Entries {
    trees.get_mut(name).expect("earlier steps create the tree")
}
