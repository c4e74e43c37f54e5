//! The class `Morsel`.
#![allow(unsafe_code)] // the buffer protocol

use std::ffi::c_int;
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use vellum_morsel::{
    Access, BackendChoice, BackendKind, Error, Mapping, Morsel, Provider, Seals, Shape,
};

use crate::mapping::PyMapping;
use crate::stat::PyStat;
use crate::{error, load, source};

/// Memory that processes share by its descriptor.
///
/// create(), open(), load(), from_fd() and receive() make one. memoryview(), bytes() and
/// numpy.frombuffer() take a Morsel: the first of these calls maps it for reading.
#[pyclass(name = "Morsel", module = "vellum.morsel", frozen)]
pub(crate) struct PyMorsel {
    state: Mutex<Option<Open>>,
    shared: bool,
}

/// The state of an open Morsel. It lives until the Morsel is closed and the calls that use it end.
struct Open {
    morsel: Arc<Morsel>,
    /// The mapping for buffers of the Morsel itself.
    mapping: Option<Py<PyMapping>>,
}

impl fmt::Debug for PyMorsel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.__repr__())
    }
}

impl PyMorsel {
    fn new(morsel: Morsel, shared: bool) -> Self {
        let open = Open { morsel: Arc::new(morsel), mapping: None };
        Self { state: Mutex::new(Some(open)), shared }
    }

    fn state(&self) -> MutexGuard<'_, Option<Open>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn morsel(&self) -> PyResult<Arc<Morsel>> {
        let state = self.state();
        let open = state.as_ref().ok_or_else(|| PyValueError::new_err("the Morsel is closed"))?;
        Ok(Arc::clone(&open.morsel))
    }

    /// Runs a function that may take long, while other Python threads go on.
    fn work<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Morsel) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let morsel = self.morsel()?;
        py.detach(|| work(&morsel)).map_err(|error| error::of(&error))
    }

    /// The mapping for buffers of the Morsel; maps the Morsel if there is none.
    fn mapping(&self, py: Python<'_>) -> PyResult<Py<PyMapping>> {
        if let Some(Open { mapping: Some(mapping), .. }) = &*self.state() {
            return Ok(mapping.clone_ref(py));
        }
        let new = Py::new(py, self.map(py, false, None)?)?;
        // Another thread may have mapped it first, or have closed it. This mapping still works.
        if let Some(open) = &mut *self.state() {
            open.mapping.get_or_insert_with(|| new.clone_ref(py));
        }
        Ok(new)
    }
}

