//! Closes the stores that are open when the process exits: stores in statics, and stores whose
//! handles `std::process::exit` does not drop.
//!
//! The C library runs the handler on the exiting thread while all other threads go on. The exiting
//! thread may hold anything: a permit of the change gate if it exits in a callback, or a lock if it
//! exits in a signal handler. So another thread, the closer, closes the stores. The exiting thread
//! waits for the closer only while the closer makes progress. A store that the closer cannot close
//! stays as if the process had been killed.

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::store::core::{StoreCore, Views};

/// How long a thread waits for the lock on the list. Threads hold the lock only for a moment,
/// unless a thread exits in a signal handler, or another thread held the lock when its process
/// forked.
const LIST_PATIENCE: Duration = Duration::from_secs(1);
/// How many milliseconds the closer waits for the changes of a store to end.
const GATE_PATIENCE: u32 = 5000;
/// How long the exiting thread waits for the closer to write the next page.
const PROGRESS_PATIENCE: Duration = Duration::from_secs(60);

/// The stores of the process. Dropping a store takes it from the list.
static STORES: Mutex<Vec<OpenStore>> = Mutex::new(Vec::new());

/// The handlers are registered with the C library. The child of a `fork` inherits them.
static HAS_HANDLERS: AtomicBool = AtomicBool::new(false);

struct OpenStore {
    store: Weak<StoreCore>,
    /// The process that opened the store. The store does not belong to a child of that process.
    process: u32,
    /// The thread that runs the callbacks of the store's commits.
    calls: Option<ThreadId>,
    /// [`StoreCore::waits_for_callbacks`].
    waits_for_callbacks: Arc<AtomicBool>,
}

impl OpenStore {
    /// Whether the store belongs to this process.
    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// Whether another thread is dropping the store. The exit waits for that, but not if the drop
    /// waits for the callback that exits.
    fn is_dropping(&self, exiting: ThreadId) -> bool {
        let waits_for_exit =
            self.calls == Some(exiting) && self.waits_for_callbacks.load(Ordering::Acquire);
        self.store.strong_count() == 0 && !waits_for_exit
    }
}

fn stores() -> Option<MutexGuard<'static, Vec<OpenStore>>> {
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

/// Has the store closed when the process exits, if it is open then.
pub(crate) fn register(store: &Arc<StoreCore>) {
    if !HAS_HANDLERS.swap(true, Ordering::Relaxed) {
        let known = vellum_pool::at_exit(close_all);
        if let Err(error) = known.and_then(|()| vellum_pool::after_fork(keep_parents_stores)) {
            tracing::warn!("stores that are open at the exit will not be closed: {error}");
        }
    }
    match stores() {
        Some(mut stores) => {
            let calls = store.pages.redo_log.as_ref().and_then(|log| log.calls_thread());
            let process = std::process::id();
            let waits_for_callbacks = store.waits_for_callbacks.clone();
            let store = Arc::downgrade(store);
            stores.push(OpenStore { store, process, calls, waits_for_callbacks });
        }
        None => tracing::warn!("this store will not be closed at the exit: the list is locked"),
    }
}

/// Takes a store from the list. Its drop has closed it.
pub(crate) fn unregister(store: &StoreCore) {
    if let Some(mut stores) = stores() {
        stores.retain(|open| !std::ptr::eq(open.store.as_ptr(), store));
        if stores.capacity() > 2 * stores.len() + 16 {
            stores.shrink_to_fit();
        }
    }
}

/// Keeps the child of a fork from dropping the parent's stores. Dropping one would wait for threads
/// that the child does not have, and would unlock the parent's file.
extern "C" fn keep_parents_stores() {
    let stores = match STORES.try_lock() {
        Ok(stores) => stores,
        Err(TryLockError::Poisoned(stores)) => stores.into_inner(),
        // Another thread of the parent held the lock at the fork. The child must not wait for it.
        Err(TryLockError::WouldBlock) => return,
    };
    stores.iter().for_each(|open| std::mem::forget(open.store.upgrade()));
}

