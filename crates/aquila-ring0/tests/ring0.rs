//! Threads that go to ring 0 and back. The tests need a KVM that runs guests, as in the lab
//! (`make lab PACKAGE=vellum-aquila-ring0`); where there is none they say so and pass, unless
//! `VELLUM_RING0` says that there must be one.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod common;

use std::arch::{asm, naked_asm};
use std::hint::black_box;
use std::io::{Seek as _, Write as _};
use std::mem::{MaybeUninit, transmute};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use common::{PAGE, found, handle, is_refused, machine, timed};
use vellum_aquila_ring0::{Counts, Error, Handler, VirtualMachine, is_in_ring_0};
use vellum_testing::own_process;
use vellum_testing::patience::SetWhenDropped;

const GIB: usize = 1 << 30;

/// Maps memory in a window of its own, which no other memory of the process is in.
fn map_alone(length: usize, access: libc::c_int, flags: libc::c_int) -> *mut u8 {
    static NEXT: AtomicUsize = AtomicUsize::new(0x2000_0000_0000);
    let at = NEXT.fetch_add(4 * GIB, Ordering::Relaxed) + GIB / 2;
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping, where nothing is.
    let start = unsafe { libc::mmap(at as *mut libc::c_void, length, access, flags, -1, 0) };
    assert_eq!(start as usize, at);
    start.cast()
}

fn map(length: usize) -> *mut u8 {
    map_alone(length, libc::PROT_READ | libc::PROT_WRITE, 0)
}

fn unmap(start: *mut u8, length: usize) {
    // SAFETY: the caller has mapped it.
    assert_eq!(unsafe { libc::munmap(start.cast(), length) }, 0);
}

fn protect(start: *mut u8, length: usize, access: libc::c_int) {
    // SAFETY: the caller has mapped it.
    assert_eq!(unsafe { libc::mprotect(start.cast(), length, access) }, 0);
}

fn parent() -> i32 {
    // SAFETY: the call has no arguments.
    unsafe { libc::getppid() }
}

/// Runs a function in ring 0 in a process of its own, which it must end by this signal.
#[track_caller]
fn ends_by(signal: libc::c_int, test: &str, act: impl FnOnce()) {
    if let Some(machine) = machine() {
        ends_by_on(&machine, signal, test, act);
    }
}

#[track_caller]
fn ends_by_on(machine: &VirtualMachine, signal: libc::c_int, test: &str, act: impl FnOnce()) {
    if let Some(output) = own_process::run(test) {
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.signal(), Some(signal), "{output:?}");
        assert!(text.contains("in ring 0: true"), "{output:?}");
        return;
    }
    // The library's own handlers of these would only repeat the access.
    // SAFETY: the default action.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    let _ = machine.run(|| {
        println!("in ring 0: {}", is_in_ring_0());
        act();
    });
}

#[test]
fn a_function_runs_in_ring_0_and_goes_on_where_it_was() {
    let Some(machine) = machine() else { return };
    let mut words = vec!["before".to_owned()];
    assert!(!is_in_ring_0());
    let sum = machine.run(|| {
        assert!(is_in_ring_0());
        words.push(format!("in {}", 0));
        (1..=100).sum::<u64>()
    });
    assert!(!is_in_ring_0());
    assert_eq!((sum, words), (Ok(5050), vec!["before".to_owned(), "in 0".to_owned()]));
}

#[test]
fn entering_again_works() {
    let Some(machine) = machine() else { return };
    for round in 0..1000 {
        assert_eq!(machine.run(|| round + i32::from(is_in_ring_0())), Ok(round + 1));
    }
}

#[test]
fn entering_from_ring_0_is_an_error() {
    let Some(machine) = machine() else { return };
    assert_eq!(machine.run(|| machine.run(|| ())), Ok(Err(Error::Inside)));
}

#[test]
fn memory_files_and_output_work() {
    for machine in [VirtualMachine::new(), VirtualMachine::without_large_pages()] {
        let Some(machine) = found(machine) else { return };
        let text = machine
            .run(|| {
                println!("printed in ring 0");
                let blocks: Vec<_> = (0..100).map(|size| vec![1_u8; size << 10]).collect();
                let large = vec![7_u8; 64 << 20];
                assert_eq!(large[black_box(40 << 20)], 7);
                let path = std::env::temp_dir().join(format!("ring0-{}", std::process::id()));
                let mut file = std::fs::File::create_new(&path).unwrap();
                file.write_all(&blocks[10]).unwrap();
                file.rewind().unwrap();
                let read = std::fs::read(&path).unwrap();
                std::fs::remove_file(&path).unwrap();
                assert_eq!(read, blocks[10]);
                std::fs::read_to_string("/proc/self/stat").unwrap()
            })
            .unwrap();
        assert!(text.starts_with(&std::process::id().to_string()));
        // Ring 0 has done it all itself.
        let counts = machine.counts();
        assert!(counts.native_steps == 0 && counts.window_faults > 0, "{counts:?}");
    }
}

