//! One large file on persistent memory that a program reads and writes in small parts: by calls, in
//! mappings, and by its table.

use std::cell::Cell;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use vellum_dax::{Access, Backend, Durability};

use super::large::{
    Interface, Large, Layout, Stores, UNIT, View, in_each_layout, is_stamped, stamp,
};
use super::read_method::table_and_heap;
use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::workload::values::Random;

/// The experiment.
pub const DAX_REPEAT: Experiment = Experiment {
    name: "dax-repeat",
    shows: "one large file, read and written in parts of 1 and 4 KiB: calls, mmap, file tables",
    source: "MICRO'22, sections III.A and V.B, figures 1c and 5",
    run,
};

/// Bytes that an operation copies.
const SIZES: [u64; 2] = [1 << 10, 4 << 10];

/// Rounds that count.
const ROUNDS: usize = 3;

/// Parts of the file that are looked at after it was written.
const CHECKED: u64 = 64;

/// What an operation does, and with which part of the file.
#[derive(Clone, Copy)]
struct Pattern {
    size: u64,
    access: Access,
    is_random: bool,
}

#[derive(Clone, Copy)]
struct Contest<'a> {
    name: &'static str,
    interface: Interface<'a>,
    durability: Durability,
    /// Whether the mapping is there, and all its pages were used before.
    again: bool,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let folder = context.make_directory("dax-repeat")?;
    let mut outcome = Outcome::default();
    let length = context.pick(16 << 20, 64 << 20);
    let table = table_and_heap(&folder, &mut outcome)?;
    let contest = |name, interface| {
        let durability = Durability::Synced;
        Contest { name, interface, durability, again: false }
    };
    let again = |name, interface| Contest { again: true, ..contest(name, interface) };
    let mmap = Interface::Mapped(Backend::Mmap);
    let mut contests = vec![
        contest("calls", Interface::Calls),
        contest("mmap", mmap),
        contest("mmap, populated", Interface::Populated),
        again("mmap, later pass", mmap),
    ];
    if let Some(heap) = &table {
        let table = Interface::Mapped(Backend::Table);
        let nosync = Durability::Flushed;
        contests.extend([
            contest("file table", table),
            Contest { durability: nosync, ..contest("file table, nosync", table) },
            contest("ephemeral", Interface::Heap(heap)),
            again("file table, later pass", table),
        ]);
    }
    let path = folder.join("file");
    let make = |layout: Layout| layout.make(&path, length);
    in_each_layout(&path, &mut outcome, make, |layout, outcome| {
        for access in [Access::Read, Access::ReadWrite] {
            for size in SIZES {
                for is_random in [false, true] {
                    let pattern = Pattern { size, access, is_random };
                    measure(context, outcome, &path, layout, pattern, &contests)?;
                }
            }
        }
        Ok(())
    })?;
    outcome.notes.push(format!(
        "A file of {} MiB. A sample maps it, does as many operations as it has parts of that size, \
         and unmaps it; in a later pass it is mapped, and was used as a whole before. Its table is \
         there. Stores go past the CPU's caches, and the file is made durable after the sample. \
         Ratios are to calls.",
        length >> 20
    ));
    Ok(outcome)
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    path: &Path,
    layout: Layout,
    pattern: Pattern,
    contests: &[Contest<'_>],
) -> Result<()> {
    let writes = pattern.access == Access::ReadWrite;
    let what = format!(
        "{} of {} KiB, {}, {}",
        if writes { "writes" } else { "reads" },
        pattern.size >> 10,
        if pattern.is_random { "random" } else { "sequential" },
        layout.name(),
    );
    // Files that are read are as they were made.
    let version = Cell::new(0);
    let contestants = contests
        .iter()
        .filter(|contest| writes || contest.durability == Durability::Synced)
        .map(|contest| {
            let version = &version;
            Contestant::new(format!("{}, {what}", contest.name), move || {
                version.set(version.get() + u64::from(writes));
                rate(contest, path, pattern, version.get())
            })
        })
        .collect();
    let samples = alternate(ROUNDS, &context.progress, contestants)?;
    for of_way in &samples {
        outcome.rows.push(Row::of(of_way, "operations/s").against(of_way, &samples[0]));
    }
    Ok(())
}

/// Operations a second.
fn rate(contest: &Contest<'_>, path: &Path, pattern: Pattern, version: u64) -> Result<f64> {
    let large = Large::open(path, contest.interface, contest.durability)?;
    let before = if contest.again { Some(large.view(pattern.access)?) } else { None };
    let parts = large.file().length()? / pattern.size;
    if let Some(view) = &before {
        pass(view, Pattern { is_random: false, ..pattern }, parts, version)?;
    }
    let start = Instant::now();
    let view = before.map_or_else(|| large.view(pattern.access), Ok)?;
    let used = pass(&view, pattern, parts, version)?;
    drop(view);
    let seconds = start.elapsed().as_secs_f64();
    // The next sample finds no pages that are to be written back.
    large.file().sync()?;
    if pattern.access == Access::ReadWrite {
        large.check(version, &used)?;
    }
    Ok(parts as f64 / seconds)
}

/// As many operations as the file has parts. Returns some of the places that they used.
fn pass(view: &View<'_>, pattern: Pattern, parts: u64, version: u64) -> Result<Vec<u64>> {
    let mut random = Random::new(5);
    let mut bytes = vec![0; pattern.size as usize];
    let mut used = Vec::new();
    for number in 0..parts {
        let part = if pattern.is_random { random.below(parts) } else { number };
        let at = part * pattern.size;
        match pattern.access {
            Access::Read => {
                view.copy_out(at, &mut bytes)?;
                // A file that was written has other versions, but is not read any more.
                ensure!(is_stamped(at / UNIT, version, &bytes), "other bytes at {at}");
            }
            Access::ReadWrite => {
                stamp(at / UNIT, version, &mut bytes);
                view.copy_in(at, &bytes, Stores::PastCaches)?;
            }
        }
        if number % parts.div_ceil(CHECKED) == 0 {
            used.push(at);
        }
    }
    Ok(used)
}
