//! What a lookup returns: [`Value`].

use std::borrow::Cow;
use std::ops::Deref;

use vellum_pool::SharedGuard;

use crate::page::blob::BLOB_DATA;

/// A value. Short ones are copies, long ones lie in the pool and are held there.
///
/// It is a slice of bytes either way (`Deref`). A [`Value::Blob`] keeps its page in memory as long
/// as it lives, and counts against the pool; do not keep many.
#[derive(Debug)]
pub enum Value<'a> {
    /// A value from a leaf.
    Inline(Cow<'a, [u8]>),
    /// A value with pages of its own, contiguous, not copied.
    Blob(Blob<'a>),
}

/// A long value, held shared in the pool (SIGMOD'23, section 3.5).
#[derive(Debug)]
pub struct Blob<'a> {
    guard: SharedGuard<'a>,
    len: usize,
}

impl<'a> Blob<'a> {
    /// `len` bytes of data fit into the page; the caller has checked it.
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
    /// The value as a vector of its own.
    pub fn into_vec(self) -> Vec<u8> {
        match self {
            Value::Inline(bytes) => bytes.into_owned(),
            Value::Blob(blob) => blob.to_vec(),
        }
    }

    /// The value has pages of its own and is held in the pool.
    pub fn is_blob(&self) -> bool {
        matches!(self, Value::Blob(_))
    }
}

impl PartialEq<[u8]> for Value<'_> {
    fn eq(&self, other: &[u8]) -> bool {
        **self == *other
    }
}
