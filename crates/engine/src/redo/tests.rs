//! Random changes of trees: redo of their records gives the pages that the changes made.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;

use proptest::prelude::*;
use vellum_log::{LogDevice, SimulatedDevice, SimulatedOptions};
use vellum_pool::device::MemoryDevice;
use vellum_pool::{PageDamage, PageRef};
use vellum_testing::random::Random;

use super::page::redo;
use super::record::{GroupRecord, PageRecord, RecordWriter, Redo, changed_parts, push_edit};
use crate::node::{self, Edit, Fences, Node, NodeLimits, Payload};
use crate::page::blob::BlobRef;
use crate::page::{self, ID};
use crate::store::open;
use crate::{Options, Store, Tree, Value};

/// A store that logs its changes to memory.
fn logged_store(page_frames: u32) -> Store {
    let device = Arc::new(SimulatedDevice::new(long_log()));
    let core = open::create(Arc::new(MemoryDevice::new()), &logged(page_frames, device)).unwrap();
    Store::from_core(core)
}

pub(super) fn long_log() -> SimulatedOptions {
    SimulatedOptions { segments: 1 << 12, segment_blocks: 64, ..Default::default() }
}

/// The options of a store with this log.
pub(super) fn logged(page_frames: u32, log: Arc<SimulatedDevice>) -> Options {
    let log: Arc<dyn LogDevice> = log;
    let options = Options::new().pool_bytes(32 << 20).page_frames(page_frames);
    Options { log: Some(log), ..options }
}

/// The bytes of all nodes of the store.
pub(super) fn nodes(store: &Store, trees: &[Tree]) -> BTreeMap<PageRef, Vec<u8>> {
    let pages = &store.core.pages;
    let mut found = BTreeMap::new();
    let mut rest: Vec<_> = trees.iter().map(|tree| tree.tree_ref().root_page()).collect();
    rest.push(store.core.catalog().root_page());
    while let Some(page) = rest.pop() {
        let bytes = pages.pool.fix_shared(page).unwrap().to_vec();
        let node = Node::new(&bytes[..]);
        if node.level().unwrap() > 0 {
            let children = (0..=node.count().unwrap()).map(|index| node.child(index).unwrap());
            rest.extend(children.map(|child| PageRef::new(child, page.frames)));
        }
        assert!(found.insert(page, bytes).is_none());
    }
    found
}

/// What redo must restore: all bytes but the checksum and the gap.
pub(super) fn comparable(page: &[u8]) -> Vec<u8> {
    let (begin, end) = Node::new(page).gap().unwrap();
    [&page[ID..begin], &page[end..]].concat()
}

/// All records from `from` on, or from the first one.
pub(super) fn records(store: &Store, from: Option<u64>) -> Vec<(u64, Vec<u8>)> {
    let log = store.core.pages.redo_log.as_ref().unwrap();
    let mut records = Vec::new();
    store.sync().unwrap();
    let first = log.point(0).begin;
    let mut scan = log.scan(from.unwrap_or(first)).unwrap();
    while let Some(record) = scan.next_record().unwrap() {
        records.push((record.lsn.0.wrapping_add(first), record.bytes));
    }
    records
}

/// The pages that redo makes of records, as recovery will: by page, from nothing.
pub(super) fn redone(records: &[(u64, Vec<u8>)]) -> BTreeMap<PageRef, Vec<u8>> {
    let mut pages: BTreeMap<PageRef, Vec<u8>> = BTreeMap::new();
    for (lsn, record) in records {
        let record = GroupRecord::read(record).unwrap();
        for range in record.taken.into_iter().chain(record.freed) {
            let end = range.id.0 + u64::from(range.frames);
            pages.retain(|page, _| !(range.id.0..end).contains(&page.id.0));
        }
        for change in record.pages {
            let bytes = pages.entry(change.page).or_insert_with(|| vec![0xa5; change.page.bytes()]);
            redo(&change, *lsn, bytes).unwrap();
        }
    }
    pages
}

/// What the keys of a test look like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keys {
    /// Some equal bytes, and a number of two bytes.
    Numbered,
    /// From some before 65,536 to some after it.
    BigEndian,
    /// As separators they look like the lengths and the flags of references to values.
    Slots,
    LittleEndian,
    /// As references to values.
    References,
    /// As long as they can be.
    Longest,
    /// Prefixes of each other, from the empty key on.
    Prefixes,
}

