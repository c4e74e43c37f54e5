//! Reading the numbers and strings of a header one after the other.

use crate::error::{Error, Result};

/// Bytes of a key or a tensor's name.
pub const MAX_NAME: u64 = u16::MAX as u64;

/// A place in a file; reading beyond the end is an error.
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
    position: u64,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a [u8]) -> Self {
        Self { rest: file, position: 0 }
    }

    /// Bytes that were read.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> u64 {
        self.rest.len() as u64
    }

    pub(super) fn take(&mut self, bytes: u64, what: &'static str) -> Result<&'a [u8]> {
        let split = usize::try_from(bytes).ok().and_then(|bytes| self.rest.split_at_checked(bytes));
        let (taken, rest) = split.ok_or(Error::Truncated { what })?;
        self.rest = rest;
        self.position += bytes;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let taken = self.take(N as u64, what)?;
        taken.try_into().map_err(|_| Error::Truncated { what })
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of the elements that follow.
    pub(super) fn count(&mut self, what: &'static str, limit: u64) -> Result<u64> {
        match self.u64(what)? {
            found if found > limit => Err(Error::Limit { what, found, limit }),
            count => Ok(count),
        }
    }

    /// A length, and then so many bytes.
    pub(super) fn bytes(&mut self, what: &'static str) -> Result<&'a [u8]> {
        let length = self.u64(what)?;
        self.take(length, what)
    }

    /// A key or a name.
    pub(super) fn name(&mut self, what: &'static str) -> Result<String> {
        let bytes = self.bytes(what)?;
        if bytes.len() as u64 > MAX_NAME {
            return Err(Error::Limit { what, found: bytes.len() as u64, limit: MAX_NAME });
        }
        let name = std::str::from_utf8(bytes);
        name.map(str::to_owned)
            .map_err(|_| Error::Header { reason: format!("{what} is not in UTF-8") })
    }
}
