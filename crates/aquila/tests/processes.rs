//! Signals, forks and the ends of processes.
#![allow(unsafe_code, clippy::unwrap_used)]

mod common;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Fixture, address, both_caches, cache, load, monitored, pattern, store, word_in};
use vellum_aquila::{
    Access, Backend, BackendChoice, Cache, Error, Evictor, Frame, Frames, Key, Mapping, PAGE_SIZE,
    Policy, PolicyChoice,
};
use vellum_testing::own_process;
use vellum_testing::patience::{PATIENCE, eventually};

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Installs a handler of a signal.
fn install(signal: i32, handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void)) {
    // SAFETY: the structure is plain data, and the handler makes only calls that are allowed in
    // one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// The address that the next handler call should report, and what it then ends the process with.
static EXPECTED: AtomicUsize = AtomicUsize::new(0);
const SEEN: i32 = 42;

extern "C" fn expect_address(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler the structure; `_exit` is allowed in one.
    unsafe {
        let found = (*info).si_addr().addr();
        libc::_exit(if found == EXPECTED.load(Ordering::Relaxed) { SEEN } else { 1 });
    }
}

/// An access that is not the cache's to handle goes to the program's own handler, with its address.
fn goes_to_the_programs_handler(test: &str, access: impl FnOnce(&Fixture, &Mapping) -> *mut u64) {
    if let Some(output) = own_process::run(test) {
        assert_eq!(output.status.code(), Some(SEEN), "{output:?}");
        return;
    }
    install(libc::SIGBUS, expect_address);
    let cache = cache(8);
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(16), .., Access::ReadWrite).unwrap();
    (0..16).for_each(|page| assert_eq!(load(&mapping, page, 0), pattern(page)));
    let bad = access(&fixture, &mapping);
    EXPECTED.store(bad.addr(), Ordering::Relaxed);
    // SAFETY: the access ends the process.
    unsafe { bad.read_volatile() };
    panic!("the access has worked");
}

#[test]
fn an_access_beyond_a_truncated_end_is_sigbus_at_its_address() {
    let test = "an_access_beyond_a_truncated_end_is_sigbus_at_its_address";
    goes_to_the_programs_handler(test, |fixture, mapping| {
        mapping.evict(..).unwrap();
        fixture.open().set_len(3 * PAGE_SIZE as u64).unwrap();
        assert_eq!(load(mapping, 2, 0), pattern(2));
        address(mapping, 3, 5)
    });
}

#[test]
fn pages_beyond_a_new_length_are_gone_at_once() {
    if let Some(output) = own_process::run("pages_beyond_a_new_length_are_gone_at_once") {
        assert_eq!(output.status.code(), Some(SEEN), "{output:?}");
        return;
    }
    install(libc::SIGBUS, expect_address);
    let cache = cache(32);
    let fixture = Fixture::new();
    let file = fixture.file(16);
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    (0..16).for_each(|page| store(&mapping, page, 0, 1));
    cache.set_length(&file, PAGE_SIZE as u64).unwrap();
    let bad = address(&mapping, 9, 1);
    EXPECTED.store(bad.addr(), Ordering::Relaxed);
    store(&mapping, 9, 1, 1);
}

#[test]
fn a_fault_of_another_mapping_goes_to_its_handler() {
    let test = "a_fault_of_another_mapping_goes_to_its_handler";
    goes_to_the_programs_handler(test, |fixture, _| {
        // A mapping of the program's own, of a file that became shorter.
        let file = fixture.open();
        // SAFETY: the call takes new addresses.
        let base = unsafe {
            let rights = libc::PROT_READ;
            libc::mmap(
                std::ptr::null_mut(),
                4 * PAGE_SIZE,
                rights,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        file.set_len(0).unwrap();
        base.cast::<u64>().wrapping_add(PAGE_SIZE / 8)
    });
}

#[test]
fn without_a_handler_the_process_ends_by_sigbus() {
    if let Some(output) = own_process::run("without_a_handler_the_process_ends_by_sigbus") {
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
        assert!(text(&output).contains("before the access"));
        return;
    }
    let cache = cache(8);
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(1), ..1 << 20, Access::ReadWrite).unwrap();
    println!("before the access");
    load(&mapping, 7, 0);
    println!("after the access");
}

#[test]
fn a_signal_that_another_process_sends_ends_the_process_too() {
    let test = "a_signal_that_another_process_sends_ends_the_process_too";
    if let Some(output) = own_process::run(test) {
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
        return;
    }
    // Instead of the handler of Rust's own, which waits for an access to be repeated.
    // SAFETY: the call takes no memory.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    let _cache = cache(8);
    // SAFETY: the call takes no memory.
    unsafe { libc::kill(libc::getpid(), libc::SIGBUS) };
    std::thread::sleep(PATIENCE);
}

#[test]
fn faults_are_handled_after_a_signal_that_was_sent() {
    if !own_process::entered("faults_are_handled_after_a_signal_that_was_sent") {
        return;
    }
    // The handler of Rust's library sets the default action and returns.
    let cache = cache(8);
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(16), .., Access::ReadWrite).unwrap();
    for page in 0..16 {
        // SAFETY: the call takes no memory.
        unsafe { libc::raise(libc::SIGBUS) };
        assert_eq!(load(&mapping, page, 0), pattern(page));
    }
}

