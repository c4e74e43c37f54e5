//! Which virtual processor the calling thread uses.
//!
//! Handlers of signals and of page faults ask that, in the middle of the program's code. So the
//! words of a thread have a fixed distance from FS (the *initial-exec* model). Rust's own
//! `thread_local!` asks the loader in a library. Once the program has loaded other libraries with
//! such data, the loader may allocate, and the program may be in the middle of an allocation.
#![allow(unsafe_code)]

use std::arch::{asm, global_asm};
use std::ptr;

use crate::entry::Block;
use crate::running::Running;

global_asm!(
    ".pushsection .tbss.vellum_ring0_words, \"awT\", @nobits",
    ".balign 8",
    ".globl vellum_ring0_words",
    ".hidden vellum_ring0_words",
    ".type vellum_ring0_words, @object",
    ".size vellum_ring0_words, 24",
    "vellum_ring0_words:",
    ".zero 24",
    ".popsection",
);

/// The block of the virtual processor that the thread uses.
const BLOCK: usize = 0;

/// Two words of the handler of SIGTRAP: [`replace_passed_on`].
const PASSED_ON: usize = 1;

/// One of the thread's words, which are zero at first.
#[inline]
fn get(word: usize) -> u64 {
    let value: u64;
    // SAFETY: the thread has three such words, which no reference leads to.
    unsafe {
        asm!(
            "mov {value}, qword ptr [rip + vellum_ring0_words@GOTTPOFF]",
            "mov {value}, qword ptr fs:[{value} + 8 * {word}]",
            value = out(reg) value,
            word = in(reg) word,
            options(nostack, readonly, preserves_flags),
        );
    }
    value
}

/// Changes one of the thread's words.
#[inline]
fn set(word: usize, value: u64) {
    // SAFETY: as above.
    unsafe {
        asm!(
            "mov {place}, qword ptr [rip + vellum_ring0_words@GOTTPOFF]",
            "mov qword ptr fs:[{place} + 8 * {word}], {value}",
            place = out(reg) _,
            word = in(reg) word,
            value = in(reg) value,
            options(nostack, preserves_flags),
        );
    }
}

/// The block of the virtual processor that the calling thread uses, or null.
#[inline]
pub(crate) fn block() -> *mut Block {
    ptr::with_exposed_provenance_mut(get(BLOCK) as usize)
}

/// Says which virtual processor the calling thread uses.
pub(crate) fn set_block(block: *mut Block) {
    set(BLOCK, block.expose_provenance() as u64);
}

/// Two numbers of the calling thread's that the handler of SIGTRAP keeps, and those before.
pub(crate) fn replace_passed_on(new: (usize, usize)) -> (usize, usize) {
    let before = (get(PASSED_ON) as usize, get(PASSED_ON + 1) as usize);
    set(PASSED_ON, new.0 as u64);
    set(PASSED_ON + 1, new.1 as u64);
    before
}

/// The number of the virtual processor that the calling thread uses; 0 if it uses none.
#[inline]
pub(crate) fn number() -> usize {
    let block = block();
    // SAFETY: a thread's block is there while the thread uses it, and this part does not change.
    if block.is_null() { 0 } else { unsafe { (*block).number } }
}

/// The virtual processor of the calling thread, if it is one of the machine with these shootdowns.
pub(crate) fn running<T>(shootdown: &T) -> Option<&Running> {
    let block = block();
    // SAFETY: as above. Processors live as long as the machine, and other threads' part is atomic.
    unsafe {
        let is_own = !block.is_null() && (*block).shootdown == ptr::from_ref(shootdown).addr();
        is_own.then(|| &(*block).running)
    }
}
