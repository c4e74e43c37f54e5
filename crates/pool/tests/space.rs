//! The free map, compared with the simplest possible one: a bit per page.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)]

use proptest::collection::vec;
use proptest::prelude::*;
use vellum_pool::{Space, SpaceError};

/// One bit per page: whether it is free.
#[derive(Debug)]
struct Bitmap {
    first: usize,
    free: Vec<bool>,
}

impl Bitmap {
    /// The free extents as (start, count).
    fn extents(&self) -> Vec<(u64, u64)> {
        let mut extents: Vec<(u64, u64)> = Vec::new();
        for page in (0_u64..).zip(&self.free).filter_map(|(page, &free)| free.then_some(page)) {
            match extents.last_mut() {
                Some((start, count)) if *start + *count == page => *count += 1,
                _ => extents.push((page, 1)),
            }
        }
        extents
    }

    fn allocate(&mut self, count: u64) -> u64 {
        let extents = self.extents();
        let fitting = extents.iter().filter(|extent| extent.1 >= count);
        let start = match (fitting.min_by_key(|extent| (extent.1, extent.0)), extents.last()) {
            (Some(&(start, _)), _) => start,
            (None, Some(&(start, size))) if start + size == self.free.len() as u64 => start,
            _ => self.free.len() as u64,
        };
        let end = (start + count) as usize;
        self.free.resize(end.max(self.free.len()), true);
        self.free[start as usize..end].fill(false);
        start
    }

    fn allocate_below(&mut self, count: u64, end: u64) -> Option<u64> {
        let extents = self.extents();
        let fitting = extents.iter().find(|extent| extent.1 >= count);
        let start = fitting.map(|extent| extent.0).filter(|start| start + count <= end)?;
        self.free[start as usize..(start + count) as usize].fill(false);
        Some(start)
    }

    fn allocated_from(&self, page: u64) -> u64 {
        let rest = self.free.iter().skip((page as usize).max(self.first));
        rest.filter(|free| !**free).count() as u64
    }

    fn free(&mut self, start: u64, count: u64) -> bool {
        let (from, to) = (start as usize, (start + count) as usize);
        if count == 0
            || from < self.first
            || to > self.free.len()
            || self.free[from..to].contains(&true)
        {
            return false;
        }
        self.free[from..to].fill(true);
        true
    }

    fn set(&mut self, start: u64, count: u64, free: bool) -> bool {
        let (from, to) = (start as usize, (start + count) as usize);
        if count == 0 || from < self.first {
            return false;
        }
        self.free.resize(to.max(self.free.len()), true);
        self.free[from..to].fill(free);
        true
    }

    fn trim(&mut self) -> Option<u64> {
        let used = self.free.iter().rposition(|free| !free).map_or(self.first, |last| last + 1);
        let used = used.max(self.first);
        let shorter = used < self.free.len();
        self.free.truncate(used);
        shorter.then_some(used as u64)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    AllocateBelow(u64, u64),
    Free(u64, u64),
    FreeAllocated(usize),
    Set(u64, u64, bool),
    Trim,
    Reload,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (1_u64..9).prop_map(Step::Allocate),
        4 => (1_u64..9, 0_u64..120).prop_map(|(count, end)| Step::AllocateBelow(count, end)),
        3 => (0_u64..120, 0_u64..9).prop_map(|(start, count)| Step::Free(start, count)),
        7 => any::<usize>().prop_map(Step::FreeAllocated),
        2 => (0_u64..120, 0_u64..9, any::<bool>())
            .prop_map(|(start, count, free)| Step::Set(start, count, free)),
        1 => Just(Step::Trim),
        1 => Just(Step::Reload),
    ];
    vec(step, 1..200)
}

