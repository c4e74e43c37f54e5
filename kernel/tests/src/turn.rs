//! Tests take turns, because the kernel's counters count for all of them together.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{DEVICE, Exmap, counters, knows, morsel};

static TURNS: Mutex<()> = Mutex::new(());

/// While it lives no other test of this program runs.
#[derive(Debug)]
pub struct Turn {
    _alone: MutexGuard<'static, ()>,
}

impl Drop for Turn {
    /// The test that had a turn has left nothing in the kernel.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            counters::assert_no_exmaps();
            counters::assert_no_morsels();
        }
    }
}

/// Waits until no other test runs. `None` where there is no device to be tested, which is said.
#[must_use]
pub fn turn() -> Option<Turn> {
    if !Path::new(DEVICE).exists() {
        eprintln!("skipped: no {DEVICE}");
        return None;
    }
    // A test that failed has nothing to do with the next one.
    Some(Turn { _alone: TURNS.lock().unwrap_or_else(PoisonError::into_inner) })
}

/// A turn for a test of Morsels. `None` where there is no morselfs, which is said.
#[must_use]
pub fn morsel_turn() -> Option<Turn> {
    if !morsel::is_mounted() {
        eprintln!("skipped: no morselfs at {}", morsel::FOLDER);
        return None;
    }
    turn()
}

/// A turn, if the module knows these flags of creation.
#[must_use]
pub fn turn_with(flags: u64) -> Option<Turn> {
    let turn = turn()?;
    knows(flags).then_some(turn)
}

/// A turn, if the module has these features.
#[must_use]
pub fn turn_for(features: u64) -> Option<Turn> {
    let turn = turn()?;
    let missing = features & !Exmap::open().query().features;
    if missing != 0 {
        eprintln!("skipped: the module does not have the features {missing:#x}");
    }
    (missing == 0).then_some(turn)
}
