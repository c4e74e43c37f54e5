//! The lock of the table of mounts.
//!
//! Invariants: the holder waits only for the kernel, and gets no signal meanwhile. So every waiter
//! gets the lock, whatever other locks it holds: also a handler that has interrupted `malloc`,
//! while another thread forks. `fork` does not wait for this lock, because `fork` holds other
//! locks, too. So a child may find that a thread of its parent holds it. The child takes it over
//! then, and calls `recover`.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::system;

/// The process of the thread that holds it; 0 if no thread does.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Runs `work` with the lock held. Calls `recover` first if a thread of this process' parent held
/// the lock when this process was forked.
pub(crate) fn locked<T>(recover: impl FnOnce(), work: impl FnOnce() -> T) -> T {
    let signals = system::block_signals();
    let own = system::process();
    let before = loop {
        match OWNER.swap(own, Ordering::Acquire) {
            owner if owner == own => system::give_way(),
            owner => break owner,
        }
    };
    if before != 0 {
        recover();
    }
    let result = work();
    OWNER.store(0, Ordering::Release);
    system::set_signals(signals);
    result
}

/// The same in a child that was just forked, which has no other thread. It may have the number that
/// the holder's process has in another namespace, or had.
pub(crate) fn locked_in_child<T>(recover: impl FnOnce(), work: impl FnOnce() -> T) -> T {
    let is_held = OWNER.swap(0, Ordering::Acquire) != 0;
    let work = || {
        if is_held {
            recover();
        }
        work()
    };
    locked(|| {}, work)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use vellum_testing::own_process;

    use super::*;

    #[test]
    fn a_lock_of_a_parent_is_taken_over() {
        if !own_process::entered("lock::tests::a_lock_of_a_parent_is_taken_over") {
            return;
        }
        let recovered = Cell::new(0);
        let recover = || recovered.set(recovered.get() + 1);
        assert_eq!((locked(recover, || 1), recovered.get()), (1, 0));
        OWNER.store(system::process() + 1, Ordering::Relaxed);
        assert_eq!((locked(recover, || 2), recovered.get()), (2, 1));
        assert_eq!((locked(recover, || 3), recovered.get()), (3, 1));
        // A child may have the number of its parent.
        OWNER.store(system::process(), Ordering::Relaxed);
        assert_eq!((locked_in_child(recover, || 4), recovered.get()), (4, 2));
        assert_eq!((locked_in_child(recover, || 5), recovered.get()), (5, 2));
    }
}