#[pymethods]
impl PyMorsel {
    /// Makes a Morsel of `length` bytes, which read as zeros and take no memory yet.
    ///
    /// name: a name, which needs Vellum's kernel module. order: the extent is 512 ** order pages of
    /// 4 KiB; None for the smallest that fits. address: where every process maps it. huge: pages of
    /// 2 MiB where the kernel has them. pinnable: devices may pin its pages. inherit: a forked
    /// child keeps mappings; otherwise an access to one in the child crashes it. backend: 'kernel',
    /// 'memfd', or None for the best that this machine has.
    #[staticmethod]
    #[pyo3(signature = (length, *, name=None, order=None, address=None, huge=false, pinnable=false,
                        inherit=true, backend=None))]
    #[allow(clippy::too_many_arguments)] // they have names in Python
    fn create(
        length: u64,
        name: Option<&str>,
        order: Option<u32>,
        address: Option<u64>,
        huge: bool,
        pinnable: bool,
        inherit: bool,
        backend: Option<&str>,
    ) -> PyResult<Self> {
        let mut shape = Shape::of_length(length);
        if let Some(order) = order {
            shape = shape.with_order(order);
        }
        if let Some(address) = address {
            shape = shape.bound_to(address);
        }
        shape = if huge { shape.huge() } else { shape };
        shape = if pinnable { shape.pinnable() } else { shape };
        shape = if inherit { shape.inherit() } else { shape };
        let provider = provider(backend)?;
        let morsel = match name {
            Some(name) => provider.create_named(name, &shape),
            None => provider.create(&shape),
        };
        Ok(Self::new(morsel.map_err(|error| error::of(&error))?, false))
    }

    /// Opens a Morsel by its name. Needs Vellum's kernel module.
    #[staticmethod]
    #[pyo3(signature = (name, *, writable=false))]
    fn open(name: &str, writable: bool) -> PyResult<Self> {
        let morsel = provider(None)?.open(name, access(writable));
        Ok(Self::new(morsel.map_err(|error| error::of(&error))?, true))
    }

    /// Removes a name. The Morsel lives until its last user ends.
    #[staticmethod]
    fn unlink(name: &str) -> PyResult<()> {
        provider(None)?.unlink(name).map_err(|error| error::of(&error))
    }

    /// Loads a file as a sealed Morsel: from the cache daemon if one answers, or else into memory
    /// of this process. `shared` tells the two apart.
    #[staticmethod]
    fn load(path: &Bound<'_, PyAny>) -> PyResult<Self> {
        load_file(path, 1)
    }

    /// The Morsel of a descriptor: a number or an object with fileno(). The caller keeps its own.
    #[staticmethod]
    fn from_fd(fd: &Bound<'_, PyAny>) -> PyResult<Self> {
        let morsel = Morsel::from_descriptor(source::descriptor(fd)?);
        Ok(Self::new(morsel.map_err(|error| error::of(&error))?, true))
    }

    /// Receives a Morsel from a Unix stream socket. Respects the socket's timeout.
    #[staticmethod]
    fn receive(py: Python<'_>, socket: &Bound<'_, PyAny>) -> PyResult<Self> {
        let descriptor = source::descriptor(socket)?;
        source::wait(socket, &descriptor)?;
        let socket = UnixStream::from(descriptor);
        let morsel = py.detach(|| Morsel::receive(&socket)).map_err(|error| error::of(&error))?;
        Ok(Self::new(morsel, true))
    }

    /// Sends it through a Unix stream socket.
    fn send(&self, py: Python<'_>, socket: &Bound<'_, PyAny>) -> PyResult<()> {
        let socket = UnixStream::from(source::descriptor(socket)?);
        self.work(py, |morsel| morsel.send(&socket))
    }

    /// Reads bytes of a file, given by path, number or fileno(), to `offset`, a multiple of 4096.
    /// `start`: the first byte of the file to read. `length`: how many bytes; None to fill the
    /// Morsel. Returns how many bytes it read: fewer if the file ends.
    #[pyo3(signature = (source, *, start=0, offset=0, length=None))]
    fn fill(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        start: u64,
        offset: u64,
        length: Option<u64>,
    ) -> PyResult<u64> {
        let file = source::file(source)?;
        self.work(py, |morsel| {
            let length = length.unwrap_or(morsel.length().saturating_sub(offset));
            morsel.fill(&file, start, offset, length)
        })
    }

    /// Populates whole pages that have no memory: without a range, all of them.
    #[pyo3(signature = (offset=0, length=None))]
    fn populate(&self, py: Python<'_>, offset: u64, length: Option<u64>) -> PyResult<()> {
        self.work(py, |morsel| morsel.populate(range(morsel, offset, length)))
    }

    /// Releases the memory of whole pages, which then read as zeros.
    #[pyo3(signature = (offset=0, length=None))]
    fn punch(&self, py: Python<'_>, offset: u64, length: Option<u64>) -> PyResult<()> {
        self.work(py, |morsel| morsel.punch(range(morsel, offset, length)))
    }

    /// Seals its content forever: no process can change it any more. population: holes stay, too.
    #[pyo3(signature = (*, population=false))]
    fn seal(&self, py: Python<'_>, population: bool) -> PyResult<()> {
        let seals = if population { Seals::CONTENT | Seals::POPULATION } else { Seals::CONTENT };
        self.work(py, |morsel| morsel.seal(seals))
    }

    /// Another object of the same Morsel, which cannot change it.
    fn read_only(&self) -> PyResult<Self> {
        let morsel = self.morsel()?.read_only().map_err(|error| error::of(&error))?;
        Ok(Self::new(morsel, self.shared))
    }

    /// Takes its memory from all processes at once: a process that then accesses it gets SIGBUS.
    /// Needs Vellum's kernel module.
    fn revoke(&self, py: Python<'_>) -> PyResult<()> {
        self.work(py, Morsel::revoke)
    }

    /// Maps the whole Morsel: at `address`, or at its own address, or at any free one.
    #[pyo3(signature = (*, writable=false, address=None))]
    fn map(&self, py: Python<'_>, writable: bool, address: Option<u64>) -> PyResult<PyMapping> {
        let map = |morsel: &Morsel| -> Result<Mapping, Error> {
            match address {
                Some(address) => morsel.map_at(access(writable), address),
                None => morsel.map(access(writable)),
            }
        };
        self.work(py, map).map(PyMapping::new)
    }

    /// Its state at this moment.
    fn stat(&self) -> PyResult<PyStat> {
        let morsel = self.morsel()?;
        let stat = morsel.stat().map_err(|error| error::of(&error))?;
        Ok(PyStat::new(&morsel, &stat))
    }

    /// Its descriptor, which close() closes.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.morsel()?.as_fd().as_raw_fd())
    }

    /// Whether other processes may share it: it came from the daemon, a name or a descriptor.
    #[getter]
    fn shared(&self) -> bool {
        self.shared
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.state().is_none()
    }

    /// Closes its descriptor. Its mappings and buffers stay.
    fn close(&self) {
        let open = self.state().take();
        drop(open);
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.close();
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.morsel()?.length())?)
    }

    fn __repr__(&self) -> String {
        match self.morsel() {
            Ok(morsel) => {
                let (length, backend) = (morsel.length(), morsel.backend());
                format!("<vellum.morsel.Morsel of {length} bytes, {backend}>")
            }
            Err(_) => "<vellum.morsel.Morsel, closed>".into(),
        }
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
        let mapping = slf.get().mapping(slf.py())?;
        // SAFETY: the pointer is Python's. The view belongs to the mapping, and keeps it.
        match unsafe { ffi::PyObject_GetBuffer(mapping.as_ptr(), view, flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }

    /// Never called, because views belong to the mapping. But NumPy only keeps a view of a type
    /// that has this function. Otherwise it keeps the object alone, which could be closed
    /// meanwhile.
    ///
    /// # Safety
    /// It does nothing.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {}
}

/// As Morsel.load(); a warning names the caller `level` frames up.
#[pyfunction]
pub(crate) fn load_file(path: &Bound<'_, PyAny>, level: i32) -> PyResult<PyMorsel> {
    let file = source::open(&source::path(path)?)?;
    let loaded = load::load(path.py(), &file, level)?;
    Ok(PyMorsel::new(loaded.morsel, loaded.shared))
}

fn provider(backend: Option<&str>) -> PyResult<Provider> {
    let choice = match backend {
        None => BackendChoice::Auto,
        Some(name) => match BackendKind::ALL.into_iter().find(|kind| kind.name() == name) {
            Some(kind) => BackendChoice::Only(kind),
            None => {
                let message = format!("no backend '{name}'; there are 'kernel' and 'memfd'");
                return Err(PyValueError::new_err(message));
            }
        },
    };
    Provider::new(choice).map_err(|error| error::of(&error))
}

fn access(writable: bool) -> Access {
    if writable { Access::ReadWrite } else { Access::Read }
}

/// A range of `length` bytes, or up to the Morsel's end. The function that uses it checks it.
fn range(morsel: &Morsel, offset: u64, length: Option<u64>) -> Range<u64> {
    let end = length.map_or(morsel.length(), |length| offset.saturating_add(length));
    offset..end
}
