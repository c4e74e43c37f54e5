//! Text search in a tree of small files on persistent memory, as `ag` does it: a file is opened,
//! mapped or read, searched once and closed.

use std::cell::Cell;
use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use vellum_dax::{Backend, Heap, tables};

use super::aged;
use super::kernel::{KeptBound, extents, forget_inodes};
use super::read_method::{Way, heap, heaps_by_table};
use super::source_tree::SourceTree;
use crate::{Context, Experiment};
use vellum_bench::measure::{Contestant, alternate};
use vellum_bench::report::{Outcome, Row};

/// The experiment.
pub const DAX_SEARCH: Experiment = Experiment {
    name: "dax-search",
    shows: "text search in a source tree: read, mmap, ephemeral mappings, file tables",
    source: "MICRO'22, section V.C, figure 9a",
    run,
};

/// The same on a file system that has seen many files come and go.
pub const DAX_SEARCH_AGED: Experiment = Experiment {
    name: "dax-search-aged",
    shows: "the same as dax-search in an aged file system",
    source: "MICRO'22, section V.C, figure 9a",
    run: run_aged,
};

/// KiB that unused tables may take, if they are to hold those of the whole tree.
const ENOUGH: u64 = 1 << 20;

/// Files that are searched by ordinary mappings of tables, which take long.
const FEWER_FILES: usize = 400;

/// Rounds that count, also in full: passes over the tree are long.
const ROUNDS: usize = 3;

/// What the module and the kernel know of the tree before a sample.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    /// All inodes; of tables, it does not matter.
    Inodes,
    /// All inodes, and no table: the first pass over the tree.
    NoTables,
    /// All inodes and all tables: a later pass.
    Tables,
    /// What the module keeps of a pass before, with the bound that it has by itself.
    UsualTables,
    /// Neither: the first pass after a start.
    Nothing,
}

struct Contest<'a> {
    name: &'static str,
    tree: &'a SourceTree,
    way: Way<'a>,
    before: Before,
    /// Kept tables that were used again in the last sample.
    resumed: Cell<u64>,
}

impl<'a> Contest<'a> {
    fn new(name: &'static str, tree: &'a SourceTree, way: Way<'a>, before: Before) -> Self {
        Self { name, tree, way, before, resumed: Cell::new(0) }
    }
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    run_in(context, &context.make_directory("dax-search")?)
}

fn run_aged(context: &Context<'_>) -> Result<Outcome> {
    aged::run_aged(context, "dax-search-aged", run_in)
}

fn run_in(context: &Context<'_>, folder: &Path) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let by_mmap = heap(Backend::Mmap, None)?;
    let heaps = heaps_by_table([None, Some(512)], &mut outcome);
    let make = |name, files| SourceTree::make(&folder.join(name), files, 18, &context.progress);
    let trees = [make("tree", context.pick(3_000, 10_000))?, make("small", FEWER_FILES)?];
    count_pieces(&mut outcome, &trees[0])?;
    let enough = KeptBound::of(ENOUGH)?;
    let usual = enough.as_ref().map_or(Ok(0), KeptBound::before)?;
    let contests = contests(&trees, &by_mmap, heaps.as_ref());
    for threads in [1, 2] {
        measure(context, &mut outcome, usual, threads, &contests)?;
    }
    if heaps.is_some() {
        count_tables(&mut outcome, usual, &contests)?;
    }
    let holds = trees[0].holds;
    outcome.notes.push(format!(
        "{} files of {:.0} MiB, half of them below 6 KiB. A sample walks the tree, searches each \
         file and closes it; {} places must be found. `read` reads into a buffer that is used \
         again. In a first pass no file has a table, in a later one the module has kept them all, \
         for which its bound was raised; 'usual bound': it was not. By ordinary mappings of file \
         tables {FEWER_FILES} other files are searched. Ratios are to mmap, after a start to mmap \
         after a start.",
        holds.files,
        holds.bytes as f64 / f64::from(1 << 20),
        holds.places,
    ));
    Ok(outcome)
}

