//! The traces: accesses of databases to a page cache, each with one difficulty.

use super::Trace;
use vellum_bench::workload::values::Random;
use vellum_bench::workload::zipf::{THETA, Zipf};

/// A kind of trace. The caller chooses its length and the number of pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Independent accesses by Zipf's distribution, hot pages scattered over the file.
    Zipf(f64),
    /// Every page equally often: nothing to learn.
    Uniform,
    /// Zipf 0.99, with this share of accesses by a scan that goes over all pages again and again.
    Scanned(f64),
    /// Zipf 0.99, interrupted by uninterrupted scans of half of the pages each, which make a
    /// quarter of all accesses.
    Interrupted,
    /// All pages in turn, again and again; the cache holds all but this share of them.
    Loop(f64),
    /// Loops over nine tenths of the cache's size. Each goes over its own pages, for a sixth of the
    /// accesses, so that all hot pages become cold at once.
    Phases,
    /// 90 % of the accesses go to a hot set of 5 % of the pages. Ten times during the trace a tenth
    /// of the hot set is replaced, and once, in the middle, all of it.
    Shifting,
    /// Descents of a tree with 100 children to a node, to leaves by Zipf 0.99 ...
    TreeZipf,
    /// ... or to leaves that are equally likely.
    TreeUniform,
    /// New pages at the end, each accessed some twenty times while it is filled; and reads of older
    /// pages, recent ones more often (YCSB D's "latest", Zipf 0.99 over the age).
    Appending,
}

impl Kind {
    /// All of them, in the order of the report.
    pub const ALL: [Kind; 14] = [
        Kind::Zipf(0.8),
        Kind::Zipf(0.99),
        Kind::Scanned(0.2),
        Kind::Scanned(0.5),
        Kind::Interrupted,
        Kind::Loop(1.02),
        Kind::Loop(1.1),
        Kind::Loop(2.0),
        Kind::Phases,
        Kind::Shifting,
        Kind::TreeZipf,
        Kind::TreeUniform,
        Kind::Appending,
        Kind::Uniform,
    ];

    /// Its name in rows and charts.
    pub fn name(self) -> String {
        match self {
            Kind::Zipf(theta) => format!("zipf {theta}"),
            Kind::Uniform => "uniform".to_owned(),
            Kind::Scanned(share) => format!("zipf 0.99 + {:.0} % scan", share * 100.0),
            Kind::Interrupted => "zipf 0.99, whole scans between".to_owned(),
            Kind::Loop(times) => format!("loop over {times} x cache"),
            Kind::Phases => "loops over 0.9 x cache, replaced".to_owned(),
            Kind::Shifting => "hot set that shifts".to_owned(),
            Kind::TreeZipf => "tree, zipf leaves".to_owned(),
            Kind::TreeUniform => "tree, uniform leaves".to_owned(),
            Kind::Appending => "appends, latest".to_owned(),
        }
    }

    /// Whether the trace depends on the size of the cache.
    pub fn depends_on_cache(self) -> bool {
        matches!(self, Kind::Loop(_) | Kind::Phases)
    }

    /// Makes the trace, over `pages` pages where it does not depend on the size of the cache.
    pub fn make(self, pages: u32, cache: u32, accesses: usize) -> Trace {
        let mut random = Random::new(0x5eed);
        let (pages, accesses) = match self {
            Kind::Zipf(theta) => (pages, zipf(pages, theta, accesses, &mut random)),
            Kind::Uniform => {
                let uniform = |_| random.below(u64::from(pages)) as u32;
                (pages, (0..accesses).map(uniform).collect())
            }
            Kind::Scanned(share) => (pages, scanned(pages, share, accesses, &mut random)),
            Kind::Interrupted => (pages, interrupted(pages, accesses, &mut random)),
            Kind::Loop(times) => {
                let length = (f64::from(cache) * times).ceil() as u32;
                (length, (0..length).cycle().take(accesses).collect())
            }
            Kind::Phases => {
                let (length, phase) = ((cache * 9 / 10).max(1), accesses.div_ceil(6));
                let page = |at: usize| (at / phase) as u32 * length + at as u32 % length;
                (6 * length, (0..accesses).map(page).collect())
            }
            Kind::Shifting => (pages, shifting(pages, accesses, &mut random)),
            Kind::TreeZipf => {
                let leaf = Zipf::new(u64::from(tree(pages).leaves), THETA);
                (pages, descents(pages, accesses, &mut random, |random| leaf.rank(random) as u32))
            }
            Kind::TreeUniform => {
                let leaves = u64::from(tree(pages).leaves);
                (pages, descents(pages, accesses, &mut random, |rng| rng.below(leaves) as u32))
            }
            Kind::Appending => appending(pages, accesses, &mut random),
        };
        Trace { name: self.name(), pages, counted_from: accesses.len() / 4, accesses }
    }
}

/// The numbers below `end` in random order.
fn permutation(end: u32, random: &mut Random) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..end).collect();
    for last in (1..numbers.len()).rev() {
        let other = random.below(last as u64 + 1) as usize;
        numbers.swap(last, other);
    }
    numbers
}

fn zipf(pages: u32, theta: f64, accesses: usize, random: &mut Random) -> Vec<u32> {
    let places = permutation(pages, random);
    let zipf = Zipf::new(u64::from(pages), theta);
    (0..accesses).map(|_| places[zipf.rank(random) as usize]).collect()
}