fn assert_same(space: &Space, bitmap: &Bitmap) -> Result<(), TestCaseError> {
    let extents = bitmap.extents();
    prop_assert_eq!(space.free_extents().collect::<Vec<_>>(), extents.clone());
    prop_assert_eq!(space.end(), bitmap.free.len() as u64);
    prop_assert_eq!(space.free_pages(), extents.iter().map(|extent| extent.1).sum::<u64>());
    prop_assert_eq!(space.largest_free(), extents.iter().map(|extent| extent.1).max().unwrap_or(0));
    for page in 0..space.end() + 2 {
        let free = bitmap.free.get(page as usize).copied().unwrap_or(false);
        prop_assert_eq!(space.has_free(page, 1), free);
        prop_assert_eq!(space.allocated_from(page), bitmap.allocated_from(page));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_free_map_behaves_like_a_bitmap(first in 0_u64..5, steps in steps()) {
        let mut space = Space::new(first);
        let mut bitmap = Bitmap { first: first as usize, free: vec![false; first as usize] };
        let mut allocated: Vec<(u64, u64)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(count) => {
                    let start = space.allocate(count);
                    prop_assert_eq!(start, bitmap.allocate(count));
                    allocated.push((start, count));
                }
                Step::AllocateBelow(count, end) => {
                    let start = bitmap.allocate_below(count, end);
                    prop_assert_eq!(space.has_room_below(count, end), start.is_some());
                    prop_assert_eq!(space.allocate_below(count, end), start);
                    allocated.extend(start.map(|start| (start, count)));
                }
                Step::Free(start, count) => {
                    prop_assert_eq!(space.free(start, count).is_ok(), bitmap.free(start, count));
                }
                Step::FreeAllocated(index) if !allocated.is_empty() => {
                    let (start, count) = allocated.swap_remove(index % allocated.len());
                    prop_assert_eq!(space.free(start, count).is_ok(), bitmap.free(start, count));
                }
                Step::FreeAllocated(_) => {}
                Step::Set(start, count, free) => {
                    let set = match free {
                        true => space.set_free(start, count),
                        false => space.set_allocated(start, count),
                    };
                    prop_assert_eq!(set.is_ok(), bitmap.set(start, count, free));
                    for page in start..start + count {
                        allocated.retain(|(first, count)| !(*first..first + count).contains(&page));
                    }
                }
                Step::Trim => prop_assert_eq!(space.trim(), bitmap.trim()),
                Step::Reload => {
                    let decoded = Space::decode(&space.encode());
                    prop_assert_eq!(decoded.as_ref(), Ok(&space));
                    space = decoded.unwrap();
                }
            }
            assert_same(&space, &bitmap)?;
        }
    }

    /// Changed bytes are refused, or decode to another space, which encodes to the same bytes.
    #[test]
    fn changed_bytes_never_panic(
        frees in vec((0_u64..200, 1_u64..6), 0..30),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut space = Space::new(3);
        space.allocate(200);
        for (start, count) in frees {
            let _ = space.free(start, count);
        }
        let mut bytes = space.encode();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        use_hostile(&bytes)?;
    }

    #[test]
    fn any_bytes_never_panic(
        mut bytes in vec(any::<u8>(), 0..200),
        small in vec(0_u64..40, 0..16),
    ) {
        use_hostile(&bytes)?;
        // With a valid beginning and small numbers, the decoder gets further.
        bytes.clear();
        bytes.extend(1_u64.to_le_bytes());
        bytes.extend(small.iter().flat_map(|number| number.to_le_bytes()));
        use_hostile(&bytes)?;
    }
}

fn use_hostile(bytes: &[u8]) -> Result<(), TestCaseError> {
    let Ok(mut space) = Space::decode(bytes) else { return Ok(()) };
    prop_assert_eq!(space.encode(), bytes);
    let start = space.allocate(7);
    prop_assert!(space.end() >= start + 7);
    space.free(start, 7).unwrap();
    let freed_twice = matches!(space.free(start, 7), Err(SpaceError::AlreadyFree { .. }));
    prop_assert!(freed_twice);
    space.trim();
    prop_assert_eq!(space.allocated_pages() + space.free_pages(), space.end() - space.first());
    Ok(())
}

#[test]
fn a_hundred_thousand_extents_work() {
    let mut space = Space::new(0);
    space.allocate(300_000);
    for extent in 0..100_000 {
        space.free(extent * 3, 1 + extent % 2).unwrap();
    }
    let decoded = Space::decode(&space.encode()).unwrap();
    assert_eq!(decoded, space);
    assert_eq!(space.free_pages(), 150_000);
    for _ in 0..50_000 {
        space.allocate(2);
    }
    assert_eq!((space.largest_free(), space.end()), (1, 300_000));
}
