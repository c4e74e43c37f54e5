//! Descriptors that a forked child leaves alone.

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd as _, OwnedFd};

use crate::generation::{self, Generation};

/// A descriptor of the process that wraps it, which closes it when this is dropped. A forked child
/// does not: it may have closed its copy already, and have a file of its own by that number.
#[derive(Debug)]
pub(crate) struct Descriptor {
    /// There until it is dropped.
    owned: Option<OwnedFd>,
    generation: Generation,
}

impl Descriptor {
    pub(crate) fn new(owned: OwnedFd) -> Self {
        Self { owned: Some(owned), generation: generation::current() }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.owned.as_ref().expect("it is there until it is dropped").as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if generation::current() != self.generation {
            let _ = self.owned.take().map(OwnedFd::into_raw_fd);
        }
    }
}
