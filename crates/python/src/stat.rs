//! The state of a Morsel, as an object with attributes.

use pyo3::prelude::*;
use vellum_morsel::{Morsel, Seals, Stat};

/// The state of a Morsel at one moment. None means that the backend does not know.
#[pyclass(name = "Stat", module = "vellum.morsel", frozen, get_all)]
#[derive(Debug)]
pub(crate) struct PyStat {
    /// 'kernel' or 'memfd'.
    backend: &'static str,
    /// Bytes.
    length: u64,
    /// Its extent is 512 ** order pages of 4 KiB.
    order: u32,
    /// The address where every process maps it, or None.
    address: Option<u64>,
    /// Whether it asks the kernel for pages of 2 MiB.
    huge: bool,
    /// Whether devices may pin its pages.
    pinnable: bool,
    /// Whether a forked child keeps mappings.
    inherit: bool,
    /// Whether its content can no longer change.
    sealed: bool,
    /// Whether its holes stay holes.
    population_sealed: bool,
    /// Pages of 4 KiB that have memory.
    pages: u64,
    /// Entries of 2 MiB; `pages` includes their pages.
    huge_pages: Option<u64>,
    /// Pages that its page tables take.
    tables: Option<u64>,
    /// Mappings, in all processes.
    mounts: Option<u64>,
}

impl PyStat {
    pub(crate) fn new(morsel: &Morsel, stat: &Stat) -> Self {
        Self {
            backend: morsel.backend().name(),
            length: stat.shape.length(),
            order: stat.shape.order(),
            address: stat.shape.address(),
            huge: stat.shape.is_huge(),
            pinnable: stat.shape.is_pinnable(),
            inherit: stat.shape.is_inherited(),
            sealed: stat.seals.has(Seals::CONTENT),
            population_sealed: stat.seals.has(Seals::POPULATION),
            pages: stat.pages,
            huge_pages: stat.huge,
            tables: stat.tables,
            mounts: stat.mounts,
        }
    }
}

#[pymethods]
impl PyStat {
    fn __repr__(&self) -> String {
        let Self { backend, length, order, sealed, pages, .. } = self;
        let sealed = if *sealed { "True" } else { "False" };
        format!(
            "<vellum.morsel.Stat backend='{backend}' length={length} order={order} \
             sealed={sealed} pages={pages}>"
        )
    }
}