#[test]
fn a_system_call_is_the_thread_s_own() {
    let Some(machine) = machine() else { return };
    // SAFETY: the calls have no arguments.
    let ask = || unsafe { (libc::getppid(), libc::gettid(), libc::sched_getcpu() >= 0) };
    assert_eq!(machine.run(ask), Ok(ask()));
    let error = machine.run(|| std::fs::File::open("/nothing").unwrap_err().raw_os_error());
    assert_eq!(error, Ok(Some(libc::ENOENT)));
}

#[test]
fn thousands_of_system_calls_are_counted() {
    const CALLS: u64 = 5000;
    let Some(machine) = machine() else { return };
    let native = parent();
    let before = machine.counts();
    assert!(machine.run(|| (0..CALLS).all(|_| parent() == native)).unwrap());
    let after = machine.counts();
    assert!(after.system_calls - before.system_calls >= CALLS, "{before:?} {after:?}");
    assert!(after.exits - before.exits < CALLS + 100, "{before:?} {after:?}");
    assert_eq!(after.native_steps, 0);
}

/// Stores to the red zone, accesses memory, makes a system call, and says whether the red zone is
/// as it was.
#[unsafe(naked)]
extern "C" fn keeps_red_zone(address: *mut u8) -> u64 {
    naked_asm!(
        "mov r8, 0x0123456789abcdef",
        "mov [rsp - 8], r8",
        "mov [rsp - 64], r8",
        "mov [rsp - 128], r8",
        "mov al, [rdi]",
        "mov eax, 110", // getppid
        "syscall",
        "xor eax, eax",
        "cmp [rsp - 8], r8",
        "jne 2f",
        "cmp [rsp - 64], r8",
        "jne 2f",
        "cmp [rsp - 128], r8",
        "jne 2f",
        "mov eax, 1",
        "2:",
        "ret",
    )
}

#[test]
fn the_red_zone_survives_faults_and_system_calls() {
    let Some(machine) = machine() else { return };
    let memory = map(PAGE);
    let before = machine.counts();
    assert_eq!(machine.run(|| keeps_red_zone(memory)), Ok(1));
    assert!(machine.counts().window_faults > before.window_faults);
    unmap(memory, PAGE);
}

/// Loads a vector register, accesses memory, and stores the register.
#[target_feature(enable = "avx")]
fn through_a_register(value: &[u8; 32], address: *const u8) -> [u8; 32] {
    let mut after = [0; 32];
    // SAFETY: the addresses are those of variables, and one that the caller may read.
    unsafe {
        asm!(
            "vmovdqu ymm9, [{before}]",
            "mov {byte}, [{address}]",
            "vmovdqu [{after}], ymm9",
            before = in(reg) value,
            address = in(reg) address,
            after = in(reg) &raw mut after,
            byte = out(reg_byte) _,
            out("ymm9") _,
        );
    }
    after
}

/// Loads a vector register, in one instruction.
#[target_feature(enable = "avx")]
fn loaded(address: *const u8) -> [u8; 32] {
    let mut after = [0; 32];
    // SAFETY: the caller may read the address.
    unsafe {
        asm!(
            "vpxor xmm9, xmm9, xmm9",
            "vmovdqu ymm9, [{address}]",
            "vmovdqu [{after}], ymm9",
            address = in(reg) address,
            after = in(reg) &raw mut after,
            out("ymm9") _,
        );
    }
    after
}

/// Stores a vector register, in one instruction.
#[target_feature(enable = "avx")]
fn store(value: &[u8; 32], address: *mut u8) {
    // SAFETY: the caller may write to the address.
    unsafe {
        asm!(
            "vmovdqu ymm9, [{value}]",
            "vmovdqu [{address}], ymm9",
            value = in(reg) value,
            address = in(reg) address,
            out("ymm9") _,
        );
    }
}

/// Fills pages with their numbers, by code that uses vector registers.
struct Numbers;

impl Handler for Numbers {
    fn fill(&self, page: usize, frame: &mut [u8; PAGE]) -> bool {
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the processor has the instructions.
            unsafe { asm!("vpxor xmm9, xmm9, xmm9", "vzeroall", clobber_abi("C")) };
        }
        frame.fill(page as u8);
        frame[..8].copy_from_slice(&(page as u64).to_le_bytes());
        page != 13
    }
}

