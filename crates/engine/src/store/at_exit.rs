//! Stores that are open when the process exits are closed then: those in statics, and those whose
//! handles are left where they are by `std::process::exit`.
//!
//! The C library runs the handler on the thread that exits while all others go on, so that thread
//! may hold anything: a passage of the gate if it exits in the caller's part of a change, or a lock
//! if it exits in a handler of a signal. So another thread closes the stores, and the one that
//! exits waits for it only for as long as it gets on. What cannot be closed by then stays as a
//! process leaves it that is killed.

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::store::core::StoreCore;

/// For so long the list may be locked. It only is for a moment, unless the thread that exits does
/// so in a handler of a signal, or the process is the child of another thread's `fork`.
const LIST_PATIENCE: Duration = Duration::from_secs(1);
/// For so many milliseconds a change may keep its store open.
const GATE_PATIENCE: u32 = 5000;
/// For so long the thread that closes may write nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// The stores, until they are closed by dropping them.
static STORES: Mutex<Vec<Open>> = Mutex::new(Vec::new());

/// The C library knows of the handlers; the child of a `fork` inherits that.
static HAS_HANDLERS: AtomicBool = AtomicBool::new(false);

struct Open {
    store: Weak<StoreCore>,
    /// The process that opened it. For a child of that the store is none of its own.
    process: u32,
}

fn stores() -> Option<MutexGuard<'static, Vec<Open>>> {
    let until = Instant::now() + LIST_PATIENCE;
    loop {
        match STORES.try_lock() {
            Ok(stores) => return Some(stores),
            Err(TryLockError::Poisoned(stores)) => return Some(stores.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= until => return None,
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// The store is closed when the process exits, if it is still open then.
pub(crate) fn enter(store: &Arc<StoreCore>) {
    if !HAS_HANDLERS.swap(true, Ordering::Relaxed) {
        let known = vellum_pool::at_exit(close_all);
        if let Err(error) = known.and_then(|()| vellum_pool::after_fork(keep_parents_stores)) {
            tracing::warn!("stores that are open at the exit will not be closed: {error}");
        }
    }
    match stores() {
        Some(mut stores) => {
            stores.push(Open { store: Arc::downgrade(store), process: std::process::id() });
        }
        None => tracing::warn!("this store will not be closed at the exit: the list is locked"),
    }
}

/// The store was closed as it was dropped.
pub(crate) fn leave(store: &StoreCore) {
    if let Some(mut stores) = stores() {
        stores.retain(|open| !std::ptr::eq(open.store.as_ptr(), store));
        if stores.capacity() > 2 * stores.len() + 16 {
            stores.shrink_to_fit();
        }
    }
}

/// In the child of a fork, the stores of its parent are never dropped: that would wait for threads
/// which the child does not have, and unlock the parent's file.
extern "C" fn keep_parents_stores() {
    let stores = match STORES.try_lock() {
        Ok(stores) => stores,
        Err(TryLockError::Poisoned(stores)) => stores.into_inner(),
        // Another thread of the parent had the list, for a moment. Nothing can be waited for here.
        Err(TryLockError::WouldBlock) => return,
    };
    stores.iter().for_each(|open| std::mem::forget(open.store.upgrade()));
}

/// The handler. A panic must not leave a function that C calls.
extern "C" fn close_all() {
    let _ = catch_unwind(|| {
        let (open, dropping) = open_stores();
        if open.is_empty() && !dropping {
            return;
        }
        let closing = Arc::new(Closing::default());
        let (closer, watched) = (closing.clone(), open.clone());
        let closes = move || {
            let _ = catch_unwind(std::panic::AssertUnwindSafe(|| {
                open.iter().for_each(|store| close(store));
                drop(open);
                wait_for_drops();
            }));
            closer.end();
        };
        match thread::Builder::new().name("vellum-exit".into()).spawn(closes) {
            Ok(_) => closing.wait(&watched),
            Err(error) => {
                tracing::error!("open stores are not closed, for want of a thread: {error}");
            }
        }
    });
}

/// The stores of this process that are not closed, and whether another thread is dropping one.
fn open_stores() -> (Vec<Arc<StoreCore>>, bool) {
    let (mut open, mut dropping) = (Vec::new(), false);
    let process = std::process::id();
    for entry in stores().iter().flat_map(|stores| stores.iter()) {
        if entry.process == process {
            match entry.store.upgrade() {
                Some(store) => open.push(store),
                None => dropping = true,
            }
        }
    }
    // Without the list's lock: this may be the last handle by now.
    open.retain(|store| store.pages.check_open().is_ok());
    (open, dropping)
}

fn close(store: &StoreCore) {
    // In the order of other checkpoints: one that is under way ends first.
    let mut checkpoints = store.checkpoint_lock();
    let closed = match store.pages.gate.hold_within(GATE_PATIENCE) {
        Some(hold) => store.close_held(&hold, &mut checkpoints),
        None => {
            tracing::error!("a store stays open at the exit: one of its changes does not end");
            return;
        }
    };
    if let Err(error) = closed {
        tracing::error!("closing a store at the exit failed: {error}");
    }
}

/// Other threads may be closing stores by dropping them.
fn wait_for_drops() {
    while open_stores().1 {
        thread::sleep(Duration::from_millis(1));
    }
}

/// What the thread that exits waits for.
#[derive(Default)]
struct Closing {
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Closing {
    fn end(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits until it has ended, or until nothing was written for a while.
    fn wait(&self, stores: &[Arc<StoreCore>]) {
        let written =
            || stores.iter().map(|store| store.pages.pool.stats().write_backs).sum::<u64>();
        let (mut before, mut since) = (written(), Instant::now());
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            if since.elapsed() > PATIENCE {
                tracing::error!("a store stays open at the exit: closing it does not end");
                return;
            }
            let waited = self.changed.wait_timeout(ended, PATIENCE / 60);
            ended = waited.unwrap_or_else(PoisonError::into_inner).0;
            let now = written();
            if now != before {
                (before, since) = (now, Instant::now());
            }
        }
    }
}
