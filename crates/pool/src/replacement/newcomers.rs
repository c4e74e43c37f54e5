//! The pages that came last, each of which gets a mark when so many others have come after it.
//!
//! The load that brings a page in is an access, and so are the next few by the same operation. A
//! clock that waits for its hand to mark the page keeps it until the hand has come twice. With the
//! mark from here, the page leaves when the hand comes, unless a thread accessed it again. So pages
//! that were read once take less of the pool from those that are read again and again.

use std::sync::atomic::{AtomicUsize, Ordering};

use zerocopy::FromZeros;

/// A page gets its mark after so many others, in pools that have many more frames. In smaller ones
/// it is a sixteenth of the frames.
const DELAY_MAX: u64 = 1_024;

/// The background thread begins to evict when so many frames are free, and goes on until twice as
/// many are. So about as many pages come between two of its searches, and the ring has room for
/// three times as many.
fn pages_between_searches(frames: u64) -> u64 {
    (frames / 64).max((frames / 16).min(256))
}

/// A ring of the places where pages were put. Threads may take a place that another one is about to
/// write: then they mark the page that is there, which may have come earlier or later.
#[derive(Debug)]
pub(super) struct Newcomers {
    places: Box<[AtomicUsize]>,
    delay: usize,
    counts: Counts,
}

/// In lines of their own: every miss changes the first.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counts {
    /// How many pages have come.
    came: AtomicUsize,
    /// How many of them were taken, or are forgotten.
    taken: AtomicUsize,
}

impl Newcomers {
    /// For a pool of so many frames.
    pub(super) fn new(frames: u64) -> Newcomers {
        let delay = (frames / 16).clamp(1, DELAY_MAX);
        let places = 2 * delay + 3 * pages_between_searches(frames);
        let places = usize::try_from(places).unwrap_or(usize::MAX);
        let places = <[AtomicUsize]>::new_box_zeroed_with_elems(places);
        let places = places.expect("address space for the places of new pages");
        Newcomers { places, delay: delay as usize, counts: Counts::default() }
    }

    /// A page was put into this place.
    pub(super) fn note(&self, place: usize) {
        let number = self.counts.came.fetch_add(1, Ordering::Relaxed);
        self.places[number % self.places.len()].store(place, Ordering::Relaxed);
    }

    /// The place of a page after which enough others have come. Each is taken once. If threads take
    /// none for long, the older ones are forgotten.
    pub(super) fn take_due(&self) -> Option<usize> {
        loop {
            let (came, taken) = (
                self.counts.came.load(Ordering::Relaxed),
                self.counts.taken.load(Ordering::Relaxed),
            );
            // Another thread may have taken more than this one knows to have come.
            if came.wrapping_sub(taken).cast_signed() <= self.delay.cast_signed() {
                return None;
            }
            let number = came.wrapping_sub(self.places.len());
            let number = if number.wrapping_sub(taken).cast_signed() > 0 { number } else { taken };
            let next = number.wrapping_add(1);
            let (done, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            if self.counts.taken.compare_exchange(taken, next, done, failed).is_ok() {
                return Some(self.places[number % self.places.len()].load(Ordering::Relaxed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_due_once_and_when_enough_others_have_come() {
        let newcomers = Newcomers::new(64);
        (0..4).for_each(|place| newcomers.note(place));
        assert_eq!(newcomers.take_due(), None);
        (4..7).for_each(|place| newcomers.note(place));
        assert_eq!([(); 4].map(|()| newcomers.take_due()), [Some(0), Some(1), Some(2), None]);
    }

    #[test]
    fn what_no_thread_takes_is_forgotten() {
        let newcomers = Newcomers::new(64);
        (0..1_000).for_each(|place| newcomers.note(place));
        let due: Vec<usize> = std::iter::from_fn(|| newcomers.take_due()).collect();
        assert!(due.into_iter().eq(980..996));
    }
}
