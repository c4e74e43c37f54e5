//! Builds a tree bottom-up from sorted entries.
//!
//! The builder buffers a leaf's cells until it knows the leaf's upper fence, because the fences
//! determine the length of the prefix, and so the size of the cells. Each finished node becomes an
//! entry of the level above. The builder passes the nodes to a [`PageSink`] in the order in which
//! it finishes them. It returns the last node, the root, to the caller.

use std::mem;

use vellum_pool::PageId;

use crate::node::{
    Fences, INNER_SLOT, LEAF_SLOT, NodeMut, Payload, capacity, common_prefix, separator,
};

/// Stores the finished nodes.
pub trait PageSink {
    /// The reason why a node could not be stored.
    type Error;

    /// Stores a node. `image` is as long as a page. Its page header is not set, except for kind and
    /// level. Returns the page of the node.
    fn store(&mut self, image: &[u8]) -> Result<PageId, Self::Error>;
}

/// An entry for a node that is not finished.
#[derive(Debug)]
struct Cell {
    key: Vec<u8>,
    payload: OwnedPayload,
}

#[derive(Debug)]
enum OwnedPayload {
    Inline(Vec<u8>),
    Blob(Vec<u8>),
    Child(u64),
}

impl OwnedPayload {
    fn borrow(&self) -> Payload<'_> {
        match self {
            OwnedPayload::Inline(bytes) => Payload::Inline(bytes),
            OwnedPayload::Blob(bytes) => Payload::Blob(bytes),
            OwnedPayload::Child(page) => Payload::Child(*page),
        }
    }

    fn heap_len(&self) -> usize {
        match self {
            OwnedPayload::Inline(bytes) | OwnedPayload::Blob(bytes) => bytes.len(),
            OwnedPayload::Child(_) => 0,
        }
    }
}

/// The unfinished node of one level.
#[derive(Debug, Default)]
struct Level {
    lower: Option<Vec<u8>>,
    pending: Vec<Cell>,
    /// The size of the slots, whole keys and payloads of `pending`.
    size: usize,
    /// Whether a node of this level has been stored, so that there must be a level above.
    stored: bool,
}

/// Builds a tree from entries in ascending order.
#[derive(Debug)]
pub struct BulkBuilder<S> {
    sink: S,
    image: Vec<u8>,
    /// The most bytes of an inner node that is not the last of its level. Leaves have no limit but
    /// their page.
    inner_target: usize,
    levels: Vec<Level>,
    entries: u64,
}

/// The end of a node: the number of pending cells that it takes, and its upper fence.
struct NodeEnd {
    cells: usize,
    upper: Option<Vec<u8>>,
}

impl<S: PageSink> BulkBuilder<S> {
    /// A builder that fills leaves of `page_len` bytes wholly, and inner nodes to `inner_fill`
    /// percent (50 to 100).
    pub fn new(sink: S, page_len: usize, inner_fill: u8) -> BulkBuilder<S> {
        BulkBuilder {
            sink,
            image: vec![0; page_len],
            inner_target: capacity(page_len) * usize::from(inner_fill.clamp(50, 100)) / 100,
            levels: vec![Level::default()],
            entries: 0,
        }
    }

    /// The last key that was pushed.
    pub fn last_key(&self) -> Option<&[u8]> {
        let leaf = &self.levels[0];
        leaf.pending.last().map(|cell| &cell.key[..])
    }

    /// The sink for the nodes.
    pub fn sink(&mut self) -> &mut S {
        &mut self.sink
    }

    /// Gives up the tree and returns the sink.
    pub fn into_sink(self) -> S {
        self.sink
    }

    /// The number of entries that were pushed so far.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Adds the next entry. The caller has checked that its key is greater than the last one, and
    /// that key and payload are within the limits.
    pub fn push(&mut self, key: &[u8], payload: Payload<'_>) -> Result<(), S::Error> {
        let payload = match payload {
            Payload::Inline(bytes) => OwnedPayload::Inline(bytes.to_vec()),
            Payload::Blob(bytes) => OwnedPayload::Blob(bytes.to_vec()),
            Payload::Child(page) => OwnedPayload::Child(page),
        };
        self.entries += 1;
        self.add(0, Cell { key: key.to_vec(), payload })
    }

    /// Stores the pending cells and returns the image of the root.
    pub fn finish(mut self) -> Result<(Vec<u8>, S), (S::Error, S)> {
        match self.finish_levels() {
            Ok(()) => Ok((self.image, self.sink)),
            Err(error) => Err((error, self.sink)),
        }
    }

    /// Leaves the root's node in `self.image`.
    fn finish_levels(&mut self) -> Result<(), S::Error> {
        let mut level = 0;
        let mut last_child = 0;
        loop {
            while let Some(end) = self.last_end(level) {
                self.store_node(level, end)?;
            }
            let cells = self.levels[level].pending.len();
            self.fill_image(level, &NodeEnd { cells, upper: None }, last_child);
            if !self.levels[level].stored {
                return Ok(());
            }
            last_child = self.sink.store(&self.image)?.0;
            level += 1;
        }
    }

