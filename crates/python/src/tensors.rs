//! The layouts of model files, as plain objects: lists, tuples, dictionaries.

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use vellum_tensors::gguf::{Kind, Value};
use vellum_tensors::{Tensor, gguf, safetensors};

use crate::error;
use crate::mapping::PyMapping;

/// Metadata, and for each tensor its name, type, shape, first byte and number of bytes.
#[pyfunction]
pub(crate) fn safetensors_layout<'py>(
    py: Python<'py>,
    mapping: &PyMapping,
) -> PyResult<(Bound<'py, PyDict>, Vec<Bound<'py, PyTuple>>)> {
    let layout =
        mapping.look(|file| safetensors::layout(file).map_err(|error| error::format(&error)))?;
    let metadata = PyDict::new(py);
    for (key, value) in layout.metadata {
        metadata.set_item(key, value)?;
    }
    let described = |tensor: &Tensor<_>| describe(py, tensor, &format!("{:?}", tensor.kind));
    let tensors: PyResult<Vec<_>> = layout.tensors.iter().map(described).collect();
    Ok((metadata, tensors?))
}

/// The same for a GGUF file.
#[pyfunction]
pub(crate) fn gguf_layout<'py>(
    py: Python<'py>,
    mapping: &PyMapping,
) -> PyResult<(Bound<'py, PyDict>, Vec<Bound<'py, PyTuple>>)> {
    let layout = mapping.look(|file| gguf::layout(file).map_err(|error| error::format(&error)))?;
    let metadata = PyDict::new(py);
    for (key, value) in layout.metadata {
        metadata.set_item(key, object(py, value)?)?;
    }
    let described = |tensor: &Tensor<Kind>| describe(py, tensor, tensor.kind.name);
    let tensors: PyResult<Vec<_>> = layout.tensors.iter().map(described).collect();
    Ok((metadata, tensors?))
}

/// The types of GGUF: number, name, elements and bytes of a block.
#[pyfunction]
pub(crate) fn gguf_kinds() -> Vec<(u32, &'static str, u64, u64)> {
    Kind::ALL.iter().map(|kind| (kind.number, kind.name, kind.block, kind.bytes)).collect()
}

fn describe<'py, T>(
    py: Python<'py>,
    tensor: &Tensor<T>,
    kind: &str,
) -> PyResult<Bound<'py, PyTuple>> {
    let shape = PyTuple::new(py, &tensor.shape)?;
    let bytes = tensor.bytes.end - tensor.bytes.start;
    (tensor.name.as_str(), kind, shape, tensor.bytes.start, bytes).into_pyobject(py)
}

/// A value of the metadata; text that is not UTF-8 is bytes.
fn object(py: Python<'_>, value: Value) -> PyResult<Bound<'_, PyAny>> {
    match value {
        Value::U8(number) => number.into_bound_py_any(py),
        Value::I8(number) => number.into_bound_py_any(py),
        Value::U16(number) => number.into_bound_py_any(py),
        Value::I16(number) => number.into_bound_py_any(py),
        Value::U32(number) => number.into_bound_py_any(py),
        Value::I32(number) => number.into_bound_py_any(py),
        Value::F32(number) => number.into_bound_py_any(py),
        Value::Bool(truth) => truth.into_bound_py_any(py),
        Value::U64(number) => number.into_bound_py_any(py),
        Value::I64(number) => number.into_bound_py_any(py),
        Value::F64(number) => number.into_bound_py_any(py),
        Value::Text(bytes) => match std::str::from_utf8(&bytes) {
            Ok(text) => text.into_bound_py_any(py),
            Err(_) => Ok(PyBytes::new(py, &bytes).into_any()),
        },
        Value::Array(values) => {
            let objects: PyResult<Vec<_>> =
                values.into_iter().map(|value| object(py, value)).collect();
            Ok(PyList::new(py, objects?)?.into_any())
        }
    }
}