/// The handler of the cache, which a later one of the program's calls.
static CHAINED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn chain(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the address is the one of a handler of this kind.
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
        unsafe { std::mem::transmute(CHAINED.load(Ordering::Relaxed)) };
    handler(signal, info, context);
}

#[test]
fn a_later_handler_that_blocks_no_signals_may_call_the_caches() {
    if !own_process::entered("a_later_handler_that_blocks_no_signals_may_call_the_caches") {
        return;
    }
    let cache = cache(8);
    let fixture = Fixture::new();
    let pages = TICKING_PAGES as usize;
    let mapping = cache.map(&fixture.file(pages), .., Access::ReadWrite).unwrap();
    TICKING.store(mapping.as_ptr().cast(), Ordering::Relaxed);
    // SAFETY: the structures are plain data, which the calls fill and read.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut action);
        CHAINED.store(action.sa_sigaction, Ordering::Relaxed);
        action.sa_sigaction = chain as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        // Ends a deadlock. In a guest time passes while the guest has no processor of the host.
        let seconds = PATIENCE.as_secs();
        let limit = libc::rlimit { rlim_cur: seconds, rlim_max: seconds };
        libc::setrlimit(libc::RLIMIT_CPU, &raw const limit);
    }
    install(libc::SIGALRM, on_tick);
    timer(200);
    let mut step = 0;
    while TICKS.load(Ordering::Relaxed) < 2000 {
        step += 1;
        store(&mapping, step * 13 % pages, 3, 1);
    }
    timer(0);
    // Another thread of this process may still be in the alarm's handler, which needs the mapping.
    std::mem::forget((mapping, cache));
}

#[test]
fn a_store_to_a_read_only_mapping_is_sigsegv() {
    if let Some(output) = own_process::run("a_store_to_a_read_only_mapping_is_sigsegv") {
        assert_eq!(output.status.code(), Some(SEEN), "{output:?}");
        return;
    }
    install(libc::SIGSEGV, expect_address);
    let cache = cache(8);
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(4), .., Access::Read).unwrap();
    assert_eq!(load(&mapping, 1, 0), pattern(1));
    EXPECTED.store(address(&mapping, 1, 0).addr(), Ordering::Relaxed);
    store(&mapping, 1, 0, 1);
}

/// Forks, and has the child work. Returns how it ended.
fn in_child(work: &dyn Fn()) -> i32 {
    // SAFETY: this process has one other thread, which holds no lock now; the child ends without
    // running what the parent will run, and soon: an alarm ends one that hangs.
    unsafe {
        match libc::fork() {
            0 => {
                libc::alarm(PATIENCE.as_secs() as u32);
                // A panic must not unwind into what the parent's thread goes on with.
                let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_ok();
                libc::_exit(if worked { 0 } else { 101 });
            }
            child => {
                let mut status = 0;
                libc::waitpid(child, &raw mut status, 0);
                status
            }
        }
    }
}

/// A cache in which every page is dirty and none is mapped, so that a fault of any other page
/// evicts some of them.
fn full_of_stores(fixture: &Fixture) -> (std::fs::File, Mapping) {
    let file = fixture.file(16);
    file.set_len(256 << 20).unwrap();
    let mapping = cache(8).map(&file, .., Access::ReadWrite).unwrap();
    (0..8).for_each(|page| mapping.write_at(&[77; 8], page * PAGE_SIZE).unwrap());
    (file, mapping)
}

