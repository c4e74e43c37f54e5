//! The cache thread makes the process' own cache, opens files for it and closes them.
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

/// How often it was woken.
static WAKES: AtomicU32 = AtomicU32::new(0);

/// Tells the cache thread that there is work.
pub(crate) fn wake() {
    WAKES.fetch_add(1, Ordering::Release);
    system::wake(&WAKES);
}

/// Starts the cache thread, which prepares and then works whenever it was woken. If that is not
/// possible, or if it cannot have descriptors of its own, `prepare` gets `false`, and nothing more
/// happens. The caller has blocked [`SIGNALS`], and so the cache thread has.
pub(crate) fn start<W: FnMut()>(prepare: impl Fn(bool) -> Option<W> + Clone + Send + 'static) {
    let keep = {
        let prepare = prepare.clone();
        move || {
            let Some(mut work) = prepare(system::have_own_descriptors()) else { return };
            loop {
                let woken = WAKES.load(Ordering::Acquire);
                work();
                system::wait_for_change(&WAKES, woken);
            }
        }
    };
    if thread::Builder::new().name("vellum-cache".to_owned()).spawn(keep).is_err() {
        prepare(false);
    }
}
