//! A program as it is, which knows nothing of ring 0: the tests of the launcher run it with the
//! library preloaded and without, and compare what it prints and how it ends.
//!
//! Without their variable it does nothing, because cargo and the lab run each program of this
//! folder, with the arguments of tests. It begins as programs in C do: Rust's own beginning lets
//! no `pthread_exit` unwind through it.
#![no_main]
#![allow(unsafe_code)]
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::panic::catch_unwind;
use std::process::{Command, Stdio};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

#[unsafe(no_mangle)]
extern "C-unwind" fn main(_: c_int, _: *const *const c_char) -> c_int {
    if std::env::var_os("VELLUM_RING0_PROGRAM").is_none() {
        println!("a program for other tests: nothing to do");
        return 0;
    }
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    match words[..] {
        ["return", code] => code.parse().unwrap(),
        ["first-thread-exits"] => first_thread_exits(),
        ["first-thread-lost", how, path] => first_thread_lost(how, path),
        _ => match catch_unwind(|| run(&arguments[0], &words)) {
            Ok(()) => std::process::exit(0),
            Err(_) => std::process::exit(101),
        },
    }
}

fn run(program: &str, words: &[&str]) {
    match words[..] {
        ["where"] => tell_where(),
        ["exit", code] => std::process::exit(code.parse().unwrap()),
        ["raise", signal] => {
            // SAFETY: it ends the process.
            unsafe { libc::raise(signal.parse().unwrap()) };
        }
        ["null"] => {
            // SAFETY: it is not, and ends the process.
            unsafe { black_box(ptr::null_mut::<u8>()).write_volatile(1) };
        }
        ["panic"] => panic!("on purpose"),
        ["lines"] => lines(),
        ["threads", rounds] => threads(rounds.parse().unwrap()),
        ["many-threads", count] => many_threads(count.parse().unwrap()),
        ["at-exit"] => at_exit(),
        ["thread-exits"] => thread_exits(),
        ["cancelled"] => cancelled(waits_to_be_cancelled),
        ["cancelled-asleep"] => cancelled(sleeps_to_be_cancelled),
        ["fork"] => fork(),
        ["spawn"] => spawn(program),
        ["exec"] => exec(program),
        ["descriptors"] => descriptors(),
        ["signals"] => signals(),
        ["lost", how, path] => lost(how, path),
        ["deep-handler"] => deep_handler(),
        ["rseq"] => rseq(),
        ["constructor"] => constructor(),
        ["deep"] => println!("{}", deep(20_000)),
        ["map", path] => map(path),
        ["map-in-threads", path, rounds] => map_in_threads(path, rounds.parse().unwrap()),
        ["refused", path] => refused(path),
        ["ring-3", path] => in_ring_3(path),
        ["bad", how, path] => bad(how, path),
        _ => panic!("{words:?}"),
    }
}

fn ring() -> u16 {
    let segment: u16;
    // SAFETY: the instruction only reads a register.
    unsafe { std::arch::asm!("mov {0:x}, cs", out(reg) segment, options(nomem, nostack)) };
    segment & 3
}

fn tell_where() {
    let in_thread = thread::spawn(|| (ring(), thread::spawn(ring).join().unwrap()));
    println!("main: ring {}, threads: {:?}", ring(), in_thread.join().unwrap());
}

fn lines() {
    for (number, line) in std::io::stdin().lock().lines().enumerate() {
        println!("{number} {}", line.unwrap().to_uppercase());
    }
}

/// Threads that end, and others that are made meanwhile.
fn threads(rounds: u64) {
    let (sender, receiver) = mpsc::channel();
    let total = AtomicU64::new(0);
    for round in 0..rounds {
        thread::scope(|scope| {
            for number in 0..4 {
                let (sender, total) = (sender.clone(), &total);
                scope.spawn(move || {
                    let words: Vec<String> = (0..50).map(|at| format!("{at}")).collect();
                    total.fetch_add(words.concat().len() as u64, Ordering::Relaxed);
                    sender.send(round * number).unwrap();
                });
            }
        });
    }
    drop(sender);
    println!("{} {}", receiver.iter().sum::<u64>(), total.into_inner());
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(open < 40, "{open} descriptors");
}

