//! Reading what is left of a tree that is damaged.

use vellum_pool::PageRef;

use super::Access;
use super::held_leaf::HeldLeaf;
use crate::error::{Error, Result};
use crate::node::Node;
use crate::page::blob::BlobRef;

/// Called with every entry that can be read and every damage that is met; false ends the walk.
pub type Visit<'v> = &'v mut dyn FnMut(Result<(&[u8], &[u8])>) -> bool;

impl Access<'_> {
    /// Visits what can be read of the tree, in order, skipping what cannot.
    pub(crate) fn salvage(self, visit: Visit<'_>) {
        // A tree has no more pages than its file; references that say otherwise run in circles.
        let mut pages_left = self.core.pool.file_pages();
        self.salvage_node(self.tree.root, u8::MAX, &mut pages_left, visit);
    }

    /// False to end the walk.
    fn salvage_node(
        self,
        page: PageRef,
        level_max: u8,
        pages_left: &mut u64,
        visit: Visit<'_>,
    ) -> bool {
        if *pages_left == 0 {
            visit(Err(Error::damaged(page, "it is referred to twice")));
            return false;
        }
        *pages_left -= 1;
        let bytes = match self.core.pool.fix_shared(page) {
            Ok(guard) => guard.to_vec(),
            Err(error) => return visit(Err(error.into())),
        };
        let node = Node::new(&bytes[..]);
        let outcome = self.salvage_read(page, node, level_max, pages_left, visit);
        outcome.unwrap_or_else(|error| visit(Err(error)))
    }

    fn salvage_read(
        self,
        page: PageRef,
        node: Node<&[u8]>,
        level_max: u8,
        pages_left: &mut u64,
        visit: Visit<'_>,
    ) -> Result<bool> {
        let torn = |torn| Error::torn(page, torn);
        let (level, count) = (node.level().map_err(torn)?, node.count().map_err(torn)?);
        if level > level_max {
            let what = format!("its level is {level} where {level_max} is due");
            return Err(Error::damaged(page, what));
        }
        if level > 0 {
            for index in 0..=count {
                let child = node.child(index).map_err(torn)?;
                if !self.salvage_node(self.page(child), level - 1, pages_left, visit) {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let mut key = Vec::new();
        for index in 0..count {
            node.key_into(index, &mut key).map_err(torn)?;
            let place = node.payload_place(index).map_err(torn)?;
            let payload = node.payload(place).map_err(torn)?;
            let go_on = match place.blob {
                false => visit(Ok((&key, payload))),
                true => {
                    let leaf = HeldLeaf { page, bytes: node.bytes() };
                    self.salvage_blob(leaf.blob(payload), &key, visit)
                }
            };
            if !go_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn salvage_blob(self, blob: Result<BlobRef>, key: &[u8], visit: Visit<'_>) -> bool {
        match blob.and_then(|blob| self.open_blob(blob)) {
            Ok(value) => visit(Ok((key, &value))),
            Err(error) => visit(Err(error)),
        }
    }
}
