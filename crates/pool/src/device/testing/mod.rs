//! Devices for tests: one whose operations fail as a test plans it, and one that calls a test back.
//!
//! The feature `testing` builds them. They are not part of the crate's interface: they may change
//! with any version.

mod fault_plan;
mod faulty;
mod hooked;

pub use fault_plan::{Fault, FaultPlan, Operation, OperationCounts};
pub use faulty::FaultyDevice;
pub use hooked::{Call, HookedDevice};