/// Threads that all live at the same time.
fn many_threads(count: usize) {
    let barrier = std::sync::Barrier::new(count);
    let sum = AtomicU64::new(0);
    thread::scope(|scope| {
        for number in 0..count as u64 {
            let (barrier, sum) = (&barrier, &sum);
            scope.spawn(move || {
                barrier.wait();
                sum.fetch_add(number, Ordering::Relaxed);
            });
        }
    });
    println!("{}", sum.into_inner());
}

static RING: AtomicU32 = AtomicU32::new(9);

extern "C" fn print_at_exit() {
    println!("at exit, in the ring of main: {}", u32::from(ring()) == RING.load(Ordering::Relaxed));
}

fn at_exit() {
    RING.store(ring().into(), Ordering::Relaxed);
    // SAFETY: the function is there as long as the process.
    unsafe { libc::atexit(print_at_exit) };
    println!("main ends");
}

unsafe extern "C-unwind" {
    fn pthread_create(
        thread: *mut libc::pthread_t,
        attributes: *const libc::pthread_attr_t,
        routine: unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void,
        argument: *mut c_void,
    ) -> c_int;
    fn pthread_exit(value: *mut c_void) -> !;
    fn pthread_cancel(thread: libc::pthread_t) -> c_int;
    fn pthread_testcancel();
    fn pause() -> c_int;
    fn makecontext(
        context: *mut libc::ucontext_t,
        function: unsafe extern "C-unwind" fn(),
        count: c_int,
    );
    fn pthread_setcanceltype(new: c_int, old: *mut c_int) -> c_int;
}

fn make(routine: unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void) -> libc::pthread_t {
    let mut thread = 0;
    // SAFETY: the routine takes no argument.
    let made = unsafe { pthread_create(&raw mut thread, ptr::null(), routine, ptr::null_mut()) };
    assert_eq!(made, 0);
    thread
}

fn join(thread: libc::pthread_t) -> usize {
    let mut value = ptr::null_mut();
    // SAFETY: the thread was made by `make`, and is joined once.
    assert_eq!(unsafe { libc::pthread_join(thread, &raw mut value) }, 0);
    value.addr()
}

unsafe extern "C-unwind" fn exits(_: *mut c_void) -> *mut c_void {
    // SAFETY: nothing here is to be cleaned up.
    unsafe { pthread_exit(ptr::without_provenance_mut(42)) }
}

fn thread_exits() {
    for _ in 0..20 {
        assert_eq!(join(make(exits)), 42);
    }
    println!("42");
}

unsafe extern "C-unwind" fn prints_later(_: *mut c_void) -> *mut c_void {
    thread::sleep(Duration::from_millis(300));
    println!("the other thread goes on");
    ptr::null_mut()
}

/// The process ends with the last of its threads.
fn first_thread_exits() -> ! {
    make(prints_later);
    // SAFETY: what is not cleaned up is the process' own until it ends.
    unsafe { pthread_exit(ptr::null_mut()) }
}

unsafe extern "C-unwind" fn waits_to_be_cancelled(_: *mut c_void) -> *mut c_void {
    loop {
        // SAFETY: nothing here is to be cleaned up.
        unsafe { pthread_testcancel() };
        std::hint::spin_loop();
    }
}

unsafe extern "C-unwind" fn sleeps_to_be_cancelled(_: *mut c_void) -> *mut c_void {
    loop {
        // SAFETY: nothing here is to be cleaned up.
        unsafe { pause() };
    }
}

fn cancelled(routine: unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void) {
    let thread = make(routine);
    thread::sleep(Duration::from_millis(300));
    // SAFETY: the thread was made, and is not joined yet.
    assert_eq!(unsafe { pthread_cancel(thread) }, 0);
    println!("{}", join(thread) == usize::MAX);
}

fn wait_for(child: libc::pid_t) -> c_int {
    let mut status = 0;
    // SAFETY: the call fills the number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

fn fork() {
    println!("before");
    std::io::stdout().flush().unwrap();
    for code in [0, 7] {
        // SAFETY: the process has one thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let sum: i32 = thread::spawn(|| (1..=10).sum()).join().unwrap();
            println!("the child has {sum}");
            std::process::exit(code);
        }
        println!("the child ended with {}", libc::WEXITSTATUS(wait_for(child)));
    }
}

