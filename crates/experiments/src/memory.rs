//! The memory of a pool without its pages: for each page of the file that was ever used, and for
//! each frame, by the kernel's count.
//!
//! The file has no blocks (its pages read as zeros), so it may be large.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use vellum_pool::device::{FileDevice, FileOptions};
use vellum_pool::{
    PAGE_SIZE, PageId, PageReader, PageRef, Pool, PoolOptions, PoolSize, RawPages, Space,
    Translation,
};

use super::{Context, Experiment};
use vellum_bench::machine::kib;
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const MEMORY: Experiment = Experiment {
    name: "memory",
    shows: "bytes of memory for each stored and each cached page, without the page itself",
    source: "SIGMOD'23, section 3.6; 28 bytes for each cached page, 8 for each stored one",
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
    let (half, nearly_all) = (frames / 2, frames * 15 / 16);
    read(context, &pool, 0..half)?;
    let of_half = Beside::of(&pool, before)?;
    read(context, &pool, half..nearly_all)?;
    let of_nearly_all = Beside::of(&pool, before)?;
    read(context, &pool, nearly_all..pages)?;
    let last = Beside::of(&pool, before)?;
    // What the cached pages take is not the stored pages'.
    let resident = pool.stats().resident_frames;
    let of_stored = |last: u64, of_nearly_all: u64| {
        let of_resident = of_nearly_all as f64 / nearly_all as f64 * resident as f64;
        (last as f64 - of_resident).max(0.0) / (pages - resident) as f64
    };

    let opening = opened.anonymous.saturating_sub(before.anonymous);
    let all = last.anonymous + last.page_tables;
    let tables = "kernel's page tables";
    let cached = |used: &str, cached: u64, beside: &Beside| {
        let name = |part: &str| format!("cached page, {used} of the pool in use: {part}");
        let all_else = per(beside.anonymous, cached);
        [
            Row::count(name(tables), per(beside.page_tables, cached), "bytes"),
            Row::count(name("all else"), all_else, "bytes"),
        ]
    };
    let mut rows = Vec::new();
    rows.extend(cached("15/16", nearly_all, &of_nearly_all));
    rows.extend(cached("half", half, &of_half));
    let page_tables = of_stored(last.page_tables, of_nearly_all.page_tables);
    let all_else = of_stored(last.anonymous, of_nearly_all.anonymous);
    rows.extend([
        Row::count(format!("stored page that was cached: {tables}"), page_tables, "bytes"),
        Row::count("stored page that was cached: all else", all_else, "bytes"),
        Row::count("all, when the pool was opened", opening as f64, "bytes"),
        Row::count("all, per byte of the pool", per(all, frames * PAGE_SIZE as u64), "bytes"),
    ]);
    let note = format!(
        "{pages} pages ({} GiB), pool of {frames} frames, found by {} at the end. Cached pages \
         were used once, in order, before any page was evicted. Stored pages are those that \
         have left after every page was used once, in order: the pool gives back the state \
         words of 512 neighbours that have all left memory. State words are 8 bytes each; \
         memory for them and for page tables comes in pieces of 4 KiB, or of 2 MiB where huge \
         pages back them. By RssAnon and VmPTE, less the memory of the pool's pages by the \
         kernel's page tables.",
        (pages * PAGE_SIZE as u64) >> 30,
        match pool.translation() {
            Translation::Table => "a table",
            _ => "the MMU",
        },
    );
    let notes = vec![note];
    Ok(Outcome { rows, notes, ..Outcome::default() })
}

/// What the process has taken since `before`, without the pool's pages.
struct Beside {
    anonymous: u64,
    page_tables: u64,
}

impl Beside {
    fn of(pool: &Pool, before: Taken) -> Result<Beside> {
        let now = Taken::now()?;
        // The memory of slots counts, whether a page is in it or not.
        let of_pages = pool.kernel_resident_pages()? * PAGE_SIZE as u64;
        Ok(Beside {
            anonymous: now.anonymous.saturating_sub(before.anonymous + of_pages),
            page_tables: now.page_tables.saturating_sub(before.page_tables),
        })
    }
}

fn per(bytes: u64, pages: u64) -> f64 {
    bytes as f64 / pages as f64
}

/// Uses each of these pages once, in order.
fn read(context: &Context<'_>, pool: &Pool, pages: Range<u64>) -> Result<()> {
    let end = pages.end as usize;
    for page in pages {
        if page % 4096 == 0 {
            context.progress.at(page as usize, end, "using every page");
        }
        let page = PageRef { id: PageId(page), frames: 1 };
        pool.read(page, |bytes| Ok(bytes.u64(0)))?.map_err(|_| anyhow!("{page} has no bytes"))?;
    }
    Ok(())
}
