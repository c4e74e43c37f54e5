//! What this machine offers, which backend is used and why, and what a page costs.
//!
//! Everything is found out by trying it, never by the kernel's version number: distributions port
//! features back, and sandboxes take them away.

mod facilities;

pub mod cost;

pub use facilities::{Facilities, Facility, facilities};

pub use crate::backend::choice::{Choice, backends, choice, choice_without_exmap, works};
pub use crate::huge_page::{HugePageCost, huge_pages};