fn spawn(program: &str) {
    let mut child = Command::new(program)
        .arg("lines")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"one\ntwo\n").unwrap();
    let output = child.wait_with_output().unwrap();
    println!("{:?} {:?}", output.status.code(), String::from_utf8(output.stdout));
    let status = Command::new(program).args(["raise", "15"]).status().unwrap();
    println!("{status}");
    println!("{}", Command::new("/no/such/program").status().unwrap_err());
}

fn exec(program: &str) {
    let words = [program, "where"].map(|word| CString::new(word).unwrap());
    let [path, word] = &words;
    let arguments = [path.as_ptr(), word.as_ptr(), ptr::null()];
    // SAFETY: the strings and the list end with zeros.
    unsafe { libc::execv(path.as_ptr(), arguments.as_ptr()) };
    panic!("{}", std::io::Error::last_os_error());
}

/// Descriptors have the numbers that they would have, and closing all of them is not seen.
fn descriptors() {
    let number = || File::open("/proc/self/comm").unwrap().as_raw_fd();
    let open: Vec<File> = (0..20).map(|_| File::open("/proc/self/comm").unwrap()).collect();
    println!("{:?}", open.iter().map(|file| file.as_raw_fd()).collect::<Vec<_>>());
    drop(open);
    for file in 3..5000 {
        // SAFETY: no descriptor of these numbers is in use by the program.
        let closed = unsafe { libc::close(file) };
        assert_eq!(closed, -1, "{file}");
    }
    // SAFETY: as above.
    println!("{}", unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) });
    println!("{} {}", number(), thread::spawn(|| 7).join().unwrap());
    // SAFETY: the new descriptors are closed by the end of the process.
    println!("{:?}", (3..60).map(|file| unsafe { libc::dup2(1, file) }).collect::<Vec<_>>());
}

static SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn on_signal(_: c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Signals of a timer while a thread computes, and while it waits.
fn signals() {
    let handler: extern "C" fn(c_int) = on_signal;
    let time = libc::timeval { tv_sec: 0, tv_usec: 20_000 };
    let timer = libc::itimerval { it_interval: time, it_value: time };
    // SAFETY: the handler is one of signals, and the structure is filled.
    unsafe {
        libc::signal(libc::SIGALRM, handler as *const () as libc::sighandler_t);
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &raw const timer, ptr::null_mut()), 0);
    }
    let mut sum = 0_u64;
    while SIGNALS.load(Ordering::Relaxed) < 5 {
        sum = black_box(sum.wrapping_add(1));
    }
    // SAFETY: it returns after a handler.
    unsafe { libc::pause() };
    println!("{}", SIGNALS.load(Ordering::Relaxed) > 5 && sum > 0);
}

/// A mapping of a file for reading.
struct Mapped {
    start: *mut u8,
    length: usize,
}

impl Mapped {
    fn new(file: &File, offset: usize, length: usize, flags: c_int) -> Self {
        let (at, file) = (ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping, at an address that the system chooses.
        let start =
            unsafe { libc::mmap(at, length, libc::PROT_READ, flags, file, offset as libc::off_t) };
        assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { start: start.cast(), length }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the program has mapped the bytes, and nothing changes the file.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    fn sum(&self) -> u64 {
        sum(self.bytes())
    }

    fn unmap(&self, from: usize, length: usize) {
        // SAFETY: the program does not use these bytes any more.
        assert_eq!(unsafe { libc::munmap(self.start.wrapping_add(from).cast(), length) }, 0);
    }
}

/// A number that depends on each byte and its place.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x1b3))
}

/// What a call answers: the number of the error, or 0.
fn answer(result: c_int) -> c_int {
    if result == 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap() }
}

