//! What this machine offers, which backend is used and why, and what a page costs.
//!
//! The probe tries each facility and never trusts the kernel's version number: distributions
//! backport features, and sandboxes block them.

mod facilities;

pub mod cost;

pub use facilities::{Facilities, Facility, facilities};

pub use crate::backend::choice::{Choice, backends, choice, choice_without_exmap, works};
pub use crate::huge_page::{HugePageCost, huge_pages};
