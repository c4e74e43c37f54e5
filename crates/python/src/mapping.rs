//! A mapping, whose memory Python accesses through the buffer protocol.
//!
//! A buffer keeps a reference to the mapping's object, and a mapping with buffers cannot be closed:
//! so the addresses of the buffers stay valid. Rust treats them as addresses only.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use vellum_morsel::{Access, Mapping};

use crate::error;

/// A Morsel in the address space of this process; memoryview(), bytes() and numpy.frombuffer() take
/// it. It is unmapped by close(), or when no object refers to it or its memory any more.
#[pyclass(name = "Mapping", module = "vellum.morsel", frozen)]
#[derive(Debug)]
pub(crate) struct PyMapping {
    state: Mutex<State>,
    writable: bool,
    length: u64,
}

#[derive(Debug)]
struct State {
    mapping: Option<Mapping>,
    /// How many buffers exist.
    buffers: usize,
}

impl PyMapping {
    pub(crate) fn new(mapping: Mapping) -> Self {
        let (writable, length) = (mapping.access() == Access::ReadWrite, mapping.length());
        Self { state: Mutex::new(State { mapping: Some(mapping), buffers: 0 }), writable, length }
    }

    /// Locks the state. No panic under the lock leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a function on the bytes, which must be sealed.
    pub(crate) fn look<T>(&self, at: impl FnOnce(&[u8]) -> PyResult<T>) -> PyResult<T> {
        let state = self.state();
        let mapping = state.mapping.as_ref().ok_or_else(closed)?;
        at(mapping.view().map_err(|error| error::of(&error))?)
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("the mapping is closed")
}

#[pymethods]
impl PyMapping {
    /// Whether the process may write to it.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    /// Whether it is unmapped.
    #[getter]
    fn closed(&self) -> bool {
        self.state().mapping.is_none()
    }

    /// Its first address.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        let state = self.state();
        Ok(state.mapping.as_ref().ok_or_else(closed)?.base().addr().get())
    }

    /// Unmaps it. Raises BufferError while it has buffers: arrays, memoryviews.
    fn close(&self) -> PyResult<()> {
        let mut state = self.state();
        if state.buffers > 0 {
            let buffers = state.buffers;
            return Err(PyBufferError::new_err(format!(
                "{buffers} buffers of the mapping are in use; drop the arrays and memoryviews"
            )));
        }
        state.mapping = None;
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close()
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.length)?)
    }

    fn __repr__(&self) -> String {
        let access = if self.writable { "writable" } else { "read-only" };
        let closed = if self.closed() { ", closed" } else { "" };
        format!("<vellum.morsel.Mapping of {} bytes, {access}{closed}>", self.length)
    }

    /// # Safety
    /// Python calls it with a pointer to a view.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        // SAFETY: the pointer is Python's. Without a view, the object in it must be null.
        unsafe { (*view).obj = ptr::null_mut() };
        let this = slf.get();
        let mut state = this.state();
        let mapping = state.mapping.as_ref().ok_or_else(closed)?;
        let length = ffi::Py_ssize_t::try_from(this.length)?;
        let base = mapping.base().as_ptr().cast();
        let read_only = c_int::from(!this.writable);
        // SAFETY: the pointer is Python's, and the memory stays while the count of buffers is above
        // 0. The function takes a reference to the object, and refuses a writable view of read-only
        // memory.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), base, length, read_only, flags) };
        if filled != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        state.buffers += 1;
        Ok(())
    }

    /// # Safety
    /// Python calls it once for each view.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.state().buffers -= 1;
    }
}
