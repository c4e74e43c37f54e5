//! Files on persistent memory that a program opens, reads once and closes: by `read`, by `mmap`,
//! and in a heap of ephemeral mappings.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use vellum_dax::{Backend, DaxFile, Heap, Options};

use super::aged;
use super::kernel::{KeptBound, extents, shootdowns};
use super::read_method::{bytes_of, heap, heaps_by_table};
use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::FileMapping;

/// The experiment.
pub const DAX_ONCE: Experiment = Experiment {
    name: "dax-once",
    shows: "small files opened, read once and closed: read, mmap, ephemeral mappings",
    source: "MICRO'22, sections III, IV.B, IV.C and V.B",
    run,
};

/// The same on a file system that has seen many files come and go.
pub const DAX_ONCE_AGED: Experiment = Experiment {
    name: "dax-once-aged",
    shows: "the same as dax-once in an aged file system",
    source: "MICRO'22, sections III and V.B, figures 1a and 4",
    run: run_aged,
};

/// Bytes of a file.
const SIZES: [usize; 5] = [4 << 10, 32 << 10, 128 << 10, 1 << 20, 4 << 20];

/// Mappings of an open file in a row.
const TIMES_ALONE: usize = 50;

/// Two sets of files: tables of the one are in use all the time, those of the other as long as an
/// attachment is there.
struct Files {
    size: usize,
    used: Vec<PathBuf>,
    unused: Vec<PathBuf>,
    _tables: Vec<DaxFile>,
}

impl Files {
    fn new(folder: &Path, size: usize, most: usize) -> Result<Self> {
        let count = ((16 << 20) / size).clamp(4, most);
        let make = |name: &str| -> Result<Vec<PathBuf>> {
            (0..count)
                .map(|number| {
                    let path = folder.join(format!("{name}-{number}"));
                    let bytes: Vec<u8> = (0..size).map(|at| (at + number) as u8).collect();
                    fs::write(&path, bytes)?;
                    Ok(path)
                })
                .collect()
        };
        let (used, unused) = (make("used")?, make("unused")?);
        let tables = used.iter().map(|path| DaxFile::open(path, &Options::default()));
        let tables = tables.collect::<vellum_dax::Result<_>>()?;
        // Blocks that are reserved and not yet written have no leaf.
        rustix::fs::sync();
        Ok(Self { size, used, unused, _tables: tables })
    }

    fn remove(self) -> Result<()> {
        self.used.iter().chain(&self.unused).try_for_each(fs::remove_file)?;
        Ok(())
    }
}

