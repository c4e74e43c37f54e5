//! Which virtual processor the calling thread uses.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ptr;

use crate::entry::Block;
use crate::running::Running;

thread_local! {
    /// The block of the virtual processor that the thread uses.
    static CURRENT: Cell<*mut Block> = const { Cell::new(ptr::null_mut()) };
}

/// The block of the virtual processor that the calling thread uses, or null.
#[inline]
pub(crate) fn block() -> *mut Block {
    CURRENT.get()
}

/// Says which virtual processor the calling thread uses.
pub(crate) fn set_block(block: *mut Block) {
    CURRENT.set(block);
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
