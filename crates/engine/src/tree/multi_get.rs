//! Looks up many keys at once, so that their waits for memory and for the device overlap.
//!
//! Up to [`ACTIVE`] lookups are active at a time. At its turn a lookup works with the cache lines
//! that the CPU has, prefetches the lines that it needs next, and yields to the next lookup
//! (asynchronous memory access chaining, Kocberber, Falsafi and Grot, VLDB'15). A lookup that needs
//! a page that is not resident becomes a waiting lookup. The thread starts the reads of all waiting
//! lookups together, and goes on with the others. It waits only if no lookup can go on.
//!
//! Each lookup is an optimistic descent of its own, by the rules in `lookup.rs`: a change on its
//! path restarts only this lookup. A lookup holds no page between two turns, so all together
//! need no more pages at a time than one.

use vellum_pool::{OptimisticGuard, PageRef};

use super::TreeRef;
use super::lookup::LeafBytes;
use super::lookup::{Attempt, AttemptError};
use crate::error::{Error, Result};
use crate::node::{INNER_SLOT, LEAF_SLOT, Node, PayloadPlace, Search};
use crate::value::Value;

/// The number of active lookups: enough to hide the latency of memory, and so few that the lines
/// that they prefetched are still in the first-level cache at their next turn.
const ACTIVE: usize = 32;

/// The most lookups that wait for reads at a time. In a small pool there are fewer.
const WAITING_MAX: u64 = 256;

/// After so many restarts, the thread finishes a lookup by itself.
const RESTARTS_MAX: u8 = 16;

/// The most reads that are started for a lookup in advance. After them the lookup reads the page
/// itself, and so meets the error.
const READS_MAX: u8 = 3;

/// After so many waits, the thread finishes a lookup by itself.
const WAITS_MAX: u8 = 64;

/// The longest value that is copied to a buffer on the stack.
const SHORT_MAX: usize = 1024;

/// The result of a lookup.
pub(crate) enum FoundValue<'v, 'a> {
    Absent,
    Inline(&'v [u8]),
    Guarded(Value<'a>),
}

/// The next stage of a lookup.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Begin to search the node.
    Begin,
    /// Search the slots that the hints have not excluded.
    Search(Search),
    /// Enter the child on this page.
    EnterChild(u64),
    /// Read the value from the leaf.
    ReadValue(Search),
}

/// The lookup of one key.
#[derive(Clone, Copy, Debug)]
struct Lookup<'a> {
    /// The node that the lookup has reached. At [`Stage::EnterChild`], this is the parent of the
    /// child.
    node: OptimisticGuard<'a>,
    stage: Stage,
    /// The index of the key.
    index: usize,
    /// The node's level.
    level: u8,
    restarts: u8,
    waits: u8,
}

/// The result of a turn.
enum LookupProgress {
    /// The lookup goes on at its next turn.
    Yield,
    /// The lookup needs a page that is not resident.
    WaitForPage,
    Done,
}

/// The lookups of one call of `multi_get`.
struct MultiGet<'a, 'k, K, V> {
    tree: TreeRef<'a>,
    keys: &'k [K],
    visit: V,
    /// The root and its level, where lookups start.
    root: (OptimisticGuard<'a>, u8),
    /// The next key to start.
    next: usize,
    waiting: Vec<Lookup<'a>>,
    /// The most lookups that may wait at a time.
    waiting_max: usize,
    /// The pages whose reads are to be started next.
    missing: Vec<PageRef>,
    /// The keys whose blobs are being read, and the frames that these blobs take.
    blobs: Vec<usize>,
    blob_frames: u64,
    /// The number of nodes that lookups have entered, for the pool's statistics.
    entered: u64,
    short: [u8; SHORT_MAX],
    long: Vec<u8>,
}

impl<'a> TreeRef<'a> {
    /// The values of `keys`, in their order.
    pub(crate) fn multi_get(self, keys: &[&[u8]]) -> Result<Vec<Option<Value<'a>>>> {
        let mut values: Vec<Option<Value<'a>>> = Vec::new();
        values.resize_with(keys.len(), || None);
        self.multi_get_with(keys, |index, found| {
            values[index] = match found {
                FoundValue::Absent => None,
                FoundValue::Inline(bytes) => Some(Value::Inline(bytes.to_vec().into())),
                FoundValue::Guarded(value) => Some(value),
            };
        })?;
        Ok(values)
    }

