//! Nothing but hits, for tools that count: `hit_path WAY READS`.
//!
//! Ways: `plain` (8 bytes of a random page through a pointer), `optimistic` (the same through
//! [`Pool::optimistic`] and `validate`), `shared` and `exclusive` (through a lock). Each way is one
//! function that is never inlined, so that `valgrind --tool=callgrind --toggle-collect=` finds it.
//! docs/hit-path.md has the commands and what they say.

use std::error::Error;
use std::sync::Arc;

use vellum_pool::device::MemoryDevice;
use vellum_pool::{PageReader, PageRef, Pool, PoolError, PoolOptions, PoolSize, RawPages, Space};

/// Pages, all of them resident: 256 KiB.
const PAGES: u64 = 64;

/// One step of a random walk over the words of all pages: page and offset.
#[inline(always)]
fn step(random: &mut u64) -> (u64, usize) {
    *random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
    ((*random >> 40) % PAGES, (*random >> 48) as usize & 0xff8)
}

#[inline(never)]
fn plain(words: &[u64], reads: u64) -> u64 {
    let (mut random, mut sum) = (1, 0u64);
    for _ in 0..reads {
        let (page, offset) = step(&mut random);
        sum = sum.wrapping_add(words[page as usize * 512 + offset / 8]);
    }
    sum
}

#[inline(never)]
fn optimistic(pool: &Pool, reads: u64) -> Result<u64, PoolError> {
    let (mut random, mut sum) = (1, 0u64);
    for _ in 0..reads {
        let (page, offset) = step(&mut random);
        let guard = pool.optimistic(PageRef::new(page, 1))?;
        let word = guard.bytes().u64(offset).unwrap_or_default();
        if guard.validate().is_ok() {
            sum = sum.wrapping_add(word);
        }
    }
    Ok(sum)
}

#[inline(never)]
fn shared(pool: &Pool, reads: u64) -> Result<u64, PoolError> {
    let (mut random, mut sum) = (1, 0u64);
    for _ in 0..reads {
        let (page, offset) = step(&mut random);
        let word = (&*pool.fix_shared(PageRef::new(page, 1))?).u64(offset);
        sum = sum.wrapping_add(word.unwrap_or_default());
    }
    Ok(sum)
}

#[inline(never)]
fn exclusive(pool: &Pool, reads: u64) -> Result<u64, PoolError> {
    let (mut random, mut sum) = (1, 0u64);
    for _ in 0..reads {
        let (page, offset) = step(&mut random);
        let word = (&*pool.fix_exclusive(PageRef::new(page, 1))?).u64(offset);
        sum = sum.wrapping_add(word.unwrap_or_default());
    }
    Ok(sum)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let way = arguments.first().map_or("optimistic", String::as_str);
    let reads: u64 = arguments.get(1).map_or(Ok(1_000_000), |count| count.parse())?;

    let options = PoolOptions { size: PoolSize::Bytes(4 << 20), evictors: 0, ..Default::default() };
    let pool =
        Pool::open(Arc::new(MemoryDevice::new()), Arc::new(RawPages), Space::new(0), options)?;
    for number in 0..PAGES {
        pool.allocate(1)?[..8].copy_from_slice(&number.to_le_bytes());
    }
    let words: Vec<u64> = (0..PAGES * 512).collect();
    let sum = match way {
        "plain" => plain(&words, reads),
        "optimistic" => optimistic(&pool, reads)?,
        "shared" => shared(&pool, reads)?,
        "exclusive" => exclusive(&pool, reads)?,
        other => return Err(format!("no way {other}: plain, optimistic, shared, exclusive").into()),
    };
    println!("{way}: {reads} reads, sum {sum}");
    Ok(())
}
