//! Checks whether a history of concurrent operations on one key is linearizable (Wing and Gong,
//! "Testing and verifying concurrent objects", with memoization).

use std::collections::HashSet;

/// An operation on a key, and its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// A read, and the value that it returned; values are numbers above 0.
    Get(Option<u64>),
    /// A read that found the key, with any value.
    Contains(bool),
    /// A write of a value, and whether it replaced another value.
    Upsert(u64, bool),
    /// An insert of a value, and whether the value was stored.
    Insert(u64, bool),
    /// A removal, and whether it found the key.
    Remove(bool),
}

/// An operation with the times of its call and its return.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub called: u64,
    pub returned: u64,
    pub done: Done,
}

impl Done {
    /// The state after the operation, if its result is right for the state before it.
    fn apply(self, state: Option<u64>) -> Option<Option<u64>> {
        let (right, after) = match self {
            Done::Get(found) => (found == state, state),
            Done::Contains(found) => (found == state.is_some(), state),
            Done::Upsert(value, replaced) => (replaced == state.is_some(), Some(value)),
            Done::Insert(value, true) => (state.is_none(), Some(value)),
            Done::Insert(_, false) => (state.is_some(), state),
            Done::Remove(there) => (there == state.is_some(), None),
        };
        right.then_some(after)
    }
}

/// `threads` has the calls of each thread in order; `state` is the value at the beginning.
pub fn is_linearizable(threads: &[Vec<Call>], state: Option<u64>) -> bool {
    let mut tried = HashSet::new();
    let mut open = vec![(vec![0; threads.len()], state)];
    while let Some((done, state)) = open.pop() {
        if done.iter().zip(threads).all(|(done, calls)| *done == calls.len()) {
            return true;
        }
        if !tried.insert((done.clone(), state)) {
            continue;
        }
        let next = || done.iter().zip(threads).map(|(done, calls)| calls.get(*done));
        // A call that began after another one had returned comes after it.
        let first_return = next().flatten().map(|call| call.returned).min().unwrap_or(u64::MAX);
        for (thread, call) in next().enumerate() {
            let Some(call) = call.filter(|call| call.called < first_return) else { continue };
            if let Some(state) = call.done.apply(state) {
                let mut done = done.clone();
                done[thread] += 1;
                open.push((done, state));
            }
        }
    }
    false
}

#[test]
fn the_checker_tells_right_from_wrong() {
    let call = |called, returned, done| Call { called, returned, done };
    let write = call(0, 10, Done::Upsert(1, false));
    for (read, expected) in [
        (call(1, 2, Done::Get(None)), true),
        (call(1, 2, Done::Get(Some(1))), true),
        (call(1, 2, Done::Get(Some(2))), false),
        (call(11, 12, Done::Get(None)), false),
        (call(11, 12, Done::Remove(true)), true),
        (call(11, 12, Done::Insert(3, true)), false),
    ] {
        assert_eq!(is_linearizable(&[vec![write], vec![read]], None), expected, "{read:?}");
    }
    // Of two reads, the first sees a write and the second does not.
    let reads = vec![call(1, 2, Done::Get(Some(1))), call(3, 4, Done::Contains(false))];
    assert!(!is_linearizable(&[vec![write], reads], None));
}
