//! Reading a value bit by bit: [`ValueReader`].

use std::borrow::Cow;
use std::io::{self, Read, Seek, SeekFrom};

use super::Access;
use super::held_leaf::{Held, HeldLeaf};
use super::pieces::{Parts, Place};
use crate::error::{Error, Result};
use crate::page::blob::BlobRef;
use crate::store::aside::Pin;
use crate::value::{Blob, Value};

/// The pool holds whole values up to this length, in frames, as far as a quarter of it has room.
const HELD_FRAMES: u64 = 64;

/// The value of a key, to be read bit by bit, with [`Read`] and [`Seek`].
///
/// It is the value that the key had when [`Tree::reader`](crate::Tree::reader) was called, whatever
/// others do. It takes a buffer of at most 1 MiB; a value in pieces that were written with a much
/// larger pool, and a whole one that is not held in the pool, 4 MiB at most beside the pool, and
/// the whole one 8 bytes for each 256 KiB of its length.
///
/// Every byte was checked before it is handed out: a value that was [written](crate::Tree::writer)
/// as a stream piece by piece, one that was stored in one call as a whole, when the reader was
/// made, and piece by piece against that when it is read. Errors of the store come as [`io::Error`]
/// with an [`Error`] inside.
#[derive(Debug)]
pub struct ValueReader<'a> {
    access: Access<'a>,
    len: u64,
    position: u64,
    source: Source<'a>,
    // Behind the source: what that holds is left before the pages go.
    _pin: Option<Pin<'a>>,
}

#[derive(Debug)]
enum Source<'a> {
    Inline(Cow<'a, [u8]>),
    Held(Blob<'a>),
    Parts(Box<Buffered<'a>>),
}

/// Parts of a value, and a copy of one of them.
#[derive(Debug)]
struct Buffered<'a> {
    parts: Parts<'a>,
    buffer: Vec<u8>,
    /// The part that is in the buffer.
    number: Option<u64>,
}

impl Buffered<'_> {
    /// Copies bytes that begin at a place, as many as the part has, and as there is room for.
    fn copy(&mut self, place: Place, target: &mut [u8]) -> Result<usize> {
        if self.number == Some(place.part) {
            return Ok(copy(&self.buffer[place.offset..], target));
        }
        let (parts, buffer) = (&mut self.parts, &mut self.buffer);
        let mut is_buffered = false;
        let copied = parts.with_part(place.part, |bytes| {
            let wanted = &bytes[place.offset..];
            if target.len() < wanted.len() {
                buffer.clear();
                buffer.extend_from_slice(bytes);
                is_buffered = true;
            }
            copy(wanted, target)
        })?;
        if is_buffered {
            self.number = Some(place.part);
        }
        Ok(copied)
    }
}

/// Copies as much as fits.
fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let count = from.len().min(to.len());
    to[..count].copy_from_slice(&from[..count]);
    count
}

