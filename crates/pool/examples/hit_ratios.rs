//! Hit ratios of the policies in a pool that evicts as it does in use: pages that are dirty, and
//! pages in slots, which `vellum bench policy` does not know.
//!
//! `cargo run --release -p vellum-pool --example hit_ratios -- [FRAMES]`: a pool of 8,192 frames
//! unless told, and data of 8 times as many pages. One thread makes 60 accesses for each frame, of
//! which the second half counts. The threads that evict in the background make the last digit vary.

use std::ops::Range;
use std::sync::Arc;

use vellum_pool::device::{Device, MemoryDevice};
use vellum_pool::{
    PAGE_SIZE, PageRef, Pool, PoolOptions, PoolSize, RawPages, Replacement, Space, Translation,
};
use vellum_testing::random::Random;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// From 0 to 1, and less than 1.
fn fraction(random: &mut Random) -> f64 {
    random.below(1 << 53) as f64 / (1_u64 << 53) as f64
}

/// What the accesses go to.
#[derive(Clone, Copy)]
enum Workload {
    Uniform,
    Zipf,
    /// A hot set of nine tenths of the pool, and a scan with this share of the accesses, which
    /// reads pages ahead or not. Only accesses to the hot set count.
    Scanned(f64, ReadAhead),
    Loop,
}

#[derive(Clone, Copy, PartialEq)]
enum ReadAhead {
    No,
    /// As far as scans of a store do.
    Yes,
}

/// How often all dirty pages are written.
#[derive(Clone, Copy)]
enum Syncs {
    Never,
    /// When there were so many accesses for each frame.
    Every(u64),
}

/// In their order: the name, the accesses, the share of them that change the page, and syncs.
const WORKLOADS: [(&str, Workload, f64, Syncs); 9] = [
    ("uniform", Workload::Uniform, 0.0, Syncs::Never),
    ("zipf 0.99", Workload::Zipf, 0.0, Syncs::Never),
    ("hot set, half scan", Workload::Scanned(0.5, ReadAhead::No), 0.0, Syncs::Never),
    ("read ahead", Workload::Scanned(0.5, ReadAhead::Yes), 0.0, Syncs::Never),
    ("the same, 80 % dirty", Workload::Scanned(0.5, ReadAhead::No), 0.8, Syncs::Never),
    ("dirty, and synced", Workload::Scanned(0.5, ReadAhead::No), 0.8, Syncs::Every(2)),
    ("hot set, a fifth scan", Workload::Scanned(0.2, ReadAhead::No), 0.0, Syncs::Never),
    ("read ahead", Workload::Scanned(0.2, ReadAhead::Yes), 0.0, Syncs::Never),
    ("loop over 1.1 pools", Workload::Loop, 0.0, Syncs::Never),
];

fn main() -> Outcome<()> {
    let frames = match std::env::args().nth(1) {
        Some(text) => text.parse::<u64>()?,
        None => 8_192,
    };
    print!("{:14}", "");
    WORKLOADS.iter().for_each(|(name, ..)| print!("{name:>23}"));
    println!();
    for translation in [Translation::Table, Translation::Mmu] {
        for replacement in [Replacement::Clock, Replacement::S3Fifo] {
            print!("{:14}", format!("{translation:?} {replacement:?}"));
            for (_, workload, dirty, syncs) in WORKLOADS {
                let options = PoolOptions { translation, replacement, ..PoolOptions::default() };
                print!("{:23.4}", hits(workload, (dirty, syncs), frames, options)?);
            }
            println!();
        }
    }
    Ok(())
}

/// The share of the counted accesses that are hits.
fn hits(
    workload: Workload,
    (dirty, syncs): (f64, Syncs),
    frames: u64,
    options: PoolOptions,
) -> Outcome<f64> {
    let pages = 8 * frames;
    let device = MemoryDevice::new();
    device.resize(pages)?;
    let options = PoolOptions { size: PoolSize::Bytes(frames * PAGE_SIZE as u64), ..options };
    let pool = Pool::open(Arc::new(device), Arc::new(RawPages), Space::new(pages), options)?;
    let mut random = Random(0x5eed);
    let mut next = accesses(workload, frames, pages);
    let (mut counted, mut hits) = (0_u64, 0_u64);
    for number in 0..60 * frames {
        let Access { page, counts, ahead } = next(number, &mut random);
        let page = PageRef::new(page, 1);
        let ahead: Vec<PageRef> = ahead.map(|id| PageRef::new(id, 1)).collect();
        if let Syncs::Every(accesses) = syncs
            && number % (accesses * frames) == 0
        {
            pool.sync()?;
        }
        pool.evict_and_prefetch(&ahead);
        if counts && number >= 30 * frames {
            counted += 1;
            hits += u64::from(pool.is_resident(page));
        }
        match fraction(&mut random) < dirty {
            true => pool.fix_exclusive(page)?[0] = 1,
            false => _ = std::hint::black_box(pool.fix_shared(page)?[0]),
        }
    }
    Ok(hits as f64 / counted as f64)
}

struct Access {
    page: u64,
    counts: bool,
    /// Pages to read ahead before.
    ahead: Range<u64>,
}

impl Access {
    fn to(page: u64) -> Access {
        Access { page, counts: true, ahead: 0..0 }
    }
}

/// Maps an access's number to it.
type Accesses = Box<dyn FnMut(u64, &mut Random) -> Access>;

fn accesses(workload: Workload, frames: u64, pages: u64) -> Accesses {
    match workload {
        Workload::Uniform => Box::new(move |_, random| Access::to(random.below(pages))),
        Workload::Zipf => {
            let sums: Vec<f64> = (1..=pages)
                .scan(0.0, |sum, rank| {
                    *sum += (rank as f64).powf(-0.99);
                    Some(*sum)
                })
                .collect();
            let all = sums[sums.len() - 1];
            Box::new(move |_, random| {
                let drawn = fraction(random) * all;
                let rank = sums.partition_point(|sum| *sum < drawn) as u64;
                // Neighbours in rank lie apart.
                Access::to(rank * 0x9e37_79b1 % pages)
            })
        }
        Workload::Scanned(share, read_ahead) => {
            let (hot, mut page, mut read) = (frames * 9 / 10, pages, pages);
            let (most, block) = ((frames / 8).min(1_024), (frames / 64).min(64));
            Box::new(move |_, random| {
                if fraction(random) >= share {
                    return Access::to(random.below(hot));
                }
                page += 1;
                if page >= pages {
                    (page, read) = (hot, hot);
                }
                let from = read;
                if read_ahead == ReadAhead::Yes && read <= page + most - block {
                    read = (page + most).min(pages);
                }
                Access { page, counts: false, ahead: from..read }
            })
        }
        Workload::Loop => Box::new(move |number, _| Access::to(number % (frames + frames / 10))),
    }
}
