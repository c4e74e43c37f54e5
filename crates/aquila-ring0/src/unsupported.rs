//! The interface on processors that have no such ring 0: every machine is an error.

use std::convert::Infallible;

use crate::counters::{Check, Counts};
use crate::error::{Error, Result};

/// A virtual machine, of which there is none on this processor.
#[derive(Debug)]
pub struct VirtualMachine(Infallible);

impl VirtualMachine {
    /// Makes no machine.
    ///
    /// # Errors
    /// [`Error::Processor`].
    pub fn new() -> Result<Self> {
        Err(Error::Processor)
    }

    /// Runs a function in ring 0.
    ///
    /// # Errors
    /// There is no machine to call it on.
    pub fn run<T>(&self, _: impl FnOnce() -> T) -> Result<T> {
        match self.0 {}
    }

    /// What has happened.
    pub fn counts(&self) -> Counts {
        match self.0 {}
    }
}

/// Whether the calling thread is in ring 0: it is not.
pub fn is_in_ring_0() -> bool {
    false
}

/// Says that threads cannot go to ring 0 here.
pub fn doctor() -> Check {
    Check { works: false, about: Error::Processor.to_string() }
}
