//! Bugs of the log that the simulator plants, to see that it finds them.
//!
//! With the feature `testing` a thread can switch one bug on for itself. Without the feature
//! [`is_planted`] is `false` for the compiler, which removes the code of the bugs.

/// A bug of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogBug {
    /// The checksums of blocks are not compared.
    SkippedChecksum,
    /// A record of which only the beginning is there counts as a record.
    BelievedTail,
    /// A record counts as durable before it is synced.
    EarlyAcknowledgement,
    /// A block that an earlier opening left over counts as a part of the log.
    BelievedRest,
    /// An opening does not sync what it has read.
    UnsyncedOpening,
    /// A record counts as durable when its flight begins.
    SubmittedIsDurable,
    /// A flight that overtakes an earlier one acknowledges the earlier one's records, too.
    OvertakenIsDurable,
}

#[cfg(feature = "testing")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<LogBug>> = const { std::cell::Cell::new(None) };
}

/// Switches a bug on for what this thread does from now on, or switches it off.
#[cfg(feature = "testing")]
pub fn plant(bug: Option<LogBug>) {
    PLANTED.set(bug);
}

/// Whether this thread has switched the bug on.
#[cfg(feature = "testing")]
pub(crate) fn is_planted(bug: LogBug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Without the feature `testing` there are no planted bugs.
#[cfg(not(feature = "testing"))]
#[inline(always)]
pub(crate) const fn is_planted(_: LogBug) -> bool {
    false
}