#[test]
fn vector_registers_survive_faults() {
    let Some(machine) = machine() else { return };
    if !std::arch::is_x86_feature_detected!("avx") {
        return;
    }
    let memory = map(PAGE);
    let managed = machine.manage(16, Box::new(Numbers)).unwrap();
    let value: [u8; 32] = std::array::from_fn(|byte| byte as u8 + 1);
    machine
        .run(|| {
            for address in [memory, managed.as_ptr()] {
                // SAFETY: the processor has the instructions.
                assert_eq!(unsafe { through_a_register(&value, address) }, value);
            }
        })
        .unwrap();
    assert_eq!(machine.counts().managed_faults, 1);
    // And instructions that the process makes: one that has nothing to do with the register, one
    // that loads another one, and one that stores it.
    handle(libc::SIGSEGV, repair as *const () as usize);
    REPAIR.store(memory as usize, Ordering::Relaxed);
    machine
        .run(|| {
            let refused = || protect(memory, PAGE, libc::PROT_NONE);
            // SAFETY: the processor has the instructions, and the page has room.
            unsafe {
                refused();
                assert_eq!(through_a_register(&value, memory), value);
                memory.cast::<[u8; 32]>().write(value.map(|byte| byte * 2));
                refused();
                assert_eq!(loaded(memory), value.map(|byte| byte * 2));
                refused();
                store(&value, memory);
                assert_eq!(memory.cast::<[u8; 32]>().read(), value);
            }
        })
        .unwrap();
    let counts = machine.counts();
    assert_eq!(counts.native_steps, 3, "{counts:?}");
    unmap(memory, PAGE);
}

/// The page that [`repair`] makes accessible.
static REPAIR: AtomicUsize = AtomicUsize::new(0);
static REPAIRED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn repair(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler the structure.
    let address = unsafe { (*info).si_addr() } as usize & !(PAGE - 1);
    if address != REPAIR.load(Ordering::Relaxed) {
        // SAFETY: another access: it ends the process when it is repeated.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        return;
    }
    REPAIRED.fetch_add(1, Ordering::Relaxed);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the page is the test's.
    unsafe { libc::mprotect(address as *mut libc::c_void, PAGE, access) };
}

#[test]
fn a_handler_of_a_bad_access_may_repair_it() {
    let test = "a_handler_of_a_bad_access_may_repair_it";
    if !own_process::entered(test) {
        return;
    }
    let Some(machine) = machine() else { return };
    handle(libc::SIGSEGV, repair as *const () as usize);
    let memory = map(PAGE);
    REPAIR.store(memory as usize, Ordering::Relaxed);
    machine
        .run(|| {
            // SAFETY: the memory is the test's.
            unsafe {
                memory.write_volatile(1);
                for (round, access) in [libc::PROT_READ, libc::PROT_NONE].into_iter().enumerate() {
                    protect(memory, PAGE, access);
                    memory.write_volatile(2);
                    assert_eq!(REPAIRED.load(Ordering::Relaxed), round + 1);
                    assert!(is_in_ring_0(), "the step does not come back");
                    assert_eq!(memory.read_volatile(), 2);
                }
            }
        })
        .unwrap();
    let counts = machine.counts();
    assert!(counts.native_steps >= 2, "{counts:?}");
}

#[test]
fn unmapped_memory_is_a_signal() {
    let memory = map(PAGE);
    ends_by(libc::SIGSEGV, "unmapped_memory_is_a_signal", || {
        // SAFETY: the access ends the process.
        unsafe {
            memory.write_volatile(1);
            unmap(memory, PAGE);
            memory.read_volatile();
        }
    });
}

#[test]
fn read_only_memory_is_a_signal() {
    let memory = map(PAGE);
    ends_by(libc::SIGSEGV, "read_only_memory_is_a_signal", || {
        // SAFETY: the access ends the process.
        unsafe {
            memory.write_volatile(1);
            protect(memory, PAGE, libc::PROT_READ);
            assert_eq!(memory.read_volatile(), 1);
            memory.write_volatile(2);
        }
    });
}

#[test]
fn a_null_pointer_is_a_signal() {
    ends_by(libc::SIGSEGV, "a_null_pointer_is_a_signal", || {
        // SAFETY: the access ends the process.
        unsafe { asm!("mov al, [{}]", in(reg) 8_usize, out("al") _) };
    });
}

#[test]
fn an_address_of_the_kernel_is_a_signal() {
    ends_by(libc::SIGSEGV, "an_address_of_the_kernel_is_a_signal", || {
        // SAFETY: the access ends the process.
        unsafe { asm!("mov al, [{}]", in(reg) 0xffff_8880_0000_0000_u64, out("al") _) };
    });
}