impl Keys {
    fn key(self, random: &mut Random) -> Vec<u8> {
        let number = random.below(700) as u32;
        let longest = NodeLimits::for_page_size(4096).max_key;
        match self {
            Keys::Numbered => {
                let mut key = vec![b'p'; random.pick(&[0, 1, 3, 8, 30, 200])];
                key.extend_from_slice(&(number as u16).to_be_bytes());
                key
            }
            Keys::BigEndian => (65_200 + number).to_be_bytes().into(),
            Keys::Slots => {
                // Without common bytes at the front: a node leaves those out.
                let head = [0x0001_0014_u32, 0x8003_0014][number as usize % 2];
                [&head.to_be_bytes()[..], &(number as u16 / 2).to_be_bytes()].concat()
            }
            Keys::LittleEndian => (65_200 + number).to_le_bytes().into(),
            Keys::References => {
                let page = PageRef::new(2 + u64::from(number), 1 + number % 2);
                let len = u64::from(3000 + number % 7);
                let piece_frames = if number.is_multiple_of(3) { 2 } else { 0 };
                BlobRef { page, len, piece_frames }.encode().into()
            }
            Keys::Longest => {
                let mut key = vec![number as u8; longest];
                let at = if number.is_multiple_of(3) { 0 } else { longest - 2 };
                key[at..at + 2].copy_from_slice(&(number as u16).to_be_bytes());
                key
            }
            Keys::Prefixes => vec![random.pick(&[0, b'p', 0xff]); number as usize % (longest + 1)],
        }
    }
}

fn value(random: &mut Random) -> Vec<u8> {
    let len = match random.below(8) {
        0 => random.below(30_000),
        1..4 => random.below(900),
        _ => random.below(40),
    };
    vec![random.next() as u8; len as usize]
}

/// A value of the same length, with some other bytes.
fn altered(random: &mut Random, old: &[u8]) -> Vec<u8> {
    let mut value = old.to_vec();
    for _ in 0..random.below(4) {
        let at = random.index(value.len());
        let end = value.len().min(at + 1 + random.below(20) as usize);
        value[at..end].fill(random.next() as u8);
    }
    value
}

fn change(random: &mut Random, tree: &Tree, keys: Keys) {
    match random.below(40) {
        0..14 => drop(tree.upsert(&keys.key(random), &value(random)).unwrap()),
        14..19 => drop(tree.remove(&keys.key(random)).unwrap()),
        19..21 => drop(tree.pop_first().unwrap()),
        21..23 => drop(tree.pop_last().unwrap()),
        23..28 => {
            let mut entries: Vec<_> = (0..random.below(60)).map(|_| keys.key(random)).collect();
            entries.sort();
            let entries = entries.iter().map(|key| (key, value(random)));
            let _ = tree.extend(entries.collect::<Vec<_>>()).unwrap();
        }
        28..31 => {
            let (key, new) = (keys.key(random), value(random));
            let mut altered = |old: Option<&[u8]>| match old {
                Some(old) if !old.is_empty() && random.once_in(2) => altered(random, old),
                _ => new.clone(),
            };
            tree.fetch_and_update(&key, |old| Some(altered(old))).map(drop).unwrap();
        }
        31..33 => drop(tree.take(&keys.key(random)).unwrap()),
        33..36 => {
            let (one, two) = (keys.key(random), keys.key(random));
            let _ = tree.remove_range(one.clone().min(two.clone())..one.max(two)).unwrap();
        }
        36 => {
            let keep = random.next() | 1 << 5;
            let keep = |key: &[u8], _: &[u8]| keep >> (key.last().unwrap_or(&0) % 64) & 1 == 1;
            let _ = tree.retain(|key, value| keep(key, value)).unwrap();
        }
        37 if random.once_in(20) => {
            tree.clear().unwrap();
            let entries = (0..random.below(3000) as u32).map(|n| (n.to_be_bytes(), [7; 50]));
            let _ = tree.bulk_load(entries).unwrap();
        }
        _ => {
            let (key, new) = (keys.key(random), value(random));
            let mut writer = tree.writer(&key).unwrap();
            std::io::Write::write_all(&mut writer, &new).unwrap();
            writer.finish().map(drop).unwrap();
        }
    }
}

