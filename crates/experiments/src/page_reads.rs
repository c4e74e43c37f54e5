//! Random reads of pages of 4 KiB, in memory and beyond it: Vellum's pool, which finds a page by
//! the MMU or by a table, and a textbook's buffer manager, which finds it by a hash table.
//!
//! All have as many frames, the same file on the same device, and direct I/O. Each word that is
//! read is checked.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vellum_pool::device::{FileDevice, FileOptions};
use vellum_pool::{
    PAGE_SIZE, PageReader as _, PageRef, Pool, PoolOptions, PoolSize, RawPages, Space, Translation,
};

use super::context::count;
use super::page_access::page_pool::{self, Library, PagePool};
use super::page_access::textbook::{FileStorage, Textbook};
use super::{Context, Experiment};
use vellum_bench::machine::device_rate::{DeviceRate, ReadMethod};
use vellum_bench::machine::page_cache;
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::Setup;
use vellum_bench::workload::values::{Random, mix};
use vellum_bench::workload::{Plan, drive_threads};

/// The experiment.
pub const PAGE_READS: Experiment = Experiment {
    name: "page-reads",
    shows: "random reads of pages: the pool by the MMU and by a table, a textbook's hash table",
    source: "SIGMOD'23, sections 2 and 5.4",
    run,
};

/// Reads that a thread makes between two looks at the clock.
const READS: usize = 16;

/// Words of a page.
const WORDS: u64 = PAGE_SIZE as u64 / 8;

/// The sizes of the data: in memory, with this part of it free; and in pools.
const SIZES: [Size; 3] = [Size::InMemory, Size::Pools(2), Size::Pools(8)];

/// The contestant that the others are compared with.
const REFERENCE: &str = "textbook";

/// How long the pool may go on putting its pages into huge ones.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may rest meanwhile.
const REST: Duration = Duration::from_secs(5);

/// The size of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    /// All pages fit, and a ninth of the frames stays free.
    InMemory,
    /// So many times the pool.
    Pools(u64),
}

impl Size {
    fn frames(self, pages: u64) -> u64 {
        match self {
            Size::InMemory => pages + pages / 8,
            Size::Pools(pools) => pages / pools,
        }
    }

    fn name(self) -> String {
        match self {
            Size::InMemory => "in memory".to_owned(),
            Size::Pools(pools) => format!("{pools}x"),
        }
    }
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let pages: u64 = context.pick(1 << 15, 1 << 18);
    let setup = Setup::fast((pages + 1) * PAGE_SIZE as u64, &context.directory)?;
    let path = setup.directory().join("pages");
    context.progress.doing("writing the pages");
    fill(&path, pages)?;
    let library = Library::from_environment()?;
    let mut outcome = Outcome::default();
    for size in SIZES {
        let readers = Readers::open(&path, pages, size, library.as_ref())?;
        context.progress.doing(&format!("{}: warming up", size.name()));
        readers.warm_up(context.quick)?;
        let all = measure(context, &readers, &DeviceRate::open(&path)?)?;
        outcome.rows.extend(rows(&all));
        outcome.notes.push(readers.about());
    }
    outcome.notes.push(format!(
        "A row's first words are the size of the data; {} MiB in all. Each thread chooses {READS} \
         pages at random, reads eight bytes of each, and checks them; these reads do not wait for \
         one another in memory. A contestant without another word reads optimistically.",
        (pages * PAGE_SIZE as u64) >> 20
    ));
    match &library {
        Some(library) => outcome.notes.push(format!(
            "{} is the library that {} names. It takes pages of 4 KiB.",
            library.name(),
            page_pool::VARIABLE
        )),
        None => outcome.notes.push(format!(
            "{} names no other pool (crates/bench-peers/caliby).",
            page_pool::VARIABLE
        )),
    }
    outcome.notes.push(setup.about());
    Ok(outcome)
}