/// How a file's bytes come to the program.
#[derive(Clone, Copy)]
enum Way<'a> {
    Read,
    Populated,
    /// In a heap, of the module or of `mmap`.
    Heap(&'a Heap),
    /// The same, with tables that the module keeps from an earlier use.
    HeapAgain(&'a Heap),
    /// The same, while the module keeps no table that nothing uses.
    HeapAnew(&'a Heap),
    /// Nothing but the mapping of a file that is open, and its end.
    MapAlone(&'a Heap),
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    run_in(context, &context.make_directory("dax-once")?)
}

fn run_aged(context: &Context<'_>) -> Result<Outcome> {
    aged::run_aged(context, "dax-once-aged", run_in)
}

fn run_in(context: &Context<'_>, folder: &Path) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let by_mmap = heap(Backend::Mmap, None)?;
    let heaps = heaps_by_table([None, Some(1), Some(512)], &mut outcome);
    for size in SIZES {
        let files = Files::new(folder, size, context.pick(200, 2_000))?;
        let pieces = files.used.iter().map(|path| extents(&File::open(path)?));
        let pieces = pieces.sum::<Result<u32>>()?;
        outcome.rows.push(Row::count(
            format!("pieces of a file of {} KiB", size >> 10),
            f64::from(pieces) / files.used.len() as f64,
            "extents",
        ));
        for threads in [1, 2] {
            let mut ways = vec![
                ("read", Way::Read, &files.used),
                ("mmap", Way::Heap(&by_mmap), &files.used),
                ("mmap, populated", Way::Populated, &files.used),
            ];
            if let Some([batched, single, large]) = &heaps {
                ways.push(("ephemeral", Way::Heap(batched), &files.used));
                ways.push(("ephemeral, flushed each time", Way::Heap(single), &files.used));
                ways.push(("ephemeral, batches of 512", Way::Heap(large), &files.used));
                ways.push(("ephemeral, kept table", Way::HeapAgain(batched), &files.unused));
                ways.push((
                    "ephemeral, table made each time",
                    Way::HeapAnew(batched),
                    &files.unused,
                ));
                ways.push(("mmap and munmap alone", Way::MapAlone(&by_mmap), &files.used));
                ways.push(("ephemeral map and unmap alone", Way::MapAlone(batched), &files.used));
                ways.push(("the same, flushed each time", Way::MapAlone(single), &files.used));
                ways.push(("the same, and a kept table", Way::MapAlone(single), &files.unused));
            }
            measure(context, &mut outcome, size, threads, &ways)?;
        }
        files.remove()?;
    }
    if let Some([batched, _, large]) = &heaps {
        count_flushes(folder, &mut outcome, &[&by_mmap, batched, large])?;
    }
    outcome.notes.push(
        "A sample opens each file, adds up its words and closes it. `read` reads into a buffer \
         that is used again. Tables are in use before, unless the row says otherwise. Ratios are \
         to `read`; those of mapping alone to mmap and munmap."
            .to_owned(),
    );
    Ok(outcome)
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    size: usize,
    threads: usize,
    ways: &[(&str, Way<'_>, &Vec<PathBuf>)],
) -> Result<()> {
    let what = format!("{} KiB, {}", size >> 10, crate::context::count(threads, "thread"));
    let contestants = ways
        .iter()
        .map(|(name, way, paths)| {
            Contestant::new(format!("{name}, {what}"), move || rate(*way, paths, size, threads))
        })
        .collect();
    let samples = alternate(context.rounds(), &context.progress, contestants)?;
    let alone = samples.iter().position(|of_way| of_way.name.starts_with("mmap and munmap"));
    for of_way in &samples {
        let is_alone = of_way.name.contains("alone") || of_way.name.starts_with("the same");
        let against = alone.filter(|_| is_alone).map_or(&samples[0], |at| &samples[at]);
        outcome.rows.push(Row::of(of_way, "files/s").against(of_way, against));
    }
    Ok(())
}

/// Files a second: each thread has its share of them.
fn rate(way: Way<'_>, paths: &[PathBuf], size: usize, threads: usize) -> Result<f64> {
    let share = paths.len().div_ceil(threads);
    let _bound = matches!(way, Way::HeapAnew(_)).then(|| KeptBound::of(0)).transpose()?;
    // The sample before may have had the module free all tables.
    if matches!(way, Way::HeapAgain(_)) {
        once(way, paths, size)?;
    }
    let start = Instant::now();
    std::thread::scope(|scope| {
        let all: Vec<_> =
            paths.chunks(share).map(|paths| scope.spawn(move || once(way, paths, size))).collect();
        all.into_iter().try_for_each(|thread| thread.join().expect("a thread does not panic"))
    })?;
    let times = if matches!(way, Way::MapAlone(_)) { TIMES_ALONE } else { 1 };
    Ok((paths.len() * times) as f64 / start.elapsed().as_secs_f64())
}

fn once(way: Way<'_>, paths: &[PathBuf], size: usize) -> Result<()> {
    let mut buffer = vec![0; size];
    let mut seen = 0;
    for path in paths {
        let mut file = File::open(path)?;
        seen |= match way {
            Way::Read => {
                file.read_exact(&mut buffer)?;
                sum_of(&buffer)
            }
            Way::Populated => sum_of(FileMapping::new(&file)?.bytes()),
            Way::Heap(heap) | Way::HeapAgain(heap) | Way::HeapAnew(heap) => {
                sum_of(bytes_of(&heap.map(&file)?))
            }
            // As often as makes the opening of the file cheap.
            Way::MapAlone(heap) => {
                let map = |_| heap.map_range(&file, 0, size as u64).map(drop);
                (0..TIMES_ALONE).try_for_each(map)?;
                1
            }
        };
    }
    ensure!(paths.is_empty() || seen != 0, "the bytes are not those of the files");
    Ok(())
}

/// The sum of all words, as the paper's programs compute it.
fn sum_of(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(8).map(|word| word.try_into().expect("eight bytes"));
    words.fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(word)))
}

/// Interrupts by which CPUs flush each other's TLBs, for a thousand unmappings, by two threads at
/// the same time.
fn count_flushes(folder: &Path, outcome: &mut Outcome, heaps: &[&Heap; 3]) -> Result<()> {
    let files = Files::new(folder, 32 << 10, 200)?;
    let names = ["munmap", "ephemeral unmap", "ephemeral unmap, batches of 512"];
    let mut by_munmap = 0.0;
    for (heap, name) in heaps.iter().zip(names) {
        let before = shootdowns()?;
        let unmaps = 10 * files.used.len();
        for _ in 0..10 {
            rate(Way::Heap(heap), &files.used, files.size, 2)?;
        }
        let found = (shootdowns()? - before) as f64 * 1e3 / unmaps as f64;
        let row = Row::count(format!("{name}, 2 threads"), found, "TLB shootdowns/1000");
        if name == names[0] {
            by_munmap = found;
            outcome.rows.push(row);
        } else {
            outcome.rows.push(row.with_ratio(found / by_munmap, "munmap, 2 threads"));
        }
    }
    files.remove()
}
