//! How long a process takes to map a large object that is in memory already: by one entry in its
//! page tables, or by one entry for each page.

use std::cell::Cell;
use std::fs::File;
use std::time::Instant;

use anyhow::{Result, ensure};
use vellum_morsel::{Access, BackendChoice, BackendKind, Morsel, Provider, Seals, Shape};

use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::{FileMapping, Weight, make_file, sum_of_pages, warm_file};

/// The experiment.
pub const MORSEL_MAP: Experiment = Experiment {
    name: "morsel-map",
    shows: "mapping an object that is in memory: a Morsel against a file with all pages brought in",
    source: "DIMES'23, section 3.1",
    run,
};

/// Sizes of the object, from the smallest that a table covers.
const SIZES: [u64; 3] = [2 << 20, 64 << 20, 1 << 30];

/// Bytes that are mapped for a sample, by small pieces if it must be.
const FILE_BYTES: u64 = 1 << 30;
/// Mappings of a Morsel for a sample: each takes microseconds.
const MORSEL_MAPS: u32 = 64;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let directory = context.make_directory("morsel-map")?;
    let mut outcome = Outcome::default();
    let provider = Provider::new(BackendChoice::Only(BackendKind::Kernel));
    if let Err(error) = &provider {
        outcome.notes.push(format!("Without Morsels: {error}."));
    }
    for size in SIZES {
        let path = directory.join(format!("{size}"));
        let sum = make_file(&path, size)?;
        warm_file(&path)?;
        let file = File::open(&path)?;
        let morsel = provider.as_ref().ok().map(|provider| loaded(provider, &file, size));
        measure(context, &mut outcome, size, sum, &file, morsel.transpose()?.as_ref())?;
        drop(file);
        std::fs::remove_file(&path)?;
    }
    outcome.notes.push(
        "A sample is the time of mmap alone, the file's with MAP_POPULATE, as the paper's \
         competitor. Every page's first word is then compared. Page tables are the growth of VmPTE \
         of the process."
            .to_owned(),
    );
    Ok(outcome)
}

/// A sealed Morsel with the file's bytes.
fn loaded(provider: &Provider, file: &File, size: u64) -> Result<Morsel> {
    let morsel = provider.create(&Shape::of_length(size))?;
    ensure!(morsel.fill(file, 0, 0, size)? == size, "the file is shorter than it was");
    morsel.seal(Seals::CONTENT)?;
    Ok(morsel)
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    size: u64,
    sum: u64,
    file: &File,
    morsel: Option<&Morsel>,
) -> Result<()> {
    let mib = size >> 20;
    let (tables, tables_of_morsel) = (Cell::new(0), Cell::new(0));
    let mut contestants = vec![Contestant::new(format!("file, {mib} MiB"), || {
        let maps = u32::try_from(FILE_BYTES / size)?.min(MORSEL_MAPS);
        sample(
            maps,
            sum,
            &tables,
            || FileMapping::new(file),
            |mapping| Ok(sum_of_pages(mapping.bytes())),
        )
    })];
    if let Some(morsel) = morsel {
        let tables = &tables_of_morsel;
        contestants.push(Contestant::new(format!("Morsel, {mib} MiB"), move || {
            let map = || Ok(morsel.map(Access::Read)?);
            sample(MORSEL_MAPS, sum, tables, map, |mapping| Ok(sum_of_pages(mapping.view()?)))
        }));
    }
    let samples = alternate(context.rounds(), &context.progress, contestants)?;
    for of_way in &samples {
        outcome.rows.push(Row::of(of_way, "maps/s").against(of_way, &samples[0]));
    }
    for (of_way, tables) in samples.iter().zip([tables, tables_of_morsel]) {
        outcome.rows.push(tables_row(of_way, tables.get()));
    }
    Ok(())
}

fn tables_row(samples: &Samples, bytes: u64) -> Row {
    Row::count(
        format!("page tables of the process, {}", samples.name),
        bytes as f64 / 1024.0,
        "KiB",
    )
}

/// Mappings a second. Checks the last one.
fn sample<T>(
    maps: u32,
    sum: u64,
    tables: &Cell<u64>,
    map: impl Fn() -> Result<T>,
    sum_of: impl Fn(&T) -> Result<u64>,
) -> Result<f64> {
    let before = Weight::now().tables;
    let mut seconds = 0.0;
    for round in 1..=maps {
        let start = Instant::now();
        let mapping = map()?;
        seconds += start.elapsed().as_secs_f64();
        if round == maps {
            ensure!(sum_of(&mapping)? == sum, "the bytes are not those of the file");
            tables.set(Weight::now().tables.saturating_sub(before));
        }
    }
    Ok(f64::from(maps) / seconds)
}