fn contests<'a>(
    [tree, small]: &'a [SourceTree; 2],
    by_mmap: &'a Heap,
    heaps: Option<&'a [Heap; 2]>,
) -> Vec<Contest<'a>> {
    let contest = |name, way, before| Contest::new(name, tree, way, before);
    let by_mmap = Way::Heap(by_mmap);
    let mut contests = vec![
        contest("mmap", by_mmap, Before::Inodes),
        contest("mmap, populated", Way::Populated, Before::Inodes),
        contest("read", Way::Read, Before::Inodes),
    ];
    let Some([batched, large]) = heaps else { return contests };
    let (batched, large) = (Way::Heap(batched), Way::Heap(large));
    contests.extend([
        contest("ephemeral, first pass", batched, Before::NoTables),
        contest("ephemeral, later pass", batched, Before::Tables),
        contest("ephemeral, later pass, usual bound", batched, Before::UsualTables),
        contest("ephemeral, batches of 512, later pass", large, Before::Tables),
        Contest::new("file table, later pass", small, Way::Table, Before::Tables),
        contest("mmap, after a start", by_mmap, Before::Nothing),
        contest("read, after a start", Way::Read, Before::Nothing),
        contest("ephemeral, after a start", batched, Before::Nothing),
    ]);
    contests
}

fn measure(
    context: &Context<'_>,
    outcome: &mut Outcome,
    usual: u64,
    threads: usize,
    contests: &[Contest<'_>],
) -> Result<()> {
    let what = crate::context::count(threads, "thread");
    let contestants = contests
        .iter()
        .map(|contest| {
            let name = format!("{}, {what}", contest.name);
            Contestant::new(name, move || rate(contest, usual, threads))
        })
        .collect();
    let samples = alternate(ROUNDS, &context.progress, contestants)?;
    let after_start = contests.iter().position(|contest| contest.before == Before::Nothing);
    for (contest, of_way) in contests.iter().zip(&samples) {
        let is_after_start = contest.before == Before::Nothing;
        let against = after_start.filter(|_| is_after_start).unwrap_or_default();
        outcome.rows.push(Row::of(of_way, "files/s").against(of_way, &samples[against]));
    }
    Ok(())
}

/// Files a second.
fn rate(contest: &Contest<'_>, usual: u64, threads: usize) -> Result<f64> {
    let tree = contest.tree;
    let search = || -> Result<()> {
        let found = tree.search(contest.way, threads)?;
        ensure!(found == tree.holds, "found {found:?}, and not {:?}", tree.holds);
        Ok(())
    };
    let is_usual = contest.before == Before::UsualTables;
    let _bound = is_usual.then(|| KeptBound::of(usual)).transpose()?;
    match contest.before {
        Before::Inodes => {}
        Before::NoTables => KeptBound::free_all()?,
        Before::Tables | Before::UsualTables => search()?,
        Before::Nothing => {
            tree.renew()?;
            forget_inodes(tree.holds.files as u64)?;
        }
    }
    let before = resumed()?;
    let start = Instant::now();
    search()?;
    let seconds = start.elapsed().as_secs_f64();
    contest.resumed.set(resumed()? - before);
    Ok(tree.holds.files as f64 / seconds)
}

/// In how many pieces the tree's files are.
fn count_pieces(outcome: &mut Outcome, tree: &SourceTree) -> Result<()> {
    let pieces = tree.files()?.into_iter().map(|path| extents(&File::open(path)?));
    let pieces = pieces.collect::<Result<Vec<u32>>>()?;
    let files = pieces.len() as f64;
    let all = f64::from(pieces.iter().sum::<u32>());
    outcome.rows.push(Row::count("pieces of a file of the tree", all / files, "extents"));
    let several = pieces.iter().filter(|pieces| **pieces > 1).count() as f64;
    outcome.rows.push(Row::count("files in several pieces", several * 100.0 / files, "%"));
    Ok(())
}

/// How often kept tables were used again so far.
fn resumed() -> Result<u64> {
    Ok(tables()?.map_or(0, |tables| tables.resumed))
}

/// What the tables take, and how many of them a later pass has used again.
fn count_tables(outcome: &mut Outcome, usual: u64, contests: &[Contest<'_>]) -> Result<()> {
    let by_tables = |contest: &&Contest<'_>| {
        matches!(contest.way, Way::Table) || contest.name.starts_with("ephemeral")
    };
    for contest in contests.iter().filter(by_tables) {
        let share = contest.resumed.get() as f64 * 100.0 / contest.tree.holds.files as f64;
        outcome.rows.push(Row::count(format!("kept tables used, {}", contest.name), share, "%"));
    }
    if let Some(later) = contests.iter().find(|contest| contest.before == Before::Tables) {
        KeptBound::free_all()?;
        rate(later, usual, 1)?;
    }
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let kept = tables()?.map_or(0, |tables| tables.kept_bytes);
    outcome.rows.push(Row::count("memory of the tree's tables", mib(kept), "MiB"));
    outcome.rows.push(Row::count("the module's usual bound", mib(usual << 10), "MiB"));
    Ok(())
}
