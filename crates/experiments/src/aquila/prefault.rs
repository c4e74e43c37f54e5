//! What it costs to make many pages of a file accessible at once: Aquila's prefetch against `mmap`
//! that is populated.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use vellum_aquila::{Access, Backend, BackendChoice, Cache, Options, PAGE_SIZE};

use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::make_file;

/// The experiment.
pub const AQUILA_PREFAULT: Experiment = Experiment {
    name: "aquila-prefault",
    shows: "many pages of a file made accessible at once: Aquila by userfaultfd against mmap",
    source: "EuroSys'21, section 3.2: read-ahead on request",
    run,
};

/// Whether the pages are in the cache before.
#[derive(Clone, Copy)]
enum Start {
    /// Another mapping of the file has brought them in: they are only mapped.
    Resident,
    /// The cache reads them from the file, which the kernel has in its page cache.
    Absent,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let directory = context.make_directory("aquila-prefault")?;
    let path = directory.join("file");
    let bytes = context.pick(64 << 20, 512 << 20);
    make_file(&path, bytes)?;
    let kernel = cache(Backend::Kernel, bytes)?;
    let own = cache(Backend::Userfaultfd, bytes);
    let mut contestants =
        vec![Contestant::new("mmap, populated", || rate(&kernel, &path, Start::Resident))];
    let mut outcome = Outcome::default();
    match &own {
        Ok(own) => {
            contestants.push(Contestant::new("Aquila, pages in its cache", || {
                rate(own, &path, Start::Resident)
            }));
            contestants.push(Contestant::new("Aquila, pages to be read", || {
                rate(own, &path, Start::Absent)
            }));
        }
        Err(error) => outcome.notes.push(format!("Without Aquila: {error}.")),
    }
    let samples = alternate(context.rounds(), &context.progress, contestants)?;
    for of_way in &samples {
        outcome.rows.push(Row::of(of_way, "pages/s").against(of_way, &samples[0]));
    }
    outcome.notes.push(
        "A sample maps the file, makes all pages accessible for reading and unmaps it. The time is \
         that of making them accessible. The kernel has the file in its page cache."
            .to_owned(),
    );
    Ok(outcome)
}

fn cache(backend: Backend, bytes: u64) -> vellum_aquila::Result<Cache> {
    let slack = 64 * PAGE_SIZE as u64;
    Options::new(bytes + slack).backend(BackendChoice::Only(backend)).build()
}

/// Pages a second.
fn rate(cache: &Cache, path: &Path, start: Start) -> Result<f64> {
    let file = File::open(path)?;
    let pages = file.metadata()?.len() / PAGE_SIZE as u64;
    // It keeps the pages in the cache when the other mapping goes.
    let keeper = cache.map(&file, .., Access::Read)?;
    // All pages leave the cache when the file has a second mapping: they come back afterwards.
    let mapping = cache.map(&file, .., Access::Read)?;
    match start {
        Start::Resident => _ = keeper.prefetch(..)?,
        Start::Absent => _ = keeper.evict(..)?,
    }
    let started = Instant::now();
    let mapped = mapping.prefetch(..)?;
    let elapsed = started.elapsed();
    ensure!(mapped == pages, "{mapped} of {pages} pages were mapped");
    Ok(pages as f64 / elapsed.as_secs_f64())
}
