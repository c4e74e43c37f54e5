//! What machines and tests of them report.

/// How often what happened in a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Times that KVM returned to the process, for whatever reason.
    pub exits: u64,
    /// System calls.
    pub system_calls: u64,
    /// Page faults that made a window of 1 GiB.
    pub window_faults: u64,
    /// Windows that there are: those that faults made, and those that the machine began with.
    pub windows: u64,
    /// Exits because of signals.
    pub interrupted: u64,
    /// Instructions that the program made in ring 3, because ring 0 could not.
    pub native_steps: u64,
    /// Page faults in managed ranges, which ring 0 handles itself.
    pub managed_faults: u64,
    /// Times that one thread had another leave ring 0 for a moment, so that its processor forgets
    /// translations.
    pub kicks: u64,
}

/// The result of a self-test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Whether threads can go to ring 0.
    pub works: bool,
    /// One line: what was seen; or why it does not work.
    pub about: String,
}
