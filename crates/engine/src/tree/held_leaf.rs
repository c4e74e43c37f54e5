//! A leaf that is held, shared or exclusively: what was found in it stays.

use vellum_pool::{ExclusiveGuard, PageRef, SharedGuard};

use crate::error::{Error, Result};
use crate::node::{Node, Position};
use crate::page::blob::BlobRef;

/// The bytes of a leaf under a lock, or of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldLeaf<'l> {
    pub page: PageRef,
    pub bytes: &'l [u8],
}

/// The value of an entry, as the leaf has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Held<'l> {
    Inline(&'l [u8]),
    Blob(BlobRef),
}

impl Held<'_> {
    pub(crate) fn blob(self) -> Option<BlobRef> {
        match self {
            Held::Inline(_) => None,
            Held::Blob(blob) => Some(blob),
        }
    }
}

impl<'l> From<&'l SharedGuard<'_>> for HeldLeaf<'l> {
    fn from(guard: &'l SharedGuard<'_>) -> HeldLeaf<'l> {
        HeldLeaf { page: guard.page(), bytes: guard }
    }
}

impl<'l> From<&'l ExclusiveGuard<'_>> for HeldLeaf<'l> {
    fn from(guard: &'l ExclusiveGuard<'_>) -> HeldLeaf<'l> {
        HeldLeaf { page: guard.page(), bytes: guard }
    }
}

impl<'l> HeldLeaf<'l> {
    /// Where `key` is, or where it would be.
    pub(crate) fn position(self, key: &[u8]) -> Result<Position> {
        Node::new(self.bytes).find(key).map_err(|torn| Error::torn(self.page, torn))
    }

    /// The number of the entry with `key` and its value; none if there is none.
    pub(crate) fn find(self, key: &[u8]) -> Result<Option<(usize, Held<'l>)>> {
        let position = self.position(key)?;
        match position.exact {
            true => Ok(Some((position.index, self.value(position.index)?))),
            false => Ok(None),
        }
    }

    /// The value of the entry `index`.
    pub(crate) fn value(self, index: usize) -> Result<Held<'l>> {
        let torn = |torn| Error::torn(self.page, torn);
        let node = Node::new(self.bytes);
        let place = node.payload_place(index).map_err(torn)?;
        let payload = node.payload(place).map_err(torn)?;
        match place.blob {
            true => self.blob(payload).map(Held::Blob),
            false => Ok(Held::Inline(payload)),
        }
    }

    /// The blob that a payload of the leaf refers to.
    pub(crate) fn blob(self, payload: &[u8]) -> Result<BlobRef> {
        let damaged = || Error::damaged(self.page, "a reference to a blob makes no sense");
        BlobRef::decode(payload).ok_or_else(damaged)
    }
}
