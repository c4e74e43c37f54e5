//! Shows the recovery of a store that was not closed: a bar if it takes long, and a line that says
//! what was done.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use vellum::{Options, Store};

use crate::progress::{DelayedProgress, say};
use crate::size;

/// Options with which opening a store shows its recovery.
pub fn shown(options: Options) -> Options {
    let bar: Mutex<Option<(DelayedProgress, u64)>> = Mutex::new(None);
    options.on_recovery(move |progress| {
        let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
        let (late, before) =
            bar.get_or_insert_with(|| (DelayedProgress::new("recover", progress.bytes_total), 0));
        late.advance(progress.bytes_done.saturating_sub(*before));
        *before = progress.bytes_done;
        if progress.bytes_done == progress.bytes_total
            && let Some((late, _)) = bar.take()
        {
            late.finish();
        }
    })
}

/// Says what the opening of a store did to recover it, if anything.
pub fn report(store: &Store, path: &Path) {
    if let Some(done) = store.recovery() {
        say(&format!(
            "{}: it was not closed; recovered {} pages from {} of its log, {} changes, in {:.1} s",
            path.display(),
            done.pages,
            size::show(done.log_bytes),
            done.records,
            done.duration.as_secs_f64()
        ));
    }
}
