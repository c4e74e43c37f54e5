//! Calls of a store from within a function of the caller that the same store runs.
//!
//! The store runs such functions while this thread keeps a page locked, or is under way with a
//! change, or holds the gate. A call that changes the store or holds the gate would wait for that
//! for ever. So each thread knows for which stores it runs the caller's code, and such a call is an
//! error ([`Error::CalledFromWithin`]).

use std::cell::{Cell, RefCell};

use crate::error::{Error, Result};
use crate::store::gate::Gate;

thread_local! {
    /// The store for which this thread runs the caller's code, by the address of its gate; 0 if it
    /// runs none.
    static INNERMOST: Cell<usize> = const { Cell::new(0) };
    /// Other stores for which it does: that code has called the innermost one.
    static OUTER: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// While this lives the thread runs the caller's code.
pub(crate) struct Within {
    is_nested: bool,
}

impl Within {
    #[inline]
    pub(crate) fn of(store: &Gate) -> Within {
        let outer = INNERMOST.replace(std::ptr::from_ref(store).addr());
        if outer != 0 {
            // It fails in destructors of the thread's end alone, where nothing is to be undone.
            let _ = OUTER.try_with(|stores| stores.borrow_mut().push(outer));
        }
        Within { is_nested: outer != 0 }
    }
}

impl Drop for Within {
    #[inline]
    fn drop(&mut self) {
        let pop = || OUTER.try_with(|stores| stores.borrow_mut().pop()).ok().flatten();
        INNERMOST.set(if self.is_nested { pop().unwrap_or(0) } else { 0 });
    }
}

/// Refuses a call that would wait for the function of the caller that makes it.
#[inline]
pub(crate) fn refuse_within(store: &Gate) -> Result<()> {
    match INNERMOST.get() {
        0 => Ok(()),
        innermost => refuse_nested(std::ptr::from_ref(store).addr(), innermost),
    }
}

#[cold]
fn refuse_nested(store: usize, innermost: usize) -> Result<()> {
    let is_outer = || OUTER.try_with(|stores| stores.borrow().contains(&store)) == Ok(true);
    if store == innermost || is_outer() { Err(Error::CalledFromWithin) } else { Ok(()) }
}