fn has_all_stores(file: &std::fs::File, mapping: &Mapping) {
    for page in 0..8 {
        let mut bytes = [0; 8];
        mapping.read_at(&mut bytes, page * PAGE_SIZE).unwrap();
        assert_eq!(bytes, [77; 8], "page {page}");
    }
    mapping.sync().unwrap();
    (0..8).for_each(|page| assert_eq!(word_in(file, page).to_le_bytes(), [77; 8]));
}

#[test]
fn a_fault_of_a_childs_own_mapping_is_no_fault_of_its_parent() {
    if !own_process::entered("a_fault_of_a_childs_own_mapping_is_no_fault_of_its_parent") {
        return;
    }
    let (fixture, other) = (Fixture::new(), Fixture::new());
    let (file, mapping) = full_of_stores(&fixture);
    let empty = other.file(0);
    let status = in_child(&|| {
        let (start, bytes) = (mapping.as_ptr(), 64 * PAGE_SIZE);
        // SAFETY: the child has no mapping there.
        let base = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
            libc::mmap(start.cast(), bytes, libc::PROT_READ, flags, empty.as_raw_fd(), 0)
        };
        assert_eq!(base, start.cast());
        load(&mapping, 40, 0);
    });
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status:#x}");
    has_all_stores(&file, &mapping);
}

#[test]
fn a_forked_child_may_have_caches_of_its_own() {
    if !own_process::entered("a_forked_child_may_have_caches_of_its_own") {
        return;
    }
    let (fixture, other) = (Fixture::new(), Fixture::new());
    let (file, mapping) = full_of_stores(&fixture);
    let parents = mapping.as_ptr().addr()..mapping.as_ptr().addr() + mapping.len();
    let childs = other.file(64);
    childs.set_len(64 << 20).unwrap();
    let status = in_child(&|| {
        let own = cache(16).map(&childs, .., Access::ReadWrite).unwrap();
        // The kernel takes the addresses that the child does not have.
        assert!(parents.contains(&own.as_ptr().addr()));
        assert_eq!(mapping.advise(vellum_aquila::Advice::Random), Err(Error::Forked));
        for page in 0..64 {
            assert_eq!(load(&own, page, 0), pattern(page));
            store(&own, page, 0, 5);
        }
        assert_eq!(mapping.sync(), Err(Error::Forked));
        own.close().unwrap();
        // A child's child is none of the two.
        let status = in_child(&|| {
            let own = cache(16).map(&childs, .., Access::ReadWrite).unwrap();
            (0..64).for_each(|page| assert_eq!(load(&own, page, 0), 5));
        });
        assert_eq!(status, 0, "{status:#x}");
    });
    assert_eq!(status, 0, "{status:#x}");
    (0..64).for_each(|page| assert_eq!(word_in(&childs, page), 5));
    has_all_stores(&file, &mapping);
}

#[test]
fn a_forked_child_with_its_parents_number_is_a_child() {
    if !own_process::entered("a_forked_child_with_its_parents_number_is_a_child") {
        return;
    }
    const LEFT_OUT: i32 = 77;
    let fixture = Fixture::new();
    let file = fixture.file(8);
    let status = in_child(&|| {
        // SAFETY: the call takes no memory; this process has one thread.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID) } != 0 {
            // SAFETY: as in `in_child`.
            unsafe { libc::_exit(LEFT_OUT) };
        }
        let status = in_child(&|| {
            assert_eq!(std::process::id(), 1);
            let mapping = cache(8).map(&file, .., Access::ReadWrite).unwrap();
            store(&mapping, 0, 0, 7);
            // SAFETY: as above.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
            let status = in_child(&|| {
                assert_eq!(std::process::id(), 1);
                assert_eq!(mapping.sync(), Err(Error::Forked));
            });
            assert_eq!(status, 0, "{status:#x}");
            mapping.sync().unwrap();
        });
        assert_eq!(status, 0, "{status:#x}");
    });
    if status >> 8 == LEFT_OUT {
        eprintln!("left out: this process may not make namespaces");
        return;
    }
    assert_eq!(status, 0, "{status:#x}");
    assert_eq!(word_in(&file, 0), 7);
}