/// Maps a file in several ways, and uses what is mapped in the ways of programs.
fn map(path: &str) {
    let file = File::open(path).unwrap();
    let length = file.metadata().unwrap().len() as usize;
    let whole = Mapped::new(&file, 0, length, libc::MAP_SHARED);
    // It need not stay open.
    drop(file);
    println!("sum {}", whole.sum());
    let bytes = whole.bytes();
    let sums: Vec<u64> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| sum(bytes))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("in threads {sums:?}");
    // All of it to standard output, and a part to a pipe of another program.
    std::io::stdout().write_all(whole.bytes()).unwrap();
    let mut child = Command::new("/bin/cat").stdin(Stdio::piped()).spawn();
    if let Ok(child) = &mut child {
        child.stdin.take().unwrap().write_all(&whole.bytes()[5000..80_000]).unwrap();
        child.wait().unwrap();
    }
    let start = whole.start.cast::<c_void>();
    // SAFETY: none of these calls changes the bytes.
    let answers = unsafe {
        [
            libc::mprotect(start, length, libc::PROT_READ),
            libc::mprotect(start, length, libc::PROT_READ | libc::PROT_WRITE),
            libc::madvise(start, length, libc::MADV_RANDOM),
            libc::madvise(start, length, libc::MADV_DONTNEED),
            libc::madvise(start, length, 1000),
            libc::msync(start, length, libc::MS_SYNC),
        ]
        .map(answer)
    };
    println!("answers {answers:?}");
    // A second mapping at the same time, and a part of the first.
    let file = File::open(path).unwrap();
    let second = Mapped::new(&file, 8192, 100_000, libc::MAP_PRIVATE);
    println!("second {} {}", second.sum(), second.bytes() == &whole.bytes()[8192..108_192]);
    whole.unmap(0, 4 << 12);
    println!("rest {}", sum(&whole.bytes()[4 << 12..]));
    fork_with(&whole, 4 << 12);
    whole.unmap(4 << 12, length - (4 << 12));
    // And again, when the first is gone.
    for _ in 0..80 {
        let page = Mapped::new(&file, 4096, 4096, libc::MAP_SHARED);
        println!("page {}", page.sum());
        page.unmap(0, 4096);
    }
    for _ in 0..2 {
        let again = Mapped::new(&file, 4096, length - 4096, libc::MAP_PRIVATE);
        println!("again {}", again.sum());
        again.unmap(0, again.length);
    }
    println!("second {}", second.sum());
}

