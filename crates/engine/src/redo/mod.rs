//! Redo: the records of the log, and what recovery does with them.
//!
//! A group (`tree/group.rs`) appends one record. A record has, for each page that the group
//! changed, either the edits of its node or the image of the node after the group. The first record
//! of a page after a cut has its image, so recovery reads no page of which a write may have been
//! torn. Each page is redone by itself: its image, and then the edits of later records, in order.

pub(crate) mod backup_records;
#[cfg(test)]
mod bad_records;
mod by_page;
#[cfg(test)]
mod faults;
pub(crate) mod files;
pub(crate) mod log;
#[cfg(test)]
mod merge_tests;
pub(crate) mod page;
pub(crate) mod pending;
#[cfg(test)]
mod pending_tests;
pub(crate) mod progress;
pub(crate) mod record;
mod record_places;
pub(crate) mod records;
pub(crate) mod recover;
pub(crate) mod redoer;
pub(crate) mod repair;
#[cfg(test)]
mod tests;
