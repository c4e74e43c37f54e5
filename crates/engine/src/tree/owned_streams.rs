//! Readers and writers of values, and bulk loads, that own a handle of their tree, for callers that
//! cannot borrow the tree: objects of other languages, tasks, threads without a scope.

use std::io::{self, Read, Seek, SeekFrom, Write};

use self_cell::self_cell;

use super::BulkLoader;
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

type Loader<'a> = Option<BulkLoader<'a>>;

self_cell!(
    struct LoaderAndTree {
        owner: Tree,
        #[not_covariant]
        dependent: Loader,
    }

    impl {Debug}
);

impl Tree {
    /// As [`reader`](Tree::reader), but the reader owns the handle of the tree.
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
                Ok(Some(OwnedValueReader { reader: OwnedByProcess::new(reader), len }))
            }
            Err(None) => Ok(None),
            Err(Some(error)) => Err(error),
        }
    }

    /// As [`writer`](Tree::writer), but the writer owns the handle of the tree.
    ///
    /// # Errors
    /// As `writer`.
    pub fn into_writer(self, key: &[u8]) -> Result<OwnedValueWriter> {
        let writer = WriterAndTree::try_new(self, |tree| tree.writer(key).map(Some))?;
        Ok(OwnedValueWriter { writer: OwnedByProcess::new(writer), len: 0 })
    }

    /// As [`bulk_loader`](Tree::bulk_loader), but the loader owns the handle of the tree.
    ///
    /// # Errors
    /// As `bulk_loader`.
    pub fn into_bulk_loader(self) -> Result<OwnedBulkLoader> {
        let loader = LoaderAndTree::try_new(self, |tree| tree.bulk_loader().map(Some))?;
        Ok(OwnedBulkLoader { loader: OwnedByProcess::new(loader) })
    }
}

/// A value that only the process that created it may use. The child of a fork does not have the
/// memory of the pool. There this returns `Closed`, and the value is not dropped.
#[derive(Debug)]
struct OwnedByProcess<T> {
    value: Option<T>,
    process: u32,
}

impl<T> OwnedByProcess<T> {
    fn new(value: T) -> OwnedByProcess<T> {
        OwnedByProcess { value: Some(value), process: std::process::id() }
    }

    fn get(&mut self) -> Result<&mut T> {
        let is_own = self.process == std::process::id();
        self.value.as_mut().filter(|_| is_own).ok_or(Error::Closed)
    }
}

impl<T> Drop for OwnedByProcess<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.value.take());
        }
    }
}

/// A [`ValueReader`] that owns a handle of its tree, and so of the store. After the store was
/// closed, reads fail with [`Closed`](Error::Closed). They also fail in the child of a fork, which
/// may drop the reader. Created by [`Tree::into_reader`].
#[derive(Debug)]
pub struct OwnedValueReader {
    reader: OwnedByProcess<ReaderAndTree>,
    len: u64,
}

impl OwnedValueReader {
    /// Length of the value in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the value has no bytes.
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

/// A [`ValueWriter`] that owns a handle of its tree, and so of the store. If the store is closed
/// meanwhile, the space of the written pieces is given back. The child of a fork may drop the
/// writer, which has no effect on the parent. Created by [`Tree::into_writer`].
#[derive(Debug)]
pub struct OwnedValueWriter {
    writer: OwnedByProcess<WriterAndTree>,
    len: u64,
}

impl OwnedValueWriter {
    /// The number of bytes that were written so far.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing was written so far.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stores the value for its key. Returns true if it replaced another value.
    ///
    /// # Errors
    /// As [`ValueWriter::finish`].
    pub fn finish(mut self) -> Result<bool> {
        self.writer.get()?.with_dependent_mut(|_, writer| take(writer)?.finish())
    }

    /// Stores the value for its key, which must be new.
    ///
    /// # Errors
    /// As [`ValueWriter::finish_new`].
    pub fn finish_new(mut self) -> Result<()> {
        self.writer.get()?.with_dependent_mut(|_, writer| take(writer)?.finish_new())
    }
}

/// Takes the writer, which is there until `finish` is called.
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

    /// Does nothing, as [`ValueWriter`]'s `flush`.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A [`BulkLoader`] that owns a handle of its tree, and so of the store. If the store is closed
/// meanwhile, the space of the loaded pages is given back. The child of a fork may drop the loader,
/// which has no effect on the parent. Created by [`Tree::into_bulk_loader`].
#[derive(Debug)]
pub struct OwnedBulkLoader {
    loader: OwnedByProcess<LoaderAndTree>,
}

impl OwnedBulkLoader {
    /// Adds the next entry, whose key must be greater than the last one. The value may be longer
    /// than the pool.
    ///
    /// # Errors
    /// As [`BulkLoader::push_from`]; [`Closed`](Error::Closed) once the store was closed.
    pub fn push(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.with(|loader| match loader.push(key, value) {
            Err(Error::ValueTooLong { .. }) => loader.push_from(key, value),
            added => added,
        })
    }

    /// Adds the next entry, whose value is the rest of a stream, of any length.
    ///
    /// # Errors
    /// As [`BulkLoader::push_from`]; [`Closed`](Error::Closed) once the store was closed.
    pub fn push_from(&mut self, key: &[u8], value: impl Read) -> Result<()> {
        self.with(|loader| loader.push_from(key, value))
    }

    /// A push of a short entry touches no page, and so would not notice that the store was closed.
    fn with(&mut self, push: impl FnOnce(&mut BulkLoader<'_>) -> Result<()>) -> Result<()> {
        self.loader.get()?.with_dependent_mut(|tree, loader| {
            tree.open_access()?;
            push(loader.as_mut().ok_or(Error::Closed)?)
        })
    }

    /// Adds the entries to the tree. Returns their number.
    ///
    /// # Errors
    /// As [`BulkLoader::finish`].
    pub fn finish(mut self) -> Result<u64> {
        self.loader
            .get()?
            .with_dependent_mut(|_, loader| loader.take().ok_or(Error::Closed)?.finish())
    }
}
