//! The cost of a checkpoint of a file with many free extents.
#![allow(clippy::unwrap_used)]

mod common;

use common::{assert_sound, memory_store};
use vellum_testing::allocations::{Counting, allocated_bytes};

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn the_free_map_is_encoded_once_and_not_for_each_of_its_pages() {
    let (_, store) = memory_store(40_000, 1);
    let tree = store.create_tree("t").unwrap();
    // Each value has a page of its own, so removing every other value leaves a free extent for
    // each.
    let values = 16_000u32;
    for number in 0..values {
        tree.insert(&number.to_be_bytes(), &[1; 2000]).unwrap();
    }
    store.sync().unwrap();
    for number in (0..values).step_by(2) {
        tree.remove(&number.to_be_bytes()).unwrap();
    }
    let before = allocated_bytes();
    store.sync().unwrap();
    // The map takes 16 bytes for each extent. A checkpoint copies up to 1 MiB of changed pages. All
    // else that it allocates is less than ten times the map.
    let (allocated, map) = (allocated_bytes() - before, 16 * u64::from(values) / 2);
    assert!(allocated < (1 << 20) + 10 * map, "{allocated} bytes for a map of {map}");
    assert_sound(&store);
}
