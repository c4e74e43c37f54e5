//! What huge pages bring: random optimistic reads of 8 bytes in pools without huge pages, with
//! huge pages for the states alone, and for pages and states; round by round in turn.
//!
//! `cargo run --release -p vellum-pool --example huge_reads -- [GIB] [ROUNDS] [POOLS]`: 2 GiB for
//! each pool, 9 rounds and `small,states,all` unless told. All pools are in memory at a time.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum_pool::{
    HugePages, PAGE_SIZE, PageReader, PageRef, Pool, PoolError, PoolOptions, PoolSize, RawPages,
    Space, device::MemoryDevice,
};

const READS: u64 = 10_000_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: f64| {
        arguments.next().map_or(Ok(default), |text| text.parse().map_err(|_| "a number, please"))
    };
    let pages = (number(2.0)? * f64::from(1 << 30)) as u64 / PAGE_SIZE as u64;
    let rounds = number(9.0)? as usize;
    let wanted = arguments.next().unwrap_or_else(|| "small,states,all".to_owned());
    let mut pools = Vec::new();
    for name in wanted.split(',') {
        let (huge_pages, evictors) = match name {
            "small" => (HugePages::Off, 1),
            "states" => (HugePages::Auto, 0),
            _ => (HugePages::Auto, 1),
        };
        pools.push((name, filled(pages, huge_pages, evictors)?, Vec::new()));
    }
    for round in 0..=rounds as u64 {
        for (_, pool, times) in &mut pools {
            let time = read(pool, pages, round)?;
            if round > 0 {
                times.push(time);
            }
        }
    }
    println!("{pages} pages, ns per read (median of {rounds} rounds, and the spread):");
    let mut first = None;
    for (name, _, times) in &mut pools {
        times.sort_by(f64::total_cmp);
        let (median, least, most) = (times[rounds / 2], times[0], times[rounds - 1]);
        let ratio = *first.get_or_insert(median) / median;
        println!("  {name:<8} {median:6.1} ({least:.1}..{most:.1})  {ratio:.2} times as fast");
    }
    println!("  64 pages {:5.1}", read(&pools[0].1, 64, 1)?);
    Ok(())
}

/// A pool that holds so many pages, all resident and, where it has huge pages, collapsed.
fn filled(pages: u64, huge_pages: HugePages, evictors: u64) -> Result<Pool, PoolError> {
    let size = PoolSize::Bytes((pages + pages / 8 + 1024) * PAGE_SIZE as u64);
    let options = PoolOptions { size, huge_pages, evictors, ..PoolOptions::default() };
    let device = Arc::new(MemoryDevice::new());
    let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options)?;
    for page in 0..pages {
        pool.allocate(1)?[..8].copy_from_slice(&page.to_le_bytes());
    }
    let started = Instant::now();
    let wanted = if huge_pages == HugePages::Auto && evictors > 0 { pages / 512 } else { 0 };
    while pool.huge_page_stats().collapsed < wanted && started.elapsed().as_secs() < 120 {
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{:?} after {:?}", pool.huge_page_stats(), started.elapsed());
    Ok(pool)
}

/// Nanoseconds per read.
fn read(pool: &Pool, pages: u64, seed: u64) -> Result<f64, PoolError> {
    let mut random = seed;
    let mut sum = 0_u64;
    let started = Instant::now();
    for _ in 0..READS {
        // Splitmix64; the next page does not depend on what was read, as in the paper's table 2.
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = mixed ^ (mixed >> 27);
        let page = (u128::from(mixed) * u128::from(pages)) >> 64;
        let guard = pool.optimistic(PageRef::new(page as u64, 1))?;
        let value = guard.bytes().u64((mixed % 512) as usize * 8).unwrap_or(0);
        sum = sum.wrapping_add(if guard.validate().is_ok() { value } else { 1 });
    }
    black_box(sum);
    Ok(started.elapsed().as_nanos() as f64 / READS as f64)
}