/// The word of a page at an index beyond 0. The first word of each page is 0, because Caliby has a
/// flag of its own there.
fn word_of(page: u64, index: u64) -> u64 {
    mix(page).wrapping_add(index.wrapping_mul(0xd1b5_4a32_d192_ed03))
}

/// Makes a file of pages 0 to `pages`, each written through a textbook's buffer manager with few
/// frames. Page 0 is not read later: Caliby does not take it from the file.
fn fill(path: &Path, pages: u64) -> Result<()> {
    let zeros = || -> std::io::Result<()> {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        (0..=pages).try_for_each(|_| file.write_all(&[0; PAGE_SIZE]))?;
        file.into_inner().map_err(|error| error.into_error())?.sync_all()
    };
    zeros().with_context(|| format!("cannot make {} of {pages} pages", path.display()))?;
    page_cache::drop_cached(path)?;
    let manager = Textbook::new(FileStorage::open(path)?, (pages / 8).max(1))?;
    for page in 0..=pages {
        let mut bytes = manager.change(page)?;
        for (index, word) in (0..).zip(bytes.chunks_exact_mut(8)).skip(1) {
            word.copy_from_slice(&word_of(page, index).to_le_bytes());
        }
    }
    manager.flush()?;
    ensure!(manager.pages_written() > pages, "{} pages were written", manager.pages_written());
    page_cache::drop_cached(path)
}

/// The reads that a thread makes between two looks at the clock.
#[derive(Debug, Default)]
struct WordReads {
    pages: [u64; READS],
    offsets: [u64; READS],
    words: [u64; READS],
}

impl WordReads {
    fn choose(&mut self, random: &mut Random, pages: u64) {
        for (page, offset) in self.pages.iter_mut().zip(&mut self.offsets) {
            *page = 1 + random.below(pages);
            *offset = 8 * (1 + random.below(WORDS - 1));
        }
    }

    /// Fills in the words by single reads.
    #[inline(always)]
    fn read<E>(&mut self, read: impl Fn(u64, usize) -> Result<u64, E>) -> Result<(), E> {
        let places = self.pages.iter().zip(&self.offsets);
        for ((page, offset), word) in places.zip(&mut self.words) {
            *word = read(*page, *offset as usize)?;
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let places = self.pages.iter().zip(&self.offsets);
        for ((page, offset), word) in places.zip(&self.words) {
            ensure!(*word == word_of(*page, offset / 8), "page {page} has {word:x} at {offset}");
        }
        Ok(())
    }
}

/// The buffer managers, each over the same pages.
struct Readers<'a> {
    pages: u64,
    size: Size,
    mmu: Pool,
    table: Pool,
    textbook: Textbook<FileStorage>,
    other: Option<(&'a str, PagePool<'a>)>,
}

/// One way to make the reads.
type MakeReads<'a> = Box<dyn Fn(&mut WordReads) -> Result<()> + Sync + 'a>;

