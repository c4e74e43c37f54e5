//! The hits of the textbook policies with the same memory: FIFO, exact LRU, and Belady's optimum
//! MIN (Belady, IBM Systems Journal 5 (2), 1966), which knows the future.
//!
//! They evict one page at a time and know the order of all accesses, with hits. A page cache whose
//! hits cost nothing cannot do that.

use std::collections::{BinaryHeap, VecDeque};

use super::Trace;

/// Counts the hits of a cache that the policy refills at every miss.
fn count(trace: &Trace, mut hit: impl FnMut(u32) -> bool) -> usize {
    let mut hits = 0;
    for (at, page) in trace.accesses.iter().enumerate() {
        if hit(*page) && at >= trace.counted_from {
            hits += 1;
        }
    }
    hits
}

/// First in, first out.
pub fn fifo(trace: &Trace, cache: u32) -> usize {
    let mut resident = vec![false; trace.pages as usize];
    let mut queue = VecDeque::with_capacity(cache as usize);
    count(trace, |page| {
        if resident[page as usize] {
            return true;
        }
        if queue.len() == cache as usize
            && let Some(oldest) = queue.pop_front()
        {
            resident[oldest as usize] = false;
        }
        queue.push_back(page);
        resident[page as usize] = true;
        false
    })
}

/// Least recently used, exactly.
pub fn lru(trace: &Trace, cache: u32) -> usize {
    // A ring through all resident pages and, as the last element, its head.
    let head = trace.pages;
    let mut ring = vec![(head, head); head as usize + 1];
    let mut resident = vec![false; head as usize];
    let mut len = 0;
    count(trace, |page| {
        let unlink = |ring: &mut Vec<(u32, u32)>, page: u32| {
            let (before, after) = ring[page as usize];
            ring[before as usize].1 = after;
            ring[after as usize].0 = before;
        };
        let hit = std::mem::replace(&mut resident[page as usize], true);
        if hit {
            unlink(&mut ring, page);
        } else if len == cache {
            let oldest = ring[head as usize].0;
            unlink(&mut ring, oldest);
            resident[oldest as usize] = false;
        } else {
            len += 1;
        }
        let newest = ring[head as usize].1;
        ring[page as usize] = (head, newest);
        ring[newest as usize].0 = page;
        ring[head as usize].1 = page;
        hit
    })
}

/// Belady's optimum: it evicts the page whose next access is the furthest.
pub fn min(trace: &Trace, cache: u32) -> usize {
    const NEVER: u32 = u32::MAX;
    let mut next = vec![NEVER; trace.pages as usize];
    let mut next_access = vec![NEVER; trace.accesses.len()];
    for (at, page) in trace.accesses.iter().enumerate().rev() {
        next_access[at] = next[*page as usize];
        next[*page as usize] = at as u32;
    }
    // From here on `next` is that of a resident page; the heap may hold outdated entries, too.
    let mut resident = vec![false; trace.pages as usize];
    let mut furthest: BinaryHeap<(u32, u32)> = BinaryHeap::new();
    let mut len = 0;
    let mut at = 0;
    count(trace, |page| {
        let hit = resident[page as usize];
        while !hit && len == cache {
            let Some((when, oldest)) = furthest.pop() else { break };
            if resident[oldest as usize] && next[oldest as usize] == when {
                resident[oldest as usize] = false;
                len -= 1;
            }
        }
        len += u32::from(!hit);
        resident[page as usize] = true;
        next[page as usize] = next_access[at];
        furthest.push((next_access[at], page));
        at += 1;
        hit
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trace(accesses: Vec<u32>) -> Trace {
        Trace { name: String::new(), pages: 10, accesses, counted_from: 0 }
    }

    /// The textbook's sequence: FIFO misses 15 times with three frames, LRU 12, MIN 9 times.
    #[test]
    fn the_textbook_sequence() {
        let sequence = vec![7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        let trace = trace(sequence);
        assert_eq!(20 - fifo(&trace, 3), 15);
        assert_eq!(20 - lru(&trace, 3), 12);
        assert_eq!(20 - min(&trace, 3), 9);
    }

    #[test]
    fn beladys_anomaly_is_fifos_alone() {
        let trace = trace(vec![1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]);
        assert_eq!((12 - fifo(&trace, 3), 12 - fifo(&trace, 4)), (9, 10));
        assert!(lru(&trace, 4) >= lru(&trace, 3) && min(&trace, 4) >= min(&trace, 3));
    }

    #[test]
    fn hits_before_the_counted_part_do_not_count() {
        let trace = Trace { counted_from: 3, ..trace(vec![1, 1, 1, 1, 2, 2]) };
        for hits in [fifo(&trace, 2), lru(&trace, 2), min(&trace, 2)] {
            assert_eq!(hits, 2);
        }
    }

    /// All possible evictions.
    fn best(accesses: &[u32], resident: &mut Vec<u32>, cache: usize) -> usize {
        let Some((page, rest)) = accesses.split_first() else { return 0 };
        if resident.contains(page) {
            return 1 + best(rest, resident, cache);
        }
        if resident.len() < cache {
            resident.push(*page);
            let hits = best(rest, resident, cache);
            resident.pop();
            return hits;
        }
        (0..cache)
            .map(|victim| {
                let evicted = std::mem::replace(&mut resident[victim], *page);
                let hits = best(rest, resident, cache);
                resident[victim] = evicted;
                hits
            })
            .max()
            .unwrap_or(0)
    }

    proptest! {
        #[test]
        fn nothing_beats_the_optimum(
            accesses in prop::collection::vec(0u32..6, 1..12), cache in 1u32..4,
        ) {
            let trace = trace(accesses);
            let optimum = best(&trace.accesses, &mut Vec::new(), cache as usize);
            prop_assert_eq!(min(&trace, cache), optimum);
            prop_assert!(lru(&trace, cache) <= optimum && fifo(&trace, cache) <= optimum);
        }

        #[test]
        fn lru_keeps_the_most_recent_pages(
            accesses in prop::collection::vec(0u32..8, 1..60), cache in 1u32..6,
        ) {
            let trace = trace(accesses);
            let mut recent: Vec<u32> = Vec::new();
            let model = count(&trace, |page| {
                let hit = recent.iter().take(cache as usize).any(|other| *other == page);
                recent.retain(|other| *other != page);
                recent.insert(0, page);
                hit
            });
            prop_assert_eq!(lru(&trace, cache), model);
        }
    }
}
