//! Breadth-first search over pages that refer to pages, with cycles.
//!
//! In memory and with a pool of an eighth of the pages; as pages that refer to each other and, on
//! the same store, as a tree from vertex to edges, as an engine without references between pages
//! must store it.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use vellum::{Options, Store, Tree};
use vellum_pool::device::{FileDevice, FileOptions};
use vellum_pool::{PAGE_SIZE, Pool, PoolOptions, PoolSize, RawPages, Space};

use super::{Context, Experiment};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::workload::graph::pages::PageGraph;
use vellum_bench::workload::graph::{Found, Graph, debian, rmat};

/// The experiment.
pub const GRAPH: Experiment = Experiment {
    name: "graph",
    shows: "breadth-first search over a graph of pages with cycles",
    source: "SIGMOD'23, sections 1 and 3.1: arbitrary reference patterns",
    run,
};

/// Edges of a vertex, before duplicates go.
const FACTOR: usize = 16;

fn run(context: &Context<'_>) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let scale = context.pick(14, 18);
    let graph = rmat::generate(scale, FACTOR, 1);
    compare(context, &mut outcome, &format!("R-MAT {scale}"), &graph)?;
    match debian::read() {
        Ok((graph, from)) => {
            outcome.notes.push(format!("Debian's packages: {from}"));
            compare(context, &mut outcome, "Debian", &graph)?;
        }
        Err(error) => outcome.notes.push(format!("Debian's packages left out: {error:#}")),
    }
    Ok(outcome)
}

/// Searches one graph in all ways and adds the rows.
fn compare(context: &Context<'_>, outcome: &mut Outcome, name: &str, graph: &Graph) -> Result<()> {
    let directory = context.make_directory("graph")?;
    let expected = graph.search(graph.hub());
    outcome.notes.push(format!(
        "{name}: {} vertices, {} edges, one page or more per vertex; from vertex {} {} vertices \
         are reached over {} edges in {} levels",
        graph.vertices(),
        graph.edges(),
        graph.hub(),
        expected.vertices(),
        expected.edges,
        expected.levels.len()
    ));
    context.progress.doing("storing the graph");
    let bytes = (graph.vertices() * PAGE_SIZE + graph.edges() * 8) as u64;
    let (large, small) = (bytes * 3 / 2 + (64 << 20), (bytes / 8).max(1 << 20));
    let pools = [pool(&directory.join("large"), large)?, pool(&directory.join("small"), small)?];
    let pages = [PageGraph::store(&pools[0], graph)?, PageGraph::store(&pools[1], graph)?];
    pools[1].sync()?;
    let options = Options::new().pool_bytes(large).log(false);
    let store = Store::create(directory.join("tree.vellum"), &options)?;
    let tree = store.create_tree("edges")?;
    tree.bulk_load((0..graph.vertices() as u32).map(|vertex| {
        let edges = graph.neighbours(vertex).iter().flat_map(|target| target.to_le_bytes());
        (vertex.to_be_bytes(), edges.collect::<Vec<u8>>())
    }))?;

    let ways: [(&str, usize, usize, bool); 5] = [
        ("pages in memory, 1 thread", 0, 1, false),
        ("pages in memory, 2 threads", 0, 2, false),
        ("pool of an eighth, 2 threads, page by page", 1, 2, false),
        ("pool of an eighth, 1 thread, reading ahead", 1, 1, true),
        ("pool of an eighth, 2 threads, reading ahead", 1, 2, true),
    ];
    let mut contestants =
        vec![Contestant::new(format!("{name}: tree in memory, 1 thread"), || {
            timed(&expected, || search_tree(&tree, graph, graph.hub()))
        })];
    for (way, pool, threads, ahead) in ways {
        let (pages, expected) = (&pages[pool], &expected);
        contestants.push(Contestant::new(format!("{name}: {way}"), move || {
            timed(expected, || pages.search(graph.hub(), threads, ahead))
        }));
    }
    let samples = alternate(context.rounds(), &context.progress, contestants)?;
    let row = |samples: &Samples| Row::of(samples, "edges/s");
    outcome.rows.push(row(&samples[0]));
    outcome.rows.push(row(&samples[1]).against(&samples[1], &samples[0]));
    outcome.rows.push(row(&samples[2]).against(&samples[2], &samples[1]));
    outcome.rows.push(row(&samples[3]));
    for ahead in &samples[4..] {
        outcome.rows.push(row(ahead).against(ahead, &samples[3]));
    }
    drop(tree);
    store.close()?;
    drop(pages);
    drop(pools);
    std::fs::remove_dir_all(&directory).context("removing the graph's files")
}

fn pool(path: &Path, bytes: u64) -> Result<Pool> {
    let device = FileDevice::create(path, FileOptions::default())?;
    let options = PoolOptions { size: PoolSize::Bytes(bytes), ..PoolOptions::default() };
    Ok(Pool::open(Arc::new(device), Arc::new(RawPages), Space::new(0), options)?)
}

/// Edges a second of a search, whose result is checked.
fn timed(expected: &Found, search: impl FnOnce() -> Result<Found>) -> Result<f64> {
    let start = std::time::Instant::now();
    let found = search()?;
    let seconds = start.elapsed().as_secs_f64();
    ensure!(found == *expected, "a search found {found:?} instead of {expected:?}");
    Ok(found.edges as f64 / seconds)
}

/// The same search where a vertex is an entry of a tree.
fn search_tree(tree: &Tree, graph: &Graph, root: u32) -> Result<Found> {
    let mut seen = vec![false; graph.vertices()];
    seen[root as usize] = true;
    let (mut frontier, mut found, mut edges) = (vec![root], Found::default(), Vec::new());
    while !frontier.is_empty() {
        found.levels.push(frontier.len());
        let mut next = Vec::new();
        for vertex in frontier {
            ensure!(tree.get_into(&vertex.to_be_bytes(), &mut edges)?, "no vertex {vertex}");
            found.edges += edges.len() as u64 / 4;
            for target in edges.chunks_exact(4) {
                let target = u32::from_le_bytes([target[0], target[1], target[2], target[3]]);
                if !std::mem::replace(&mut seen[target as usize], true) {
                    next.push(target);
                }
            }
        }
        frontier = next;
    }
    Ok(found)
}
