//! Building a tree bottom-up from sorted entries.
//!
//! A leaf's cells are held back until its upper fence is known, for only then is the length of its
//! prefix, and so the size of its cells. Each finished node becomes an entry of the level above.
//! Pages leave through [`PageSink`] in the order in which they are finished; the last one is the
//! root and is handed back instead.

use std::mem;

use vellum_pool::PageId;

use crate::node::{
    Fences, INNER_SLOT, LEAF_SLOT, NodeMut, Payload, capacity, common_prefix, separator,
};

/// Where finished nodes go.
pub trait PageSink {
    /// Why a page could not be taken.
    type Error;

    /// Stores a node. `image` is as long as a page; its page header is not set but for kind and
    /// level. Returns where the node is.
    fn store(&mut self, image: &[u8]) -> Result<PageId, Self::Error>;
}

/// One value on its way into a leaf.
#[derive(Debug)]
struct Cell {
    key: Vec<u8>,
    payload: Owned,
}

#[derive(Debug)]
enum Owned {
    Inline(Vec<u8>),
    Blob(Vec<u8>),
    Child(u64),
}

impl Owned {
    fn borrow(&self) -> Payload<'_> {
        match self {
            Owned::Inline(bytes) => Payload::Inline(bytes),
            Owned::Blob(bytes) => Payload::Blob(bytes),
            Owned::Child(page) => Payload::Child(*page),
        }
    }

    fn heap_len(&self) -> usize {
        match self {
            Owned::Inline(bytes) | Owned::Blob(bytes) => bytes.len(),
            Owned::Child(_) => 0,
        }
    }
}

/// The unfinished node of one level.
#[derive(Debug, Default)]
struct Level {
    lower: Option<Vec<u8>>,
    pending: Vec<Cell>,
    /// Slots, keys and payloads of `pending`, with whole keys.
    size: usize,
    /// A node of this level has been stored, so there must be a level above.
    stored: bool,
}

/// Takes entries in ascending order and builds a tree of them.
#[derive(Debug)]
pub struct BulkBuilder<S> {
    sink: S,
    image: Vec<u8>,
    target: usize,
    levels: Vec<Level>,
    entries: u64,
}

/// Where a node ends: how many pending cells it takes, and the fence behind them.
struct Cut {
    cells: usize,
    upper: Option<Vec<u8>>,
}

impl<S: PageSink> BulkBuilder<S> {
    /// Fills pages of `page_len` bytes up to `fill` percent (50 to 100).
    pub fn new(sink: S, page_len: usize, fill: u8) -> BulkBuilder<S> {
        let target = capacity(page_len) * usize::from(fill.clamp(50, 100)) / 100;
        let levels = vec![Level::default()];
        BulkBuilder { sink, image: vec![0; page_len], target, levels, entries: 0 }
    }

    /// The last key that was taken.
    pub fn last_key(&self) -> Option<&[u8]> {
        let leaf = &self.levels[0];
        leaf.pending.last().map(|cell| &cell.key[..])
    }

    /// The place that takes the pages.
    pub fn sink(&mut self) -> &mut S {
        &mut self.sink
    }

    /// The sink, when the tree is not wanted any more.
    pub fn into_sink(self) -> S {
        self.sink
    }

    /// Number of entries taken so far.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Takes the next entry. The caller has checked that its key is above the last one, and key
    /// and payload against the limits.
    pub fn push(&mut self, key: &[u8], payload: Payload<'_>) -> Result<(), S::Error> {
        let payload = match payload {
            Payload::Inline(bytes) => Owned::Inline(bytes.to_vec()),
            Payload::Blob(bytes) => Owned::Blob(bytes.to_vec()),
            Payload::Child(page) => Owned::Child(page),
        };
        self.entries += 1;
        self.add(0, Cell { key: key.to_vec(), payload })
    }

    /// Stores what is pending and returns the image of the root.
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
            while let Some(cut) = self.last_cut(level) {
                self.store_node(level, cut)?;
            }
            let cells = self.levels[level].pending.len();
            self.fill_image(level, &Cut { cells, upper: None }, last_child);
            if !self.levels[level].stored {
                return Ok(());
            }
            last_child = self.sink.store(&self.image)?.0;
            level += 1;
        }
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
        // With the last key as the fence nothing can be longer than what is counted here, so a
        // node that is below the target now may only grow above it by its prefix getting shorter.
        while self.pending_size(level) > self.target && self.levels[level].pending.len() > 1 {
            let cut = self.best_cut(level);
            self.store_node(level, cut)?;
        }
        Ok(())
    }

    /// Size of the node that all pending cells of a level would make, with the last key as fence.
    fn pending_size(&self, level: usize) -> usize {
        let level = &self.levels[level];
        let upper = level.pending.last().map(|cell| &cell.key[..]);
        node_size(level.lower.as_deref(), upper, level.size, level.pending.len())
    }

    /// The largest node that stays within the target, of at least one cell.
    fn best_cut(&self, level: usize) -> Cut {
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
            if cells == 1 || node_size(lower, Some(upper), size, cells) <= self.target {
                return Cut { cells, upper: Some(upper.to_vec()) };
            }
            cells -= 1;
        }
    }

    /// A cut, if the pending cells are too much for the last node of a level, which has no prefix.
    fn last_cut(&self, level: usize) -> Option<Cut> {
        let pending = &self.levels[level];
        let size = node_size(pending.lower.as_deref(), None, pending.size, pending.pending.len());
        let fits = size <= capacity(self.image.len());
        (!fits && pending.pending.len() > 1).then(|| self.best_cut(level))
    }

    /// Stores a node of the first pending cells. In an inner node the cell behind them gives the
    /// upper child and goes as well; its key is the fence.
    fn store_node(&mut self, level: usize, cut: Cut) -> Result<(), S::Error> {
        let upper_child = match self.levels[level].pending[cut.cells].payload {
            Owned::Child(page) => page,
            _ => 0,
        };
        self.fill_image(level, &cut, upper_child);
        let page = self.sink.store(&self.image)?;
        let taken = cut.cells + usize::from(level > 0);
        let done = &mut self.levels[level];
        for cell in done.pending.drain(..taken) {
            done.size -= Self::slot(level) + cell.key.len() + cell.payload.heap_len();
        }
        done.stored = true;
        let Some(upper) = cut.upper else { return Ok(()) };
        done.lower = Some(upper.clone());
        self.add(level + 1, Cell { key: upper, payload: Owned::Child(page.0) })
    }

    fn fill_image(&mut self, level: usize, cut: &Cut, upper_child: u64) {
        let mut image = mem::take(&mut self.image);
        let source = &self.levels[level];
        let fences = Fences { lower: source.lower.as_deref(), upper: cut.upper.as_deref() };
        let prefix = fences.prefix_len();
        // Levels beyond 255 would take more pages than there are page numbers.
        let mut node = NodeMut::format(&mut image, level as u8, fences, upper_child);
        for cell in &source.pending[..cut.cells] {
            node.push([&cell.key[prefix..], &[]], cell.payload.borrow());
        }
        node.finish();
        self.image = image;
    }
}

/// Size of a node with these fences and cells of `size` bytes that still have their prefix.
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
        fn everything_that_was_loaded_is_there(
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

    #[test]
    fn nothing_gives_an_empty_leaf() {
        let (root, pages) = load(&[], 90);
        assert_eq!((Node::new(&root[..]).level(), pages.0.len()), (Ok(0), 0));
    }
}
