//! New files on persistent memory that a program writes whole: by `write`, through `mmap`, through
//! file tables, and with blocks that a pool has zeroed before.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::fs::FallocateFlags;
use vellum_dax::{
    Access, Backend, BackendChoice, DaxFile, Durability, Options, ZeroPool, ZeroPoolOptions,
    copy_past_caches,
};

use super::read_method::table_and_heap;
use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const DAX_APPEND: Experiment = Experiment {
    name: "dax-append",
    shows: "new files on persistent memory, written whole, with and without zeroed blocks",
    source: "MICRO'22, sections III.B, IV.E and V.B, figure 7",
    run,
};

/// Bytes of a file.
const SIZES: [usize; 5] = [4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20];

/// How the bytes of a new file come to be there.
#[derive(Clone, Copy)]
struct Way {
    /// `None`: by `write`.
    mapped_by: Option<Backend>,
    from_pool: bool,
    durable: Durable,
}

/// Who makes the file durable before it is closed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durable {
    Not,
    Fsync,
    /// The program's own stores, past the caches.
    Stores,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let folder = context.make_directory("dax-append")?;
    let mut outcome = Outcome::default();
    let table = table_and_heap(&folder, &mut outcome)?.map(|_| Backend::Table);
    let mmap = Some(Backend::Mmap);
    let mut ways = Vec::new();
    for durable in [Durable::Not, Durable::Fsync] {
        let mut way = |mapped_by, from_pool| ways.push(Way { mapped_by, from_pool, durable });
        way(mmap, false);
        way(None, false);
        way(mmap, true);
        if table.is_some() {
            way(table, false);
            way(table, true);
        }
    }
    for from_pool in [false, true] {
        ways.push(Way { mapped_by: table.or(mmap), from_pool, durable: Durable::Stores });
    }
    for size in SIZES {
        measure(context, &mut outcome, &folder, size, &ways)?;
    }
    outcome.notes.push(
        "A sample makes files, writes each whole, past the CPU's caches, and closes it. mmap \
         reserves the blocks by fallocate before. A pool is full before a sample and zeroes \
         nothing meanwhile. Ratios are to mmap, with fsync where the row is durable."
            .to_owned(),
    );
    Ok(outcome)
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    folder: &Path,
    size: usize,
    ways: &[Way],
) -> Result<()> {
    let count = ((32 << 20) / size).clamp(4, context.pick(100, 1_000));
    let bytes: Vec<u8> = (0..size).map(|at| at as u8 | 1).collect();
    let contestants = ways
        .iter()
        .map(|way| {
            let name = format!("{}, {} KiB", name_of(*way), size >> 10);
            let bytes = &bytes;
            Contestant::new(name, move || rate(*way, folder, bytes, count))
        })
        .collect();
    let samples = alternate(context.rounds(), &context.progress, contestants)?;
    let first =
        |is_durable| ways.iter().position(|way| (way.durable != Durable::Not) == is_durable);
    for (of_way, way) in samples.iter().zip(ways) {
        let against = first(way.durable != Durable::Not).unwrap_or_default();
        outcome.rows.push(Row::of(of_way, "files/s").against(of_way, &samples[against]));
    }
    Ok(())
}

fn name_of(way: Way) -> String {
    let by = match way.mapped_by {
        None => "write",
        Some(Backend::Mmap) => "mmap",
        Some(Backend::Table) => "file table",
    };
    let pool = if way.from_pool { ", zeroed before" } else { "" };
    let durable = match way.durable {
        Durable::Not => "",
        Durable::Fsync => ", fsync",
        Durable::Stores => ", nosync",
    };
    format!("{by}{pool}{durable}")
}

/// Files a second.
fn rate(way: Way, folder: &Path, bytes: &[u8], count: usize) -> Result<f64> {
    let length = bytes.len() as u64;
    let place = folder.join("pool");
    let pool = way.from_pool.then(|| -> Result<ZeroPool> {
        let files = vec![(length, u32::try_from(count)?)];
        let filler = ZeroPool::fill(&place, &ZeroPoolOptions { files, rate: u64::MAX })?;
        let is_full = filler.wait_until_full(Duration::from_secs(300))?;
        ensure!(is_full, "the pool does not become full");
        Ok(ZeroPool::open(&place)?)
    });
    let pool = pool.transpose()?;
    let paths: Vec<PathBuf> = (0..count).map(|number| folder.join(format!("{number}"))).collect();
    let start = Instant::now();
    for path in &paths {
        write_file(way, pool.as_ref(), path, bytes)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    if let Some(pool) = pool {
        ensure!(pool.stat()?.missed == 0, "the pool had no file for the program");
        fs::remove_dir_all(&place)?;
    }
    ensure!(fs::read(&paths[count / 2])? == bytes, "the file has other bytes");
    paths.iter().try_for_each(fs::remove_file)?;
    Ok(count as f64 / seconds)
}

/// Makes a file with these bytes.
fn write_file(way: Way, pool: Option<&ZeroPool>, path: &Path, bytes: &[u8]) -> Result<()> {
    let new = || OpenOptions::new().read(true).write(true).create_new(true).open(path);
    let Some(backend) = way.mapped_by else {
        let mut file = new()?;
        file.write_all(bytes)?;
        if way.durable == Durable::Fsync {
            file.sync_all()?;
        }
        return Ok(());
    };
    let durability = match way.durable {
        Durable::Stores => Durability::Flushed,
        _ => Durability::Synced,
    };
    let options = Options { backend: BackendChoice::Only(backend), durability };
    let length = bytes.len() as u64;
    let file = match pool {
        Some(pool) => pool.create(path, length, &options)?,
        None => without_pool(new()?, length, backend, &options)?,
    };
    let mapping = file.map(Access::ReadWrite)?;
    match way.durable {
        Durable::Stores => mapping.write_durably(0, bytes)?,
        _ => {
            // SAFETY: the file is that long, and only this thread has it.
            #[allow(unsafe_code)]
            unsafe {
                copy_past_caches(bytes, mapping.base().as_ptr());
            }
        }
    }
    if way.durable == Durable::Fsync {
        file.sync()?;
    }
    Ok(())
}

/// A new file of zeros: for `mmap` of blocks that are reserved, for a table of blocks that are
/// written.
fn without_pool(file: File, length: u64, backend: Backend, options: &Options) -> Result<DaxFile> {
    if backend == Backend::Mmap {
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, length)?;
    }
    let file = DaxFile::from_file(file, options)?;
    file.extend(length)?;
    Ok(file)
}
