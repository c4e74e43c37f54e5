//! The backends by name.

use std::fmt;

/// A way of having Morsels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendKind {
    /// Vellum's kernel module: one entry of page tables for a mapping, shared tables, names.
    Kernel,
    /// A sealed memfd, on every kernel: processes share the memory, not the page tables; no names.
    Memfd,
}

impl BackendKind {
    /// All of them, the best first.
    pub const ALL: [Self; 2] = [Self::Kernel, Self::Memfd];

    /// Its name, which commands print and accept.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Memfd => "memfd",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Which backend to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The best that this machine offers.
    #[default]
    Auto,
    /// This one, or an error.
    Only(BackendKind),
}
