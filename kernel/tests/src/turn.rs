//! Tests take turns, because the kernel's counters count for all of them together.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{DEVICE, Exmap, counters, knows, morsel};

static TURNS: Mutex<()> = Mutex::new(());

/// While this lives, no other test of this program runs.
#[derive(Debug)]
pub struct Turn {
    _alone: MutexGuard<'static, ()>,
}

impl Drop for Turn {
    /// Checks that the test has left nothing in the kernel.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            counters::assert_no_exmaps();
            counters::assert_no_morsels();
            counters::assert_no_file_tables();
        }
    }
}

/// Waits until no other test runs. `None`, and a printed line, if there is no device to test.
#[must_use]
pub fn turn() -> Option<Turn> {
    if !Path::new(DEVICE).exists() {
        eprintln!("skipped: no {DEVICE}");
        return None;
    }
    // A failed test does not affect the next one.
    Some(Turn { _alone: TURNS.lock().unwrap_or_else(PoisonError::into_inner) })
}

/// A turn for a test of Morsels. `None`, and a printed line, if there is no morselfs.
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
