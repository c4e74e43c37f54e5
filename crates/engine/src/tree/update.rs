//! Changing a value where it is: read, change and write as one step.

use vellum_pool::ExclusiveGuard;

use super::Access;
use super::apply::{Action, apply};
use super::modify::Incoming;
use crate::error::{Error, Result};
use crate::node::{Node, Payload};
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
        let Some((index, mut value)) = inline_value(&leaf, key)? else {
            let torn = |torn| Error::torn(leaf.page(), torn);
            let there = Node::new(&leaf[..]).find(key).map_err(torn)?.exact;
            return Ok(if there { Found::Blob } else { Found::Nothing });
        };
        // On a copy: should `change` panic, the page is as it was.
        change(&mut value);
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
            let Some((old, value)) = self.get_blob(key)? else {
                // It became a value in a leaf, or went.
                match self.update_inline(begun, key, change)? {
                    Found::Nothing => return Ok(false),
                    Found::Changed => return Ok(true),
                    Found::Blob => continue,
                }
            };
            let mut fill = |target: &mut [u8]| {
                target.copy_from_slice(&value);
                change(target);
                Ok(())
            };
            let new = self.store_blob(begun, Incoming::Fill(value.len(), &mut fill))?;
            let mut leaf = match self.exclusive_leaf(key) {
                Ok(leaf) => leaf,
                Err(error) => {
                    self.free_blob(begun, new);
                    return Err(error);
                }
            };
            let torn = |torn| Error::torn(leaf.page(), torn);
            let position = Node::new(&leaf[..]).find(key).map_err(torn)?;
            if position.exact && self.blob_at(&leaf, position.index)? == Some(old) {
                let payload = new.encode();
                let payload = Payload::Blob(&payload);
                apply(begun, &mut leaf, Action::Replace { index: position.index, payload })?;
                drop((leaf, value));
                self.free_blob(begun, old);
                return Ok(true);
            }
            drop(leaf);
            self.free_blob(begun, new);
        }
    }
}

/// The entry's index and a copy of its value; none if there is no entry, or its value is a blob.
fn inline_value(leaf: &ExclusiveGuard<'_>, key: &[u8]) -> Result<Option<(usize, Vec<u8>)>> {
    let torn = |torn| Error::torn(leaf.page(), torn);
    let node = Node::new(&leaf[..]);
    let position = node.find(key).map_err(torn)?;
    if !position.exact {
        return Ok(None);
    }
    let place = node.payload_place(position.index).map_err(torn)?;
    if place.blob {
        return Ok(None);
    }
    Ok(Some((position.index, node.payload(place).map_err(torn)?.to_vec())))
}
