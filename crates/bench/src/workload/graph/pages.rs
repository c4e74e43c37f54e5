//! A graph on the buffer manager: a vertex is a page, an edge is a reference to a page.
//!
//! A vertex with many edges has a longer page: pages are any multiple of 4 KiB. The bytes: the
//! number of edges in 8 bytes, then 8 bytes for each, the page's number times 256 plus its length
//! in frames.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, anyhow};
use vellum_pool::{PAGE_SIZE, PageId, PageReader, PageRef, Pool, Restart};

use super::{Found, Graph};

/// Bytes of an edge, and of the header before the edges.
const EDGE: usize = 8;
const HEADER: usize = 8;

/// The number of reads that are started together, while the pages before them are processed.
const AHEAD: usize = 128;

/// A graph whose vertices are pages of a pool.
#[derive(Debug)]
pub struct PageGraph<'a> {
    pool: &'a Pool,
    vertices: Vec<PageRef>,
}

fn frames(edges: usize) -> u32 {
    (HEADER + edges * EDGE).div_ceil(PAGE_SIZE) as u32
}

fn encode(page: PageRef) -> u64 {
    page.id.0 << 8 | u64::from(page.frames)
}

fn decode(edge: u64) -> PageRef {
    PageRef { id: PageId(edge >> 8), frames: (edge & 0xff) as u32 }
}

impl<'a> PageGraph<'a> {
    /// Stores a graph. Vertices may have up to 130,000 edges.
    ///
    /// # Errors
    /// A vertex with more edges; a full pool or disk.
    pub fn store(pool: &'a Pool, graph: &Graph) -> Result<PageGraph<'a>> {
        let mut vertices = Vec::with_capacity(graph.vertices());
        for vertex in 0..graph.vertices() as u32 {
            let frames = frames(graph.neighbours(vertex).len());
            if frames > 255 {
                return Err(anyhow!("vertex {vertex} has too many edges for a page"));
            }
            // Edges can be stored only after all pages are allocated.
            vertices.push(pool.allocate(frames)?.page());
        }
        for (vertex, page) in vertices.iter().enumerate() {
            let neighbours = graph.neighbours(vertex as u32);
            let mut guard = pool.fix_exclusive(*page)?;
            guard[..HEADER].copy_from_slice(&(neighbours.len() as u64).to_le_bytes());
            for (place, target) in guard[HEADER..].chunks_exact_mut(EDGE).zip(neighbours) {
                place.copy_from_slice(&encode(vertices[*target as usize]).to_le_bytes());
            }
        }
        Ok(PageGraph { pool, vertices })
    }

    /// A breadth-first search by `threads` threads. With `ahead`, it starts the reads of the next
    /// vertices of a level while it processes those before.
    ///
    /// # Errors
    /// A page that cannot be read, or is no vertex.
    pub fn search(&self, root: u32, threads: usize, ahead: bool) -> Result<Found> {
        let seen = Seen::new(self.pool.file_pages());
        let root = self.vertices[root as usize];
        seen.insert(root);
        let (mut frontier, mut found) = (vec![root], Found::default());
        while !frontier.is_empty() {
            found.level(frontier.len());
            let share = frontier.len().div_ceil(threads).max(1);
            let parts: Vec<Result<(Vec<PageRef>, u64)>> = std::thread::scope(|scope| {
                let parts = frontier.chunks(share);
                let started: Vec<_> =
                    parts.map(|part| scope.spawn(|| self.visit(part, &seen, ahead))).collect();
                let panicked = || Err(anyhow!("a thread panicked"));
                started.into_iter().map(|part| part.join().unwrap_or_else(|_| panicked())).collect()
            });
            let mut next = Vec::new();
            for part in parts {
                let (pages, edges) = part?;
                next.extend(pages);
                found.edges += edges;
            }
            frontier = next;
        }
        Ok(found)
    }

    /// Follows the edges of some vertices: the pages that were not seen before, and the edges.
    fn visit(&self, part: &[PageRef], seen: &Seen, ahead: bool) -> Result<(Vec<PageRef>, u64)> {
        let (mut next, mut followed) = (Vec::new(), 0);
        let mut edges = Vec::new();
        if ahead {
            self.pool.prefetch(&part[..part.len().min(AHEAD)]);
        }
        for (index, page) in part.iter().enumerate() {
            if ahead && index % AHEAD == 0 {
                let from = (index + AHEAD).min(part.len());
                self.pool.prefetch(&part[from..(from + AHEAD).min(part.len())]);
            }
            self.edges_of(*page, &mut edges)?;
            followed += edges.len() as u64;
            for target in edges.drain(..).map(decode) {
                if seen.insert(target) {
                    next.push(target);
                }
            }
        }
        Ok((next, followed))
    }

    /// Copies the edges of a vertex, consistently.
    fn edges_of(&self, page: PageRef, edges: &mut Vec<u64>) -> Result<()> {
        let read = self.pool.read(page, |bytes| {
            edges.clear();
            let count = bytes.u64(0).ok_or(Restart)?;
            for edge in 0..count as usize {
                edges.push(bytes.u64(HEADER + edge * EDGE).ok_or(Restart)?);
            }
            Ok(())
        })?;
        read.map_err(|Restart| anyhow!("{page} is no vertex")).context("following an edge")
    }
}

/// One bit for each page: whether it was seen.
struct Seen(Vec<AtomicU64>);

impl Seen {
    fn new(pages: u64) -> Seen {
        Seen((0..=pages / 64).map(|_| AtomicU64::new(0)).collect())
    }

    /// True if the page was not seen before.
    fn insert(&self, page: PageRef) -> bool {
        let (word, bit) = ((page.id.0 / 64) as usize, 1 << (page.id.0 % 64));
        let word = &self.0[word];
        // Most pages are seen more than once, so loading first saves the atomic operation.
        word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vellum_pool::device::MemoryDevice;
    use vellum_pool::{PoolOptions, PoolSize, RawPages, Space};

    use super::*;
    use crate::workload::graph::rmat;

    fn pool(frames: u64) -> Pool {
        let size = PoolSize::Bytes(frames * PAGE_SIZE as u64);
        let options = PoolOptions { size, ..PoolOptions::default() };
        Pool::open(Arc::new(MemoryDevice::new()), Arc::new(RawPages), Space::new(0), options)
            .unwrap()
    }

    #[test]
    fn searches_find_the_same_whatever_the_pool() {
        let graph = rmat::generate(11, 16, 5);
        let expected = graph.search(graph.hub());
        assert!(expected.vertices() > 500);
        for frames in [16, 200, 10_000] {
            let pool = pool(frames);
            let stored = PageGraph::store(&pool, &graph).unwrap();
            for (threads, ahead) in [(1, false), (1, true), (3, true)] {
                assert_eq!(stored.search(graph.hub(), threads, ahead).unwrap(), expected);
            }
        }
    }

    #[test]
    fn a_vertex_of_many_edges_has_a_long_page() {
        let edges = (1..5000).map(|to| (0, to)).collect();
        let graph = Graph::of_edges(5000, edges);
        let pool = pool(64);
        let stored = PageGraph::store(&pool, &graph).unwrap();
        assert_eq!(stored.vertices[0].frames, 10);
        assert_eq!(stored.search(0, 2, true).unwrap().levels, [1, 4999]);
    }
}