    /// Calls `visit` once for each key, in any order.
    #[inline]
    pub(crate) fn multi_get_with<K: AsRef<[u8]>>(
        self,
        keys: &[K],
        visit: impl FnMut(usize, FoundValue<'_, 'a>),
    ) -> Result<()> {
        let pages = self.pages.pool.capacity() / 4 / u64::from(self.pages.page_frames);
        let mut lookups = MultiGet {
            tree: self,
            keys,
            visit,
            root: self.stable_root()?,
            next: 0,
            waiting: Vec::new(),
            waiting_max: pages.clamp(1, WAITING_MAX) as usize,
            missing: Vec::new(),
            blobs: Vec::new(),
            blob_frames: 0,
            entered: 0,
            short: [0; SHORT_MAX],
            long: Vec::new(),
        };
        let outcome = lookups.run();
        self.pages.pool.count_optimistic(lookups.entered);
        outcome
    }

    /// The root and its level. Retries until the root does not change meanwhile.
    fn stable_root(self) -> Result<(OptimisticGuard<'a>, u8)> {
        loop {
            match self.root() {
                Ok(root) => return Ok(root),
                Err(AttemptError::Restart) => {}
                Err(AttemptError::Failed(error)) => return Err(error),
            }
        }
    }
}

impl<'a, K: AsRef<[u8]>, V: FnMut(usize, FoundValue<'_, 'a>)> MultiGet<'a, '_, K, V> {
    #[inline(always)]
    fn run(&mut self) -> Result<()> {
        let mut active: [Lookup<'a>; ACTIVE] = std::array::from_fn(|index| self.start(index));
        let mut count = ACTIVE.min(self.keys.len());
        self.next = count;
        while count > 0 || !self.waiting.is_empty() {
            let mut at = 0;
            while at < count {
                match self.run_turn(&mut active[at])? {
                    LookupProgress::Yield => {
                        at += 1;
                        continue;
                    }
                    LookupProgress::WaitForPage => self.waiting.push(active[at]),
                    LookupProgress::Done => {}
                }
                if self.next < self.keys.len() && self.waiting.len() < self.waiting_max {
                    active[at] = self.start(self.next);
                    self.next += 1;
                    at += 1;
                } else {
                    count -= 1;
                    active[at] = active[count];
                }
            }
            if !self.waiting.is_empty() {
                count = self.serve_waiting(&mut active, count)?;
            }
        }
        self.finish_blobs()
    }

    /// A lookup of the key at `index`, at the root.
    #[inline(always)]
    fn start(&self, index: usize) -> Lookup<'a> {
        let (node, level) = self.root;
        Lookup { node, stage: Stage::Begin, index, level, restarts: 0, waits: 0 }
    }

    /// Runs a lookup until it yields, waits or is done.
    #[inline(always)]
    fn run_turn(&mut self, lookup: &mut Lookup<'a>) -> Result<LookupProgress> {
        match self.run_stages(lookup) {
            Ok(turn) => Ok(turn),
            Err(error) => self.interrupted(lookup, error),
        }
    }

    /// Restarts a lookup that a change has interrupted, or returns its error.
    #[cold]
    fn interrupted(
        &mut self,
        lookup: &mut Lookup<'a>,
        error: AttemptError,
    ) -> Result<LookupProgress> {
        if let AttemptError::Failed(error) = error {
            return Err(error);
        }
        if lookup.restarts >= RESTARTS_MAX {
            self.look_up_alone(lookup.index)?;
            return Ok(LookupProgress::Done);
        }
        self.root = self.tree.stable_root()?;
        let restarts = lookup.restarts + 1;
        *lookup = Lookup { restarts, ..self.start(lookup.index) };
        Ok(LookupProgress::Yield)
    }

    #[inline(always)]
    fn run_stages(&mut self, lookup: &mut Lookup<'a>) -> Attempt<LookupProgress> {
        let (tree, key) = (self.tree, self.keys[lookup.index].as_ref());
        let pool = &tree.pages.pool;
        loop {
            let level = lookup.level;
            match lookup.stage {
                Stage::Begin => {
                    let search = tree.read(lookup.node, |node| match level {
                        0 => node.narrow::<LEAF_SLOT>(key),
                        _ => node.narrow::<INNER_SLOT>(key),
                    })?;
                    lookup.stage = Stage::Search(search);
                    // The nodes above the parents of leaves are few, and mostly in the cache.
                    if level < 2 && search.has_hints() {
                        let node = Node::new(lookup.node.bytes());
                        match level {
                            0 => node.prefetch_slots::<LEAF_SLOT>(search),
                            _ => node.prefetch_slots::<INNER_SLOT>(search),
                        }
                        return Ok(LookupProgress::Yield);
                    }
                }
                Stage::Search(mut search) if level > 0 => {
                    let id = tree.read(lookup.node, |node| {
                        node.probe::<INNER_SLOT>(&mut search)?;
                        Ok(node.resolve_child(search, key)?.1)
                    })?;
                    lookup.stage = Stage::EnterChild(id);
                    if level <= 2 {
                        pool.prefetch_state(tree.page(id));
                        tree.touch_node(tree.page(id), level - 1);
                        return Ok(LookupProgress::Yield);
                    }
                }
                Stage::EnterChild(id) => {
                    if !self.enter(lookup, id)? {
                        return Ok(LookupProgress::WaitForPage);
                    }
                }
                Stage::Search(mut search) => {
                    let cell = tree.read(lookup.node, |node| {
                        node.probe::<LEAF_SLOT>(&mut search)?;
                        node.cell_at(search)
                    })?;
                    lookup.stage = Stage::ReadValue(search);
                    if let Some((offset, len)) = cell {
                        pool.prefetch_bytes(lookup.node.page(), offset, len.min(SHORT_MAX));
                        return Ok(LookupProgress::Yield);
                    }
                }
                Stage::ReadValue(search) => return self.read_value(lookup, search),
            }
        }
    }

    /// Enters a child. Returns false if the child is not resident, after validating the parent.
    #[inline(always)]
    fn enter(&mut self, lookup: &mut Lookup<'a>, id: u64) -> Attempt<bool> {
        let tree = self.tree;
        let child = tree.pages.pool.try_optimistic(tree.page(id));
        lookup.node.validate()?;
        let Some(child) = child else {
            lookup.waits = lookup.waits.saturating_add(1);
            self.missing.push(tree.page(id));
            return Ok(false);
        };
        tree.check_node(child, lookup.level - 1)?;
        self.entered += 1;
        lookup.waits = 0;
        (lookup.node, lookup.level, lookup.stage) = (child, lookup.level - 1, Stage::Begin);
        Ok(true)
    }

    /// Reads the value of a key from the leaf that the lookup has reached.
    #[inline(always)]
    fn read_value(&mut self, lookup: &mut Lookup<'a>, search: Search) -> Attempt<LookupProgress> {
        let (leaf, key) = (lookup.node, self.keys[lookup.index].as_ref());
        let place = self.tree.read(leaf, |node| node.resolve_payload(search, key))?;
        let Some(place) = place else {
            leaf.validate()?;
            (self.visit)(lookup.index, FoundValue::Absent);
            return Ok(LookupProgress::Done);
        };
        if place.blob {
            return self.start_blob(lookup, place);
        }
        let value = match self.short.get_mut(..place.len) {
            Some(value) => value,
            None => {
                self.long.resize(place.len, 0);
                &mut self.long[..]
            }
        };
        self.tree.read(leaf, |node| node.payload_to(place, value))?;
        leaf.validate()?;
        (self.visit)(lookup.index, FoundValue::Inline(value));
        Ok(LookupProgress::Done)
    }

    /// Starts the read of a blob. `visit` gets the blob after all lookups have reached their
    /// leaves.
    #[cold]
    fn start_blob(&mut self, lookup: &Lookup<'a>, place: PayloadPlace) -> Attempt<LookupProgress> {
        let pool = &self.tree.pages.pool;
        // The reference is valid while this thread has locked the leaf.
        let leaf = lookup.node.upgrade_shared()?;
        let torn = |torn| Error::torn(leaf.page(), torn);
        let payload = Node::new(&leaf[..]).payload(place).map_err(torn)?;
        let blob = LeafBytes::from(&leaf).blob(payload)?;
        let (frames, most) = (u64::from(blob.page.frames), pool.capacity() / 8);
        if frames <= most && !pool.is_resident(blob.page) {
            if self.blob_frames + frames > most {
                drop(leaf);
                self.finish_blobs()?;
                // At its next turn, the lookup finds the reference again.
                return Ok(LookupProgress::Yield);
            }
            self.blob_frames += frames;
            pool.evict_and_prefetch(&[blob.page]);
        }
        self.blobs.push(lookup.index);
        Ok(LookupProgress::Done)
    }

    /// Passes the blobs whose reads were started to `visit`.
    #[inline(never)]
    fn finish_blobs(&mut self) -> Result<()> {
        self.blob_frames = 0;
        for index in std::mem::take(&mut self.blobs) {
            self.look_up_alone(index)?;
        }
        Ok(())
    }

    /// Looks up one key without interleaving.
    #[cold]
    fn look_up_alone(&mut self, index: usize) -> Result<()> {
        let value = self.tree.get(self.keys[index].as_ref())?;
        (self.visit)(index, value.map_or(FoundValue::Absent, FoundValue::Guarded));
        Ok(())
    }

    /// Starts the reads for waiting lookups, and makes lookups active whose pages have arrived. If
    /// no lookup is active, waits for one page.
    #[cold]
    #[inline(never)]
    fn serve_waiting(
        &mut self,
        active: &mut [Lookup<'a>; ACTIVE],
        mut count: usize,
    ) -> Result<usize> {
        self.bring_in();
        // While many lookups are active the others may wait, because checking them costs time.
        if count > ACTIVE / 2 {
            return Ok(count);
        }
        let mut at = 0;
        while at < self.waiting.len() && count < ACTIVE {
            if self.still_waits(at) {
                at += 1;
            } else {
                active[count] = self.waiting.swap_remove(at);
                count += 1;
            }
        }
        self.bring_in();
        if count == 0 {
            // When the page in the middle has arrived, about half of the pages have. So the thread
            // wakes up rarely, and the device stays busy.
            let mut lookup = self.waiting.swap_remove(self.waiting.len() / 2);
            if !self.await_page(&mut lookup)? {
                active[0] = lookup;
                count = 1;
            }
        }
        Ok(count)
    }

    fn bring_in(&mut self) {
        if !self.missing.is_empty() {
            self.tree.pages.pool.evict_and_prefetch(&self.missing);
            self.missing.clear();
        }
    }

    /// Whether the page of a waiting lookup has not arrived. If no read of the page is under way,
    /// for example because the pool had no frame for it, its read is started again.
    fn still_waits(&mut self, at: usize) -> bool {
        let pool = &self.tree.pages.pool;
        let lookup = &mut self.waiting[at];
        let Stage::EnterChild(id) = lookup.stage else { return false };
        let page = self.tree.page(id);
        if pool.try_optimistic(page).is_some() {
            return false;
        }
        if lookup.waits < READS_MAX && !pool.is_resident(page) {
            if lookup.node.validate().is_err() {
                return false;
            }
            lookup.waits += 1;
            self.missing.push(page);
        }
        true
    }

    /// Waits for the page that a lookup needs, or reads it. Returns true if the lookup is done.
    fn await_page(&mut self, lookup: &mut Lookup<'a>) -> Result<bool> {
        let Stage::EnterChild(id) = lookup.stage else { return Ok(false) };
        if lookup.waits > WAITS_MAX {
            // The pool evicts the lookup's pages as soon as they have arrived.
            return self.look_up_alone(lookup.index).map(|()| true);
        }
        match self.tree.fault_in_child(lookup.node, id) {
            Ok(_) => Ok(false),
            Err(error) => {
                self.interrupted(lookup, error).map(|turn| matches!(turn, LookupProgress::Done))
            }
        }
    }
}