impl<'a> Readers<'a> {
    fn open(path: &Path, pages: u64, size: Size, library: Option<&'a Library>) -> Result<Self> {
        let frames = size.frames(pages);
        let (pool_bytes, data_bytes) = (frames * PAGE_SIZE as u64, (pages + 1) * PAGE_SIZE as u64);
        let open = |library: &'a Library| {
            Ok::<_, anyhow::Error>((library.name(), library.open(path, pool_bytes, data_bytes)?))
        };
        let textbook = Textbook::new(FileStorage::open(path)?, frames)?;
        Ok(Readers {
            pages,
            size,
            mmu: pool(path, pages, pool_bytes, Translation::Mmu)?,
            table: pool(path, pages, pool_bytes, Translation::Table)?,
            textbook,
            other: library.map(open).transpose()?,
        })
    }

    /// The contestants and their names; the first is the [`REFERENCE`].
    fn all(&self) -> Vec<(String, MakeReads<'_>)> {
        let mut all: Vec<(String, MakeReads<'_>)> = Vec::new();
        let mut add = |name: &str, read| all.push((name.to_owned(), read));
        add(
            REFERENCE,
            Box::new(|reads| Ok(reads.read(|page, offset| self.textbook.word(page, offset))?)),
        );
        let pinned = |page, offset| {
            Ok::<_, anyhow::Error>((&self.textbook.pin(page)?[..]).u64(offset).unwrap_or_default())
        };
        add("textbook, pinned", Box::new(move |reads| reads.read(pinned)));
        for (name, pool) in [("MMU", &self.mmu), ("table", &self.table)] {
            add(name, Box::new(|reads| reads.read(|page, offset| optimistic(pool, page, offset))));
        }
        for (name, pool) in [("MMU, fixed", &self.mmu), ("table, fixed", &self.table)] {
            add(name, Box::new(|reads| reads.read(|page, offset| fixed(pool, page, offset))));
        }
        if let Some((name, other)) = &self.other {
            add(name, Box::new(|reads| other.read(&reads.pages, &reads.offsets, &mut reads.words)));
        }
        all
    }

    /// Reads all pages by each contestant, so that memory has as many as fit, and waits until the
    /// pool has put them into huge pages, if it does.
    fn warm_up(&self, quick: bool) -> Result<()> {
        for (name, read) in self.all() {
            // In a thread of its own, as in the samples.
            let warm = std::thread::scope(|scope| {
                scope
                    .spawn(|| self.visit_all(&read))
                    .join()
                    .unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))
            });
            warm.with_context(|| format!("warming up '{name}'"))?;
        }
        let (started, mut last) = (Instant::now(), (0, Instant::now()));
        let (patience, rest) = if quick { (REST, REST / 5) } else { (PATIENCE, REST) };
        while self.size == Size::InMemory && started.elapsed() < patience && last.1.elapsed() < rest
        {
            let collapsed = self.mmu.huge_page_stats().collapsed;
            if collapsed != last.0 {
                last = (collapsed, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn visit_all(&self, read: &MakeReads<'_>) -> Result<()> {
        let mut reads = WordReads { offsets: [8; READS], ..WordReads::default() };
        for first in (1..=self.pages).step_by(READS) {
            for (page, number) in reads.pages.iter_mut().zip(first..) {
                *page = number.min(self.pages);
            }
            read(&mut reads)?;
            reads.check()?;
        }
        Ok(())
    }

    fn about(&self) -> String {
        let frames = self.size.frames(self.pages);
        let each = |bytes: u64| bytes as f64 / frames as f64;
        let states = self.table.state_bytes().unwrap_or_default();
        format!(
            "{}: each has {frames} frames. Beside them a frame takes {:.1} bytes of the textbook's \
             table and frame headers, and {:.1} of the pool's state words. Misses of the textbook: \
             {}, direct I/O: {}. Huge chunks of the pool by the MMU: {}, by a table: {}.",
            self.size.name(),
            each(self.textbook.overhead()),
            each(states),
            self.textbook.pages_read(),
            self.textbook.storage().is_direct(),
            self.mmu.huge_page_stats().collapsed,
            self.table.huge_page_stats().collapsed,
        )
    }
}

fn pool(path: &Path, pages: u64, bytes: u64, translation: Translation) -> Result<Pool> {
    let device = FileDevice::open(path, FileOptions { read_only: true, ..Default::default() })?;
    let options = PoolOptions {
        size: PoolSize::Bytes(bytes),
        translation,
        read_only: true,
        ..PoolOptions::default()
    };
    Ok(Pool::open(Arc::new(device), Arc::new(RawPages), Space::new(pages + 1), options)?)
}

/// Eight bytes of a page, by an optimistic read.
#[inline(always)]
fn optimistic(pool: &Pool, page: u64, offset: usize) -> Result<u64> {
    loop {
        let guard = pool.optimistic(PageRef::new(page, 1))?;
        let word = guard.bytes().u64(offset).unwrap_or_default();
        if guard.validate().is_ok() {
            return Ok(word);
        }
    }
}

/// Eight bytes of a page under a shared lock.
#[inline(always)]
fn fixed(pool: &Pool, page: u64, offset: usize) -> Result<u64> {
    let guard = pool.fix_shared(PageRef::new(page, 1))?;
    Ok((&guard[..]).u64(offset).unwrap_or_default())
}

fn measure(
    context: &Context<'_>,
    readers: &Readers<'_>,
    device: &DeviceRate,
) -> Result<Vec<Samples>> {
    let seconds = context.pick(0.1, 1.0);
    let all = readers.all();
    let (pages, size) = (readers.pages, readers.size.name());
    let mut contestants = Vec::new();
    for threads in [1, 2] {
        let name = |what: &str| format!("{size}, {what}, {}", count(threads, "thread"));
        for (what, read) in &all {
            let mut seeds = 1..;
            contestants.push(Contestant::new(name(what), move || {
                let seed = seeds.next().unwrap_or_default();
                let plan = Plan { threads, seconds, seed };
                let measured = drive_threads(&plan, |_| {
                    let mut reads = WordReads::default();
                    Ok(move |random: &mut Random| {
                        reads.choose(random, pages);
                        read(&mut reads)?;
                        reads.check()?;
                        Ok(READS as u64)
                    })
                })?;
                Ok(measured.rate())
            }));
        }
        if readers.size != Size::InMemory {
            let (mut seeds, time) = (1.., Duration::from_secs_f64(seconds));
            contestants.push(Contestant::new(name("device"), move || {
                device.random(threads, ReadMethod::Wait, time, seeds.next().unwrap_or_default())
            }));
        }
    }
    alternate(context.rounds(), &context.progress, contestants)
}

/// A row each, with the ratio to the reference of as many threads.
fn rows(all: &[Samples]) -> Vec<Row> {
    let threads =
        |samples: &Samples| samples.name.rsplit_once(", ").map(|parts| parts.1.to_owned());
    let is_reference = |samples: &&Samples| {
        samples.name.rsplit_once(", ").is_some_and(|(rest, _)| rest.ends_with(REFERENCE))
    };
    let row = |samples: &Samples| {
        let row = Row::of(samples, "reads/s");
        let mut references = all.iter().filter(is_reference);
        match references.find(|reference| threads(reference) == threads(samples)) {
            Some(reference) if reference.name != samples.name => row.against(samples, reference),
            _ => row,
        }
    };
    all.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_readers_find_the_words_of_their_pages() {
        const PAGES: u64 = 1 << 12;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pages");
        fill(&path, PAGES).unwrap();
        for size in SIZES {
            let readers = Readers::open(&path, PAGES, size, None).unwrap();
            let mut random = Random::new(7);
            for (name, read) in readers.all() {
                readers.visit_all(&read).unwrap();
                let mut reads = WordReads::default();
                for _ in 0..500 {
                    reads.choose(&mut random, PAGES);
                    read(&mut reads).unwrap();
                    reads.check().unwrap();
                }
                reads.words[3] ^= 1;
                assert!(reads.check().is_err(), "{name}");
            }
            let (misses, evicts) = (readers.textbook.pages_read(), size != Size::InMemory);
            assert_eq!(misses > PAGES, evicts, "{size:?}: {misses} misses");
            assert_eq!(readers.table.stats().evictions > 0, evicts, "{size:?}");
            assert_eq!(readers.mmu.stats().evictions > 0, evicts, "{size:?}");
        }
    }

    #[test]
    fn ratios_are_to_the_reference_of_as_many_threads() {
        let samples = |name: &str, value| Samples { name: name.to_owned(), values: vec![value] };
        let all = [
            samples("2x, textbook, 1 thread", 2.0),
            samples("2x, textbook, pinned, 1 thread", 1.0),
            samples("2x, textbook, 2 threads", 4.0),
            samples("2x, table, 2 threads", 6.0),
        ];
        let ratios: Vec<_> = rows(&all).into_iter().map(|row| row.ratio).collect();
        assert_eq!(ratios, [None, Some(0.5), None, Some(1.5)]);
    }
}