/// The entries of each tree.
pub(super) fn entries(trees: &[Tree]) -> Vec<Vec<(Vec<u8>, Vec<u8>)>> {
    let entry = |(key, value): (Vec<u8>, Value<'_>)| (key, value.into_vec());
    let entries = |tree: &Tree| tree.range(..).map(|found| entry(found.unwrap())).collect();
    trees.iter().map(entries).collect()
}

/// A recovery makes a sound store with these entries, and loses no page.
pub(super) fn check_recovery(
    options: &Options,
    file: Vec<u8>,
    expected: &[Vec<(Vec<u8>, Vec<u8>)>],
) {
    let store = Store::open_on(Arc::new(MemoryDevice::from_snapshot(file)), options).unwrap();
    assert!(store.recovery().is_some());
    let trees = ["one", "two"].map(|name| store.tree(name).unwrap());
    assert!(entries(&trees) == expected);
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
}

#[test]
fn redo_makes_the_pages_that_the_changes_made() {
    for (seed, page_frames, keys) in [
        (1, 1, Keys::Numbered),
        (2, 1, Keys::Numbered),
        (3, 2, Keys::Numbered),
        (4, 16, Keys::Numbered),
        (5, 1, Keys::BigEndian),
        (6, 3, Keys::BigEndian),
        (7, 1, Keys::LittleEndian),
        (8, 1, Keys::References),
        (9, 2, Keys::References),
        (10, 1, Keys::Longest),
        (11, 1, Keys::Prefixes),
        (12, 1, Keys::Slots),
    ] {
        let random = &mut Random(seed);
        let (memory, log) = (Arc::new(MemoryDevice::new()), SimulatedDevice::new(long_log()));
        let device = Arc::new(log);
        let core = open::create(memory.clone(), &logged(page_frames, device.clone())).unwrap();
        let store = Store::from_core(core);
        let trees = ["one", "two"].map(|name| store.create_tree(name).unwrap());
        let mut from = None;
        let mut before: BTreeMap<PageRef, Vec<u8>> = BTreeMap::new();
        let mut loaded = 0;
        for _cut in 0..4 {
            for _ in 0..400 {
                let tree = random.below(2) as usize;
                change(random, &trees[tree], keys);
            }
            trees.iter().for_each(|tree| _ = tree.check().unwrap());
            let after = nodes(&store, &trees);
            let redone = redone(&records(&store, from));
            let mut unchanged = 0;
            for (page, bytes) in &after {
                node::check(bytes).unwrap();
                match (redone.get(page), before.get(page)) {
                    // A load has written it, and nothing has changed it since.
                    (None, _) if page::lsn(bytes) == 0 => loaded += 1,
                    (Some(made), _) => {
                        assert!(comparable(made) == comparable(bytes), "seed {seed}: {page}");
                    }
                    (None, Some(old)) => {
                        unchanged += 1;
                        assert!(comparable(old) == comparable(bytes), "seed {seed}: {page}");
                    }
                    (None, None) => panic!("seed {seed}: {page} has no image"),
                }
            }
            assert!(redone.len() > 2 && unchanged < after.len());
            if from.is_none() {
                let crashed = logged(page_frames, Arc::new(device.kill()));
                check_recovery(&crashed, memory.snapshot(), &entries(&trees));
            }
            before = after;
            from = Some(store.core.pages.redo_log.as_ref().unwrap().cut_at_end());
        }
        assert!(seed != 2 || loaded > 0, "a seed with a load");
        drop(trees);
        store.close().unwrap();
    }
}

/// A record that was damaged before its checksum was computed: redo refuses it, or makes another
/// page of it, and does nothing worse.
#[test]
fn no_record_does_harm() {
    let random = &mut Random(7);
    let store = logged_store(1);
    let trees = [store.create_tree("one").unwrap()];
    (0..300).for_each(|_| change(random, &trees[0], Keys::Numbered));
    let records = records(&store, None);
    let mut pages: BTreeMap<PageRef, Vec<u8>> = BTreeMap::new();
    let (mut refused, mut made) = (0, 0);
    for (lsn, record) in &records {
        for _ in 0..20 {
            let mut damaged = record.clone();
            for _ in 0..=random.below(3) {
                let at = random.index(damaged.len());
                match random.below(4) {
                    0 => damaged.truncate(at.max(1)),
                    1 => damaged[at] = random.pick(&[0, 1, 0x7f, 0x80, 0xff]),
                    _ => damaged[at] ^= 1 << random.below(8),
                }
            }
            let Ok(damaged) = GroupRecord::read(&damaged) else {
                refused += 1;
                continue;
            };
            for change in damaged.pages {
                let page = change.page;
                if page.frames > 64 {
                    continue;
                }
                let mut bytes = pages.get(&page).cloned().unwrap_or(vec![0; page.bytes()]);
                match redo(&change, *lsn, &mut bytes) {
                    Ok(()) => {
                        made += 1;
                        node::check_bounds(&bytes).unwrap();
                    }
                    Err(PageDamage { .. }) => refused += 1,
                }
            }
        }
        let record = GroupRecord::read(record).unwrap();
        record.freed.iter().for_each(|page| drop(pages.remove(page)));
        for change in record.pages {
            let bytes = pages.entry(change.page).or_insert_with(|| vec![0; change.page.bytes()]);
            redo(&change, *lsn, bytes).unwrap();
        }
    }
    assert!(refused > 100 && made > 100, "{refused} refused, {made} made");
}

/// A record of a value of which a small part changes has that part.
#[test]
fn a_record_has_what_changed_of_a_value() {
    let store = logged_store(1);
    let tree = store.create_tree("one").unwrap();
    let mut value = vec![7; 700];
    tree.insert(b"a", &value).unwrap();
    let len_of_next = |value: &[u8]| {
        let log = store.core.pages.redo_log.as_ref().unwrap();
        let before = log.end();
        tree.upsert(b"a", value).unwrap();
        log.end() - before
    };
    value[300..310].fill(8);
    value[699] = 9;
    let parts = len_of_next(&value);
    let same = len_of_next(&value);
    let whole = len_of_next(&[1; 700]);
    assert!(same < parts && parts < 100 && whole > 700, "{same}, {parts}, {whole}");
    // Half of the value, and one byte: too much.
    value = vec![1; 700];
    value[..351].fill(2);
    assert!(len_of_next(&value) > 700);
    let redone = redone(&records(&store, None));
    for (page, bytes) in nodes(&store, &[tree]) {
        assert_eq!(comparable(&redone[&page]), comparable(&bytes), "{page}");
    }
}

proptest! {
    #[test]
    fn changed_parts_are_all_that_changed(
        old in prop::collection::vec(0..3_u8, 0..200),
        changes in prop::collection::vec((0..200_usize, 0..3_u8), 0..20),
    ) {
        let mut new = old.clone();
        for (at, byte) in changes {
            new.get_mut(at).into_iter().for_each(|place| *place = byte);
        }
        let Some(parts) = changed_parts(&old, &new) else { return Ok(()) };
        let (mut made, mut bytes) = (old.clone(), 0);
        for part in parts {
            bytes += 7 + part.len();
            made[part.clone()].copy_from_slice(&new[part]);
        }
        prop_assert_eq!(made, new);
        prop_assert!(2 * bytes <= old.len());
    }
}

/// A record of its own could be the last one before a crash, and would leave pages that nothing
/// refers to.
#[test]
fn the_record_of_a_value_says_that_its_pages_are_in_use() {
    let store = logged_store(1);
    let value = vec![7; 3 << 20];
    let tree = store.create_tree("one").unwrap();
    for _ in 0..2 {
        let mut writer = tree.writer(b"key").unwrap();
        writer.write_all(&value).unwrap();
        writer.finish().unwrap();
    }
    let tree = store.create_tree("two").unwrap();
    let mut loader = tree.bulk_loader().unwrap();
    (0..3_u8).for_each(|key| loader.push_from(&[key], &value[..]).unwrap());
    loader.finish().unwrap();
    let mut taken = 0;
    for (_, record) in records(&store, None) {
        let record = GroupRecord::read(&record).unwrap();
        assert!(record.taken.is_empty() || !record.pages.is_empty(), "{record:?}");
        taken += record.taken.iter().map(|range| range.bytes()).sum::<usize>();
    }
    assert!(taken > 5 * value.len());
}

#[test]
fn an_edit_of_a_page_that_has_it_already_is_refused() {
    let store = logged_store(1);
    let tree = store.create_tree("one").unwrap();
    tree.insert(b"a", b"1").unwrap();
    tree.insert(b"b", b"2").unwrap();
    let records = records(&store, None);
    let (lsn, record) = records.last().unwrap();
    let record = GroupRecord::read(record).unwrap();
    let [change @ PageRecord { redo: Redo::Edits(_), .. }] = record.pages[..] else {
        panic!("{record:?}")
    };
    let mut bytes = redone(&records).remove(&change.page).unwrap();
    let damage = redo(&change, *lsn, &mut bytes).unwrap_err();
    assert!(damage.to_string().contains("newer than the record"), "{damage}");
}

/// The example of docs/log.md, "A record of a store".
#[test]
fn a_record_has_the_documented_bytes() {
    let page = PageRef::new(5, 1);
    let (mut edits, mut record) = (Vec::new(), Vec::new());
    push_edit(&mut edits, Edit::Insert { index: 0, key: b"k", payload: Payload::Inline(b"v") });
    RecordWriter::new(&mut record, &[page], &[]).edits(page, &edits);
    let range = [5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let documented: [&[u8]; 5] = [
        &[1, 0, 1, 0, 1, 0, 0, 0],
        &range,
        &range,
        &[1, 10, 0, 0, 0],
        &[1, 0, 0, 1, 0, 1, 1, 0, b'k', b'v'],
    ];
    assert_eq!(record, documented.concat());
}

#[test]
fn removed_values_are_read_as_they_were_written() {
    let pages = |first| [PageRef::new(first, 3), PageRef::new(first + 9, 1)];
    let value = |page| BlobRef { page: PageRef::new(page, 2), len: 1 << 30, piece_frames: 64 };
    let (values, edits) = ([(7, value(100)), (9, value(200))], [1, 2, 3]);
    let mut bytes = Vec::new();
    RecordWriter::removing(&mut bytes, &pages(10), &pages(30), &values)
        .edits(PageRef::new(50, 1), &edits);
    let group = GroupRecord::read(&bytes).unwrap();
    assert_eq!((&group.taken[..], &group.freed[..]), (&pages(10)[..], &pages(30)[..]));
    assert_eq!((&group.values[..], group.pages[0].redo), (&values[..], Redo::Edits(&edits)));
    let of_pages: Vec<_> =
        GroupRecord::pages_of(&bytes).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(of_pages, group.pages);
    for len in 0..bytes.len() {
        assert!(GroupRecord::read(&bytes[..len]).is_err(), "{len} bytes");
    }
    // A value that is not in pieces.
    let place = bytes.len() - edits.len() - 17 - 4;
    bytes[place..place + 4].fill(0);
    assert!(GroupRecord::read(&bytes).is_err());
}

/// A split in a run keeps the larger part in its page. The record says only where that part ends.
#[test]
fn a_split_in_a_run_logs_little() {
    for descending in [false, true] {
        let store = logged_store(1);
        let tree = store.create_tree("one").unwrap();
        let log = store.core.pages.redo_log.as_ref().unwrap();
        let key = |n: u64| if descending { u64::MAX - n } else { n }.to_be_bytes();
        (0..1000).for_each(|n| _ = tree.upsert(&key(n), &[7; 100]).unwrap());
        let (before, mut longest) = (log.end(), 0);
        for n in 1000..3000 {
            let before = log.end();
            tree.upsert(&key(n), &[7; 100]).unwrap();
            longest = longest.max(log.end() - before);
        }
        let each = (log.end() - before) / 2000;
        // With an image of a full leaf for each split it would be 273 bytes, and 4,249.
        assert!(each < 180 && longest < 600, "{each} bytes for each put, {longest} at most");
        let redone = redone(&records(&store, None));
        for (page, bytes) in nodes(&store, &[tree]) {
            assert_eq!(comparable(&redone[&page]), comparable(&bytes), "{page}");
        }
    }
}

/// The keys of a tree, of which `pages` has all nodes. Checks each node, and its fences.
fn keys_of(pages: &BTreeMap<PageRef, Vec<u8>>, page: PageRef, fences: Fences<'_>) -> Vec<Vec<u8>> {
    let bytes = &pages[&page];
    node::check(bytes).unwrap();
    let node = Node::new(&bytes[..]);
    let (lower, upper) = (node.lower().unwrap(), node.upper().unwrap());
    assert_eq!(Fences { lower, upper }, fences, "{page}");
    let count = node.count().unwrap();
    let keys: Vec<_> = (0..count).map(|index| node.key(index).unwrap().to_vec()).collect();
    if node.level().unwrap() == 0 {
        return keys;
    }
    let of_child = |index: usize| {
        let before = index.checked_sub(1).map(|before| &keys[before][..]);
        let fences = Fences {
            lower: before.or(lower),
            upper: keys.get(index).map(|key| &key[..]).or(upper),
        };
        keys_of(pages, PageRef::new(node.child(index).unwrap(), page.frames), fences)
    };
    (0..=count).flat_map(of_child).collect()
}

/// How a tree stores its values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    /// In the leaves.
    Short,
    /// Each in a page of its own.
    Whole,
    Pieces,
}

/// How many keys a tree had at a crash, the file, and the log.
type Crash = (usize, Vec<u8>, SimulatedDevice);

impl Values {
    fn options(self, log: Arc<SimulatedDevice>) -> Options {
        // The pool decides about the length of pieces: here two frames.
        let pool_bytes = if self == Values::Pieces { 256 << 10 } else { 8 << 20 };
        let options = Options::new().pool_bytes(pool_bytes);
        Options { log: Some(log), evictors: 0, cut_in_background: false, ..options }
    }

    fn of(self, key: &[u8]) -> Vec<u8> {
        let len = match self {
            Values::Short => 200,
            Values::Whole => 5000,
            Values::Pieces => 9000,
        };
        key.iter().rev().zip(0..).map(|(byte, at)| byte ^ at).cycle().take(len).collect()
    }

    /// What the pages of a value have, in bytes.
    fn page_bytes(self) -> u64 {
        match self {
            Values::Short => 0,
            Values::Whole => 2 * 4096,
            // Two pieces, and an index.
            Values::Pieces => (2 * 2 + 1) * 4096,
        }
    }

    fn put(self, tree: &Tree, key: &[u8]) {
        let value = self.of(key);
        if self != Values::Pieces {
            return tree.insert(key, &value).unwrap();
        }
        let mut writer = tree.writer(key).unwrap();
        writer.write_all(&value).unwrap();
        writer.finish_new().unwrap();
    }

    /// Puts the keys into a tree, with a checkpoint amid it. Each split is redone to a sound tree.
    /// Returns what crashes left of the store.
    fn check_splits(self, keys: &[Vec<u8>]) -> Vec<Crash> {
        let device = SimulatedOptions { segments: 256, segment_blocks: 64, ..Default::default() };
        let device = Arc::new(SimulatedDevice::new(device));
        let memory = Arc::new(MemoryDevice::new());
        let store = Store::create_on(memory.clone(), &self.options(device.clone())).unwrap();
        let trees = [store.create_tree("tree").unwrap()];
        let log = store.core.pages.redo_log.as_ref().unwrap();
        let (mut before, mut crashes) = (BTreeMap::new(), Vec::new());
        for (put, key) in keys.iter().enumerate() {
            if put == keys.len() / 2 {
                store.core.pages.cut_log_if(log, |_| true).unwrap();
                before = nodes(&store, &trees);
            }
            self.put(&trees[0], key);
            if put % 80 == 79 {
                store.sync().unwrap();
                crashes.push((put + 1, memory.snapshot(), device.kill()));
            }
        }
        let stat = trees[0].stat().unwrap();
        assert!(stat.height > 2);
        assert_eq!(stat.blob_page_bytes, keys.len() as u64 * self.page_bytes());

        let (root, mut pages) = (trees[0].tree_ref().root_page(), before);
        // Splits of nodes of which the log has no image since the checkpoint, of others, of inner
        // nodes.
        let mut splits = [0; 3];
        for (lsn, record) in records(&store, Some(log.newest_cut())) {
            let record = GroupRecord::read(&record).unwrap();
            // No page of a value, either.
            assert!(record.freed.is_empty() && record.values.is_empty(), "{self:?}: {record:?}");
            let is_split = record.pages.len() > 1;
            let images = record.pages.iter().filter(|page| matches!(page.redo, Redo::Image { .. }));
            let images = images.count();
            let pages_of_split: Vec<_> = record.pages.iter().map(|change| change.page).collect();
            for change in record.pages {
                let bytes = pages.entry(change.page).or_insert(vec![0xa5; change.page.bytes()]);
                redo(&change, lsn, bytes).unwrap();
            }
            if is_split {
                let is_inner = |page: &PageRef| Node::new(&pages[page][..]).level() != Ok(0);
                splits[usize::from(images == 1)] += 1;
                splits[2] += u32::from(pages_of_split.iter().all(is_inner));
                let found = keys_of(&pages, root, Fences::default());
                let mut expected = keys[..found.len()].to_vec();
                expected.sort();
                assert_eq!(found, expected);
            }
        }
        assert!(splits.iter().all(|count| *count > 0), "{self:?}: {splits:?}");
        crashes
    }

    /// Recovers a store, has it split more nodes, and recovers it from another crash.
    fn check_recovery(self, keys: &[Vec<u8>], crash: Crash, is_pending: bool) {
        let (mut count, mut file, mut log) = crash;
        for _ in 0..2 {
            let (memory, device) = (Arc::new(MemoryDevice::from_snapshot(file)), Arc::new(log));
            let mut options = self.options(device.clone());
            // Memory for two pages, or for all.
            options.recovery_bytes = is_pending.then_some(8 << 10);
            let store = Store::open_on(memory.clone(), &options).unwrap();
            assert!(store.recovery().is_some());
            let pending = &store.core.pages.redo_log.as_ref().unwrap().pending;
            assert!(!is_pending || pending.left() > 0);
            let tree = store.tree("tree").unwrap();
            let more = keys.len().min(count + 40);
            keys[count..more].iter().for_each(|key| self.put(&tree, key));
            count = more;
            store.sync().unwrap();
            (file, log) = (memory.snapshot(), device.kill());
            let mut expected = keys[..count].to_vec();
            expected.sort();
            let mut found = 0;
            for entry in tree.entries() {
                let (key, value) = entry.unwrap();
                assert!(*key == expected[found] && *value == self.of(&key), "{self:?}, {count}");
                found += 1;
            }
            assert_eq!(found, count);
            let report = store.check(&mut |_| ()).unwrap();
            assert!(report.is_sound() && report.lost_pages == 0, "{self:?}, {count}: {report:?}");
        }
    }
}

/// Inserts in runs and in no order split leaves and the nodes above them. After each record the
/// redone pages are a sound tree with the first entries, whether a page has its image from before
/// the checkpoint or after it. A store that crashes there has these entries, and their values
/// wherever these lie.
#[test]
fn splits_are_redone_over_several_levels() {
    // Long keys: an inner node has some 17 children.
    let key = |n: u32| [&[b'p'; 200][..], &n.to_be_bytes()].concat();
    let two_runs = |n: u32, keys: u32| n % 2 * keys + n / 2;
    let scattered = |n: u32, _: u32| n.wrapping_mul(0x9e37_79b1);
    let orders: [&dyn Fn(u32, u32) -> u32; 4] =
        [&|n, _| n, &|n, keys| keys - n, &two_runs, &scattered];
    let runs = &orders[..2];
    for (values, count, orders) in [
        (Values::Short, 2400, &orders[..]),
        (Values::Whole, 700, runs),
        (Values::Pieces, 700, runs),
    ] {
        for order in orders {
            let keys: Vec<_> = (0..count).map(|n| key(order(n, count))).collect();
            let crashes = values.check_splits(&keys);
            for (index, crash) in crashes.into_iter().enumerate() {
                values.check_recovery(&keys, crash, index % 2 == 1);
            }
        }
    }
}

/// Slots of inner nodes have children, and no values. The head of this separator is what the length
/// and the flag of a value would be in a leaf.
#[test]
fn the_record_of_a_merge_frees_only_the_merged_leaf() {
    let store = logged_store(1);
    let tree = store.create_tree("one").unwrap();
    // Four to a leaf. The separator at slot 2 is 65,556.
    let keys = (0..8_u32).chain(65_553..65_559);
    keys.for_each(|key| tree.insert(&key.to_be_bytes(), &[7; 900]).unwrap());
    let leaves = tree.stat().unwrap().leaf_pages;
    let root = store.core.pages.pool.fix_shared(tree.tree_ref().root_page()).unwrap();
    assert_eq!(&*Node::new(&root[..]).key(2).unwrap(), &65_556_u32.to_be_bytes());
    drop(root);
    (65_553..65_556_u32).for_each(|key| assert!(tree.remove(&key.to_be_bytes()).unwrap()));
    assert_eq!(tree.stat().unwrap().leaf_pages, leaves - 1);
    let records = records(&store, None);
    let freed = records.iter().flat_map(|(_, record)| GroupRecord::read(record).unwrap().freed);
    let freed: Vec<_> = freed.collect();
    assert!(matches!(freed[..], [PageRef { id, frames: 1 }] if id.0 > 1), "{freed:?}");
}

/// A group of another thread has ended in its midst since the change began. The log does not know
/// how that group has changed pages, so it must not get more edits of them.
#[test]
fn a_change_that_began_before_a_failure_is_not_logged() {
    let store = logged_store(1);
    let tree = store.create_tree("one").unwrap();
    tree.insert(b"key", b"before").unwrap();
    let (pages, log) = (&store.core.pages, store.core.pages.redo_log.as_ref().unwrap());
    let end = log.end();
    let changed = tree.update(b"key", |value| {
        pages.file.poison_for("a change has failed");
        value.copy_from_slice(b"behind");
    });
    assert!(matches!(changed, Err(crate::Error::Poisoned(_))), "{changed:?}");
    assert_eq!(log.end(), end);
    assert!(matches!(pages.log_freed(&[PageRef::new(7, 1)]), Err(crate::Error::Poisoned(_))));
}

/// A recovery would refuse the log, or lose pages.
#[test]
fn ranges_that_no_group_can_free_are_refused() {
    let store = logged_store(1);
    let tree = store.create_tree("one").unwrap();
    (0..4).for_each(|key| tree.insert(&[key], &[key; 9000]).unwrap());
    let pages = &store.core.pages;
    let value = |key: u8| {
        let leaf = pages.pool.fix_shared(tree.tree_ref().root_page()).unwrap();
        let place = Node::new(&leaf[..]).payload_place(key.into()).unwrap();
        BlobRef::decode(Node::new(&leaf[..]).payload(place).unwrap()).unwrap()
    };
    let [one, two] = [value(1).page, value(2).page];
    let check = |freed: &[PageRef], changed: &[PageRef]| {
        pages.check_ranges(&[], freed, &[], changed.iter().copied()).is_ok()
    };
    let end = pages.pool.with_space(|space| space.end());
    let root = tree.tree_ref().root_page();
    assert!(check(&[two, one], &[root]));
    // Twice, in part twice, of the headers, beyond the end, of no pages, and changed.
    assert!(!check(&[one, two, one], &[]));
    assert!(!check(&[one, PageRef::new(one.id.0 + 1, 1)], &[]));
    assert!(!check(&[PageRef::new(0, 20_493)], &[]));
    assert!(!check(&[PageRef::new(end - 1, 2)], &[]));
    assert!(!check(&[PageRef { id: one.id, frames: 0 }], &[]));
    assert!(!check(&[one, root], &[root]));
    assert!(pages.check_ranges(&[one], &[one], &[], [].into_iter()).is_err());
    let removed = BlobRef { page: PageRef::new(end, 1), len: 9000, piece_frames: 1 };
    assert!(pages.check_ranges(&[], &[], &[(1, removed)], [].into_iter()).is_err());
    // Free by now.
    assert!(tree.remove(&[1]).unwrap());
    store.sync().unwrap();
    pages.pool.trim_space().unwrap();
    assert!(!check(&[one], &[]) && check(&[two], &[]));
}
