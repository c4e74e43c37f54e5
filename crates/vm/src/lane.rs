//! Chooses addresses for a mapping so that it can grow in place.
//!
//! The kernel places ordinary mappings from the top of the address space downwards, so a mapping
//! that it placed has a neighbour right above it and can never grow. Here the middle of the lower
//! 47 bits, which the kernel reaches last, is divided among the growable mappings of the process:
//! each new one goes into the middle of the widest gap that is left, so that it and the one below
//! have the same room. With 16 mappings alive each can grow to about 4 TiB, with 64 to 1 TiB.
//! A lane maps nothing in advance; it is only an address to start from.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The divided span: from above AddressSanitizer's shadow, which ends at 16 TiB + 2 GiB, to below
/// where position-independent executables and their heaps are placed (85 TiB on x86-64).
const SPAN: (usize, usize) = (17 << 40, 81 << 40);
/// Lanes start at multiples of this, so that each has page tables of its own.
const ALIGN: usize = 1 << 30;
/// Places that other mappings may have taken before the search ends.
const TRIES: usize = 64;

/// The addresses that lanes of this process use: start to end.
type Used = BTreeMap<usize, usize>;

static USED: Mutex<Used> = Mutex::new(Used::new());

/// A place in the address space; dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Lane {
    start: usize,
}

impl Lane {
    /// Takes a place for `bytes` in which `map` succeeds.
    ///
    /// `map` returns `Ok(None)` if another mapping is in the way, and the search tries another
    /// place; it returns an error if no place can work. `Ok(None)` means that the search found no
    /// place.
    pub(crate) fn claim<T, E>(
        bytes: usize,
        mut map: impl FnMut(usize) -> Result<Option<T>, E>,
    ) -> Result<Option<(Self, T)>, E> {
        let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut avoided = used.clone();
        for _ in 0..TRIES {
            let Some(start) = best_start(&avoided, bytes) else { break };
            if let Some(mapped) = map(start)? {
                used.insert(start, start + bytes);
                return Ok(Some((Self { start }, mapped)));
            }
            avoided.insert(start, start + bytes.max(ALIGN));
        }
        Ok(None)
    }

    /// Notes that the mapping in this lane is now `bytes` long.
    pub(crate) fn grown_to(&self, bytes: usize) {
        let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
        used.insert(self.start, self.start + bytes);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        USED.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.start);
    }
}

/// The middle of the widest gap in which `bytes` fit; the bottom of the lowest gap, because no
/// mapping below it grows.
fn best_start(used: &Used, bytes: usize) -> Option<usize> {
    let mut best = None;
    let mut widest = bytes.checked_sub(1)?;
    let mut below = SPAN.0;
    for (&start, &end) in used.iter().chain([(&SPAN.1, &SPAN.1)]) {
        let first = below.next_multiple_of(ALIGN);
        let gap = start.saturating_sub(first);
        if gap > widest {
            let skip = if below == SPAN.0 { 0 } else { (gap - bytes) / 2 / ALIGN * ALIGN };
            best = Some(first + skip);
            widest = gap;
        }
        below = end;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIB: usize = 1 << 40;

    #[test]
    fn sixteen_lanes_have_nearly_four_tebibytes_each() {
        let mut used = Used::new();
        for _ in 0..16 {
            let start = best_start(&used, ALIGN).unwrap();
            assert!(start.is_multiple_of(ALIGN) && !used.contains_key(&start));
            used.insert(start, start + ALIGN);
        }
        let mut starts: Vec<usize> = used.into_keys().chain([SPAN.1]).collect();
        starts.sort_unstable();
        assert_eq!(starts[0], SPAN.0);
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] > 4 * TIB - 20 * ALIGN));
        assert!(SPAN.1 < 0x5555_5555_4000);
    }

    #[test]
    fn a_large_neighbour_is_given_room_and_a_large_mapping_finds_it() {
        let used = Used::from([(SPAN.0, SPAN.0 + 40 * TIB)]);
        assert_eq!(best_start(&used, 2 * TIB), Some(SPAN.0 + 40 * TIB + 11 * TIB));
        assert_eq!(best_start(&used, 24 * TIB), Some(SPAN.0 + 40 * TIB));
        assert_eq!(best_start(&used, 24 * TIB + 1), None);
        assert_eq!(best_start(&Used::new(), 64 * TIB), Some(SPAN.0));
        assert_eq!(best_start(&Used::new(), usize::MAX), None);
    }

    #[test]
    fn taken_places_are_skipped() {
        let mut seen = Vec::new();
        let claimed = Lane::claim(ALIGN, |address| {
            seen.push(address);
            Ok::<_, ()>((seen.len() == 3).then_some(address))
        });
        let (lane, address) = claimed.unwrap().unwrap();
        seen.dedup();
        assert_eq!((seen.len(), lane.start), (3, address));
        assert_eq!(Lane::claim(ALIGN, |_| Err::<Option<()>, _>("no")).unwrap_err(), "no");
        assert!(Lane::claim(ALIGN, |_| Ok::<Option<()>, ()>(None)).unwrap().is_none());
    }
}