/// Threads that map files of their own, copies of one, and unmap them, while others use theirs.
fn map_in_threads(path: &str, rounds: usize) {
    let sums: Vec<Vec<u64>> = thread::scope(|scope| {
        let work = |number: usize| {
            let copy = format!("{path}-{number}");
            std::fs::copy(path, &copy).unwrap();
            let file = File::open(&copy).unwrap();
            std::fs::remove_file(&copy).unwrap();
            let length = file.metadata().unwrap().len() as usize;
            let sums = (0..rounds).map(|_| {
                let whole = Mapped::new(&file, 0, length, libc::MAP_SHARED);
                let found = sum(&whole.bytes()[number..]);
                whole.unmap(0, length);
                found
            });
            sums.collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("{sums:?}");
}

/// A child has its parent's mapping, and unmaps it.
fn fork_with(whole: &Mapped, from: usize) {
    std::io::stdout().flush().unwrap();
    // SAFETY: the process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        println!("the child's {}", sum(&whole.bytes()[from..]));
        whole.unmap(from, whole.length - from);
        std::process::exit(5);
    }
    println!("{} {}", libc::WEXITSTATUS(wait_for(child)), sum(&whole.bytes()[from..]));
}

static MAPPED: AtomicU64 = AtomicU64::new(0);
static FOUND: AtomicU64 = AtomicU64::new(0);

/// The sum of the mapped bytes, for code that has no arguments.
fn sum_of_mapped() -> u64 {
    let start = ptr::with_exposed_provenance_mut(MAPPED.load(Ordering::Relaxed) as usize);
    Mapped { start, length: 300_000 }.sum()
}

extern "C" fn sum_in_handler(_: c_int) {
    FOUND.store(sum_of_mapped(), Ordering::Relaxed);
}

unsafe extern "C" fn sum_in_thread(_: *mut c_void) -> c_int {
    c_int::from(sum_of_mapped() == FOUND.load(Ordering::Relaxed))
}

unsafe extern "C" {
    fn thrd_create(
        thread: *mut libc::pthread_t,
        routine: unsafe extern "C" fn(*mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn thrd_join(thread: libc::pthread_t, result: *mut c_int) -> c_int;
}

/// Code that runs in ring 3 also where threads are in ring 0, and system calls.
fn in_ring_3(path: &str) {
    let file = File::open(path).unwrap();
    let whole = Mapped::new(&file, 4096, 300_000, libc::MAP_SHARED);
    MAPPED.store(whole.start.expose_provenance() as u64, Ordering::Relaxed);
    let handler: extern "C" fn(c_int) = sum_in_handler;
    // SAFETY: the handler is one of signals.
    unsafe {
        libc::signal(libc::SIGUSR1, handler as *const () as libc::sighandler_t);
        libc::raise(libc::SIGUSR1);
    }
    println!("handler {}", FOUND.load(Ordering::Relaxed) == whole.sum());
    let (mut thread, mut result) = (0, 0);
    // SAFETY: the routine takes no argument; the results are numbers.
    unsafe {
        assert_eq!(thrd_create(&raw mut thread, sum_in_thread, ptr::null_mut()), 0);
        assert_eq!(thrd_join(thread, &raw mut result), 0);
    }
    println!("thread {result}");
    let [from, to] = sockets();
    let mut vector = libc::iovec { iov_base: whole.start.cast(), iov_len: 10_000 };
    // SAFETY: the structure is plain data, and the bytes are mapped.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut vector, 1);
        libc::sendmsg(from, &raw const message, 0)
    };
    let mut received = vec![0; 10_000];
    // SAFETY: the buffer has the bytes.
    let length = unsafe { libc::read(to, received.as_mut_ptr().cast(), received.len()) };
    println!("{sent} {length} {}", received == whole.bytes()[..10_000]);
    whole.unmap(0, 4096);
    whole.unmap(4096, whole.length - 4096);
}

extern "C" fn tell_signal(signal: c_int) {
    println!("signal {signal}");
    // SAFETY: it ends the process.
    unsafe { libc::_exit(9) };
}

/// Bad accesses to a mapped file.
fn bad(how: &str, path: &str) {
    let file = File::open(path).unwrap();
    let whole = Mapped::new(&file, 0, 400_000, libc::MAP_SHARED);
    println!("{}", whole.bytes()[0]);
    let handler: extern "C" fn(c_int) = tell_signal;
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: the handler is one of signals.
        unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
    }
    let at = whole.start.wrapping_add(390_000);
    match how {
        // SAFETY: it is not, and the handler ends the process.
        "store" => unsafe { black_box(at).write_volatile(1) },
        "truncated" => {
            File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
            // SAFETY: as above.
            println!("{}", unsafe { black_box(at).read_volatile() });
        }
        _ => panic!("{how}"),
    }
}

fn sockets() -> [c_int; 2] {
    let mut pair = [0; 2];
    // SAFETY: the call fills both numbers.
    let made = unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) };
    assert_eq!(made, 0);
    pair
}

/// What only a mapping of the kernel's can do is an error, and the bytes stay.
fn refused(path: &str) {
    let file = File::open(path).unwrap();
    let whole = Mapped::new(&file, 0, 100_000, libc::MAP_SHARED);
    let before = whole.sum();
    let start = whole.start.cast::<c_void>();
    // SAFETY: calls that succeed would not change the bytes, but where they are.
    unsafe {
        println!("{}", answer(libc::mprotect(start, 4096, libc::PROT_NONE)));
        println!("{}", answer(libc::madvise(start, 4096, libc::MADV_DONTFORK)));
        let moved = libc::mremap(start, 100_000, 200_000, libc::MREMAP_MAYMOVE);
        println!("{}", answer((moved == libc::MAP_FAILED).into()));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let over = libc::mmap(start, 4096, libc::PROT_READ, flags, -1, 0);
        println!("{}", answer((over == libc::MAP_FAILED).into()));
    }
    println!("{}", whole.sum() == before);
}

