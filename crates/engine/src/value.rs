//! What a lookup returns: [`Value`].

use std::borrow::Cow;
use std::ops::Deref;

use vellum_pool::SharedGuard;

use crate::page::blob::BLOB_DATA;

/// A value. A short value is a copy. A long value stays in the pool, under a guard.
///
/// Both dereference to a slice of bytes. A [`Value::Blob`] pins its page in memory while it lives,
/// and that memory counts against the pool: do not keep many.
#[derive(Debug)]
pub enum Value<'a> {
    /// A value from a leaf.
    Inline(Cow<'a, [u8]>),
    /// A value on a page of its own: contiguous, not copied.
    Blob(Blob<'a>),
}

/// A long value in the pool, under a shared guard (SIGMOD'23, section 3.5).
#[derive(Debug)]
pub struct Blob<'a> {
    guard: SharedGuard<'a>,
    len: usize,
}

impl<'a> Blob<'a> {
    /// The caller has checked that the page has `len` bytes of data.
    pub(crate) fn new(guard: SharedGuard<'a>, len: usize) -> Blob<'a> {
        Blob { guard, len }
    }
}

impl Deref for Blob<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.guard[BLOB_DATA..BLOB_DATA + self.len]
    }
}

impl Deref for Value<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Value::Inline(bytes) => bytes,
            Value::Blob(blob) => blob,
        }
    }
}

impl AsRef<[u8]> for Value<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Value<'_> {
    /// Copies the value into a vector, unless it is one already.
    pub fn into_vec(self) -> Vec<u8> {
        match self {
            Value::Inline(bytes) => bytes.into_owned(),
            Value::Blob(blob) => blob.to_vec(),
        }
    }

    /// Whether the value is in the pool, on a page of its own.
    pub fn is_blob(&self) -> bool {
        matches!(self, Value::Blob(_))
    }
}

impl PartialEq<[u8]> for Value<'_> {
    fn eq(&self, other: &[u8]) -> bool {
        **self == *other
    }
}
