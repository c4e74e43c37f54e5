//! How much memory it takes to drop a tree, or to empty it.
#![allow(clippy::unwrap_used)]

mod common;

use common::{assert_sound, memory_store};
use vellum_testing::allocations::{Counting, most_held};

#[global_allocator]
static COUNTING: Counting = Counting;

/// The most that it takes to drop a tree of so many values with pages of their own, and to empty
/// another one.
fn taken(values: u32) -> [u64; 2] {
    let (_, store) = memory_store(128, 1);
    let trees = ["dropped", "cleared"].map(|name| store.create_tree(name).unwrap());
    // One tree after the other: a map of free ranges with a range for each page would take memory.
    for tree in &trees {
        tree.bulk_load((0..values).map(|n| (n.to_be_bytes(), [7; 1500]))).unwrap();
    }
    let taken = [
        most_held(|| store.drop_tree("dropped").unwrap()),
        most_held(|| trees[1].clear().unwrap()),
    ];
    assert_sound(&store);
    taken
}

#[test]
fn dropping_a_tree_takes_no_memory_for_each_of_its_values() {
    let (few, many) = (taken(2_000), taken(30_000));
    for (few, many) in few.into_iter().zip(many) {
        // A list of the values would take 24 bytes for each, 670,000 more.
        assert!(many < few + 100_000, "{few} bytes for 2,000 values, {many} for 30,000");
    }
}