#[test]
fn an_instruction_that_does_not_exist_is_a_signal() {
    ends_by(libc::SIGILL, "an_instruction_that_does_not_exist_is_a_signal", || {
        // SAFETY: it ends the process.
        unsafe { asm!("ud2") };
    });
}

#[test]
fn a_division_by_zero_is_a_signal() {
    ends_by(libc::SIGFPE, "a_division_by_zero_is_a_signal", || {
        // SAFETY: it ends the process.
        unsafe { asm!("div {:e}", in(reg) 0, inout("eax") 1 => _, inout("edx") 0 => _) };
    });
}

#[test]
fn an_instruction_of_kernels_is_a_signal() {
    is_refused("an_instruction_of_kernels_is_a_signal", || {
        // SAFETY: it ends the process.
        unsafe { asm!("hlt") };
    });
}

#[test]
fn access_to_a_device_is_a_signal() {
    is_refused("access_to_a_device_is_a_signal", || {
        // SAFETY: it ends the process.
        unsafe { asm!("in al, 0x60", out("al") _) };
    });
}

#[test]
fn a_page_that_cannot_be_had_is_a_signal() {
    let Some(machine) = machine() else { return };
    let managed = machine.manage(16, Box::new(Numbers)).unwrap();
    ends_by_on(&machine, libc::SIGSEGV, "a_page_that_cannot_be_had_is_a_signal", || {
        // SAFETY: the handler does not fill page 13, so the access ends the process.
        unsafe { managed.as_ptr().add(13 * PAGE).read_volatile() };
    });
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn signals_interrupt_ring_0_and_leave_errno_alone() {
    const ENOUGH: u64 = 20;
    let Some(machine) = machine() else { return };
    handle(libc::SIGUSR1, count_signal as *const () as usize);
    let stop = AtomicBool::new(false);
    // SAFETY: the call has no arguments.
    let target = unsafe { libc::pthread_self() };
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // SAFETY: the thread waits for this one.
                unsafe { libc::pthread_kill(target, libc::SIGUSR1) };
                thread::sleep(Duration::from_millis(1));
            }
        });
        let _stop = SetWhenDropped(&stop);
        machine
            .run(|| {
                // SAFETY: the place of the thread's own number.
                let errno = unsafe { libc::__errno_location() };
                let before = SIGNALS.load(Ordering::Relaxed);
                while SIGNALS.load(Ordering::Relaxed) < before + ENOUGH {
                    // SAFETY: as above.
                    unsafe { errno.write_volatile(77) };
                    (0..1000).for_each(|_| std::hint::spin_loop());
                    // SAFETY: as above.
                    assert_eq!(unsafe { errno.read_volatile() }, 77);
                }
                assert!(is_in_ring_0());
            })
            .unwrap();
    });
    let counts = machine.counts();
    assert!(counts.interrupted > 0, "{counts:?}");
}

/// A timer that sends the calling thread a signal every 2 ms, until it is dropped.
struct Timer(libc::timer_t);

impl Timer {
    fn new(signal: libc::c_int) -> Self {
        let time = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let times = libc::itimerspec { it_interval: time, it_value: time };
        // SAFETY: the structures are plain data, and there during the calls.
        unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer = std::mem::zeroed();
            let made = libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
            assert_eq!(made, 0);
            let set = libc::timer_settime(timer, 0, &raw const times, std::ptr::null_mut());
            assert_eq!(set, 0);
            Self(timer)
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: it has made the timer.
        assert_eq!(unsafe { libc::timer_delete(self.0) }, 0);
    }
}

#[test]
fn a_timer_interrupts_ring_0_and_ends_a_wait() {
    let Some(machine) = machine() else { return };
    handle(libc::SIGUSR2, count_signal as *const () as usize);
    let (is_there, waited) = machine
        .run(|| {
            let _timer = Timer::new(libc::SIGUSR2);
            let before = SIGNALS.load(Ordering::Relaxed);
            while SIGNALS.load(Ordering::Relaxed) < before + 20 {
                std::hint::spin_loop();
            }
            // SAFETY: it waits for no descriptors.
            let waited = unsafe { libc::poll(std::ptr::null_mut(), 0, 100_000) };
            (is_in_ring_0(), (waited, std::io::Error::last_os_error().raw_os_error()))
        })
        .unwrap();
    assert_eq!((is_there, waited), (true, (-1, Some(libc::EINTR))));
    let counts = machine.counts();
    assert!(counts.interrupted > 0, "{counts:?}");
}

