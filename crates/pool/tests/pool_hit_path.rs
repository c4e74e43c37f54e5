//! What a hit does not do: no system call, no allocation. And what of it is counted.
//!
//! System calls are shown by the strictest witness there is: a filter that lets the kernel kill the
//! process at the first one. docs/hit-path.md has instruction counts.

#![cfg(not(feature = "model"))]
#![allow(unsafe_code, clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use common::{faulty, filled, options};
use vellum_pool::{PageReader, PageRef, Pool, PoolOptions};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: hands everything to the system's allocator; counting touches a plain cell of the thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A pool with some resident pages.
fn resident() -> (Pool, Vec<PageRef>) {
    let (pool, _) = faulty(PoolOptions { evictors: 0, ..options(128) });
    let pages = filled(&pool, 64);
    (pool, pages)
}

/// Every kind of access to every page.
fn hit_all(pool: &Pool, pages: &[PageRef]) {
    for page in pages {
        let guard = pool.optimistic(*page).unwrap();
        assert_eq!(guard.bytes().u64(0), Some(page.id.0));
        guard.validate().unwrap();
        assert_eq!((&pool.fix_shared(*page).unwrap()[..]).u64(0), Some(page.id.0));
        assert_eq!((&pool.fix_exclusive(*page).unwrap()[..]).u64(0), Some(page.id.0));
        drop(guard.upgrade());
    }
    pool.count_optimistic(pages.len() as u64);
}

#[test]
fn a_hit_allocates_nothing() {
    let (pool, pages) = resident();
    hit_all(&pool, &pages); // the first count of a thread gives it a stripe of the counters
    let before = ALLOCATIONS.get();
    (0..100).for_each(|_| hit_all(&pool, &pages));
    assert_eq!(ALLOCATIONS.get() - before, 0);
    drop(vec![1]);
    assert_eq!(ALLOCATIONS.get() - before, 1, "the count counts");
}

/// Set for the child processes that the tests start.
const ROLE: &str = "VELLUM_TEST_CHILD";
/// What a child exits with that got to its end.
const SURVIVED: i32 = 42;
/// The kernel's answer to a forbidden system call.
const SIGSYS: i32 = libc::SIGSYS;

/// Runs a test in a process of its own, because a sandbox cannot be left. None within it.
fn in_child(test: &str) -> Option<ExitStatus> {
    if std::env::var_os(ROLE).is_some() {
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    Some(child.args([test, "--exact"]).env(ROLE, "1").output().unwrap().status)
}

/// From now on each system call of this thread ends the process, but for the one that exits it.
fn forbid_all() {
    // SAFETY: these only fill in structs, and the filter lives through the calls.
    let forbidden = unsafe {
        let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        let give = (libc::BPF_RET | libc::BPF_K) as u16;
        let mut filter = [
            libc::BPF_STMT(load, 0),
            libc::BPF_JUMP(equal, libc::SYS_exit_group as u32, 0, 1),
            libc::BPF_STMT(give, libc::SECCOMP_RET_ALLOW),
            libc::BPF_STMT(give, libc::SECCOMP_RET_KILL_PROCESS),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if !forbidden {
        println!("skipped: no seccomp here: {}", std::io::Error::last_os_error());
        std::process::exit(SURVIVED);
    }
}

fn survive() -> ! {
    // SAFETY: ends the process; nothing that matters is left to be done.
    unsafe { libc::_exit(SURVIVED) }
}

#[test]
fn a_hit_makes_no_system_call() {
    if let Some(status) = in_child("a_hit_makes_no_system_call") {
        assert_eq!(status.code(), Some(SURVIVED), "{status}");
        return;
    }
    let (pool, pages) = resident();
    hit_all(&pool, &pages);
    forbid_all();
    (0..1000).for_each(|_| hit_all(&pool, &pages));
    survive();
}

/// The same with a page that is not resident: the witness above is not asleep.
#[test]
fn a_miss_makes_some() {
    if let Some(status) = in_child("a_miss_makes_some") {
        let killed = status.signal() == Some(SIGSYS);
        assert!(killed || status.code() == Some(SURVIVED), "{status}");
        return;
    }
    let (pool, _) = faulty(PoolOptions { evictors: 0, ..options(16) });
    let pages = filled(&pool, 64);
    hit_all(&pool, &pages);
    forbid_all();
    (0..1000).for_each(|_| hit_all(&pool, &pages));
    // Reached where there is no seccomp only; there, forbid_all has ended the process.
    std::process::exit(1);
}

#[test]
fn optimistic_reads_are_counted_when_they_are_reported() {
    let (pool, _) = faulty(PoolOptions { evictors: 0, ..options(16) });
    let pages = filled(&pool, 64);
    let before = pool.stats();
    for page in &pages {
        let guard = pool.optimistic(*page).unwrap();
        guard.validate().unwrap();
    }
    let silent = pool.stats();
    let misses = silent.misses - before.misses;
    assert!(misses >= 48, "{misses} of 64 pages were not among the 16 resident ones");
    assert_eq!(silent.hits, before.hits, "nobody reported the reads");
    pool.count_optimistic(64);
    let stats = pool.stats();
    assert_eq!(stats.hits - before.hits, 64 - misses);
    assert_eq!(stats.misses, silent.misses);
}

/// A guard that was taken before other readers came, or left, or the clock's hand, still holds.
#[test]
fn shared_locks_do_not_disturb_a_validation() {
    let (pool, pages) = resident();
    let locked = pool.fix_shared(pages[0]).unwrap();
    let guard = pool.optimistic(pages[0]).unwrap();
    guard.validate().unwrap();
    drop(locked);
    guard.validate().unwrap();
    let again = pool.fix_shared(pages[0]).unwrap();
    guard.validate().unwrap();
    drop(again);
    assert_eq!(pool.stats().restarts, 0);
    drop(pool.fix_exclusive(pages[0]).unwrap());
    assert!(guard.validate().is_err());
    assert_eq!(pool.stats().restarts, 1);
}
