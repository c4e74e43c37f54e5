//! Callbacks: functions of the caller that the store runs. A callback must not make the store wait
//! for the callback itself.
//!
//! The store runs a callback while the thread has locked a page, has begun a change, or has frozen
//! the gate. If the callback called the store to change it or to freeze the gate, that call would
//! wait for ever. So each thread knows the stores for which it runs a callback, and such a call is
//! an error ([`Error::CalledFromWithin`]).

use std::cell::{Cell, RefCell};

use crate::error::{Error, Result};
use crate::store::gate::Gate;

thread_local! {
    /// The store whose callback this thread runs, by the address of its gate; 0 if the thread runs
    /// no callback.
    static INNERMOST: Cell<usize> = const { Cell::new(0) };
    /// The stores whose callbacks have called the innermost store.
    static OUTER: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// While this lives, the thread runs a callback of the store.
pub(crate) struct CallbackScope {
    is_nested: bool,
}

impl CallbackScope {
    #[inline]
    pub(crate) fn of(store: &Gate) -> CallbackScope {
        let outer = INNERMOST.replace(std::ptr::from_ref(store).addr());
        if outer != 0 {
            // This fails only in destructors at the thread's end, where nothing needs to be undone.
            let _ = OUTER.try_with(|stores| stores.borrow_mut().push(outer));
        }
        CallbackScope { is_nested: outer != 0 }
    }
}

impl Drop for CallbackScope {
    #[inline]
    fn drop(&mut self) {
        let pop = || OUTER.try_with(|stores| stores.borrow_mut().pop()).ok().flatten();
        INNERMOST.set(if self.is_nested { pop().unwrap_or(0) } else { 0 });
    }
}

/// Refuses a call that would wait for the callback that makes it.
#[inline]
pub(crate) fn refuse_in_callback(store: &Gate) -> Result<()> {
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