#[test]
fn clocks_agree() {
    let Some(machine) = machine() else { return };
    for _ in 0..100 {
        let (before, wall) = (Instant::now(), SystemTime::now());
        let (inside, wall_inside) = machine.run(|| (Instant::now(), SystemTime::now())).unwrap();
        let after = Instant::now();
        assert!(before <= inside && inside <= after, "{before:?} {inside:?} {after:?}");
        let ahead = wall_inside.duration_since(wall).unwrap();
        assert!(ahead < Duration::from_secs(60), "{ahead:?}");
    }
}

#[test]
fn a_panic_goes_on_in_ring_3() {
    let Some(machine) = machine() else { return };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        machine.run(|| {
            if is_in_ring_0() {
                panic!("in ring 0");
            }
        })
    }));
    assert_eq!(caught.unwrap_err().downcast_ref(), Some(&"in ring 0"));
    assert!(!is_in_ring_0());
    assert_eq!(machine.run(is_in_ring_0), Ok(true));
}

#[test]
fn threads_are_in_ring_0_at_the_same_time() {
    const ROUNDS: u64 = 500;
    let Some(machine) = machine() else { return };
    let (together, has_ended) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // The others do not wait for a thread that has failed.
                let _ended = SetWhenDropped(&has_ended);
                machine
                    .run(|| {
                        together.fetch_add(1, Ordering::SeqCst);
                        while together.load(Ordering::SeqCst) < 4
                            && !has_ended.load(Ordering::SeqCst)
                        {
                            thread::yield_now();
                        }
                        (0..ROUNDS).for_each(|_| assert!(parent() >= 0));
                        assert!(is_in_ring_0());
                    })
                    .unwrap();
            });
        }
    });
}

#[test]
fn a_thread_that_is_made_in_ring_0_begins_in_ring_3() {
    let Some(machine) = machine() else { return };
    let told = machine.run(|| {
        let made = thread::spawn(|| (is_in_ring_0(), 1.5_f64.sqrt()));
        (is_in_ring_0(), made.join().unwrap())
    });
    assert_eq!(told, Ok((true, (false, 1.5_f64.sqrt()))));
}

#[test]
fn a_program_may_be_started_in_ring_0() {
    let Some(machine) = machine() else { return };
    let program = std::env::current_exe().unwrap();
    let output = machine.run(|| {
        let output = Command::new(program).arg("--list").output().unwrap();
        (is_in_ring_0(), output)
    });
    let (is_there, output) = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(is_there && output.status.success(), "{output:?}");
    assert!(text.contains("a_program_may_be_started_in_ring_0"), "{text}");
}

#[test]
fn a_forked_child_goes_on_in_ring_3() {
    let Some(machine) = machine() else { return };
    let mut memory = vec![1_u8; 10 * PAGE];
    let child = machine
        .run(|| {
            // SAFETY: the child calls nothing that needs other threads.
            let child = unsafe { libc::fork() };
            memory[5 * PAGE] = if child == 0 { 2 } else { 3 };
            child
        })
        .unwrap();
    if child == 0 {
        let is_error = machine.run(|| ()) == Err(Error::Forked);
        // KVM's pages of a processor would be shared: both would see the other's registers.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_alone = !maps.contains("kvm-vcpu");
        let is_right = is_error && is_alone && !is_in_ring_0() && memory[5 * PAGE] == 2;
        // SAFETY: it ends the child without the parent's handlers.
        unsafe { libc::_exit(if is_right { 42 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: the call fills the number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 42));
    assert_eq!(memory[5 * PAGE], 3);
    // The parent's registers are not the child's.
    assert_eq!(machine.run(is_in_ring_0), Ok(true));
}

/// The signals that cannot be blocked.
const NEVER: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);

/// Sets the mask of the thread's signals, and returns what it was.
fn masked(mask: u64) -> u64 {
    let mut old = 0_u64;
    let how = libc::SIG_SETMASK;
    // SAFETY: both sets have the size that is given.
    let set =
        unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const mask, &raw mut old, 8) };
    assert_eq!(set, 0);
    old
}

#[test]
fn a_stack_grows() {
    const LENGTH: usize = 64 * PAGE;
    let Some(machine) = machine() else { return };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let start = map_alone(PAGE, access, libc::MAP_GROWSDOWN);
    let grown = machine.run(|| {
        // The trap that follows a step must come although the program blocks all signals.
        let all = masked(u64::MAX);
        for page in 0..LENGTH / PAGE {
            // SAFETY: the kernel maps the pages below, one after the other.
            unsafe { start.sub(page * PAGE).write_volatile(page as u8) };
        }
        let is_there = is_in_ring_0();
        (is_there, masked(all) | NEVER)
    });
    assert_eq!(grown, Ok((true, u64::MAX)));
    let counts = machine.counts();
    assert!(counts.native_steps > 0, "{counts:?}");
}

