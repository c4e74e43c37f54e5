//! What a Morsel is and has at the moment.

use crate::seals::Seals;
use crate::shape::Shape;

/// What a Morsel is and has. `None`: the backend does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stat {
    /// What was decided when it was made.
    pub shape: Shape,
    /// Seals that are on.
    pub seals: Seals,
    /// Pages of 4 KiB that are there.
    pub pages: u64,
    /// Entries of 2 MiB, whose pages are among those.
    pub huge: Option<u64>,
    /// Pages that its page tables take.
    pub tables: Option<u64>,
    /// Mappings, of whatever processes.
    pub mounts: Option<u64>,
}

impl Stat {
    /// Pages that are not there.
    pub fn missing(&self) -> u64 {
        self.shape.length().div_ceil(crate::PAGE_SIZE).saturating_sub(self.pages)
    }
}
