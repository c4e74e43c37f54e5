//! A process with little address space. The limit is the process', so this is its only test.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::Arc;

use common::{new_page, open};
use vellum_pool::device::MemoryDevice;
use vellum_pool::{PoolOptions, PoolSize, Translation};

/// Bytes of address space that the process has at this moment.
fn address_space() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 4096
}

/// There is no room for slots besides. A pool that has the choice does without them.
#[test]
fn a_pool_opens_where_there_are_no_addresses_for_slots() {
    if std::env::var_os("VELLUM_TRANSLATION").is_some() {
        return println!("skipped: the translation is given");
    }
    let limit = address_space() + (1 << 30);
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    rustix::process::setrlimit(
        rustix::process::Resource::As,
        rustix::process::Rlimit { current: Some(limit.rlim_cur), maximum: Some(limit.rlim_max) },
    )
    .unwrap();
    let options = |translation| PoolOptions {
        size: PoolSize::Bytes(2 << 30),
        translation,
        ..PoolOptions::default()
    };
    let pool = open(Arc::new(MemoryDevice::new()), options(Translation::Auto));
    new_page(&pool, 1, 1);
    assert_eq!(pool.translation(), Translation::Mmu);
}
