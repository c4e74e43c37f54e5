//! Slotted B+tree nodes.
//!
//! A node has two fence keys, and contains the keys `k` with `lower < k <= upper`. The node stores
//! the common prefix of its fences once. The sorted slots grow upwards after the header, and the
//! cells grow downwards from the end of the page. Sixteen hints are copies of the heads of slots at
//! equal distances. A search reads them before it touches the first slot (as in LeanStore and
//! vmcache, SIGMOD'23 section 5).
//!
//! [`Node`] reads from locked slices and from racy optimistic memory. It checks every offset:
//! invalid bytes give [`Torn`], never a panic or an endless loop. [`NodeMut`] changes a page under
//! an exclusive lock. [`check_bounds`] has checked the bounds of that page when it was read from
//! the file.

pub mod bulk;
mod check;
mod layout;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use check::{NodeDamage, check, check_bounds};
pub use layout::{NodeLimits, Torn};
pub use read::{Node, Position};
pub use write::{
    Fences, NodeMut, Part, Payload, Split, copy_part, fits_merge, merge_into_right, plan_split,
    plan_split_for, separator,
};

pub(crate) use layout::{HINTS_END, HINTS_FROM, INNER_SLOT, LEAF_SLOT, capacity, common_prefix};
pub(crate) use read::{PayloadPlace, Search};
pub(crate) use write::{Edit, splits_at};