/// The stack of the first thread grows as it is used.
fn deep(rest: u64) -> u64 {
    let words = black_box([rest; 32]);
    if rest == 0 { 0 } else { deep(rest - 1) + words[31] }
}

/// How the handler below leaves.
static LEAVES_BY: Mutex<&str> = Mutex::new("");

/// What the thread has done, and whether it may end.
static BEGUN: AtomicBool = AtomicBool::new(false);
static JUMPED: AtomicBool = AtomicBool::new(false);
static MAY_END: AtomicBool = AtomicBool::new(false);

fn wait_until(flag: &AtomicBool) {
    while !flag.swap(false, Ordering::AcqRel) {
        thread::yield_now();
    }
}

/// A handler that does not return.
extern "C-unwind" fn leave(_: c_int) {
    const STACK: usize = 256 << 10;
    let how = *LEAVES_BY.lock().unwrap();
    // SAFETY: nothing on the thread's stacks is to be cleaned up, and the new stack is there as
    // long as the process.
    unsafe {
        match how {
            "exit" => pthread_exit(ptr::without_provenance_mut(42)),
            "call" => _ = libc::syscall(libc::SYS_exit, 0),
            _ => {
                let context: &mut libc::ucontext_t = Box::leak(Box::new(std::mem::zeroed()));
                assert_eq!(libc::getcontext(context), 0);
                context.uc_stack.ss_sp = Box::leak(Box::new([0_u8; STACK])).as_mut_ptr().cast();
                context.uc_stack.ss_size = STACK;
                makecontext(context, goes_on, 0);
                libc::setcontext(context);
            }
        }
    }
}

/// What a thread does that has jumped out of the handler.
unsafe extern "C-unwind" fn goes_on() {
    FOUND.store(sum_of_mapped(), Ordering::Relaxed);
    JUMPED.store(true, Ordering::Release);
    wait_until(&MAY_END);
    // SAFETY: nothing here is to be cleaned up.
    unsafe { pthread_exit(ptr::without_provenance_mut(43)) }
}

unsafe extern "C-unwind" fn computes(_: *mut c_void) -> *mut c_void {
    const ASYNCHRONOUS: c_int = 1;
    let mut old = 0;
    // SAFETY: the thread has nothing that is to be cleaned up.
    unsafe { pthread_setcanceltype(ASYNCHRONOUS, &raw mut old) };
    black_box(sum_of_mapped());
    BEGUN.store(true, Ordering::Release);
    loop {
        std::hint::spin_loop();
    }
}

/// The mapping that threads use which handlers take away, and the handler.
fn prepare_to_lose(how: &'static str, path: &str) -> Mapped {
    let whole = Mapped::new(&File::open(path).unwrap(), 4096, 400_000, libc::MAP_SHARED);
    MAPPED.store(whole.start.expose_provenance() as u64, Ordering::Relaxed);
    *LEAVES_BY.lock().unwrap() = how;
    let handler: extern "C-unwind" fn(c_int) = leave;
    // SAFETY: the handler is one of signals.
    unsafe { libc::signal(libc::SIGUSR1, handler as *const () as libc::sighandler_t) };
    whole
}

/// Threads that a handler takes away while they compute, and others that use the cache afterwards.
fn lost(how: &str, path: &str) {
    let whole = prepare_to_lose(String::leak(how.to_owned()), path);
    for _ in 0..20 {
        let thread = make(computes);
        wait_until(&BEGUN);
        // SAFETY: the thread was made, and is not joined yet.
        let sent = unsafe {
            match how {
                "cancel" => pthread_cancel(thread),
                _ => libc::pthread_kill(thread, libc::SIGUSR1),
            }
        };
        assert_eq!(sent, 0);
        if how == "jump" {
            wait_until(&JUMPED);
            println!("{} {}", whole.sum(), sum_of_mapped() == FOUND.load(Ordering::Relaxed));
            MAY_END.store(true, Ordering::Release);
        }
        println!("{} {}", join(thread), whole.sum());
    }
    // Each takes one in ring 0.
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(open < 15, "{open} descriptors");
}