/// The exit handler. C calls it, so no panic may leave it.
extern "C" fn close_all() {
    let _ = catch_unwind(|| {
        let exiting = thread::current().id();
        let OpenStores { open, called, dropping } = open_stores(exiting);
        if open.is_empty() && called.is_empty() && !dropping {
            return;
        }
        let closing = Arc::new(Closing::default());
        let (closer, watched) = (closing.clone(), open.clone());
        let run_closer = move || {
            let _ = catch_unwind(std::panic::AssertUnwindSafe(|| {
                open.iter().for_each(|store| close(store));
                called.iter().for_each(|store| store.wait_callbacks());
                drop((open, called));
                wait_for_drops(exiting);
            }));
            closer.end();
        };
        match thread::Builder::new().name("vellum-exit".into()).spawn(run_closer) {
            Ok(_) => closing.wait(&watched),
            Err(error) => {
                tracing::error!(
                    "open stores are not closed, because no thread could be started: {error}"
                );
            }
        }
    });
}

/// The stores of this process that have handles.
struct OpenStores {
    open: Vec<Arc<StoreCore>>,
    /// Those whose callbacks can return, closed ones too. A callback that exits never returns.
    called: Vec<Arc<StoreCore>>,
    /// [`OpenStore::is_dropping`].
    dropping: bool,
}

fn open_stores(exiting: ThreadId) -> OpenStores {
    let (mut open, mut called, mut dropping) = (Vec::new(), Vec::new(), false);
    for entry in stores().iter().flat_map(|stores| stores.iter()).filter(|entry| entry.is_here()) {
        dropping |= entry.is_dropping(exiting);
        if let Some(store) = entry.store.upgrade() {
            called.extend((entry.calls != Some(exiting)).then(|| store.clone()));
            open.push(store);
        }
    }
    // After unlocking the list: dropping the store here, which may be its last handle, locks it.
    open.retain(|store| store.pages.check_open().is_ok());
    OpenStores { open, called, dropping }
}

fn close(store: &StoreCore) {
    store.closing.store(true, Ordering::Release);
    // In the lock order of all checkpoints. A checkpoint that is under way ends first.
    let mut checkpoints = store.checkpoint_lock();
    let closed = match store.pages.gate.freeze_within(GATE_PATIENCE) {
        Some(freeze) => store.close_frozen(&freeze, &mut checkpoints, Views::End),
        None => {
            tracing::error!("a store stays open at the exit: one of its changes does not end");
            return;
        }
    };
    if let Err(error) = closed {
        tracing::error!("closing a store at the exit failed: {error}");
    }
}

/// Waits for other threads that are closing stores by dropping them.
fn wait_for_drops(exiting: ThreadId) {
    let is_dropping = |entry: &OpenStore| entry.is_here() && entry.is_dropping(exiting);
    while stores().iter().flat_map(|stores| stores.iter()).any(is_dropping) {
        thread::sleep(Duration::from_millis(1));
    }
}

/// The progress of the closer, for which the exiting thread waits.
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

    /// Waits until the closer has ended, or has written nothing for [`PROGRESS_PATIENCE`].
    fn wait(&self, stores: &[Arc<StoreCore>]) {
        let written =
            || stores.iter().map(|store| store.pages.pool.stats().write_backs).sum::<u64>();
        let (mut before, mut since) = (written(), Instant::now());
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            if since.elapsed() > PROGRESS_PATIENCE {
                tracing::error!("a store stays open at the exit: closing it does not end");
                return;
            }
            let waited = self.changed.wait_timeout(ended, PROGRESS_PATIENCE / 60);
            ended = waited.unwrap_or_else(PoisonError::into_inner).0;
            let now = written();
            if now != before {
                (before, since) = (now, Instant::now());
            }
        }
    }
}
