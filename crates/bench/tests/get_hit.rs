//! What a lookup does not do whose pages are in memory: no system call, no allocation.
//!
//! Beside crates/pool/tests/pool_hit_path.rs, which shows the same of single pages.

#![allow(unsafe_code, clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::process::Command;
use std::sync::Arc;

use vellum::{Options, Store, Tree};
use vellum_pool::device::MemoryDevice;

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

const ENTRIES: u64 = 5_000;

/// A tree of three levels with all of its pages in memory.
fn resident() -> (Store, Tree) {
    let options = Options::new().pool_bytes(8 << 20).evictors(0);
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap();
    let tree = store.create_tree("data").unwrap();
    for key in 0..ENTRIES {
        tree.insert(&key.to_be_bytes(), &[key as u8; 120]).unwrap();
    }
    (store, tree)
}

/// Looks up every key, and one that is not there.
fn look_up_all(tree: &Tree, value: &mut Vec<u8>) {
    for key in 0..ENTRIES {
        assert!(tree.get_into(&key.to_be_bytes(), value).unwrap());
        assert_eq!(value[119], key as u8);
    }
    assert!(!tree.get_into(b"none", value).unwrap());
}

#[test]
fn a_lookup_allocates_nothing() {
    let (_store, tree) = resident();
    let mut value = Vec::with_capacity(120);
    look_up_all(&tree, &mut value);
    let before = ALLOCATIONS.get();
    look_up_all(&tree, &mut value);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    drop(vec![1]);
    assert_eq!(ALLOCATIONS.get() - before, 1, "the count counts");
}

/// Set for the child process that the test starts.
const ROLE: &str = "VELLUM_TEST_CHILD";
/// What the child exits with that got to its end.
const SURVIVED: i32 = 42;

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

#[test]
fn a_lookup_makes_no_system_call() {
    if std::env::var_os(ROLE).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["a_lookup_makes_no_system_call", "--exact"]).env(ROLE, "1");
        let status = child.output().unwrap().status;
        assert_eq!(status.code(), Some(SURVIVED), "{status}");
        return;
    }
    let (_store, tree) = resident();
    let mut value = Vec::with_capacity(120);
    look_up_all(&tree, &mut value);
    forbid_all();
    (0..20).for_each(|_| look_up_all(&tree, &mut value));
    // SAFETY: ends the process; nothing that matters is left to be done.
    unsafe { libc::_exit(SURVIVED) }
}
