//! Binds threads to processors, because short samples end before the kernel has spread the threads.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds this thread to the n-th processor that it may use, modulo their number. If that is not
/// allowed, it runs anywhere.
pub fn stay_on(number: usize) {
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let processors: Vec<usize> =
        (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)).collect();
    if let Some(processor) = nth(&processors, number) {
        let mut one = CpuSet::new();
        one.set(processor);
        // On an error the affinity does not change.
        let _ = sched_setaffinity(None, &one);
    }
}

fn nth(processors: &[usize], number: usize) -> Option<usize> {
    processors.get(number.checked_rem(processors.len())?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_over_again() {
        assert_eq!([0, 1, 2, 5].map(|number| nth(&[3, 7], number)), [3, 7, 3, 7].map(Some));
        assert_eq!(nth(&[], 1), None);
    }

    #[test]
    fn a_thread_stays_where_it_was_put() {
        std::thread::spawn(|| {
            stay_on(1);
            let after = sched_getaffinity(None).unwrap();
            assert_eq!(after.count(), 1);
        })
        .join()
        .unwrap();
    }
}