#[test]
fn the_lowest_and_the_highest_page_are_visible() {
    const LOWEST: usize = 0x1_0000; // what the kernel allows all users
    const HIGHEST: usize = 0x7fff_ffff_e000;
    let Some(machine) = machine() else { return };
    for place in [LOWEST, HIGHEST] {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, where nothing is.
        let start = unsafe { libc::mmap(place as *mut libc::c_void, PAGE, access, flags, -1, 0) };
        assert_eq!(start as usize, place);
        let last = (place + PAGE - 1) as *mut u8;
        // SAFETY: the page is the test's.
        machine.run(|| unsafe { last.write_volatile(5) }).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { last.read_volatile() }, 5);
        unmap(start.cast(), PAGE);
    }
    assert_eq!(machine.counts().native_steps, 0);
}

#[test]
fn memory_above_the_stack_is_visible() {
    let Some(machine) = machine() else { return };
    // The kernel puts the program's path there, above the stack.
    // SAFETY: the path is there as long as the process.
    let path = || unsafe {
        let path = libc::getauxval(libc::AT_EXECFN) as *const libc::c_char;
        std::ffi::CStr::from_ptr(path).to_owned()
    };
    assert_eq!(machine.run(path), Ok(path()));
    assert_eq!(machine.counts().native_steps, 0);
}

#[test]
fn a_page_that_the_kernel_emulates_works() {
    const TIME: usize = 0xffff_ffff_ff60_0400; // the old place of `time`
    let Some(machine) = machine() else { return };
    if !std::fs::read_to_string("/proc/self/maps").unwrap().contains("[vsyscall]") {
        return println!("skipped: this kernel has no page of vsyscalls");
    }
    // SAFETY: the function takes an address that may be null.
    let time = || unsafe {
        let time: extern "C" fn(*mut i64) -> i64 = transmute(TIME);
        time(std::ptr::null_mut())
    };
    let before = time();
    let inside = machine.run(time).unwrap();
    assert!(before <= inside && inside <= time(), "{before} {inside}");
}

#[test]
fn the_base_of_gs_is_the_program_s() {
    let Some(machine) = machine() else { return };
    let words = [11_u64, 22, 33];
    let load = || {
        let word: u64;
        // SAFETY: the base is that of three words.
        unsafe { asm!("mov {}, gs:[8]", out(reg) word) };
        word
    };
    let inside = machine.run(|| {
        // SAFETY: nothing else uses GS on Linux.
        let set = unsafe { libc::syscall(libc::SYS_arch_prctl, 0x1001, words.as_ptr()) };
        assert_eq!(set, 0);
        load()
    });
    assert_eq!((inside, load()), (Ok(22), 22));
    assert_eq!(machine.run(load), Ok(22));
    assert_eq!(machine.counts().native_steps, 0);
}

#[test]
fn managed_faults_need_no_exit() {
    const PAGES: usize = 2000;
    let Some(machine) = machine() else { return };
    let managed = machine.manage(PAGES, Box::new(Numbers)).unwrap();
    let load = |page: usize| {
        // SAFETY: the pages are there, or the handler fills them.
        unsafe { managed.as_ptr().add(page * PAGE).cast::<u64>().read_volatile() }
    };
    let pages = || (0..PAGES).filter(|page| *page != 13);
    let (before, after): (Counts, Counts) = machine
        .run(|| {
            // The first has windows made, of the frames and of the code.
            load(0);
            let before = machine.counts();
            assert!(pages().all(|page| load(page) == page as u64));
            (before, machine.counts())
        })
        .unwrap();
    assert_eq!(after.managed_faults - before.managed_faults, PAGES as u64 - 2);
    assert_eq!(after.exits - before.exits, after.interrupted - before.interrupted);
    // Once more, from another thread: the pages are there.
    thread::scope(|scope| {
        let again =
            scope.spawn(|| machine.run(|| pages().all(|page| load(page) == page as u64)).unwrap());
        assert!(again.join().unwrap());
    });
    assert_eq!(machine.counts().managed_faults, after.managed_faults);
}

#[test]
fn ranges_do_not_overlap_after_one_that_was_refused() {
    let Some(machine) = machine() else { return };
    let bytes = |managed: &vellum_aquila_ring0::Managed<'_>| {
        let start = managed.as_ptr().addr();
        start..start + managed.pages() * PAGE
    };
    let first = machine.manage(3, Box::new(Numbers)).unwrap();
    for pages in [0, 200_000_000, usize::MAX / PAGE, usize::MAX / PAGE - 5, usize::MAX] {
        assert!(machine.manage(pages, Box::new(Numbers)).is_err(), "{pages} pages");
    }
    let inside = machine.run(|| machine.manage(1, Box::new(Numbers)).map(|_| ())).unwrap();
    assert!(matches!(inside, Err(Error::OnlyInRing3 { .. })), "{inside:?}");
    let second = machine.manage(2, Box::new(Numbers)).unwrap();
    let (first, second) = (bytes(&first), bytes(&second));
    assert_eq!(second.start, first.end);
}

