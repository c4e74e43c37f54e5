//! The pages that came last, each of which gets a mark when so many others have come after it.
//!
//! The load that brings a page in is an access, and so are the next few by the same operation. A
//! clock that waits for its hand to mark the page keeps it until the hand has come twice. With the
//! mark from here, the page leaves when the hand comes, unless a thread accessed it again. So pages
//! that were read once take less of the pool from those that are read again and again.
//!
//! A page that was read ahead is accessed later, and gets its mark after that. A scan reads up to
//! 1,024 pages ahead, or an eighth of the pool.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use zerocopy::FromZeros;

use super::Arrival;

/// A page that a thread needed gets its mark after so many others, in pools that have many more
/// frames. In smaller ones it is a sixteenth of the frames.
const NEEDED_DELAY: u64 = 1_024;

/// The same of a page that was read ahead. In smaller pools it is a quarter of the frames.
const AHEAD_DELAY: u64 = 4_096;

/// The background thread begins to evict when so many frames are free, and goes on until twice as
/// many are. So about as many pages come between two of its searches, and the ring has room for
/// four times as many.
fn pages_between_searches(frames: u64) -> u64 {
    (frames / 64).max((frames / 16).min(256))
}

/// A ring of the places where pages were put. Threads may take a place that another one is about to
/// write: then they mark the page that is there, which may have come earlier or later.
#[derive(Debug)]
pub(super) struct Newcomers {
    /// Each place twice, and one more for a page that was read ahead.
    places: Box<[AtomicU32]>,
    /// How many pages have come. Every miss changes it.
    came: Count,
    needed: Taken,
    ahead: Taken,
}

/// In a line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Count(AtomicUsize);

/// Of pages of one kind.
#[derive(Debug)]
struct Taken {
    /// How many of all pages were taken, were passed over, or are forgotten.
    count: Count,
    delay: usize,
}

impl Taken {
    fn new(delay: u64) -> Taken {
        Taken { count: Count::default(), delay: delay as usize }
    }
}

impl Newcomers {
    /// For a pool of so many frames.
    pub(super) fn new(frames: u64) -> Newcomers {
        let needed = (frames / 16).clamp(1, NEEDED_DELAY);
        let ahead = (frames / 4).clamp(1, AHEAD_DELAY);
        let places = ahead + 4 * pages_between_searches(frames);
        let places = usize::try_from(places).unwrap_or(usize::MAX);
        let places = <[AtomicU32]>::new_box_zeroed_with_elems(places);
        let places = places.expect("address space for the places of new pages");
        let (needed, ahead) = (Taken::new(needed), Taken::new(ahead));
        Newcomers { places, came: Count::default(), needed, ahead }
    }

    /// A page was put into this place. Pages in places from 2^31 on, of pools of 3 TiB, get their
    /// marks from the hand alone.
    pub(super) fn note(&self, place: usize, arrival: Arrival) {
        let ahead = u32::from(arrival == Arrival::Ahead);
        let number = self.came.0.fetch_add(1, Ordering::Relaxed);
        let Some(entry) = u32::try_from(place).ok().and_then(|place| place.checked_mul(2)) else {
            return;
        };
        self.places[number % self.places.len()].store(entry + ahead, Ordering::Relaxed);
    }

    /// The place of a page after which enough others have come. Each is taken once. If threads take
    /// none for long, the older ones are forgotten.
    pub(super) fn take_due(&self) -> Option<usize> {
        let of_kind =
            |taken, kind| std::iter::from_fn(|| self.take(taken)).find(|entry| entry % 2 == kind);
        let entry = of_kind(&self.needed, 0).or_else(|| of_kind(&self.ahead, 1));
        entry.map(|entry| entry as usize / 2)
    }

    /// The next entry after which enough others have come, of either kind.
    fn take(&self, of_kind: &Taken) -> Option<u32> {
        loop {
            let count = &of_kind.count.0;
            let (came, taken) =
                (self.came.0.load(Ordering::Relaxed), count.load(Ordering::Relaxed));
            // Another thread may have taken more than this one knows to have come.
            if came.wrapping_sub(taken).cast_signed() <= of_kind.delay.cast_signed() {
                return None;
            }
            let number = came.wrapping_sub(self.places.len());
            let number = if number.wrapping_sub(taken).cast_signed() > 0 { number } else { taken };
            let next = number.wrapping_add(1);
            let (done, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            if count.compare_exchange(taken, next, done, failed).is_ok() {
                return Some(self.places[number % self.places.len()].load(Ordering::Relaxed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(newcomers: &Newcomers) -> Vec<usize> {
        std::iter::from_fn(|| newcomers.take_due()).collect()
    }

    #[test]
    fn a_place_is_due_once_and_when_enough_others_have_come() {
        let newcomers = Newcomers::new(64);
        (0..4).for_each(|place| newcomers.note(place, Arrival::Needed));
        assert_eq!(due(&newcomers), []);
        (4..7).for_each(|place| newcomers.note(place, Arrival::Needed));
        assert_eq!(due(&newcomers), [0, 1, 2]);
    }

    #[test]
    fn a_place_of_a_page_that_was_read_ahead_is_due_later() {
        let newcomers = Newcomers::new(64);
        (0..4).for_each(|place| newcomers.note(place, Arrival::Ahead));
        (4..18).for_each(|place| newcomers.note(place, Arrival::Needed));
        assert_eq!(due(&newcomers), [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0, 1]);
        newcomers.note(18, Arrival::Ahead);
        assert_eq!(due(&newcomers), [14, 2]);
    }

    #[test]
    fn what_no_thread_takes_is_forgotten() {
        let newcomers = Newcomers::new(64);
        (0..1_000).for_each(|place| newcomers.note(place, Arrival::Needed));
        assert_eq!(due(&newcomers), (968..996).collect::<Vec<_>>());
    }
}