#[test]
fn a_forked_child_cannot_use_a_mapping_by_the_kernel() {
    if !own_process::entered("a_forked_child_cannot_use_a_mapping_by_the_kernel") {
        return;
    }
    let kernel = BackendChoice::Only(Backend::Kernel);
    let cache = common::options(8).backend(kernel).build().unwrap();
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(2), .., Access::ReadWrite).unwrap();
    let status = in_child(&|| {
        let errors = [
            mapping.sync().unwrap_err(),
            mapping.evict(..).unwrap_err(),
            mapping.prefetch(..).unwrap_err(),
            mapping.read_at(&mut [0], 0).unwrap_err(),
            mapping.write_at(&[0], 0).unwrap_err(),
            mapping.pin(.., Access::Read).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| *error == Error::Forked), "{errors:?}");
    });
    assert_eq!(status, 0, "{status:#x}");
}

#[test]
fn a_forked_child_does_not_have_the_mappings() {
    if !own_process::entered("a_forked_child_does_not_have_the_mappings") {
        return;
    }
    let cache = cache(8);
    let fixture = Fixture::new();
    let file = fixture.file(16);
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    (0..16).for_each(|page| store(&mapping, page, 1, 1));
    let status = in_child(&|| _ = load(&mapping, 0, 0));
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
    let status = in_child(&|| {
        let errors = [
            mapping.sync().unwrap_err(),
            mapping.evict(..).unwrap_err(),
            mapping.read_at(&mut [0], 0).unwrap_err(),
            cache.map(&file, .., Access::Read).unwrap_err(),
            cache.resize(PAGE_SIZE as u64).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| *error == Error::Forked));
        // A copy of the mapping goes away in the child, and changes nothing in the parent.
        // SAFETY: the child ends without dropping the original.
        drop(unsafe { std::ptr::read(&raw const mapping) });
    });
    assert_eq!(status, 0, "{status:#x}");
    (0..16).for_each(|page| assert_eq!(load(&mapping, page, 1), 1));
    mapping.sync().unwrap();
    assert_eq!(word_in(&file, 15), pattern(15));
}

#[test]
fn a_program_that_locks_all_its_memory_has_the_files_contents() {
    if !own_process::entered("a_program_that_locks_all_its_memory_has_the_files_contents") {
        return;
    }
    let fixture = Fixture::new();
    let file = fixture.file(64);
    let before = cache(8);
    let early = before.map(&file, .., Access::ReadWrite).unwrap();
    // SAFETY: the calls change no memory.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        eprintln!("left out: this process may not lock memory");
        return;
    }
    let after = cache(8);
    let late = after.map(&file, .., Access::ReadWrite).unwrap();
    // SAFETY: as above.
    unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
    let locked = after.map(&file, .., Access::ReadWrite).unwrap();
    drop(early);
    for page in 0..64 {
        assert_eq!((load(&late, page, 0), load(&locked, page, 0)), (pattern(page), pattern(page)));
        store(&late, page, 0, 5);
    }
    late.sync().unwrap();
    (0..64).for_each(|page| assert_eq!(word_in(&file, page), 5));
    assert!(after.statistics().unwrap().written_back >= 64);
}

#[test]
fn another_mapping_of_a_file_ends_no_lock() {
    if !own_process::entered("another_mapping_of_a_file_ends_no_lock") {
        return;
    }
    let cache = cache(8);
    let fixture = Fixture::new();
    let file = fixture.file(2);
    let lock = |command| {
        // SAFETY: the structure is plain data, which the kernel reads or fills.
        unsafe {
            let mut lock: libc::flock = std::mem::zeroed();
            lock.l_type = libc::F_WRLCK as libc::c_short;
            assert_eq!(libc::fcntl(file.as_raw_fd(), command, &raw mut lock), 0);
            i32::from(lock.l_type)
        }
    };
    let is_locked = || in_child(&|| assert_ne!(lock(libc::F_GETLK), libc::F_UNLCK)) == 0;
    let _first = cache.map(&file, .., Access::ReadWrite).unwrap();
    lock(libc::F_SETLK);
    assert!(is_locked());
    let second = cache.map(&file, .., Access::ReadWrite).unwrap();
    assert!(is_locked());
    cache.set_length(&file, PAGE_SIZE as u64).unwrap();
    drop(second);
    assert!(is_locked());
}

/// Has a system call fail with `EIO` on this thread from now on. Returns whether it does.
fn forbid(call: i64) -> bool {
    let step =
        |code, jump_false, value| libc::sock_filter { code, jt: 0, jf: jump_false, k: value };
    let filter = [
        step(0x20, 0, 0),
        step(0x15, 1, call as u32),
        step(0x06, 0, 0x0005_0000 | libc::EIO as u32),
        step(0x06, 0, 0x7fff_0000),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the filter.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    }
}

