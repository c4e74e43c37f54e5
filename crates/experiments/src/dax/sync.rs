//! Stores to a large file on persistent memory that become durable every so many bytes: by the
//! kernel, for a mapping or for the file, and by the program itself.

use std::cell::Cell;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use vellum_dax::{Access, Backend, Durability};

use super::large::{Interface, Large, Layout, Stores, UNIT, in_each_layout, stamp};
use super::read_method::table_and_heap;
use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const DAX_SYNC: Experiment = Experiment {
    name: "dax-sync",
    shows: "stores to a large file that are made durable every 4 KiB to 2 MiB: calls, mmap, tables",
    source: "MICRO'22, section V.B, figure 6",
    run,
};

/// Bytes that are written between two syncs.
const SIZES: [u64; 4] = [4 << 10, 32 << 10, 256 << 10, 2 << 20];

/// Bytes of a store.
const STORE: u64 = 4 << 10;

/// Rounds that count.
const ROUNDS: usize = 3;

/// Who makes stores durable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// The kernel, for the range that was written (`msync`), or by `fdatasync` without a mapping.
    Range,
    /// The kernel, for the file (`fsync`).
    File,
    /// The program, by stores past the CPU's caches.
    Program,
}

#[derive(Clone, Copy)]
struct Contest<'a> {
    name: &'static str,
    interface: Interface<'a>,
    by: By,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let folder = context.make_directory("dax-sync")?;
    let mut outcome = Outcome::default();
    let length = context.pick(16 << 20, 64 << 20);
    let heap = table_and_heap(&folder, &mut outcome)?;
    let contest = |name, interface, by| Contest { name, interface, by };
    let mmap = Interface::Mapped(Backend::Mmap);
    let mut contests = vec![
        contest("write, fdatasync", Interface::Calls, By::Range),
        contest("mmap, msync", mmap, By::Range),
        contest("mmap, fsync", mmap, By::File),
        contest("mmap, own stores", mmap, By::Program),
    ];
    if let Some(heap) = &heap {
        let table = Interface::Mapped(Backend::Table);
        contests.extend([
            contest("file table, msync", table, By::Range),
            contest("file table, fsync", table, By::File),
            contest("file table, nosync", table, By::Program),
            contest("ephemeral, msync", Interface::Heap(heap), By::Range),
        ]);
    }
    let path = folder.join("file");
    let make = |layout: Layout| layout.make(&path, length);
    in_each_layout(&path, &mut outcome, make, |layout, outcome| {
        SIZES.iter().try_for_each(|size| measure(context, outcome, &path, layout, *size, &contests))
    })?;
    outcome.notes.push(format!(
        "A sample maps a file of {} MiB, writes it in parts of 4 KiB, from the beginning, and \
         makes it durable after so many bytes. Stores of the program's own go past the CPU's \
         caches, the others through them. Ratios are to write and fdatasync.",
        length >> 20
    ));
    Ok(outcome)
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    path: &Path,
    layout: Layout,
    size: u64,
    contests: &[Contest<'_>],
) -> Result<()> {
    let most = context.pick(200, 1_000);
    let version = Cell::new(size);
    let contestants = contests
        .iter()
        .map(|contest| {
            let version = &version;
            let name = format!("{}, every {} KiB, {}", contest.name, size >> 10, layout.name());
            Contestant::new(name, move || {
                version.set(version.get() + 1);
                rate(contest, path, size, most, version.get())
            })
        })
        .collect();
    let samples = alternate(ROUNDS, &context.progress, contestants)?;
    for of_way in &samples {
        outcome.rows.push(Row::of(of_way, "MiB/s").against(of_way, &samples[0]));
    }
    Ok(())
}

/// MiB a second, for `most` syncs or until the end of the file.
fn rate(contest: &Contest<'_>, path: &Path, size: u64, most: u64, version: u64) -> Result<f64> {
    let durability = match contest.by {
        By::Program => Durability::Flushed,
        By::Range | By::File => Durability::Synced,
    };
    let stores = match contest.by {
        By::Program => Stores::PastCaches,
        By::Range | By::File => Stores::Cached,
    };
    let large = Large::open(path, contest.interface, durability)?;
    let syncs = (large.file().length()? / size).min(most);
    let mut bytes = vec![0; STORE as usize];
    let mut written = Vec::new();
    let start = Instant::now();
    let view = large.view(Access::ReadWrite)?;
    for part in (0..syncs * size).step_by(size as usize) {
        for at in (part..part + size).step_by(STORE as usize) {
            stamp(at / UNIT, version, &mut bytes);
            view.copy_in(at, &bytes, stores)?;
        }
        match contest.by {
            By::Range => view.sync_range(part, size as usize)?,
            By::File => large.file().sync()?,
            By::Program => {}
        }
        written.push(part);
    }
    drop(view);
    let seconds = start.elapsed().as_secs_f64();
    // The next sample finds no pages that are to be written back.
    large.file().file().sync_all()?;
    large.check(version, &written)?;
    Ok((syncs * size) as f64 / f64::from(1 << 20) / seconds)
}
