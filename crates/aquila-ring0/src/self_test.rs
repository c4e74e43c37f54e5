//! Whether KVM really runs guests: a few instructions with vector registers, and a loop whose time
//! is taken. There are machines whose `/dev/kvm` interprets all instructions, knows few of them,
//! and needs a microsecond for each.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use kvm_bindings::{KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO};

use crate::entry::{self, LOOP, port};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::memory::Window;
use crate::processor::{Processor, errno};

/// Nanoseconds that an instruction of the loop may take. A processor takes less than one, an
/// emulated one that runs a guest about ten, an interpreter seven hundred.
const BOUND: f64 = 100.0;

/// How often the loop runs at least: the fastest counts, because the machine may do other things.
const ROUNDS: u32 = 3;

/// How often it runs at most, if no round was fast enough. On a busy machine three rounds in a row
/// may be interrupted. An interpreter has no fast round.
const MOST_ROUNDS: u32 = 30;

/// Exits that the test may take: a few windows.
const EXITS: usize = 16;

/// Runs the self-test, and returns the nanoseconds of an instruction.
///
/// # Errors
/// [`Error::Interpreted`], and what KVM returns.
pub(crate) fn run(guest: &Guest, processor: &mut Processor) -> Result<f64> {
    let start = entry::self_test as *const () as u64;
    processor.prepare((start, 0), guest.managed())?;
    next_exit(guest, processor)?;
    // SAFETY: KVM has filled the structure, and the guest does not run.
    let found = unsafe { (*processor.run()).s.regs.regs.rdx };
    if found != 42 {
        let found = format!("a sum in vector registers is {found} instead of 42");
        return Err(Error::Interpreted { found });
    }
    let (mut fastest, mut rounds) = (Duration::MAX, 0);
    let of_instruction = |round: Duration| round.as_secs_f64() * 1e9 / f64::from(2 * LOOP);
    while rounds < ROUNDS || (of_instruction(fastest) > BOUND && rounds < MOST_ROUNDS) {
        let begun = Instant::now();
        next_exit(guest, processor)?;
        fastest = fastest.min(begun.elapsed());
        rounds += 1;
    }
    let nanoseconds = of_instruction(fastest);
    if nanoseconds > BOUND {
        let found = format!("an instruction takes {nanoseconds:.0} ns");
        return Err(Error::Interpreted { found });
    }
    Ok(nanoseconds)
}

/// Runs the guest until it exits on purpose.
fn next_exit(guest: &Guest, processor: &Processor) -> Result<()> {
    for _ in 0..EXITS {
        let result = processor.go();
        match -result as i32 {
            0 => {}
            libc::EINTR => continue,
            _ => return Err(Error::of("running a guest for the self-test", errno(result))),
        }
        // SAFETY: KVM has filled the structure, and the guest does not run.
        let (reason, port) = unsafe {
            let run = &*processor.run();
            (run.exit_reason, run.__bindgen_anon_1.io.port)
        };
        match (reason, port) {
            (KVM_EXIT_IO, port::NOTHING) => return Ok(()),
            (KVM_EXIT_IO, port::FAULT) => {
                // SAFETY: the entry has stored the address, and the guest does not run.
                let address = unsafe { (*processor.block()).address };
                if guest.make_window(address) != Window::None {
                    continue;
                }
                let found = format!("it faults at {address:#x}");
                return Err(Error::Interpreted { found });
            }
            (KVM_EXIT_INTERNAL_ERROR, _) => {
                let found = "it stops at an instruction that it does not know".to_owned();
                return Err(Error::Interpreted { found });
            }
            _ => return Err(Error::Interpreted { found: format!("it ends with exit {reason}") }),
        }
    }
    let found = format!("it does not end within {EXITS} exits");
    Err(Error::Interpreted { found })
}