#[test]
fn no_sync_succeeds_after_one_that_failed() {
    let cache = cache(8);
    let fixture = Fixture::new();
    let file = fixture.file(4);
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    mapping.sync().unwrap();
    store(&mapping, 0, 0, 5);
    let failed = std::thread::scope(|scope| {
        let sync = || forbid(libc::SYS_fdatasync).then(|| mapping.sync().unwrap_err());
        scope.spawn(sync).join().unwrap()
    });
    let Some(error) = failed else {
        eprintln!("left out: this process may not filter system calls");
        return;
    };
    assert!(matches!(error, Error::System { .. }), "{error}");
    assert_eq!(cache.statistics().unwrap().dirty, 0);
    for _ in 0..2 {
        let error = mapping.sync().unwrap_err();
        assert!(matches!(error, Error::SyncFailed { .. }), "{error}");
    }
    mapping.write_back(..).unwrap();
    // A program that maps the file again has checked it.
    drop(mapping);
    cache.map(&file, .., Access::ReadWrite).unwrap().sync().unwrap();
}

/// The process that is killed: it syncs, says so, and goes on storing.
#[test]
#[ignore = "a part of the test below"]
fn stores_until_it_is_killed() {
    let Some(path) = std::env::var_os("VELLUM_AQUILA_KILLED") else { return };
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let cache = cache(8);
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    for round in 1_u64.. {
        (0..32).for_each(|page| store(&mapping, page, 1, round));
        mapping.sync().unwrap();
        println!("synced {round}");
    }
}

#[test]
fn what_was_synced_survives_a_kill() {
    for kill in 0..5 {
        let fixture = Fixture::new();
        let file = fixture.file(32);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["stores_until_it_is_killed", "--exact", "--ignored", "--nocapture"])
            .env("VELLUM_AQUILA_KILLED", fixture.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains(&format!("synced {}", 3 + kill)) {
            line.clear();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "the child has ended");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        let rounds = [line.as_str()].into_iter().chain(rest.lines());
        let parse = |line: &str| line.trim().strip_prefix("synced ")?.parse::<u64>().ok();
        let synced = rounds.filter_map(parse).max().unwrap();
        for page in 0..32 {
            let mut bytes = [0; 8];
            let at = (page * PAGE_SIZE + 8) as u64;
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, at).unwrap();
            let found = u64::from_le_bytes(bytes);
            assert!((synced..=synced + 1).contains(&found), "{found}, and {synced} was synced");
            assert_eq!(word_in(&file, page), pattern(page));
        }
    }
}

/// The mapping that the handler of the timer uses, and how often it began and ended.
static TICKING: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());
static TICKS: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);
const TICKING_PAGES: u64 = 64;

extern "C" fn on_tick(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let tick = TICKS.fetch_add(1, Ordering::Relaxed);
    let page = (tick * 7 % TICKING_PAGES) as usize;
    let word = TICKING.load(Ordering::Relaxed).wrapping_add(page * PAGE_SIZE / 8 + 2);
    // SAFETY: the word is within a mapping that lives as long as the timer runs, and only handlers
    // access it: perhaps on two threads at once.
    unsafe { AtomicU64::from_ptr(word).fetch_add(1, Ordering::Relaxed) };
    ENDED.fetch_add(1, Ordering::Release);
}

/// Has the alarm ring at intervals; with zero, no more.
fn timer(microseconds: i64) {
    let interval = libc::timeval { tv_sec: 0, tv_usec: microseconds };
    let timer = libc::itimerval { it_interval: interval, it_value: interval };
    // SAFETY: the call reads the structure.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
}

