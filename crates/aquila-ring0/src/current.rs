//! Which virtual processor the calling thread uses.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::Ordering;

use crate::entry::Block;
use crate::memory::Memory;

thread_local! {
    /// The block of the virtual processor that the thread uses.
    static CURRENT: Cell<*mut Block> = const { Cell::new(ptr::null_mut()) };
}

/// The block of the virtual processor that the calling thread uses, or null.
pub(crate) fn block() -> *mut Block {
    CURRENT.get()
}

/// Says which virtual processor the calling thread uses.
pub(crate) fn set_block(block: *mut Block) {
    CURRENT.set(block);
}

/// Whether the calling thread uses a virtual processor whose guest has this memory.
pub(crate) fn uses(memory: &Memory) -> bool {
    let block = block();
    // SAFETY: a thread's block is there while the thread uses it, and this part does not change.
    !block.is_null() && unsafe { (*block).memory } == ptr::from_ref(memory).addr() as u64
}

/// The virtual processor of the calling thread, if the memory is its guest's, has forgotten all
/// translations of earlier generations than this one.
pub(crate) fn note_flush(memory: &Memory, generation: u64) {
    if uses(memory) {
        // SAFETY: as above; the word is atomic.
        unsafe { (*block()).seen.store(generation, Ordering::SeqCst) };
    }
}
