//! Nothing but lookups that find their pages in memory, for tools that count: `get_hit LOOKUPS`.
//!
//! 100,000 entries of 8 and 120 bytes; every lookup is one of `Tree::get_into`. All of them are in
//! one function that is never inlined, so that `valgrind --tool=callgrind
//! --toggle-collect='get_hit::lookups'` finds it. docs/hit-path.md has the commands and what they
//! say.

use std::error::Error;
use std::sync::Arc;

use vellum::{Options, Store, Tree};
use vellum_pool::device::MemoryDevice;

const ENTRIES: u64 = 100_000;

#[inline(never)]
fn lookups(tree: &Tree, count: u64) -> vellum::Result<u64> {
    let (mut random, mut sum, mut value) = (1u64, 0, Vec::with_capacity(120));
    for _ in 0..count {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let key = ((random >> 32) * ENTRIES) >> 32;
        if tree.get_into(&key.to_be_bytes(), &mut value)? {
            sum += u64::from(value[7]);
        }
    }
    Ok(sum)
}

fn main() -> Result<(), Box<dyn Error>> {
    let count: u64 = std::env::args().nth(1).map_or(Ok(100_000), |count| count.parse())?;
    let options = Options::new().pool_bytes(64 << 20).evictors(0);
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options)?;
    let tree = store.create_tree("data")?;
    for key in 0..ENTRIES {
        let mut value = [0; 120];
        value[..8].copy_from_slice(&key.to_be_bytes());
        tree.insert(&key.to_be_bytes(), &value)?;
    }
    let sum = lookups(&tree, count)?;
    println!("{count} lookups, sum {sum}");
    Ok(())
}
