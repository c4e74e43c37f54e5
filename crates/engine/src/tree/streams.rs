//! A tree's values as streams.

use super::{Tree, ValueReader, ValueWriter};
use crate::error::Result;

impl Tree {
    /// The value of `key`, to be read bit by bit: of any length, with any pool, in memory that does
    /// not grow with it.
    ///
    /// The reader has the value that the key had at this call, to its end: a change or a removal of
    /// the key, or of the tree, takes none of it away. The space comes back when the reader is
    /// dropped.
    ///
    /// A value that was stored in one call has one checksum for all of it. If it is not in memory
    /// and longer than a sixteenth of the pool (or 256 KiB), this call reads it once to check it.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards.
    pub fn reader(&self, key: &[u8]) -> Result<Option<ValueReader<'_>>> {
        self.open_access()?.reader(key)
    }

    /// Stores a value of any length for `key`, which comes bit by bit. The key has it, at once and
    /// as a whole, when [`finish`](ValueWriter::finish) returns; whatever the key had until then
    /// stays so long.
    ///
    /// # Errors
    /// Limits of the key.
    pub fn writer(&self, key: &[u8]) -> Result<ValueWriter<'_>> {
        ValueWriter::new(self.open_access()?, key)
    }
}