#[test]
fn a_handler_that_needs_more_than_its_stack_is_a_signal() {
    struct Greedy;
    impl Handler for Greedy {
        fn fill(&self, page: usize, frame: &mut [u8; PAGE]) -> bool {
            let mut bytes = [0_u8; 256 << 10];
            bytes[page] = 1;
            frame[0] = black_box(&mut bytes).iter().sum();
            true
        }
    }
    let Some(machine) = machine() else { return };
    let managed = machine.manage(1, Box::new(Greedy)).unwrap();
    let test = "a_handler_that_needs_more_than_its_stack_is_a_signal";
    ends_by_on(&machine, libc::SIGSEGV, test, || {
        // SAFETY: the handler fills the page, or the process ends.
        unsafe { managed.as_ptr().read_volatile() };
    });
}

#[test]
fn threads_that_fault_at_the_same_time_see_one_page() {
    const PAGES: usize = 512;
    /// Counts how often each page is filled.
    struct Once([AtomicUsize; PAGES]);
    impl Handler for &'static Once {
        fn fill(&self, page: usize, frame: &mut [u8; PAGE]) -> bool {
            frame.fill(page as u8);
            // The other thread wants the same page meanwhile.
            thread::yield_now();
            self.0[page].fetch_add(1, Ordering::Relaxed);
            true
        }
    }
    let Some(machine) = machine() else { return };
    let counts: &'static Once = Box::leak(Box::new(Once([const { AtomicUsize::new(0) }; PAGES])));
    let managed = machine.manage(PAGES, Box::new(counts)).unwrap();
    let start = managed.as_ptr() as usize;
    let together = Barrier::new(2);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                machine
                    .run(|| {
                        together.wait();
                        for page in 0..PAGES {
                            let place = (start + page * PAGE + 100) as *mut u8;
                            // SAFETY: the handler fills the page.
                            assert_eq!(unsafe { place.read_volatile() }, page as u8);
                        }
                    })
                    .unwrap();
            });
        }
    });
    assert!(counts.0.iter().all(|count| count.load(Ordering::Relaxed) == 1));
}

#[test]
fn the_control_words_of_vector_registers_move_along() {
    const ROUND_UP: u32 = 2 << 13;
    let word = || {
        let mut word = 0_u32;
        // SAFETY: the instruction stores the word.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word) };
        word
    };
    let set = |word: u32| {
        // SAFETY: the bits that are changed are those of rounding, which this test changes back.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word) };
    };
    let Some(machine) = machine() else { return };
    let before = word();
    set(before | ROUND_UP);
    let inside = machine.run(|| {
        let inside = word();
        set(before);
        inside
    });
    let after = word();
    set(before);
    assert_eq!(inside.unwrap() & ROUND_UP, ROUND_UP);
    assert_eq!(after & ROUND_UP, 0);
}

#[test]
fn a_breakpoint_reaches_the_program_s_handler() {
    if !own_process::entered("a_breakpoint_reaches_the_program_s_handler") {
        return;
    }
    let Some(machine) = machine() else { return };
    // Later than the machine's.
    handle(libc::SIGTRAP, count_signal as *const () as usize);
    let before = SIGNALS.load(Ordering::Relaxed);
    // SAFETY: the handler returns.
    assert_eq!(machine.run(|| unsafe { asm!("int3", "int3") }), Ok(()));
    assert_eq!(SIGNALS.load(Ordering::Relaxed), before + 2);
    assert_eq!(machine.run(is_in_ring_0), Ok(true));
}

/// Reads pages from a file.
struct Pages(std::fs::File);

impl Handler for Pages {
    fn fill(&self, page: usize, frame: &mut [u8; PAGE]) -> bool {
        self.0.read_exact_at(frame, (page * PAGE) as u64).is_ok()
    }
}

