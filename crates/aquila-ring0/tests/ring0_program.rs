//! A program as it is, which knows nothing of ring 0: the tests of the launcher run it with the
//! library preloaded and without, and compare what it prints and how it ends.
//!
//! Without arguments it does nothing, because the lab runs each program of this folder.
#![allow(unsafe_code)]
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

use std::ffi::{CString, c_int, c_void};
use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::process::{Command, ExitCode, Stdio};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    match words[..] {
        [] => println!("a program for other tests: nothing to do"),
        ["where"] => tell_where(),
        ["return", code] => return ExitCode::from(code.parse::<u8>().unwrap()),
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
        ["first-thread-exits"] => first_thread_exits(),
        ["cancelled"] => cancelled(waits_to_be_cancelled),
        ["cancelled-asleep"] => cancelled(sleeps_to_be_cancelled),
        ["fork"] => fork(),
        ["spawn"] => spawn(&arguments[0]),
        ["exec"] => exec(&arguments[0]),
        ["descriptors"] => descriptors(),
        ["signals"] => signals(),
        ["deep"] => println!("{}", deep(20_000)),
        _ => panic!("{words:?}"),
    }
    ExitCode::SUCCESS
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
fn first_thread_exits() {
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
    println!("{}", number());
    for file in 3..5000 {
        // SAFETY: no descriptor of these numbers is in use by the program.
        let closed = unsafe { libc::close(file) };
        assert_eq!(closed, -1, "{file}");
    }
    // SAFETY: as above.
    println!("{}", unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) });
    println!("{} {}", number(), thread::spawn(|| 7).join().unwrap());
    // SAFETY: the new descriptor is closed by the end of the process.
    println!("{}", unsafe { libc::dup2(1, 3) });
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

/// The stack of the first thread grows as it is used.
fn deep(rest: u64) -> u64 {
    let words = black_box([rest; 32]);
    if rest == 0 { 0 } else { deep(rest - 1) + words[31] }
}
