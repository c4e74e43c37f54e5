//! What the tests of machines share.
#![allow(dead_code)] // not every test uses all of it

use std::io::Write as _;

use vellum_aquila_ring0::{Error, VirtualMachine};
use vellum_testing::own_process;

pub const PAGE: usize = 4096;

/// What a machine is, or `None` with a message if there can be none here.
pub fn found(machine: Result<VirtualMachine, Error>) -> Option<VirtualMachine> {
    match machine {
        Ok(machine) => Some(machine),
        Err(error) => {
            assert!(std::env::var_os("VELLUM_RING0").is_none(), "{error}");
            // Not by a macro, whose output a test that passes does not show.
            let said = format!("skipped, because there is no ring 0 here: {error}\n");
            std::io::stderr().write_all(said.as_bytes()).unwrap();
            None
        }
    }
}

pub fn machine() -> Option<VirtualMachine> {
    found(VirtualMachine::new())
}

/// Installs a handler of a signal.
pub fn handle(signal: libc::c_int, handler: usize) {
    // SAFETY: the structure is plain data; the handler is a function for signals.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// What a process of its own ends with after SIGSEGV. Without a handler the kernel would report a
/// general protection fault, which the lab takes for one of the kernel's own.
pub const SEGV: i32 = 43;

extern "C" fn end(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: it ends the process.
    unsafe { libc::_exit(SEGV) };
}

/// Runs a function in ring 0 in a process of its own, where it must be SIGSEGV.
#[track_caller]
pub fn is_refused(test: &str, act: impl FnOnce()) {
    let Some(machine) = machine() else { return };
    is_refused_on(&machine, test, act);
}

#[track_caller]
pub fn is_refused_on(machine: &VirtualMachine, test: &str, act: impl FnOnce()) {
    if let Some(output) = own_process::run(test) {
        assert_eq!(output.status.code(), Some(SEGV), "{output:?}");
        return;
    }
    handle(libc::SIGSEGV, end as *const () as usize);
    machine.run(act).unwrap();
}

/// Prints what something costs in nanoseconds, the average of some rounds after a first one. With
/// `COUNT=1` these are instructions in the lab.
pub fn timed(what: &str, rounds: usize, mut act: impl FnMut(usize)) {
    act(0);
    let begun = std::time::Instant::now();
    (1..=rounds).for_each(&mut act);
    let each = begun.elapsed().as_nanos() / rounds as u128;
    // Not by a macro, as above.
    std::io::stdout().write_all(format!("{what}: {each}\n").as_bytes()).unwrap();
}
