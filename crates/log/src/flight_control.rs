//! What a simulation steers a slow log by (`slow_flights.rs`).

use std::fmt;
use std::sync::Weak;
use std::time::Duration;

use crate::flights::Shared;

/// Lets time pass for a log that is [slowed down](crate::Log::slow_down).
#[derive(Clone)]
pub struct Pilot(pub(crate) Weak<Shared>);

impl Pilot {
    /// So much time passes. One flight may go on by a step, or the log's thread does something.
    pub fn pass(&self, time: Duration) {
        if let Some(shared) = self.0.upgrade() {
            shared.pass(time);
        }
    }

    /// Whether something will happen when time passes: a flight is aloft, or records are to become
    /// durable soon.
    pub fn is_busy(&self) -> bool {
        self.0.upgrade().is_some_and(|shared| !shared.airspace.is_empty() || shared.has_work())
    }

    /// Whether the log takes records: it has not failed, and has not ended.
    pub fn takes_records(&self) -> bool {
        self.0.upgrade().is_some_and(|shared| !shared.refuses())
    }
}

impl fmt::Debug for Pilot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pilot")
    }
}
