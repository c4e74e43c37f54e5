//! Reads the entries that are left of a damaged tree.

use vellum_pool::PageRef;

use super::lookup::LeafBytes;
use super::{TreeRef, ValueReader};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::node::Node;
use crate::page::blob::BlobRef;

/// The walk calls this with every entry that it can read, and with every damage. Returning false
/// ends the walk.
pub type Visit<'v> = &'v mut dyn FnMut(Result<(&[u8], &[u8])>) -> bool;

/// As [`Visit`], with values of any length.
pub type VisitReaders<'v> = &'v mut dyn FnMut(Result<(&[u8], ValueReader<'_>)>) -> bool;

/// The bounds of the keys of a node: its keys are greater than the first bound and at most the
/// second.
#[derive(Clone, Copy)]
struct KeyBounds<'k>(Option<&'k [u8]>, Option<&'k [u8]>);

impl KeyBounds<'_> {
    fn has(self, key: &[u8]) -> bool {
        self.0.is_none_or(|lower| key > lower) && self.1.is_none_or(|upper| key <= upper)
    }

    /// Whether any key can be within the bounds.
    fn is_possible(self) -> bool {
        !matches!(self, KeyBounds(Some(lower), Some(upper)) if lower >= upper)
    }
}

/// A node from which a salvage goes down: the root, or a node whose parent is lost. Its keys are
/// between its fences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub page: PageRef,
    pub level: u8,
    pub lower: Option<Key>,
    pub upper: Option<Key>,
}

impl Part {
    fn root(page: PageRef) -> Part {
        Part { page, level: u8::MAX, lower: None, upper: None }
    }

    /// A node of a tree.
    ///
    /// # Errors
    /// If the page is no node, or is damaged.
    pub(crate) fn of(page: PageRef, bytes: &[u8]) -> Result<Part> {
        let (torn, node) = (|torn| Error::torn(page, torn), Node::new(bytes));
        let fence = |key: Option<&[u8]>| key.map(Key::from);
        Ok(Part {
            page,
            level: node.level().map_err(torn)?,
            lower: fence(node.lower().map_err(torn)?),
            upper: fence(node.upper().map_err(torn)?),
        })
    }
}

impl TreeRef<'_> {
    /// Visits the readable entries of the tree in order, and skips damaged pages.
    ///
    /// The pages of the file may be from different times. The walk uses a page if it belongs to
    /// this tree, and those of its entries whose keys are between its ancestors' separators. So
    /// each visited entry was in the tree at some time, and is visited once.
    pub(crate) fn salvage_readers(self, visit: VisitReaders<'_>) {
        self.salvage_parts(&[Part::root(self.root_page())], visit);
    }

    /// As [`salvage_readers`](Self::salvage_readers), for a tree of which only these parts are
    /// left. They are sorted by their lower fences.
    pub(crate) fn salvage_parts(self, parts: &[Part], visit: VisitReaders<'_>) {
        // A tree has no more pages than its file. If the walk visits more, references form a cycle.
        let mut pages_left = self.pages.pool.file_pages();
        // The walk has visited all keys up to this one.
        let mut done: Option<&[u8]> = None;
        for Part { page, level, lower, upper } in parts {
            let (lower, upper) = (lower.as_deref(), upper.as_deref());
            let keys = KeyBounds(lower.max(done), upper);
            if !keys.is_possible() {
                continue;
            }
            if lower > done && !visit(Err(Error::damaged(*page, "no page has the keys before it")))
                || !self.salvage_node(*page, *level, keys, &mut pages_left, visit)
            {
                return;
            }
            if upper.is_none() {
                return;
            }
            done = upper;
        }
        if let Some(last) = parts.last() {
            visit(Err(Error::damaged(last.page, "no page has the keys after it")));
        }
    }

    /// As [`salvage_readers`](Self::salvage_readers), with values as slices. A value that does not
    /// fit into the pool is an error.
    pub(crate) fn salvage(self, visit: Visit<'_>) {
        self.salvage_readers(&mut |found| {
            let (key, reader) = match found {
                Ok(found) => found,
                Err(error) => return visit(Err(error)),
            };
            if let Some(value) = reader.as_slice() {
                return visit(Ok((key, value)));
            }
            match self.copy_of(reader) {
                Ok(value) => visit(Ok((key, &value))),
                Err(error) => visit(Err(error)),
            }
        });
    }

    /// Returns false to end the walk.
    fn salvage_node(
        self,
        page: PageRef,
        level_max: u8,
        keys: KeyBounds<'_>,
        pages_left: &mut u64,
        visit: VisitReaders<'_>,
    ) -> bool {
        if *pages_left == 0 {
            visit(Err(Error::damaged(page, "it is referred to twice")));
            return false;
        }
        *pages_left -= 1;
        let bytes = match self.pages.pool.fix_shared(page) {
            Ok(guard) => guard.to_vec(),
            Err(error) => return visit(Err(error.into())),
        };
        let outcome = self.salvage_read(page, &bytes, level_max, keys, pages_left, visit);
        outcome.unwrap_or_else(|error| visit(Err(error)))
    }

    fn salvage_read(
        self,
        page: PageRef,
        bytes: &[u8],
        level_max: u8,
        keys: KeyBounds<'_>,
        pages_left: &mut u64,
        visit: VisitReaders<'_>,
    ) -> Result<bool> {
        let torn = |torn| Error::torn(page, torn);
        let node = Node::new(bytes);
        let (level, count) = (node.level().map_err(torn)?, node.count().map_err(torn)?);
        if level > level_max || !node.is_of(self.state.id, level) {
            let what =
                format!("it is not a node of tree {} up to level {level_max}", self.state.id);
            return Err(Error::damaged(page, what));
        }
        let fences = (node.lower().map_err(torn)?, node.upper().map_err(torn)?);
        if fences != (keys.0, keys.1) && !visit(Err(Error::fences(page))) {
            return Ok(false);
        }
        let (mut key, mut lower) = (Vec::new(), keys.0.map(<[u8]>::to_vec));
        if level > 0 {
            for index in 0..=count {
                let mut upper = keys.1;
                if index < count {
                    node.key_into(index, &mut key).map_err(torn)?;
                    upper = Some(upper.map_or(&key[..], |upper| upper.min(&key[..])));
                }
                let below = KeyBounds(lower.as_deref(), upper);
                let child = self.page(node.child(index).map_err(torn)?);
                if below.is_possible()
                    && !self.salvage_node(child, level - 1, below, pages_left, visit)
                {
                    return Ok(false);
                }
                if index < count && lower.as_deref().is_none_or(|lower| lower < &key[..]) {
                    lower = Some(key.clone());
                }
            }
            return Ok(true);
        }
        for index in 0..count {
            node.key_into(index, &mut key).map_err(torn)?;
            if !keys.has(&key) {
                continue;
            }
            let place = node.payload_place(index).map_err(torn)?;
            let payload = node.payload(place).map_err(torn)?;
            let go_on = match place.blob {
                false => visit(Ok((&key, ValueReader::inline(self, payload.into())))),
                true => {
                    let leaf = LeafBytes { page, bytes: node.bytes() };
                    self.salvage_blob(leaf.blob(payload), &key, visit)
                }
            };
            if !go_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn salvage_blob(self, blob: Result<BlobRef>, key: &[u8], visit: VisitReaders<'_>) -> bool {
        let open = |blob: BlobRef| self.open_reader(blob, key, self.pages.pin(blob.page.id));
        match blob.and_then(open) {
            Ok(reader) => visit(Ok((key, reader))),
            Err(error) => visit(Err(error)),
        }
    }
}