/// Without a machine the last one would end the process by the signal, too.
#[test]
fn handlers_of_traps_may_call_one_another() {
    static BEFORE: AtomicUsize = AtomicUsize::new(0);
    type HandlerOfSignal = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    extern "C" fn chained(
        signal: libc::c_int,
        info: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        // SAFETY: the machine's handler, which takes three arguments.
        let before: HandlerOfSignal = unsafe { transmute(BEFORE.load(Ordering::Relaxed)) };
        before(signal, info, context);
    }
    let Some(machine) = machine() else { return };
    if let Some(output) = own_process::run("handlers_of_traps_may_call_one_another") {
        assert_eq!(output.status.signal(), Some(libc::SIGTRAP), "{output:?}");
        return;
    }
    // SAFETY: the structure is plain data, which the calls fill and read.
    unsafe {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        libc::sigaction(libc::SIGTRAP, std::ptr::null(), &raw mut action);
        BEFORE.store(action.sa_sigaction, Ordering::Relaxed);
        action.sa_sigaction = chained as *const () as usize;
        libc::sigaction(libc::SIGTRAP, &raw const action, std::ptr::null_mut());
    }
    // SAFETY: the process ends.
    let _ = machine.run(|| unsafe { asm!("int3") });
}

#[test]
fn a_handler_may_make_system_calls() {
    const PAGES: usize = 200;
    let Some(machine) = machine() else { return };
    let path = std::env::temp_dir().join(format!("ring0-pages-{}", std::process::id()));
    let bytes: Vec<u8> = (0..PAGES * PAGE).map(|byte| (byte / 7) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let managed = machine.manage(PAGES, Box::new(Pages(file))).unwrap();
    let (before, is_same, after) = machine
        .run(|| {
            // SAFETY: the handler fills the pages.
            let load = |at: usize| unsafe { managed.as_ptr().add(at).read_volatile() };
            load(0);
            let before = machine.counts();
            let is_same = (0..bytes.len()).all(|at| load(at) == bytes[at]);
            (before, is_same, machine.counts())
        })
        .unwrap();
    assert!(is_same);
    assert_eq!(after.managed_faults - before.managed_faults, PAGES as u64 - 1);
    assert_eq!(after.system_calls - before.system_calls, PAGES as u64 - 1);
    assert_eq!(after.native_steps, 0);
}

/// Prints what things cost in nanoseconds. With `COUNT=1` these are instructions in the lab, so
/// that the numbers are nearly the same each time, and say nothing of processors.
#[test]
fn costs() {
    // As many frames as there are in a huge page, which the kernel gives for the first of them.
    const ROUNDS: usize = 500;
    /// Fills nothing, so that the fault itself is measured.
    struct Empty;
    impl Handler for Empty {
        fn fill(&self, _: usize, _: &mut [u8; PAGE]) -> bool {
            true
        }
    }
    let Some(machine) = machine() else { return };
    let managed = machine.manage(2 * ROUNDS, Box::new(Empty)).unwrap();
    let native = map((ROUNDS + 1) * PAGE);
    // SAFETY: the memory is the test's, or the handler's.
    let store = |start: *mut u8, page: usize| unsafe { start.add(page * PAGE).write_volatile(1) };
    timed("getppid in ring 3", ROUNDS, |_| assert!(parent() >= 0));
    let length = (ROUNDS + 1) * PAGE;
    // SAFETY: the memory is the test's.
    assert_eq!(unsafe { libc::madvise(native.cast(), length, libc::MADV_NOHUGEPAGE) }, 0);
    timed("a fault in ring 3, of new memory", ROUNDS, |page| store(native, page));
    timed("entering and leaving", ROUNDS, |_| assert_eq!(machine.run(is_in_ring_0), Ok(true)));
    machine
        .run(|| {
            timed("getppid in ring 0", ROUNDS, |_| assert!(parent() >= 0));
            timed("a managed fault, of a frame in memory", ROUNDS, |page| {
                store(managed.as_ptr(), page);
            });
        })
        .unwrap();
    unmap(native, length);
}

#[test]
fn without_dev_kvm_there_is_an_error() {
    let test = "without_dev_kvm_there_is_an_error";
    if !own_process::entered(test) {
        return;
    }
    // SAFETY: this process runs nothing else.
    if unsafe { libc::chroot(c"/proc/self/fdinfo".as_ptr()) } != 0 {
        println!("skipped: only root may hide /dev/kvm");
        return;
    }
    let error = VirtualMachine::new().unwrap_err();
    assert!(matches!(error, Error::NoKvm { .. }), "{error}");
    assert!(error.to_string().contains("load the module kvm-intel or kvm-amd"), "{error}");
}

#[test]
fn the_doctor_says_why() {
    let check = vellum_aquila_ring0::doctor();
    assert_eq!(check.works, VirtualMachine::new().is_ok());
    assert!(!check.about.is_empty());
    if std::env::var_os("VELLUM_RING0").is_some() {
        assert!(check.works, "{}", check.about);
    }
    println!("{check:?}");
}
