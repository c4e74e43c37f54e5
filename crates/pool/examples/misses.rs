//! What a miss costs on each backend: random reads of pages, most of which are not in the pool, so
//! that as many leave; round by round in turn.
//!
//! `cargo run --release -p vellum-pool --example misses -- PATH [THREADS] [ROUNDS] [FACTOR]
//! [FRAMES]`: PATH is a file to be made, or a block device to be overwritten; 2 threads, 7 rounds,
//! data of 8 times the pool, and a pool of 4,096 frames (16 MiB) unless told.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum_pool::device::{Device, FileDevice, FileOptions};
use vellum_pool::{
    BackendChoice, PAGE_SIZE, PageRef, Pool, PoolOptions, PoolSize, RawPages, Space,
};
use vellum_vm::probe;

/// How long a round is.
const ROUND: Duration = Duration::from_millis(700);

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let path = PathBuf::from(arguments.next().ok_or("where? Name a file or a block device")?);
    let mut number = |default: u64| {
        arguments.next().map_or(Ok(default), |text| text.parse().map_err(|_| "a number, please"))
    };
    let (threads, rounds, factor) = (number(2)?, number(7)? as usize, number(8)?);
    let frames = number(4096)?;
    let (size, pages) = (PoolSize::Bytes(frames * PAGE_SIZE as u64), frames * factor);
    let device = FileDevice::create(&path, FileOptions::default())?;
    device.resize(pages)?;
    println!("{:?}", device.info());
    let device: Arc<dyn Device> = Arc::new(device);
    write(&device, pages, size)?;
    let mut rates: Vec<_> = probe::backends().into_iter().map(|kind| (kind, Vec::new())).collect();
    for round in 0..=rounds as u64 {
        for (kind, rates) in &mut rates {
            let backend = BackendChoice::Only(*kind);
            let options = PoolOptions { size, backend, ..PoolOptions::default() };
            let space = Space::new(pages);
            let pool = Pool::open(device.clone(), Arc::new(RawPages), space, options)?;
            read(&pool, pages, threads, round, ROUND / 4)?;
            let rate = read(&pool, pages, threads, round, ROUND)?;
            if round > 0 {
                rates.push(rate);
            }
        }
    }
    println!("misses a second, {threads} threads: median of {rounds} rounds, and the spread");
    let mut first = None;
    for (kind, rates) in &mut rates {
        rates.sort_by(f64::total_cmp);
        let (median, least, most) = (rates[rounds / 2], rates[0], rates[rounds - 1]);
        let ratio = median / *first.get_or_insert(median);
        println!("  {kind:<16} {median:9.0} ({least:.0}..{most:.0})  {ratio:.2} times as many");
    }
    drop(device);
    Ok(())
}

/// Writes every page: what was never written is read without the storage.
fn write(device: &Arc<dyn Device>, pages: u64, size: PoolSize) -> Outcome<()> {
    let options = PoolOptions { size, ..PoolOptions::default() };
    let pool = Pool::open(device.clone(), Arc::new(RawPages), Space::new(pages), options)?;
    for page in 0..pages {
        pool.fix_exclusive(PageRef::new(page, 1))?[0] = 1;
    }
    Ok(pool.sync()?)
}

/// Random reads by so many threads; misses a second.
fn read(pool: &Pool, pages: u64, threads: u64, seed: u64, time: Duration) -> Outcome<f64> {
    let before = pool.stats().misses;
    let start = Instant::now();
    let work = |thread: u64| {
        let mut state = seed << 8 | thread | 1;
        while start.elapsed() < time {
            for _ in 0..16 {
                // Marsaglia's generator; only the places have to look random.
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let page = pool.fix_shared(PageRef::new(state % pages, 1))?;
                std::hint::black_box(page[0]);
            }
        }
        Ok::<(), vellum_pool::PoolError>(())
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        all.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
    })?;
    Ok((pool.stats().misses - before) as f64 / start.elapsed().as_secs_f64())
}
