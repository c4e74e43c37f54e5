//! One kind of work on many entries in memory, for tools that count: `bulk WORK ENTRIES`.
//!
//! Keys of 12 bytes (tenant, time) and values of 100, as `vellum bench bulk-work` has them. The
//! work is in one function that is never inlined, so that `valgrind --tool=callgrind
//! --toggle-collect='bulk::work'` finds it. docs/benchmarks.md has the commands and what they say.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;

use vellum::{Options, Store, Tree};
use vellum_pool::device::MemoryDevice;

const TENANTS: u32 = 100;

fn key(tenant: u32, time: u64) -> [u8; 12] {
    let mut key = [0; 12];
    key[..4].copy_from_slice(&tenant.to_be_bytes());
    key[4..].copy_from_slice(&time.to_be_bytes());
    key
}

/// Does the work; returns how many entries it concerned.
#[inline(never)]
fn work(tree: &Tree, name: &str) -> vellum::Result<u64> {
    let mut count = 0;
    match name {
        "pop-first" => {
            while black_box(tree.pop_first()?).is_some() {
                count += 1;
            }
        }
        "pop-last" => {
            while black_box(tree.pop_last()?).is_some() {
                count += 1;
            }
        }
        "read" => {
            let mut entries = tree.range(..);
            while let Some(entry) = entries.next_entry()? {
                black_box(entry);
                count += 1;
            }
        }
        "read-bounded" => {
            let mut entries = tree.range([0]..[255]);
            while let Some(entry) = entries.next_entry()? {
                black_box(entry);
                count += 1;
            }
        }
        "read-back" => {
            let mut entries = tree.range(..);
            while let Some(entry) = entries.next_entry_back()? {
                black_box(entry);
                count += 1;
            }
        }
        "remove-range" => {
            count = tree.remove_range(key(TENANTS / 4, 0)..key(TENANTS * 3 / 4, 0))?;
        }
        "retain" => count = tree.retain(|key, _| key[11] % 4 != 1)?,
        "extract-if" => {
            for entry in tree.extract_if(.., |key, _| key[11] % 4 == 1) {
                black_box(entry?);
                count += 1;
            }
        }
        "len" => count = tree.stat()?.entries,
        _ => {}
    }
    Ok(count)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().ok_or("which work?")?;
    let entries: u64 = arguments.next().map_or(Ok(100_000), |count| count.parse())?;
    let options = Options::new().pool_bytes(128 << 20).evictors(0);
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options)?;
    let tree = store.create_tree("data")?;
    for tenant in 0..TENANTS {
        for time in 0..entries / u64::from(TENANTS) {
            tree.insert(&key(tenant, time), &[time as u8; 100])?;
        }
    }
    let count = work(&tree, &name)?;
    println!("{name}: {count} entries");
    Ok(())
}