#[test]
fn signal_handlers_may_use_mappings() {
    if !own_process::entered("signal_handlers_may_use_mappings") {
        return;
    }
    let cache = cache(4);
    let fixture = Fixture::new();
    let file = fixture.file(TICKING_PAGES as usize);
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    TICKING.store(mapping.as_ptr().cast(), Ordering::Relaxed);
    install(libc::SIGALRM, on_tick);
    timer(200);
    // The handler interrupts faults, and the interface, in all places.
    let mut round = 0;
    while TICKS.load(Ordering::Relaxed) < 2000 {
        for page in 0..TICKING_PAGES as usize {
            assert_eq!(load(&mapping, page, 0), pattern(page));
            store(&mapping, page, 3, round);
        }
        mapping.write_back(..).unwrap();
        mapping.evict(..20 * PAGE_SIZE).unwrap();
        drop(mapping.pin(..2 * PAGE_SIZE, Access::ReadWrite).unwrap());
        let mut word = [0; 8];
        mapping.read_at(&mut word, 0).unwrap();
        round += 1;
    }
    timer(0);
    // No signal that is still on its way begins a handler from now on.
    // SAFETY: the call takes no memory.
    unsafe { libc::signal(libc::SIGALRM, libc::SIG_IGN) };
    let counted = || -> u64 {
        // SAFETY: the words are within the mapping, and volatile loads assume nothing of them.
        let load = |page| unsafe { address(&mapping, page, 2).read_volatile() };
        (0..TICKING_PAGES as usize).map(load).sum()
    };
    // A handler may still run, on the other thread of this process.
    eventually("the pages have all ticks", || {
        let ended = ENDED.load(Ordering::Acquire);
        ended == TICKS.load(Ordering::Relaxed) && counted() == ended
    });
}

extern "C" fn load_from_a_far_page(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let word = TICKING.load(Ordering::Relaxed).wrapping_add(20 * PAGE_SIZE / 8);
    // SAFETY: the word is within a mapping that lives as long as the handler is installed.
    let found = unsafe { word.read_volatile() };
    EXPECTED.store(found as usize, Ordering::Relaxed);
}

/// Faults in a handler that runs on an alternate stack of so many bytes.
fn fault_on_an_alternate_stack(bytes: usize) {
    let cache = cache(16);
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(64), .., Access::ReadWrite).unwrap();
    TICKING.store(mapping.as_ptr().cast(), Ordering::Relaxed);
    (0..16).for_each(|page| store(&mapping, page, 1, 1));
    install(libc::SIGUSR1, load_from_a_far_page);
    let memory = Box::leak(vec![0xab_u8; 256 << 10].into_boxed_slice());
    let (below, own) = memory.split_at_mut((256 << 10) - bytes);
    // SAFETY: the structures are plain data; nothing else uses the memory.
    unsafe {
        let stack = libc::stack_t { ss_sp: own.as_mut_ptr().cast(), ss_flags: 0, ss_size: bytes };
        assert_eq!(libc::sigaltstack(&raw const stack, std::ptr::null_mut()), 0);
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGUSR1, std::ptr::null(), &raw mut action);
        action.sa_flags |= libc::SA_ONSTACK;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        libc::raise(libc::SIGUSR1);
    }
    assert_eq!(EXPECTED.load(Ordering::Relaxed) as u64, pattern(20));
    assert!(below.iter().all(|byte| *byte == 0xab), "the handler left its stack");
}

#[test]
fn a_handler_on_a_large_alternate_stack_may_fault() {
    if own_process::entered("a_handler_on_a_large_alternate_stack_may_fault") {
        fault_on_an_alternate_stack(48 << 10);
    }
}

#[test]
fn a_fault_on_a_small_alternate_stack_ends_the_process_and_says_why() {
    let test = "a_fault_on_a_small_alternate_stack_ends_the_process_and_says_why";
    if let Some(output) = own_process::run(test) {
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("48 KiB"), "{output:?}");
        return;
    }
    fault_on_an_alternate_stack(16 << 10);
}

#[test]
fn a_pin_lasts_when_another_one_ends_on_the_kernel_backend_too() {
    if !own_process::entered("a_pin_lasts_when_another_one_ends_on_the_kernel_backend_too") {
        return;
    }
    let locked = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap().to_owned();
        line.trim_end_matches("kB").trim().parse::<usize>().unwrap() * 1024 / PAGE_SIZE
    };
    let kernel = BackendChoice::Only(Backend::Kernel);
    let cache = common::options(64).backend(kernel).build().unwrap();
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(4), .., Access::ReadWrite).unwrap();
    let all = mapping.pin(.., Access::Read).unwrap();
    let part = mapping.pin(PAGE_SIZE..2 * PAGE_SIZE, Access::Read).unwrap();
    drop(mapping.pin(.., Access::Read).unwrap());
    assert_eq!(locked(), 4);
    drop(all);
    assert_eq!(locked(), 1);
    drop(part);
    assert_eq!(locked(), 0);
}

