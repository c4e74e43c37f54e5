//! Where in the address space a mapping is put, so that it can grow in place.
//!
//! The kernel places ordinary mappings from the top of the address space downwards, so a mapping
//! that it placed has a neighbour right above it and can never grow. Here the middle of the lower
//! 47 bits, which the kernel reaches last, is divided among the growable mappings of the process:
//! the first gets the bottom, the second the middle, then the quarters, and so on. Each new lane
//! halves the widest gap that is left: with up to 16 mappings alive each can grow to 4 TiB, with
//! up to 64 to 1 TiB. Nothing is mapped ahead of need; a lane is only a place to start from.

use std::sync::{Mutex, PoisonError};

/// The bottom of the divided span: above AddressSanitizer's shadow, which ends at 16 TiB + 2 GiB
/// (the one lane that touches it is found taken and skipped).
const SPAN_START: usize = 1 << 44;
/// Bits of the size of the span: 64 TiB, which ends below where position-independent executables
/// and their heaps are placed (85 TiB on x86-64).
const SPAN_BITS: u32 = 46;
/// Bits of the number of lanes: 65,536, so that the narrowest are 1 GiB.
const LANE_BITS: u32 = 16;
/// Lanes that may be found taken by somebody else before the search ends.
const TRIES: usize = 64;

/// Which lanes are in use in this process, by lane number.
static IN_USE: Mutex<Vec<bool>> = Mutex::new(Vec::new());

/// A starting place in the address space; given back when dropped.
#[derive(Debug)]
pub(crate) struct Lane {
    number: usize,
}

impl Lane {
    /// The address where a mapping in this lane starts.
    pub(crate) fn address(&self) -> usize {
        address_of(self.number)
    }

    /// Takes the first free lane in which `place` succeeds.
    ///
    /// `place` says `Ok(None)` where the lane is taken by something else, which moves on to the
    /// next one, and an error where no lane can work. `Ok(None)` comes back when all that were
    /// tried were taken.
    pub(crate) fn claim<T, E>(
        mut place: impl FnMut(usize) -> Result<Option<T>, E>,
    ) -> Result<Option<(Self, T)>, E> {
        let mut from = 0;
        for _ in 0..TRIES {
            let Some(lane) = Self::next_free(from) else {
                break;
            };
            if let Some(placed) = place(lane.address())? {
                return Ok(Some((lane, placed)));
            }
            from = lane.number + 1;
        }
        Ok(None)
    }

    /// Marks the first free lane at or after `from` as used.
    fn next_free(from: usize) -> Option<Self> {
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let free = in_use.iter().skip(from).position(|used| !used);
        let number = free.map_or(in_use.len().max(from), |skipped| from + skipped);
        if number >= 1 << LANE_BITS {
            return None;
        }
        if number >= in_use.len() {
            in_use.resize(number + 1, false);
        }
        in_use[number] = true;
        Some(Self { number })
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        in_use[self.number] = false;
    }
}

/// The address of a lane: its number with the bits reversed is its position in the span.
fn address_of(number: usize) -> usize {
    let reversed = number.reverse_bits() >> (usize::BITS - LANE_BITS);
    SPAN_START + (reversed << (SPAN_BITS - LANE_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sixteen_lanes_are_four_tebibytes_apart() {
        let mut starts: Vec<usize> = (0..16).map(address_of).collect();
        starts.sort_unstable();
        assert_eq!(starts[0], SPAN_START);
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == 4 << 40));
        assert!(starts[15] + (4 << 40) < 0x5555_5555_4000);
    }

    #[test]
    fn taken_lanes_are_skipped_and_dropped_ones_are_found_again() {
        let mut seen = Vec::new();
        let claimed = Lane::claim(|address| {
            seen.push(address);
            Ok::<_, ()>((seen.len() == 3).then_some(address))
        });
        let (lane, address) = claimed.unwrap().unwrap();
        assert_eq!(seen.len(), 3);
        assert_eq!(lane.address(), address);
        assert_eq!(Lane::claim(|_| Err::<Option<()>, _>("no")).unwrap_err(), "no");
        assert!(Lane::claim(|_| Ok::<Option<()>, ()>(None)).unwrap().is_none());
    }
}
