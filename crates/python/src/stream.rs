//! The native parts of readers and writers of values.
//!
//! A call reads and writes Python's buffers part by part while it holds the interpreter's lock, and
//! works on the store without that lock. So Rust never has a reference to memory that other Python
//! threads may write, and those threads go on while this one waits.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::Mutex;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use vellum::{Error, OwnedValueReader, OwnedValueWriter};

use crate::call::{lock, of_stream, work};

/// Bytes that a call moves between a buffer and the store at a time, between two checks for Ctrl-C.
const PART: usize = 1 << 20;

/// The native part of ValueReader; None once it is closed.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeReader {
    reader: Mutex<Option<OwnedValueReader>>,
    len: u64,
}

impl NativeReader {
    pub(crate) fn new(reader: OwnedValueReader) -> NativeReader {
        NativeReader { len: reader.len(), reader: Mutex::new(Some(reader)) }
    }

    fn work<T: Send>(
        &self,
        py: Python<'_>,
        with: impl FnOnce(&mut OwnedValueReader) -> io::Result<T> + Send,
    ) -> PyResult<T> {
        work(py, || {
            let mut reader = lock(&self.reader);
            with(reader.as_mut().ok_or(Error::Closed)?).map_err(of_stream)
        })
    }
}

#[pymethods]
impl NativeReader {
    /// Reads into a buffer; returns how many bytes it read, which may be fewer than the buffer
    /// holds.
    fn readinto(&self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<usize> {
        let Some(target) = buffer.as_mut_slice(py) else {
            return Err(PyBufferError::new_err("the buffer is read-only or not contiguous"));
        };
        let mut part = vec![0; target.len().min(PART)];
        let count = self.work(py, |reader| reader.read(&mut part))?;
        target.iter().zip(&part[..count]).for_each(|(cell, byte)| cell.set(*byte));
        Ok(count)
    }

    /// Moves to a position, counted from the beginning.
    fn seek(&self, py: Python<'_>, to: u64) -> PyResult<u64> {
        self.work(py, |reader| reader.seek(SeekFrom::Start(to)))
    }

    fn tell(&self, py: Python<'_>) -> PyResult<u64> {
        self.work(py, Seek::stream_position)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(lock(&self.reader).take()));
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.len)?)
    }
}

/// The native part of ValueWriter; None once it is finished or aborted.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeWriter {
    writer: Mutex<Option<OwnedValueWriter>>,
    new: bool,
}

impl NativeWriter {
    pub(crate) fn new(writer: OwnedValueWriter, new: bool) -> NativeWriter {
        NativeWriter { writer: Mutex::new(Some(writer)), new }
    }
}

#[pymethods]
impl NativeWriter {
    /// Writes all of a buffer. If a signal handler raises, a part may be written.
    fn write(&self, py: Python<'_>, buffer: PyBuffer<u8>) -> PyResult<()> {
        let Some(bytes) = buffer.as_slice(py) else {
            return Err(PyBufferError::new_err("the buffer is not contiguous"));
        };
        for part in bytes.chunks(PART) {
            let part: Vec<u8> = part.iter().map(|cell| cell.get()).collect();
            work(py, || {
                let mut writer = lock(&self.writer);
                writer.as_mut().ok_or(Error::Closed)?.write_all(&part).map_err(of_stream)
            })?;
            py.check_signals()?;
        }
        Ok(())
    }

    fn tell(&self, py: Python<'_>) -> u64 {
        py.detach(|| lock(&self.writer).as_ref().map_or(0, OwnedValueWriter::len))
    }

    /// Gives the value to its key; returns whether it replaced a value.
    fn finish(&self, py: Python<'_>) -> PyResult<bool> {
        work(py, || {
            let writer = lock(&self.writer).take().ok_or(Error::Closed)?;
            if self.new { writer.finish_new().map(|()| false) } else { writer.finish() }
        })
    }

    /// Drops the value; returns whether the writer was unfinished.
    fn abort(&self, py: Python<'_>) -> bool {
        py.detach(|| lock(&self.writer).take().is_some())
    }
}
