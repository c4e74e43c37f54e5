//! Readers and writers of values that keep their tree, for those who cannot borrow it: objects of
//! other languages, tasks, threads without a scope.

use std::io::{self, Read, Seek, SeekFrom, Write};

use self_cell::self_cell;

use super::handle::Tree;
use super::streams::{ValueReader, ValueWriter};
use crate::error::{Error, Result};

self_cell!(
    struct ReaderAndTree {
        owner: Tree,
        #[not_covariant]
        dependent: ValueReader,
    }

    impl {Debug}
);

type Writer<'a> = Option<ValueWriter<'a>>;

self_cell!(
    struct WriterAndTree {
        owner: Tree,
        #[not_covariant]
        dependent: Writer,
    }

    impl {Debug}
);

impl Tree {
    /// As [`reader`](Tree::reader), of a reader that keeps the tree.
    ///
    /// # Errors
    /// As `reader`.
    pub fn into_reader(self, key: &[u8]) -> Result<Option<OwnedValueReader>> {
        let reader = ReaderAndTree::try_new(self, |tree| match tree.reader(key) {
            Ok(Some(reader)) => Ok(reader),
            Ok(None) => Err(None),
            Err(error) => Err(Some(error)),
        });
        match reader {
            Ok(reader) => {
                let len = reader.with_dependent(|_, reader| reader.len());
                Ok(Some(OwnedValueReader { reader: Own::new(reader), len }))
            }
            Err(None) => Ok(None),
            Err(Some(error)) => Err(error),
        }
    }

    /// As [`writer`](Tree::writer), of a writer that keeps the tree.
    ///
    /// # Errors
    /// As `writer`.
    pub fn into_writer(self, key: &[u8]) -> Result<OwnedValueWriter> {
        let writer = WriterAndTree::try_new(self, |tree| tree.writer(key).map(Some))?;
        Ok(OwnedValueWriter { writer: Own::new(writer), len: 0 })
    }
}

/// What the process that made it may use. The child of a fork has not the memory of the pool, so
/// there it counts as closed, and nothing is dropped.
#[derive(Debug)]
struct Own<T> {
    value: Option<T>,
    process: u32,
}

impl<T> Own<T> {
    fn new(value: T) -> Own<T> {
        Own { value: Some(value), process: std::process::id() }
    }

    fn get(&mut self) -> Result<&mut T> {
        let is_own = self.process == std::process::id();
        self.value.as_mut().filter(|_| is_own).ok_or(Error::Closed)
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.value.take());
        }
    }
}

/// A [`ValueReader`] that keeps its tree, and so its store, as a handle of it does: the store may
/// be closed meanwhile, and reads fail with [`Closed`](Error::Closed) then, as they do in the child
/// of a fork, which may drop it. From [`Tree::into_reader`].
#[derive(Debug)]
pub struct OwnedValueReader {
    reader: Own<ReaderAndTree>,
    len: u64,
}

impl OwnedValueReader {
    /// Length of the value in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The value has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Read for OwnedValueReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reader.get()?.with_dependent_mut(|_, reader| reader.read(buffer))
    }
}

impl Seek for OwnedValueReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.reader.get()?.with_dependent_mut(|_, reader| reader.seek(to))
    }
}

/// A [`ValueWriter`] that keeps its tree, and so its store, as a handle of it does: the store may
/// be closed meanwhile, and what was written is given back then. The child of a fork may drop it,
/// without an effect on its parent. From [`Tree::into_writer`].
#[derive(Debug)]
pub struct OwnedValueWriter {
    writer: Own<WriterAndTree>,
    len: u64,
}

impl OwnedValueWriter {
    /// Bytes that were written so far.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Nothing was written so far.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gives the value to its key; true if it replaced another one.
    ///
    /// # Errors
    /// As [`ValueWriter::finish`].
    pub fn finish(mut self) -> Result<bool> {
        self.writer.get()?.with_dependent_mut(|_, writer| take(writer)?.finish())
    }

    /// Gives the value to its key, which must be new.
    ///
    /// # Errors
    /// As [`ValueWriter::finish_new`].
    pub fn finish_new(mut self) -> Result<()> {
        self.writer.get()?.with_dependent_mut(|_, writer| take(writer)?.finish_new())
    }
}

/// The writer, which is there until its owner ends.
fn take<'a>(writer: &mut Writer<'a>) -> Result<ValueWriter<'a>> {
    writer.take().ok_or(Error::Closed)
}

impl Write for OwnedValueWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.writer.get()?.with_dependent_mut(|_, writer| match writer {
            Some(writer) => writer.write(bytes),
            None => Err(Error::Closed.into()),
        })?;
        self.len += written as u64;
        Ok(written)
    }

    /// Does nothing, as that of [`ValueWriter`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