#[test]
fn a_limit_of_file_sizes_is_an_error() {
    if !own_process::entered("a_limit_of_file_sizes_is_an_error") {
        return;
    }
    let fixture = Fixture::new();
    let file = fixture.file(16);
    let bytes = 8 * PAGE_SIZE as u64;
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the call reads the structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    let cache = common::options(8).frames(Frames::MemoryFile).build().unwrap();
    let error = cache.map(&file, .., Access::Read).unwrap_err();
    assert!(matches!(error, Error::FileSizeLimit { .. }), "{error}");
    let mapping = cache.map(&file, ..bytes, Access::ReadWrite).unwrap();
    (0..8).for_each(|page| store(&mapping, page, 0, 5));
    mapping.sync().unwrap();
    drop(mapping);
    // Anonymous memory has no such limit, until it is to become a memory file.
    let cache = common::options(8).frames(Frames::Anonymous).build().unwrap();
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    store(&mapping, 3, 0, 6);
    let errors = [
        cache.map(&file, ..bytes, Access::Read).map(drop).unwrap_err(),
        mapping.pin(.., Access::Read).map(drop).unwrap_err(),
    ];
    let is_limit = |error: &Error| matches!(error, Error::FileSizeLimit { .. });
    assert!(errors.iter().all(is_limit), "{errors:?}");
    assert_eq!(load(&mapping, 3, 0), 6);
    (8..16).for_each(|page| assert_eq!(load(&mapping, page, 0), pattern(page)));
}

#[test]
fn a_limit_of_private_memory_leads_to_a_memory_file() {
    if !own_process::entered("a_limit_of_private_memory_leads_to_a_memory_file") {
        return;
    }
    let limit = libc::rlimit { rlim_cur: 1 << 30, rlim_max: 1 << 30 };
    // SAFETY: the call reads the structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) }, 0);
    let fixture = Fixture::new();
    let file = fixture.file(4);
    let map = |frames| {
        let cache = common::options(8).frames(frames).build().unwrap();
        cache.map(&file, ..2 << 30, Access::ReadWrite)
    };
    let error = map(Frames::Anonymous).unwrap_err();
    assert!(matches!(error, Error::NoMemory { .. }), "{error}");
    let mapping = map(Frames::Auto).unwrap();
    assert_eq!(common::memory_files().0, 1);
    store(&mapping, 3, 0, 5);
    mapping.sync().unwrap();
    assert_eq!(word_in(&file, 3), 5);
}

#[test]
fn everything_here_holds_with_memory_files_too() {
    if std::env::var_os(common::MEMORY_FILES).is_some() {
        return;
    }
    // The tests above use anonymous memory, because their files have one mapping.
    let mut program = Command::new(std::env::current_exe().unwrap());
    let output = program.env(common::MEMORY_FILES, "yes").output().unwrap();
    println!("{}", text(&output));
    assert!(output.status.success() && text(&output).contains("test result: ok"), "{output:?}");
}

#[test]
fn a_policy_that_panics_ends_the_process() {
    struct Panicking;
    impl Policy for Panicking {
        fn admit(&self, _: Frame, _: Key) {}
        fn touch(&self, _: Frame) {}
        fn remove(&self, _: Frame, _: Key) {}
        fn propose(&self, evictor: &mut dyn Evictor) {
            evictor.take(0);
            panic!("planned");
        }
    }
    if let Some(output) = own_process::run("a_policy_that_panics_ends_the_process") {
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("policy"), "{output:?}");
        return;
    }
    let policy = PolicyChoice::Custom(std::sync::Arc::new(Panicking));
    let cache = common::options(8).policy(policy).build().unwrap();
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(64), .., Access::Read).unwrap();
    let read = |page| mapping.read_at(&mut [0], page * PAGE_SIZE).unwrap();
    let all = std::panic::AssertUnwindSafe(|| (0..64).for_each(read));
    let _ = std::panic::catch_unwind(all);
}

#[test]
fn a_thread_with_a_small_stack_may_fault() {
    // Enough pages for batches of the full size, and dirty ones.
    let cache = cache(4096);
    let fixture = Fixture::new();
    let file = fixture.file(1);
    file.set_len((10_000 * PAGE_SIZE) as u64).unwrap();
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(40 << 10);
        let stores = || (0..10_000).for_each(|page| store(&mapping, page, 1, 1));
        thread.spawn_scoped(scope, stores).unwrap();
    });
    assert_eq!(cache.statistics().unwrap().evictions % 512, 0);
    assert!(cache.statistics().unwrap().evictions > 5_000);
}