impl<'a> ValueReader<'a> {
    /// A value that lies in a leaf.
    pub(crate) fn inline(access: Access<'a>, value: Cow<'a, [u8]>) -> ValueReader<'a> {
        let (len, source) = (value.len() as u64, Source::Inline(value));
        ValueReader { access, len, position: 0, source, _pin: None }
    }

    /// Length of the value in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The value has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends the rest of the value.
    pub(crate) fn read_rest(&mut self, value: &mut Vec<u8>) -> Result<()> {
        let rest = self.len.saturating_sub(self.position);
        let no_memory = || Error::Input(io::ErrorKind::OutOfMemory.into());
        let rest = usize::try_from(rest).map_err(|_| no_memory())?;
        value.try_reserve_exact(rest).map_err(|_| no_memory())?;
        let mut filled = value.len();
        value.resize(filled + rest, 0);
        while filled < value.len() {
            match self.read_some(&mut value[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        value.truncate(filled);
        Ok(())
    }

    /// The value as a slice, if it is in memory as such.
    pub(crate) fn as_slice(&self) -> Option<&[u8]> {
        match &self.source {
            Source::Inline(value) => Some(value),
            Source::Held(blob) => Some(blob),
            Source::Parts(_) => None,
        }
    }

    fn read_some(&mut self, target: &mut [u8]) -> Result<usize> {
        let left = self.len.saturating_sub(self.position);
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(target.len());
        if wanted == 0 {
            return Ok(0);
        }
        self.access.core.check_open()?;
        let target = &mut target[..wanted];
        let copied = match &mut self.source {
            Source::Inline(value) => copy(&value[self.position as usize..], target),
            Source::Held(blob) => copy(&blob[self.position as usize..], target),
            Source::Parts(parts) => parts.copy(parts.parts.place(self.position), target)?,
        };
        // What was read past the pool may be another process's, if the store was closed meanwhile.
        self.access.core.check_open()?;
        self.position += copied as u64;
        Ok(copied)
    }
}

impl Read for ValueReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.read_some(buffer)?)
    }
}

impl Seek for ValueReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(by) => self.len.checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        let before = || io::Error::new(io::ErrorKind::InvalidInput, "a seek before the beginning");
        self.position = position.ok_or_else(before)?;
        Ok(self.position)
    }
}

impl<'a> Access<'a> {
    /// The value of `key`, to be read bit by bit.
    pub(crate) fn reader(self, key: &[u8]) -> Result<Option<ValueReader<'a>>> {
        let leaf = self.leaf_for_reading(key)?;
        match HeldLeaf::from(&leaf).find(key)? {
            None => Ok(None),
            Some((_, Held::Inline(value))) => {
                Ok(Some(ValueReader::inline(self, value.to_vec().into())))
            }
            Some((_, Held::Blob(blob))) => {
                let pin = self.core.pin(blob.page.id);
                drop(leaf);
                self.open_reader(blob, key, pin).map(Some)
            }
        }
    }

    /// The value that a reference leads to, whose pages stay.
    pub(crate) fn open_reader(
        self,
        blob: BlobRef,
        key: &[u8],
        pin: Pin<'a>,
    ) -> Result<ValueReader<'a>> {
        let buffered =
            |parts| Source::Parts(Box::new(Buffered { parts, buffer: Vec::new(), number: None }));
        let source = if !blob.is_whole() {
            buffered(Parts::of_pieces(self, blob, Some(key))?)
        } else if self.is_held(blob) {
            Source::Held(self.open_blob(blob, key)?)
        } else {
            buffered(Parts::of_whole(self, blob, key)?)
        };
        Ok(ValueReader { access: self, len: blob.len, position: 0, source, _pin: Some(pin) })
    }

    /// A whole value is read in the pool, not past it. One that is not in memory is in the file:
    /// values that were stored do not change.
    fn is_held(self, blob: BlobRef) -> bool {
        let pool = &self.core.pool;
        let most = (pool.capacity() / 16).max(HELD_FRAMES).min(pool.capacity() / 4);
        u64::from(blob.page.frames) <= most || pool.is_resident(blob.page)
    }

    /// Checks a whole value. The store does not change meanwhile.
    pub(crate) fn check_whole(self, blob: BlobRef, key: &[u8]) -> Result<()> {
        match self.is_held(blob) {
            true => self.open_blob(blob, key).map(drop),
            false => Parts::of_whole(self, blob, key).map(drop),
        }
    }

    /// A copy of the value that a reader is at the beginning of.
    pub(crate) fn copy_of(self, mut reader: ValueReader<'a>) -> Result<Value<'a>> {
        let (len, max) = (reader.len, self.core.max_blob);
        if len > max {
            return Err(Error::NeedsReader { len, max });
        }
        let mut value = Vec::new();
        reader.read_rest(&mut value)?;
        Ok(Value::Inline(Cow::Owned(value)))
    }
}
