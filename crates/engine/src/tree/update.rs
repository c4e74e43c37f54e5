//! Changing a value where it is: read, change and write as one step.

use super::Access;
use super::apply::{Action, apply};
use super::held_leaf::{Held, HeldLeaf};
use super::modify::Incoming;
use crate::error::Result;
use crate::node::Payload;
use crate::store::core::Change;

/// What an attempt under the leaf's lock found.
enum Found {
    Nothing,
    Changed,
    /// The value is a blob, which cannot be replaced while the leaf is locked.
    Blob,
}

impl<'a> Access<'a> {
    /// Changes the value of `key` in place; false if there is none.
    pub(crate) fn update(self, key: &[u8], change: &mut dyn FnMut(&mut [u8])) -> Result<bool> {
        let begun = self.core.change()?;
        self.check_dropped()?;
        match self.update_inline(&begun, key, change)? {
            Found::Nothing => Ok(false),
            Found::Changed => Ok(true),
            Found::Blob => self.update_blob(&begun, key, change),
        }
    }

    fn update_inline(
        self,
        begun: &Change<'_>,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<Found> {
        let mut leaf = self.exclusive_leaf(key)?;
        // On a copy: should `change` panic, the page is as it was.
        let (index, mut value) = match HeldLeaf::from(&leaf).find(key)? {
            None => return Ok(Found::Nothing),
            Some((_, Held::Blob(_))) => return Ok(Found::Blob),
            Some((index, Held::Inline(value))) => (index, value.to_vec()),
        };
        begun.callers_code(|| change(&mut value));
        apply(begun, &mut leaf, Action::Replace { index, payload: Payload::Inline(&value) })?;
        Ok(Found::Changed)
    }

    /// Puts a changed copy in the place of a blob, unless another change came first.
    fn update_blob(
        self,
        begun: &Change<'_>,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        loop {
            // The old blob is held to the end: its place cannot become another blob's meanwhile,
            // so finding the same reference again means that nothing changed.
            let Some((old, long)) = self.get_blob(key)? else {
                // It became a value in a leaf, or went.
                match self.update_inline(begun, key, change)? {
                    Found::Nothing => return Ok(false),
                    Found::Changed => return Ok(true),
                    Found::Blob => continue,
                }
            };
            let mut fill = |target: &mut [u8]| {
                target.copy_from_slice(&long.value);
                change(target);
                Ok(())
            };
            let new = self.store_blob(begun, key, Incoming::Fill(long.value.len(), &mut fill))?;
            let mut leaf = match self.exclusive_leaf(key) {
                Ok(leaf) => leaf,
                Err(error) => {
                    self.free_blob(begun, new);
                    return Err(error);
                }
            };
            let found = HeldLeaf::from(&leaf).find(key)?;
            if let Some((index, Held::Blob(blob))) = found
                && blob == old
            {
                let payload = new.encode();
                let payload = Payload::Blob(&payload);
                apply(begun, &mut leaf, Action::Replace { index, payload })?;
                drop((leaf, long));
                self.free_blob(begun, old);
                return Ok(true);
            }
            drop(leaf);
            self.free_blob(begun, new);
        }
    }
}
