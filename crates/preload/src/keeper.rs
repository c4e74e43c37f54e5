//! The keeper: the thread that makes the process' own cache, opens files for it and closes them.
//!
//! It has a table of descriptors of its own, as have the threads that it starts. So the program's
//! descriptors have the numbers that they would have without a cache, and the program cannot close
//! the cache's. A process loses its locks on a file (`fcntl(2)`) when it closes any descriptor of
//! the file: when the cache does, the program keeps its locks.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use crate::system;

/// All signals but the two that the C library sends to all threads.
pub(crate) const SIGNALS: u64 = !(1 << 31 | 1 << 32);

/// How often it was rung.
static BELL: AtomicU32 = AtomicU32::new(0);

/// Tells the keeper that there is work.
pub(crate) fn ring() {
    BELL.fetch_add(1, Ordering::Release);
    system::wake(&BELL);
}

/// Starts the keeper, which prepares and then works whenever it was rung. If that is not possible,
/// or if it cannot have descriptors of its own, `prepare` gets `false`, and nothing more happens.
/// All signals of the caller are blocked.
pub(crate) fn start<W: FnMut()>(prepare: impl Fn(bool) -> Option<W> + Clone + Send + 'static) {
    let keep = {
        let prepare = prepare.clone();
        move || {
            system::set_signals(SIGNALS);
            let Some(mut work) = prepare(system::have_own_descriptors()) else { return };
            loop {
                let rung = BELL.load(Ordering::Acquire);
                work();
                system::wait_for_change(&BELL, rung);
            }
        }
    };
    if thread::Builder::new().name("vellum-keeper".to_owned()).spawn(keep).is_err() {
        prepare(false);
    }
}