#[test]
fn the_handler_keeps_errno() {
    let cache = cache(4);
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(16), .., Access::ReadWrite).unwrap();
    for page in 0..16 {
        // SAFETY: the pointer is to a variable of this thread.
        unsafe { *libc::__errno_location() = 1000 + page as i32 };
        store(&mapping, page, 0, 1);
        // SAFETY: as above.
        assert_eq!(unsafe { *libc::__errno_location() }, 1000 + page as i32);
    }
}

/// A child that closes all descriptors, and opens files of its own, keeps these.
#[test]
fn a_child_that_drops_a_cache_closes_none_of_its_own_files() {
    if !own_process::entered("a_child_that_drops_a_cache_closes_none_of_its_own_files") {
        return;
    }
    let fixture = Fixture::new();
    let file = fixture.file(8);
    let path = std::ffi::CString::new(fixture.path().to_str().unwrap()).unwrap();
    let mut caches = vec![cache(64)];
    caches.extend(monitored(64).build());
    let map = |cache: &Cache| cache.map(&file, .., Access::ReadWrite).unwrap();
    let mappings: Vec<_> = caches.iter().map(map).collect();
    // SAFETY: the child drops what it has, and ends.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: nothing of the child uses the descriptors any more.
            unsafe { libc::close_range(3, u32::MAX, 0) };
            // SAFETY: the path ends with a zero.
            let open = || unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) };
            let own: [i32; 40] = std::array::from_fn(|_| open());
            drop((mappings, caches));
            // SAFETY: the call takes no memory.
            let is_closed = |number: &&i32| unsafe { libc::fcntl(**number, libc::F_GETFD) } == -1;
            let closed = own.iter().filter(is_closed).count();
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(closed as i32) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the call fills the status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(ExitStatus::from_raw(status).code(), Some(0), "descriptors were closed");
        }
    }
    mappings.iter().for_each(|mapping| assert_eq!(load(mapping, 3, 0), pattern(3)));
}

/// A page beyond a limit that the program has set since cannot be written, and no signal says so.
#[test]
fn a_limit_of_file_sizes_is_an_error_of_write_back() {
    if !own_process::entered("a_limit_of_file_sizes_is_an_error_of_write_back") {
        return;
    }
    let fixture = Fixture::new();
    let file = fixture.file(64);
    for cache in both_caches(64) {
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        let set = |limit| {
            let limits = libc::rlimit { rlim_cur: limit, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: the call reads the structure.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limits) }, 0);
        };
        store(&mapping, 3, 0, 6);
        store(&mapping, 50, 0, 7);
        set(16 * PAGE_SIZE as u64);
        let error = mapping.sync().unwrap_err().to_string();
        assert!(error.contains("large"), "{error}");
        assert_eq!((load(&mapping, 50, 0), word_in(&file, 3)), (7, 6));
        set(libc::RLIM_INFINITY);
        mapping.sync().unwrap();
        assert_eq!(word_in(&file, 50), 7);
        file.write_all_at(&[0; 8], 50 * PAGE_SIZE as u64).unwrap();
    }
}

/// To open the file once more, and wait, would take until the kernel ends the lease.
#[test]
fn a_program_with_a_lease_of_its_own_maps_the_file_at_once() {
    if !own_process::entered("a_program_with_a_lease_of_its_own_maps_the_file_at_once") {
        return;
    }
    let fixture = Fixture::new();
    let file = fixture.file(8);
    // SAFETY: the calls take no memory. The kernel says by SIGIO that another opening waits.
    let leased = unsafe {
        libc::signal(libc::SIGIO, libc::SIG_IGN);
        libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK)
    };
    if leased != 0 {
        eprintln!("left out: no lease: {}", std::io::Error::last_os_error());
        return;
    }
    let kept = std::fs::read_to_string("/proc/sys/fs/lease-break-time").unwrap();
    let kept = Duration::from_secs(kept.trim().parse().unwrap());
    let begin = Instant::now();
    let mapping = cache(64).map(&file, .., Access::ReadWrite).unwrap();
    assert!(begin.elapsed() < kept, "{:?}", begin.elapsed());
    store(&mapping, 3, 0, 7);
    mapping.close().unwrap();
    assert_eq!(word_in(&file, 3), 7);
}
