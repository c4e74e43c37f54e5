//! Trees of several levels that shrink to one leaf, in pages with large numbers: redo of the
//! records of merges gives the pages, and a store that crashes amid them is recovered.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum_log::SimulatedDevice;
use vellum_pool::PageRef;
use vellum_pool::device::MemoryDevice;
use vellum_testing::random::Random;

use super::record::{GroupRecord, Redo};
use super::tests::{check_recovery, comparable, entries, logged, long_log, nodes, records, redone};
use crate::node::{Node, NodeLimits};
use crate::page::blob::BlobRef;
use crate::store::open;
use crate::{Store, Tree};

/// The page from which on trees have their nodes. The low half of a few numbers after it is the
/// length of a reference to a value, and the high half is the flag of one.
const FIRST: u64 = 0x1_0000;

/// Makes the key with a number.
type MakeKey = fn(u32) -> Vec<u8>;

/// A key as long as can be: an inner node has few children.
fn longest(number: u32) -> Vec<u8> {
    let mut key = number.wrapping_mul(0x9e37_79b1).to_be_bytes().to_vec();
    key.resize(NodeLimits::for_page_size(4096).max_key, b'f');
    key
}

/// Its head looks like the length and the flag of a reference.
fn slot(number: u32) -> Vec<u8> {
    let head = [0x0001_0014_u32, 0x8003_0014][number as usize % 2];
    [head, number / 2].map(u32::to_be_bytes).concat()
}

fn reference(number: u32) -> Vec<u8> {
    let page = PageRef::new(u64::from(2 + number), 1);
    BlobRef::whole(page, 3000).encode().into()
}

fn number(number: u32) -> Vec<u8> {
    (64_000 + number).to_be_bytes().into()
}

/// One in some values has a page of its own.
fn value(number: u32) -> Vec<u8> {
    vec![number as u8; if number.is_multiple_of(37) { 3000 } else { 900 }]
}

/// Makes a tree smaller by one of some operations.
fn shrink(random: &mut Random, tree: &Tree, key: MakeKey, count: u32) {
    let key = |random: &mut Random| key(random.below(count.into()) as u32);
    match random.below(40) {
        0..34 => _ = tree.remove(&key(random)).unwrap(),
        34 => (0..10).for_each(|_| drop(tree.pop_first().unwrap())),
        35 => (0..10).for_each(|_| drop(tree.pop_last().unwrap())),
        36 if random.once_in(4) => {
            let (one, other) = (key(random), key(random));
            let first = tree.range(one.min(other)..).take(60);
            let keys: Vec<_> = first.map(|entry| entry.unwrap().0).collect();
            let Some((from, to)) = keys.first().zip(keys.last()) else { return };
            let _ = tree.remove_range(from.clone()..=to.clone()).unwrap();
        }
        37 if random.once_in(8) => {
            let keep = random.next();
            let keeps = |key: &[u8]| {
                key.iter().fold(keep, |sum, byte| Random(sum ^ u64::from(*byte)).next()) % 8 > 0
            };
            let _ = tree.retain(|key, _| keeps(key)).unwrap();
        }
        _ => drop(tree.take(&key(random)).unwrap()),
    }
}

/// How many records merge inner nodes: they free one, and change only inner nodes.
fn inner_merges(records: &[(u64, Vec<u8>)]) -> usize {
    let is_inner = |bytes: &[u8]| Node::new(bytes).level().is_ok_and(|level| level > 0);
    let mut levels = BTreeMap::new();
    let mut merges = 0;
    for (_, record) in records {
        let record = GroupRecord::read(record).unwrap();
        for change in &record.pages {
            if let Redo::Image { bytes, .. } = change.redo {
                levels.insert(change.page, is_inner(bytes));
            }
        }
        let is_inner = |page: &PageRef| levels.get(page) == Some(&true);
        let changes_inner = record.pages.iter().all(|change| is_inner(&change.page));
        merges += usize::from(changes_inner && record.freed.iter().any(is_inner));
    }
    merges
}

#[test]
fn merges_are_redone_over_several_levels() {
    let kinds: [(MakeKey, u32); 4] =
        [(longest, 800), (slot, 3000), (reference, 3000), (number, 3000)];
    for (seed, (key, count)) in (1..).zip(kinds) {
        let random = &mut Random(seed);
        let (memory, device) = (Arc::new(MemoryDevice::new()), SimulatedDevice::new(long_log()));
        let device = Arc::new(device);
        let core = open::create(memory.clone(), &logged(1, device.clone())).unwrap();
        let store = Store::from_core(core);
        let trees = ["one", "two"].map(|name| store.create_tree(name).unwrap());
        let end = store.core.pages.pool.with_space(|space| space.end());
        let before = store.core.pages.pool.allocate_place((FIRST - end) as u32).unwrap();
        (0..count).for_each(|n| _ = trees[0].upsert(&key(n), &value(n)).unwrap());
        let mut heights = vec![trees[0].stat().unwrap().height];
        let mut left = 4;
        for step in 0.. {
            (0..20).for_each(|_| shrink(random, &trees[0], key, count));
            let height = trees[0].stat().unwrap().height;
            let is_lower = heights.last() != Some(&height);
            if is_lower || step % 50 == 0 {
                let redone = redone(&records(&store, None));
                for (page, bytes) in nodes(&store, &trees) {
                    assert!(comparable(&redone[&page]) == comparable(&bytes), "{seed}: {page}");
                }
            }
            if is_lower && left > 0 {
                left -= 1;
                let crashed = logged(1, Arc::new(device.kill()));
                check_recovery(&crashed, memory.snapshot(), &entries(&trees));
            }
            if is_lower {
                heights.push(height);
            }
            if height == 1 {
                break;
            }
        }
        assert!(heights[0] > 2, "{seed}: {heights:?}");
        let merges = inner_merges(&records(&store, None));
        assert!(merges > 0, "{seed}: no inner nodes were merged");
        store.core.pages.pool.free_place(before).unwrap();
    }
}
