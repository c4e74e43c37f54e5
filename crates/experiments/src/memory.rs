//! The memory of a pool without its pages: for each page of the file that was ever used, and for
//! each frame, by the kernel's count.
//!
//! The file has no blocks (its pages read as zeros), so it may be large.

use std::fs::File;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use vellum_pool::device::{FileDevice, FileOptions};
use vellum_pool::{
    PAGE_SIZE, PageId, PageReader, PageRef, Pool, PoolOptions, PoolSize, RawPages, Space,
};

use super::{Context, Experiment};
use vellum_bench::machine::kib;
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const MEMORY: Experiment = Experiment {
    name: "memory",
    shows: "bytes of memory for each stored and each cached page, without the page itself",
    source: "SIGMOD'23, section 3.6: 16 bytes for each stored page",
    run,
};

/// Pages of the file for each frame of the pool.
const PAGES_PER_FRAME: u64 = 8;

/// The memory of the process, in bytes.
#[derive(Clone, Copy)]
struct Taken {
    anonymous: u64,
    page_tables: u64,
}

impl Taken {
    fn now() -> Result<Taken> {
        let of = |name| {
            let bytes = kib("/proc/self/status", name).map(|kib| kib * 1024);
            bytes.with_context(|| format!("no {name} in /proc/self/status"))
        };
        Ok(Taken { anonymous: of("RssAnon")?, page_tables: of("VmPTE")? })
    }
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let pages: u64 = context.pick(128 << 10, 2 << 20);
    let frames = pages / PAGES_PER_FRAME;
    let path = context.make_directory("memory")?.join("pages");
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    file.set_len(pages * PAGE_SIZE as u64).context("making the file long")?;

    let before = Taken::now()?;
    let device = FileDevice::open(&path, FileOptions::default())?;
    let size = PoolSize::Bytes(frames * PAGE_SIZE as u64);
    let options = PoolOptions { size, read_only: true, ..PoolOptions::default() };
    let pool = Pool::open(Arc::new(device), Arc::new(RawPages), Space::new(pages), options)?;
    let opened = Taken::now()?;
    for page in 0..pages {
        if page % 4096 == 0 {
            context.progress.at(page as usize, pages as usize, "using every page");
        }
        let page = PageRef { id: PageId(page), frames: 1 };
        pool.read(page, |bytes| Ok(bytes.u64(0)))?.map_err(|_| anyhow!("{page} has no bytes"))?;
    }
    let used = Taken::now()?;
    let resident = pool.stats().resident_frames * PAGE_SIZE as u64;

    let beside = (used.anonymous - before.anonymous).saturating_sub(resident);
    let of_frames = opened.anonymous.saturating_sub(before.anonymous);
    let states = 8 * pages;
    let tables = used.page_tables.saturating_sub(before.page_tables);
    let per = |bytes: u64, pages: u64| bytes as f64 / pages as f64;
    let rows = vec![
        Row::count("stored page: kernel's page tables", per(tables, pages), "bytes"),
        Row::count(
            "stored page: all else that grew while every page was used",
            per(beside.saturating_sub(of_frames), pages),
            "bytes",
        ),
        Row::count("cached page: taken when the pool was opened", per(of_frames, frames), "bytes"),
        Row::count("all, per byte of the pool", per(beside + tables, 1) / resident as f64, "bytes"),
    ];
    let note = format!(
        "{pages} pages ({} GiB), pool of {frames} frames, every page used once. State words are 8 \
         bytes each, {} MiB; memory for them and for page tables comes in pieces of 4 KiB, or of 2 \
         MiB where huge pages back them, so a page that was never used costs nothing unless a \
         neighbour was. By RssAnon and VmPTE.",
        (pages * PAGE_SIZE as u64) >> 30,
        states >> 20
    );
    Ok(Outcome { rows, notes: vec![note], ..Outcome::default() })
}