    fn target(&self, level: usize) -> usize {
        if level == 0 { capacity(self.image.len()) } else { self.inner_target }
    }

    fn slot(level: usize) -> usize {
        if level == 0 { LEAF_SLOT } else { INNER_SLOT }
    }

    fn add(&mut self, level: usize, cell: Cell) -> Result<(), S::Error> {
        if level == self.levels.len() {
            self.levels.push(Level::default());
        }
        let pending = &mut self.levels[level];
        pending.size += Self::slot(level) + cell.key.len() + cell.payload.heap_len();
        pending.pending.push(cell);
        // With the last key as the fence, the node cannot be larger than this size. So a node that
        // fits now can become too large later only if its prefix gets shorter. A node that fits may
        // be the last of its level, which is filled wholly.
        let room = capacity(self.image.len());
        while self.pending_size(level) > room && self.levels[level].pending.len() > 1 {
            let end = self.best_end(level);
            self.store_node(level, end)?;
        }
        Ok(())
    }

    /// The size of a node of all pending cells of a level, with the last key as its upper fence.
    fn pending_size(&self, level: usize) -> usize {
        let level = &self.levels[level];
        let upper = level.pending.last().map(|cell| &cell.key[..]);
        node_size(level.lower.as_deref(), upper, level.size, level.pending.len())
    }

    /// The largest node within the target size, of at least one cell.
    fn best_end(&self, level: usize) -> NodeEnd {
        let pending = &self.levels[level].pending;
        let mut size = self.levels[level].size;
        let mut cells = pending.len() - 1;
        loop {
            size -=
                Self::slot(level) + pending[cells].key.len() + pending[cells].payload.heap_len();
            let upper = match level {
                0 => separator(&pending[cells - 1].key, &pending[cells].key),
                _ => &pending[cells].key,
            };
            let lower = self.levels[level].lower.as_deref();
            if cells == 1 || node_size(lower, Some(upper), size, cells) <= self.target(level) {
                return NodeEnd { cells, upper: Some(upper.to_vec()) };
            }
            cells -= 1;
        }
    }

    /// The end of the next node, if the pending cells do not fit into the last node of the level.
    /// The last node has no prefix.
    fn last_end(&self, level: usize) -> Option<NodeEnd> {
        let pending = &self.levels[level];
        let size = node_size(pending.lower.as_deref(), None, pending.size, pending.pending.len());
        let fits = size <= capacity(self.image.len());
        (!fits && pending.pending.len() > 1).then(|| self.best_end(level))
    }

    /// Stores a node of the first pending cells. In an inner node, the next cell is consumed, too:
    /// its child becomes the upper child, and its key the upper fence.
    fn store_node(&mut self, level: usize, end: NodeEnd) -> Result<(), S::Error> {
        let upper_child = match self.levels[level].pending[end.cells].payload {
            OwnedPayload::Child(page) => page,
            _ => 0,
        };
        self.fill_image(level, &end, upper_child);
        let page = self.sink.store(&self.image)?;
        let taken = end.cells + usize::from(level > 0);
        let done = &mut self.levels[level];
        for cell in done.pending.drain(..taken) {
            done.size -= Self::slot(level) + cell.key.len() + cell.payload.heap_len();
        }
        done.stored = true;
        let Some(upper) = end.upper else { return Ok(()) };
        done.lower = Some(upper.clone());
        self.add(level + 1, Cell { key: upper, payload: OwnedPayload::Child(page.0) })
    }

    fn fill_image(&mut self, level: usize, end: &NodeEnd, upper_child: u64) {
        let mut image = mem::take(&mut self.image);
        let source = &self.levels[level];
        let fences = Fences { lower: source.lower.as_deref(), upper: end.upper.as_deref() };
        let prefix = fences.prefix_len();
        // Levels beyond 255 would take more pages than there are page numbers.
        let mut node = NodeMut::format(&mut image, level as u8, fences, upper_child);
        for cell in &source.pending[..end.cells] {
            node.push([&cell.key[prefix..], &[]], cell.payload.borrow());
        }
        node.finish();
        self.image = image;
    }
}

