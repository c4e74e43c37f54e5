//! Threads that share a list of work.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::{Failure, Outcome};

/// Has `threads` threads call `work` with every index below `count`. The first failure stops all of
/// them.
///
/// # Errors
/// The first failure.
pub fn for_each(threads: usize, count: usize, work: impl Fn(usize) -> Outcome + Sync) -> Outcome {
    let next = AtomicUsize::new(0);
    each_thread(threads, |_, stop| {
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                break;
            }
            work(index)?;
        }
        Ok(())
    })
}

/// Runs `work` on `threads` threads, with the thread's number and a flag that is set when another
/// thread has failed.
///
/// # Errors
/// The first failure.
pub fn each_thread(threads: usize, work: impl Fn(usize, &AtomicBool) -> Outcome + Sync) -> Outcome {
    let stop = AtomicBool::new(false);
    let first: Mutex<Option<Failure>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (work, stop, first) = (&work, &stop, &first);
            scope.spawn(move || {
                if let Err(failure) = work(thread, stop) {
                    stop.store(true, Ordering::Relaxed);
                    let mut first = first.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    first.get_or_insert(failure);
                }
            });
        }
    });
    match first.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn every_index_is_worked_on_once() {
        let sum = AtomicU64::new(0);
        for_each(3, 100, |index| {
            sum.fetch_add(index as u64, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert_eq!(sum.into_inner(), 4950);
    }

    #[test]
    fn the_first_failure_stops_all() {
        let done = AtomicUsize::new(0);
        let result = for_each(2, 1_000_000, |index| {
            done.fetch_add(1, Ordering::Relaxed);
            if index == 10 { Err(Failure::message("ten")) } else { Ok(()) }
        });
        assert_eq!(result.unwrap_err().to_string(), "ten");
        assert!(done.into_inner() < 1_000_000);
    }
}
