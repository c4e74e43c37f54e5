//! The memory that it takes to drop a tree, or to clear it.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write;

use common::{assert_sound, memory_store};
use vellum_testing::allocations::{Counting, most_held};

#[global_allocator]
static COUNTING: Counting = Counting;

/// The peak of memory while a tree of `values` blobs is dropped, and while another one is cleared.
fn taken(values: u32) -> [u64; 2] {
    let (_, store) = memory_store(128, 1);
    let trees = ["dropped", "cleared"].map(|name| store.create_tree(name).unwrap());
    // One tree after the other, so that freed pages are adjacent: otherwise the map of free ranges
    // would take memory for each page.
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
        // A list of the values would take 24 bytes for each: 670,000 bytes more.
        assert!(many < few + 100_000, "{few} bytes for 2,000 values, {many} for 30,000");
    }
}

#[test]
fn removing_a_streamed_value_takes_no_memory_for_each_of_its_pieces() {
    const PIECES: usize = 20_000;
    let (_, store) = memory_store(32, 1);
    let tree = store.create_tree("t").unwrap();
    // Two values that are written in turn have no adjacent pieces.
    let mut writers = [b"a", b"b"].map(|key| tree.writer(key).unwrap());
    for _ in 0..PIECES {
        writers.iter_mut().for_each(|writer| writer.write_all(&[7; 4000]).unwrap());
    }
    for writer in writers {
        writer.finish().unwrap();
    }
    let used = store.stat().unwrap().used_pages;
    // Removing the first value leaves a free range for each piece, which takes memory in the map.
    // Removing the second one joins these ranges.
    assert!(tree.remove(b"a").unwrap());
    let taken = most_held(|| assert!(tree.remove(b"b").unwrap()));
    // A list of the pieces would take 16 bytes for each.
    assert!(taken < 4 * PIECES as u64, "{taken} bytes");
    assert!(used - store.stat().unwrap().used_pages > 2 * PIECES as u64 * 95 / 100);
    assert_sound(&store);
}