/// The size of a node with these fences. `size` is the size of its cells with whole keys.
fn node_size(lower: Option<&[u8]>, upper: Option<&[u8]>, size: usize, cells: usize) -> usize {
    let fences = lower.map_or(0, <[u8]>::len) + upper.map_or(0, <[u8]>::len);
    let prefix = match (lower, upper) {
        (Some(lower), Some(upper)) => common_prefix(lower, upper),
        _ => 0,
    };
    fences + size - cells * prefix
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::node::{Node, NodeLimits, check};

    #[derive(Default)]
    struct Pages(Vec<Vec<u8>>);

    impl PageSink for Pages {
        type Error = ();

        fn store(&mut self, image: &[u8]) -> Result<PageId, ()> {
            check(image).unwrap();
            self.0.push(image.to_vec());
            Ok(PageId(self.0.len() as u64))
        }
    }

    /// Appends the entries below a node, checking its fences.
    fn walk(
        pages: &Pages,
        image: &[u8],
        fences: (Option<Vec<u8>>, Option<Vec<u8>>),
        found: &mut Vec<(Vec<u8>, Vec<u8>)>,
    ) {
        let node = Node::new(image);
        assert_eq!(node.lower().unwrap().map(<[u8]>::to_vec), fences.0);
        assert_eq!(node.upper().unwrap().map(<[u8]>::to_vec), fences.1);
        let (count, mut lower) = (node.count().unwrap(), fences.0);
        for index in 0..count + usize::from(node.level().unwrap() > 0) {
            let mut key = Vec::new();
            let inner = index < count && node.key_into(index, &mut key).is_ok();
            if node.level().unwrap() == 0 {
                let place = node.payload_place(index).unwrap();
                found.push((key, node.payload(place).unwrap().to_vec()));
                continue;
            }
            let upper = if inner { Some(key) } else { fences.1.clone() };
            let child = &pages.0[node.child(index).unwrap() as usize - 1];
            walk(pages, child, (lower, upper.clone()), found);
            lower = upper;
        }
    }

    fn load(entries: &[(Vec<u8>, Vec<u8>)], fill: u8) -> (Vec<u8>, Pages) {
        let mut builder = BulkBuilder::new(Pages::default(), 4096, fill);
        for (key, value) in entries {
            builder.push(key, Payload::Inline(value)).unwrap();
        }
        assert_eq!(builder.entries(), entries.len() as u64);
        let (root, pages) = builder.finish().map_err(|_| ()).unwrap();
        check(&root).unwrap();
        let mut found = Vec::new();
        walk(&pages, &root, (None, None), &mut found);
        assert!(found == entries, "{} of {} entries", found.len(), entries.len());
        (root, pages)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn all_loaded_entries_are_found(
            seeds in prop::collection::btree_set(any::<u32>(), 0..2000),
            shape in 0..4usize,
            fill in 50..=100u8,
        ) {
            let limits = NodeLimits::for_page_size(4096);
            let mut entries: Vec<_> = seeds.iter().map(|seed| {
                let bytes = seed.to_be_bytes();
                let mut key = bytes.to_vec();
                match shape {
                    0 => {}
                    1 => key.splice(0..0, vec![b'p'; 300]).for_each(drop),
                    // Long keys whose beginnings change seldom: prefixes come and go.
                    2 => key.splice(0..0, vec![bytes[0] & 3; limits.max_key - 4]).for_each(drop),
                    _ => key.resize((*seed as usize % limits.max_key).max(4), 0),
                }
                let len = limits.max_inline_value(key.len()).min(*seed as usize % 700);
                (key, vec![bytes[3]; len])
            }).collect();
            entries.sort();
            entries.dedup_by(|a, b| a.0 == b.0);
            load(&entries, fill);
        }
    }

    #[test]
    fn full_pages_are_full() {
        let entries: Vec<_> =
            (0..20_000u32).map(|n| (n.to_be_bytes().to_vec(), vec![7; 20])).collect();
        let (root, pages) = load(&entries, 100);
        assert!(Node::new(&root[..]).level().unwrap() > 0);
        let leaves = pages.0.iter().filter(|page| Node::new(&page[..]).level() == Ok(0)).count();
        // 12 bytes of slot, 20 of value and at most 4 of key an entry.
        assert!(leaves <= 20_000 * 36 / 3900 + 1, "{leaves} leaves");
    }

    /// Inner nodes have room for later separators, but not at the price of a level.
    #[test]
    fn a_level_that_fits_into_one_node_has_one() {
        let height = |fill, entries: u32| {
            let mut builder = BulkBuilder::new(Pages::default(), 4096, fill);
            for number in 0..entries {
                builder.push(&number.to_be_bytes(), Payload::Inline(&[7; 1000])).unwrap();
            }
            let (root, _) = builder.finish().map_err(|_| ()).unwrap();
            Node::new(&root[..]).level().unwrap()
        };
        let most = |fill| (100..).find(|entries| height(fill, *entries) > 1).unwrap() - 1;
        assert_eq!(most(50), most(100));
    }

    #[test]
    fn no_entries_give_an_empty_leaf() {
        let (root, pages) = load(&[], 90);
        assert_eq!((Node::new(&root[..]).level(), pages.0.len()), (Ok(0), 0));
    }
}
