//! The lock of the table of mounts.
//!
//! What holds: who has it waits for nobody but the kernel, and gets no signal meanwhile. So whoever
//! waits for it gets it, whatever else is held: also a handler that has interrupted `malloc`, while
//! another thread forks. That is why `fork` does not wait for it: `fork` holds other locks, too. A
//! child may find it taken by a thread of its parent. It takes it over then, and is told.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::system;

/// The process of which a thread has it; 0 for nobody.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Does something while nobody else does. Before that `recover`, if a thread of this process'
/// parent was in the midst of something when this process was forked.
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
    }
}