fn scanned(pages: u32, share: f64, accesses: usize, random: &mut Random) -> Vec<u32> {
    let places = permutation(pages, random);
    let zipf = Zipf::new(u64::from(pages), THETA);
    let mut scan = (0..pages).cycle();
    let access = |_| match random.fraction() < share {
        true => scan.next().unwrap_or(0),
        false => places[zipf.rank(random) as usize],
    };
    (0..accesses).map(access).collect()
}

fn interrupted(pages: u32, accesses: usize, random: &mut Random) -> Vec<u32> {
    let places = permutation(pages, random);
    let zipf = Zipf::new(u64::from(pages), THETA);
    let scan = pages / 2;
    let mut trace = Vec::with_capacity(accesses + scan as usize);
    while trace.len() < accesses {
        trace.extend((0..3 * scan).map(|_| places[zipf.rank(random) as usize]));
        let from = random.below(u64::from(pages)) as u32;
        trace.extend((from..from + scan).map(|page| page % pages));
    }
    trace.truncate(accesses);
    trace
}

fn shifting(pages: u32, accesses: usize, random: &mut Random) -> Vec<u32> {
    let hot = (pages / 20).max(10) as usize;
    let mut places = permutation(pages, random);
    let step = (accesses / 10).max(1);
    let access = |at: usize| {
        if at > 0 && at.is_multiple_of(step) {
            let change = if at / step == 5 { hot } else { hot / 10 };
            for place in 0..change {
                let other = hot + random.below(places.len() as u64 - hot as u64) as usize;
                places.swap(place, other);
            }
            // Another tenth next time.
            places[..hot].rotate_left(change);
        }
        let end = if random.fraction() < 0.9 { hot } else { places.len() };
        places[random.below(end as u64) as usize]
    };
    (0..accesses).map(access).collect()
}

/// How many nodes of each level.
struct Tree {
    leaves: u32,
    inner: u32,
    root: u32,
}

const FANOUT: u32 = 100;

fn tree(pages: u32) -> Tree {
    let inner = (pages / FANOUT).max(1);
    let root = inner.div_ceil(FANOUT);
    Tree { leaves: pages - inner - root - 1, inner, root }
}

fn descents(
    pages: u32,
    accesses: usize,
    random: &mut Random,
    mut leaf: impl FnMut(&mut Random) -> u32,
) -> Vec<u32> {
    let Tree { leaves, inner, root } = tree(pages);
    let places = permutation(pages, random);
    let scattered = permutation(leaves, random);
    let mut trace = Vec::with_capacity(accesses + 4);
    while trace.len() < accesses {
        let leaf = scattered[leaf(random) as usize];
        let parent = (leaf / FANOUT).min(inner - 1);
        let path = [0, 1 + parent / FANOUT, 1 + root + parent, 1 + root + inner + leaf];
        trace.extend(path.map(|node| places[node as usize]));
    }
    trace.truncate(accesses);
    trace
}

fn appending(pages: u32, accesses: usize, random: &mut Random) -> (u32, Vec<u32>) {
    const FILLED_IN: usize = 20;
    let age = Zipf::new(u64::from(pages), THETA);
    let mut end = pages;
    let mut trace = Vec::with_capacity(accesses);
    for at in 0..accesses {
        // Every other access is an insertion into the last page.
        if at % (2 * FILLED_IN) == 0 {
            end += 1;
        }
        trace.push(if at % 2 == 0 {
            end - 1
        } else {
            end - 1 - (age.rank(random) as u32).min(end - 1)
        });
    }
    (end, trace)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_trace_is_as_long_as_asked_and_within_its_pages() {
        for kind in Kind::ALL {
            let trace = kind.make(5_000, 500, 20_000);
            assert_eq!(trace.accesses.len(), 20_000, "{}", trace.name);
            assert!(trace.accesses.iter().all(|page| *page < trace.pages), "{}", trace.name);
            assert!(trace.counted_from < trace.accesses.len());
        }
    }

    #[test]
    fn traces_are_the_same_every_time() {
        for kind in Kind::ALL {
            let make = || kind.make(2_000, 100, 5_000).accesses;
            assert_eq!(make(), make(), "{kind:?}");
        }
    }

    #[test]
    fn names_are_distinct() {
        let names: HashSet<String> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), Kind::ALL.len());
    }

    #[test]
    fn inner_nodes_of_the_tree_are_hot() {
        let trace = Kind::TreeUniform.make(20_000, 100, 40_000);
        let mut counts = vec![0; trace.pages as usize];
        trace.accesses.iter().for_each(|page| counts[*page as usize] += 1);
        assert_eq!(counts.iter().filter(|count| **count == 10_000).count(), 1, "the root");
        let inner = counts.iter().filter(|count| **count > 20).count();
        let leaves = tree(20_000).leaves;
        assert_eq!(inner as u32, 1 + 2 + leaves.div_ceil(FANOUT), "levels above the leaves");
    }

    #[test]
    fn the_hot_set_takes_its_share_and_moves() {
        let trace = Kind::Shifting.make(10_000, 100, 100_000);
        let hottest = |accesses: &[u32]| {
            let mut counts = vec![0u32; 10_000];
            accesses.iter().for_each(|page| counts[*page as usize] += 1);
            let mut pages: Vec<usize> = (0..10_000).collect();
            pages.sort_by_key(|page| std::cmp::Reverse(counts[*page]));
            pages.into_iter().take(500).collect::<HashSet<_>>()
        };
        let at = |step: usize| hottest(&trace.accesses[step * 10_000..][..10_000]);
        let kept = |a: usize, b: usize| at(a).intersection(&at(b)).count();
        assert!((420..=470).contains(&kept(1, 2)), "a tenth moved: {}", kept(1, 2));
        assert!(kept(4, 5) < 60, "all moved: {}", kept(4, 5));
    }
}
