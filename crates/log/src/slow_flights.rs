//! How far flights are, and those that are *aloft*: on a device that takes its time, for
//! simulations that have one thread.
//!
//! The thread that leads a flight waits for the device, and other threads go on meanwhile. One
//! thread alone cannot do both. So the flights of a log that is slowed down (`Log::slow_down`) stay
//! aloft: a flight goes on by one step, which is its write, its sync or its landing, when the
//! simulation lets time pass. Several flights go on in any order. A caller that waits for a record
//! has time pass until the record is durable. What is to happen within a millisecond happens by the
//! simulation's clock.

#[cfg(feature = "testing")]
use std::time::{Duration, Instant};

#[cfg(feature = "testing")]
use crate::ring::SealedBlocks;
#[cfg(feature = "testing")]
use crate::sync::{Mutex, MutexGuard, lock};

/// How far a flight is.
pub(crate) enum Stage {
    /// Nothing is written yet.
    Taken,
    /// It is written, and not synced.
    Written,
    /// The device has done its part, and the flight may land.
    Ended(Result<(), String>),
}

/// Chooses one of so many, from 0 on: whose turn it is. The last one is the thread of the log.
#[cfg(feature = "testing")]
pub type Choose = Box<dyn FnMut(usize) -> usize + Send>;

/// The flights that are aloft: none, unless the log is slowed down.
#[cfg(feature = "testing")]
#[derive(Default)]
pub(crate) struct Airspace(Mutex<Option<Sky>>);

#[cfg(feature = "testing")]
struct Sky {
    choose: Choose,
    now: Instant,
    aloft: Vec<Aloft>,
    /// A turn is under way. What the device does meanwhile gives no turn to others: they would wait
    /// for locks of this one.
    in_turn: bool,
}

/// A flight that is aloft.
#[cfg(feature = "testing")]
pub(crate) struct Aloft {
    pub(crate) sealed: SealedBlocks,
    pub(crate) flags: u8,
    pub(crate) stage: Stage,
}

/// A turn, which ends when this is dropped, also by a panic.
#[cfg(feature = "testing")]
pub(crate) struct Turn<'a>(&'a Airspace);

#[cfg(feature = "testing")]
impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(sky) = &mut *self.0.lock() {
            sky.in_turn = false;
        }
    }
}

#[cfg(feature = "testing")]
impl Airspace {
    fn lock(&self) -> MutexGuard<'_, Option<Sky>> {
        lock(&self.0)
    }

    /// From now on flights stay aloft until time passes.
    pub(crate) fn open(&self, choose: Choose) {
        let (now, aloft) = (Instant::now(), Vec::new());
        *self.lock() = Some(Sky { choose, now, aloft, in_turn: false });
    }

    /// Whether flights stay aloft until time passes.
    pub(crate) fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    /// Whether no flight is aloft.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().as_ref().is_none_or(|sky| sky.aloft.is_empty())
    }

    /// The time of the simulation.
    pub(crate) fn now(&self) -> Option<Instant> {
        self.lock().as_ref().map(|sky| sky.now)
    }

    /// Keeps a flight aloft. Gives it back if flights do not stay aloft.
    pub(crate) fn keep(&self, aloft: Aloft) -> Option<Aloft> {
        match &mut *self.lock() {
            Some(sky) => {
                sky.aloft.push(aloft);
                None
            }
            None => Some(aloft),
        }
    }

    /// So much time passes, and a turn begins: that of a flight, or of the log's thread. `None` if
    /// another turn is under way.
    pub(crate) fn begin_turn(&self, time: Duration) -> Option<(Turn<'_>, Option<Aloft>)> {
        let mut guard = self.lock();
        let sky = guard.as_mut()?;
        sky.now += time;
        if std::mem::replace(&mut sky.in_turn, true) {
            return None;
        }
        let turn = (sky.choose)(sky.aloft.len() + 1);
        let aloft = (turn < sky.aloft.len()).then(|| sky.aloft.swap_remove(turn));
        Some((Turn(self), aloft))
    }
}