/// The same with the first thread. The kernel says that it is there until the process ends.
fn first_thread_lost(how: &str, path: &str) -> ! {
    prepare_to_lose(String::leak(how.to_owned()), path);
    // SAFETY: the call has no arguments.
    let first = unsafe { libc::pthread_self() };
    thread::spawn(move || {
        wait_until(&BEGUN);
        // SAFETY: the thread computes.
        assert_eq!(unsafe { libc::pthread_kill(first, libc::SIGUSR1) }, 0);
        thread::sleep(Duration::from_millis(300));
        println!("{} {}", sum_of_mapped(), sum_of_mapped());
        std::process::exit(3);
    });
    // SAFETY: it does not return.
    unsafe { computes(ptr::null_mut()) };
    unreachable!("it computes")
}

extern "C" fn uses_its_stack(_: c_int) {
    let bytes = black_box([7_u8; 1 << 20]);
    FOUND.store(sum(&bytes), Ordering::Relaxed);
}

fn deep_handler() {
    let handler: extern "C" fn(c_int) = uses_its_stack;
    // SAFETY: the handler is one of signals.
    unsafe {
        libc::signal(libc::SIGUSR1, handler as *const () as libc::sighandler_t);
        assert_eq!(libc::raise(libc::SIGUSR1), 0);
    }
    println!("{}", FOUND.load(Ordering::Relaxed));
}

/// Asks for restartable sequences.
fn rseq() {
    let mut area = [0_u64; 8];
    // SAFETY: the kernel takes the area or not. It is there as long as the thread needs it.
    let result = unsafe { libc::syscall(libc::SYS_rseq, area.as_mut_ptr(), 32, 0, 0x1234) };
    println!("{}", answer(result as c_int));
    std::process::exit(0);
}

/// A library (ELF) that calls a function of this program when it is loaded, and has nothing else.
fn library_that_calls(function: unsafe extern "C-unwind" fn()) -> Vec<u8> {
    const SIZE: u64 = 0x1000;
    let [dynamic, strings, symbols, code] = [0x100, 0x180, 0x1a0, 0x200];
    let mut bytes = vec![0; SIZE as usize];
    let mut put = |at: u64, value: &[u8]| {
        bytes[at as usize..][..value.len()].copy_from_slice(value);
    };
    let words =
        |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    put(0, b"\x7fELF\x02\x01\x01");
    // A library for x86-64; where the headers of segments are, their bytes, and how many.
    put(16, &[3, 0, 62, 0, 1]);
    put(32, &[64]);
    put(52, &[64, 0, 56, 0, 3]);
    // All bytes; what the loader is told; and that the stack is not executable.
    put(64, &words(&[7 << 32 | 1, 0, 0, 0, SIZE, SIZE, SIZE]));
    put(64 + 56, &words(&[6 << 32 | 2, dynamic, dynamic, dynamic, 96, 96, 8]));
    put(64 + 112, &words(&[6 << 32 | 0x6474_e551, 0, 0, 0, 0, 0, 16]));
    put(dynamic, &words(&[12, code, 5, strings, 6, symbols, 10, 1, 11, 24, 0, 0]));
    // mov rax, FUNCTION; jmp rax
    put(code, &[0x48, 0xb8]);
    put(code + 2, &(function as *const () as u64).to_le_bytes());
    put(code + 10, &[0xff, 0xe0]);
    bytes
}

unsafe extern "C-unwind" fn makes_another(_: *mut c_void) -> *mut c_void {
    ptr::without_provenance_mut(join(make(exits)))
}

unsafe extern "C-unwind" fn makes_threads() {
    println!("{}", join(make(makes_another)));
}

/// The loader holds its lock while a library that it loads makes a thread, which makes another.
fn constructor() {
    // What `pthread_exit` needs is loaded before.
    join(make(exits));
    let path = std::env::temp_dir().join(format!("ring0-{}.so", std::process::id()));
    std::fs::write(&path, library_that_calls(makes_threads)).unwrap();
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the library's only code calls the function.
    let loaded = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    std::fs::remove_file(path).unwrap();
    assert!(!loaded.is_null(), "{}", std::io::Error::last_os_error());
    println!("loaded");
}
