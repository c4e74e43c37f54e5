//! A process with little address space. The limit is the process', so this is its only test.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::Arc;

use common::{generation, new_page, open};
use vellum_pool::device::MemoryDevice;
use vellum_pool::{Pool, PoolError, PoolOptions, PoolSize, RawPages, Space, Translation};

/// Bytes of address space that the process has at this moment.
fn address_space() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 4096
}

/// The error of a pool that does not open.
fn refused(space: Space, options: PoolOptions) -> PoolError {
    let device = Arc::new(MemoryDevice::new());
    Pool::open(device, Arc::new(RawPages), space, options).map(drop).unwrap_err()
}

/// There is no room for slots besides. A pool that has the choice does without them. One that has
/// not says what it lacks, and why, and so does one of a file that is too long.
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
    let before = open(
        Arc::new(MemoryDevice::new()),
        PoolOptions { size: PoolSize::Bytes(1 << 20), ..options(Translation::Table) },
    );
    let page = new_page(&before, 1, 7);
    let error = refused(Space::new(0), options(Translation::Table));
    assert!(matches!(error, PoolError::NoSlots { slots: 524_288, .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("the 524288 slots of the pool"), "{message}");
    assert!(message.contains("RLIMIT_AS") && message.contains("by the MMU"), "{message}");
    let error = refused(Space::new(1 << 30), options(Translation::Mmu));
    assert!(error.to_string().contains("RLIMIT_AS"), "{error}");
    // A pool that is open goes on.
    assert_eq!(generation(&before, page), Some(7));
    let pool = open(Arc::new(MemoryDevice::new()), options(Translation::Auto));
    new_page(&pool, 1, 1);
    assert_eq!(pool.translation(), Translation::Mmu);
}
