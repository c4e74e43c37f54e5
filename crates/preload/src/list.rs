//! A list without a lock: any thread adds to it, and one thread takes all that is in it.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// What a list has.
pub(crate) struct Node<T> {
    pub(crate) value: T,
    /// The one that was added before it.
    next: AtomicPtr<Node<T>>,
}

impl<T> Node<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { value, next: AtomicPtr::new(ptr::null_mut()) }
    }
}

/// Nodes that were added, the last first.
pub(crate) struct List<T>(AtomicPtr<Node<T>>);

impl<T> List<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Adds a node.
    ///
    /// # Safety
    /// It is in no list, and lives, unmoved, until it is taken.
    pub(crate) unsafe fn add(&self, node: *mut Node<T>) {
        // SAFETY: the caller's promise.
        let next = unsafe { &(*node).next };
        let mut last = self.0.load(Ordering::Relaxed);
        loop {
            next.store(last, Ordering::Relaxed);
            match self.0.compare_exchange_weak(last, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(newer) => last = newer,
            }
        }
    }

    /// Takes all nodes. Each is the caller's when it is returned, and was not used before.
    pub(crate) fn take(&self) -> impl Iterator<Item = *mut Node<T>> {
        let mut rest = self.0.swap(ptr::null_mut(), Ordering::Acquire);
        std::iter::from_fn(move || {
            let node = rest;
            if node.is_null() {
                return None;
            }
            // SAFETY: it was added, and nothing has taken it before.
            rest = unsafe { (*node).next.load(Ordering::Relaxed) };
            Some(node)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn all_that_threads_add_is_taken_once() {
        const EACH: usize = 1000;
        let list = List::new();
        let mut found = Vec::new();
        let mut take = || {
            for node in list.take() {
                // SAFETY: it was leaked below, and was taken now.
                found.push(unsafe { Box::from_raw(node) }.value);
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|thread| {
                    let list = &list;
                    scope.spawn(move || {
                        for number in 0..EACH {
                            let node = Box::new(Node::new(thread * EACH + number));
                            // SAFETY: it lives until it is taken.
                            unsafe { list.add(Box::into_raw(node)) };
                        }
                    })
                })
                .collect();
            while threads.iter().any(|thread| !thread.is_finished()) {
                take();
            }
        });
        take();
        found.sort_unstable();
        assert!(found.into_iter().eq(0..3 * EACH));
    }
}
