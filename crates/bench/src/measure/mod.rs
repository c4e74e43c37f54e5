//! Alternating measurements, and the statistics of several samples.

mod alternate;
mod samples;

pub use alternate::{Contestant, alternate};
pub use samples::Samples;
