//! Bugs of the store that the simulator plants, to see that it finds them.
//!
//! With the feature `testing` a thread can switch one bug on for itself. Without the feature
//! [`is_planted`] is `false` for the compiler, which removes the code of the bugs.

/// A bug of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreBug {
    /// A dirty page leaves memory before its record is durable.
    NoWriteRule,
    /// The place of a freed page is used again before the record that frees it is durable.
    EarlyReuse,
    /// The values of a record are not synced before the record is written.
    LateValues,
    /// The first record of a page after a cut does not have the page's image.
    NoImage,
    /// A record does not name the pages that its group took.
    UnnamedPages,
    /// A record leaves out the last changed part of a value.
    LostPart,
    /// A record leaves out the last page of a group of several pages.
    HalfGroup,
    /// The header of a checkpoint is written before its pages.
    EarlyHeader,
    /// The free map of a checkpoint is written over that of the checkpoint before.
    MapInPlace,
    /// The log is trimmed before a checkpoint has written what the records say.
    EarlyTrim,
    /// Recovery applies records in another order.
    WrongOrder,
    /// Recovery leaves out the last record.
    LostRecord,
    /// Recovery writes its clean header before the pages.
    EarlyRecoveryHeader,
    /// A store that goes on with recovered pages in memory lacks the first of them.
    LostRedone,
    /// A page that recovery has left pending is read as the file has it.
    UnredonePage,
    /// The repair of a page leaves out what came after its image.
    HalfRepair,
    /// Recovery relies on a header that may not be durable.
    TrustedHeader,
    /// A commit does not compare the keys that the transaction has read.
    UncheckedKeys,
    /// A commit does not compare the ranges that the transaction has passed.
    UncheckedRanges,
    /// With snapshot isolation, a commit does not compare the keys that it changes.
    UncheckedWrites,
    /// An old value goes while a view still sees it.
    LostVersion,
    /// The file gets shorter before the header is durable that says so.
    EarlyEnd,
    /// A root moves, and the catalog does not say so.
    LostRoot,
    /// The store does not note what it writes after a backup.
    UnnotedWrite,
    /// Recovery does not note what was written after the checkpoint.
    UnnotedRecord,
    /// A page that was written since the backup is repaired from that.
    StaleRepair,
}

#[cfg(feature = "testing")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<StoreBug>> = const { std::cell::Cell::new(None) };
}

/// Switches a bug on for what this thread does from now on, or switches it off.
#[cfg(feature = "testing")]
pub fn plant(bug: Option<StoreBug>) {
    PLANTED.set(bug);
}

/// Whether this thread has switched the bug on.
#[cfg(feature = "testing")]
pub(crate) fn is_planted(bug: StoreBug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Without the feature `testing` there are no planted bugs.
#[cfg(not(feature = "testing"))]
#[inline(always)]
pub(crate) const fn is_planted(_: StoreBug) -> bool {
    false
}
