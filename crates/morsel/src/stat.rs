//! The properties and the memory of a Morsel at the moment.

use crate::seals::Seals;
use crate::shape::Shape;

/// The properties and the memory of a Morsel. `None`: the backend does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stat {
    /// The shape with which it was made.
    pub shape: Shape,
    /// Seals that are on.
    pub seals: Seals,
    /// Populated pages of 4 KiB.
    pub pages: u64,
    /// Entries of 2 MiB, whose pages are among those.
    pub huge: Option<u64>,
    /// Pages that its page tables take.
    pub tables: Option<u64>,
    /// Mappings, of all processes.
    pub mounts: Option<u64>,
}

impl Stat {
    /// Pages that are not there.
    pub fn missing(&self) -> u64 {
        self.shape.length().div_ceil(crate::PAGE_SIZE).saturating_sub(self.pages)
    }
}
