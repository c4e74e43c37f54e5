//! The native part of the package `vellum` for Python. Users import `package/vellum`.
//!
//! Rust never has a reference to memory that Python may write. Python gets writable buffers only of
//! mappings for writing, and while such a mapping exists, the Morsel's content cannot be sealed. A
//! buffer keeps its mapping, a mapping keeps its memory.

mod bulk;
mod call;
mod commits;
mod entries;
mod error;
mod load;
mod maintenance;
mod mapping;
mod morsel;
mod snapshot;
mod source;
mod stat;
mod store;
mod stream;
mod tensors;
mod transaction;
mod tree;
mod view;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<morsel::PyMorsel>()?;
    module.add_class::<mapping::PyMapping>()?;
    module.add_class::<stat::PyStat>()?;
    module.add_class::<store::PyStore>()?;
    module.add_class::<tree::PyTreeView>()?;
    module.add_class::<tree::PyTree>()?;
    module.add_class::<tree::PyTransactionTree>()?;
    module.add_class::<transaction::PyTransaction>()?;
    module.add_class::<transaction::PySavepoint>()?;
    module.add_class::<commits::PyEnds>()?;
    module.add_class::<snapshot::PySnapshot>()?;
    module.add_class::<entries::PyEntries>()?;
    module.add_class::<maintenance::PyCheck>()?;
    module.add_class::<maintenance::PyControlSocket>()?;
    module.add("Conflict", module.py().get_type::<error::Conflict>())?;
    module.add("FormatError", module.py().get_type::<error::FormatError>())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(maintenance::restore, module)?)?;
    module.add_function(wrap_pyfunction!(morsel::load_file, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::safetensors_layout, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::gguf_layout, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::gguf_kinds, module)?)
}
