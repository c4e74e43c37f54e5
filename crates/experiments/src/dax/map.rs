//! How long a process takes to map a file on persistent memory, to use it once, and to unmap it: by
//! a file table, by `mmap`, and by `mmap` that brings all pages in at once.

use std::fs::{self, File};
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use vellum_dax::{Access, Backend, BackendChoice, DaxFile, Mapping, Options};

use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{FileMapping, make_file, sum_of_pages};

/// The experiment.
pub const DAX_MAP: Experiment = Experiment {
    name: "dax-map",
    shows: "a file on persistent memory, mapped, used once and unmapped: file table against mmap",
    source: "MICRO'22, sections III and V.B",
    run,
};

/// Sizes of the file.
const SIZES: [u64; 5] = [4 << 10, 32 << 10, 2 << 20, 64 << 20, 512 << 20];

/// What is read of the file.
#[derive(Clone, Copy)]
enum Part {
    /// The first byte: the least after which the mapping is in use.
    First,
    /// A word of each page.
    Pages,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let directory = context.make_directory("dax-map")?;
    let mut outcome = Outcome::default();
    let longest = context.pick(64 << 20, 512 << 20);
    for size in SIZES.into_iter().filter(|size| *size <= longest) {
        let path = directory.join(format!("{size}"));
        let sum = make(&path, size)?;
        for part in [Part::First, Part::Pages] {
            measure(context, &mut outcome, &path, size, sum, part)?;
        }
        fs::remove_file(&path)?;
    }
    outcome.notes.push(
        "A sample maps the file, reads the first byte or a word of each page, and unmaps it, again \
         and again. The file and its table are open all the time."
            .to_owned(),
    );
    Ok(outcome)
}

/// Makes a file of this size, and returns the sum of the first words of its pages.
fn make(path: &Path, size: u64) -> Result<u64> {
    make_file(path, size.next_multiple_of(1 << 20))?;
    let file = File::options().write(true).open(path)?;
    file.set_len(size)?;
    file.sync_all()?;
    Ok(sum_of_pages(&fs::read(path)?))
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    path: &Path,
    size: u64,
    sum: u64,
    part: Part,
) -> Result<()> {
    let open = |backend| {
        let backend = BackendChoice::Only(backend);
        DaxFile::open(path, &Options { backend, ..Options::default() })
    };
    let plain = File::open(path)?;
    let by_mmap = open(Backend::Mmap)?;
    let by_table = open(Backend::Table);
    let maps = repetitions(size, part);
    let bytes = usize::try_from(size)?;
    let what = match part {
        Part::First => format!("{} KiB, first byte", size >> 10),
        Part::Pages => format!("{} KiB, each page", size >> 10),
    };
    let mut contestants = vec![
        Contestant::new(format!("mmap, {what}"), || {
            rate(maps, || used(&by_mmap.map(Access::Read)?, bytes, sum, part))
        }),
        Contestant::new(format!("mmap, populated, {what}"), || {
            rate(maps, || read(FileMapping::new(&plain)?.bytes(), sum, part))
        }),
    ];
    match &by_table {
        Ok(file) => contestants.push(Contestant::new(format!("file table, {what}"), move || {
            rate(maps, || used(&file.map(Access::Read)?, bytes, sum, part))
        })),
        Err(error) if size == SIZES[0] && matches!(part, Part::First) => {
            outcome.notes.push(format!("Without file tables: {error}."));
        }
        Err(_) => {}
    }
    let samples = alternate(context.rounds(), &context.progress, contestants)?;
    for of_way in &samples {
        outcome.rows.push(Row::of(of_way, "maps/s").against(of_way, &samples[0]));
    }
    Ok(())
}

/// Mappings for a sample: as many as take some time also where each page faults.
fn repetitions(size: u64, part: Part) -> u32 {
    match part {
        Part::First => 200,
        Part::Pages => u32::try_from((64 << 20) / size).unwrap_or(1).clamp(2, 200),
    }
}

/// Mappings a second.
fn rate(maps: u32, once: impl Fn() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    (0..maps).try_for_each(|_| once())?;
    Ok(f64::from(maps) / start.elapsed().as_secs_f64())
}

fn used(mapping: &Mapping, bytes: usize, sum: u64, part: Part) -> Result<()> {
    // SAFETY: nothing changes the file while the experiment runs.
    #[allow(unsafe_code)]
    let seen = unsafe { mapping.bytes(bytes as u64)? };
    read(seen, sum, part)
}

fn read(bytes: &[u8], sum: u64, part: Part) -> Result<()> {
    match part {
        Part::First => {
            std::hint::black_box(bytes[0]);
        }
        Part::Pages => {
            ensure!(sum_of_pages(bytes) == sum, "the bytes are not those of the file");
        }
    }
    Ok(())
}
