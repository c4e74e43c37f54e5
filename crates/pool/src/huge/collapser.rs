//! The thread that collapses chunks.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum_vm::HUGE_PAGES;

use crate::core::Core;
use crate::huge::Attempt;
use crate::sync::thread;

/// The thread rests as long as the collapse took, because a collapse uses the memory's bandwidth
/// and makes other threads wait. It rests at most this long: a collapse that took longer spent most
/// of the time waiting.
const REST_PER_CHUNK: Duration = Duration::from_millis(2);
/// The rest after a collapse that the kernel declined; twice as long after two in a row, ...
const REST_AFTER_FAILURE: Duration = Duration::from_millis(10);
/// ... up to ten seconds.
const REST_DOUBLINGS: u32 = 10;

/// Starts the thread, for a pool that has huge pages. [`Core::end_huge_pages`] ends it.
pub(crate) fn spawn(core: &Arc<Core>) -> io::Result<Option<thread::JoinHandle<()>>> {
    if core.huge.is_none() {
        return Ok(None);
    }
    let core = core.clone();
    let builder = thread::Builder::new().name("vellum-collapse".into());
    builder.spawn(move || run(&core)).map(Some)
}

fn run(core: &Core) {
    let Some(huge) = &core.huge else { return };
    let mut failures = 0;
    while let Some(chunk) = huge.candidates.next() {
        let started = Instant::now();
        let take_frames = || core.try_reserve_on_surface(HUGE_PAGES as u32).ok();
        let attempt = huge.try_collapse(&core.surface, &core.budget, take_frames, chunk);
        if let Attempt::Later(wait) | Attempt::Declined(wait) = attempt {
            let later = Instant::now() + Duration::from_millis(u64::from(wait));
            huge.candidates.add_at(chunk, later);
        }
        match attempt {
            Attempt::Collapsed(chunks) => {
                failures = 0;
                let most = REST_PER_CHUNK * u32::try_from(chunks).unwrap_or(1);
                huge.candidates.rest(started.elapsed().min(most));
            }
            Attempt::Declined(_) => {
                huge.candidates.rest(REST_AFTER_FAILURE * (1 << failures));
                failures = (failures + 1).min(REST_DOUBLINGS);
            }
            Attempt::Dismissed | Attempt::Later(_) => {}
        }
    }
}
