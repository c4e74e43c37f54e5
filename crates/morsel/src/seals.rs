//! Seals: what can no longer change in a Morsel.

use std::ops::BitOr;

use vellum_uapi::morsel::{SEAL_CONTENT, SEAL_POPULATION};

/// Seals, which are put on a Morsel and never come off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seals(pub(crate) u64);

impl Seals {
    /// None.
    pub const NONE: Self = Self(0);
    /// The content never changes: no writing, filling or punching, no mapping for writing.
    pub const CONTENT: Self = Self(SEAL_CONTENT);
    /// Holes stay holes, and an access to one is SIGBUS. Kernel backend only.
    pub const POPULATION: Self = Self(SEAL_POPULATION);

    /// Whether all of these seals are set.
    pub const fn has(self, seals: Self) -> bool {
        self.0 & seals.0 == seals.0
    }
}

impl BitOr for Seals {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
