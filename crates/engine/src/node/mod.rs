//! Slotted B+tree nodes.
//!
//! A node holds the keys `k` with `lower < k <= upper`, its fence keys; what both fences begin with
//! is the node's prefix, kept once. Slots grow upwards behind the header, sorted; cells grow
//! downwards from the end. Sixteen hints, the heads of slots at equal distances, narrow a search
//! before the first slot is touched (LeanStore's and vmcache's node, SIGMOD'23 section 5).
//!
//! [`Node`] reads, from locked slices and from racy optimistic memory alike: every offset is
//! checked, rubbish gives [`Torn`], never a panic or an endless loop. [`NodeMut`] changes a page
//! that is exclusively held and whose bounds [`check_bounds`] accepted when it was read.

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
    Fences, NodeMut, Payload, Split, fits_merge, merge_into_right, plan_split, separator,
    split_off_left,
};

pub(crate) use layout::{HINTS_END, HINTS_FROM, INNER_SLOT, LEAF_SLOT, capacity, common_prefix};
pub(crate) use read::{PayloadPlace, Search};
