//! Looking up many keys at once, so that none waits for the memory or the device alone.
//!
//! Up to [`ACTIVE`] lookups are under way side by side. Each does what it can with what is in the
//! processor's caches, asks for the cache lines that it needs next, and gives way to the next one
//! (asynchronous memory access chaining, Kocberber, Falsafi and Grot, VLDB'15). A lookup whose page
//! is not in memory steps aside; the reads of all that did so are started together, and the others
//! go on meanwhile. Only when none can go on does the thread wait.
//!
//! Each lookup is an optimistic descent of its own, by the rules in `descend.rs`: a change on its
//! way restarts it and no other. No page is held between two steps, so a batch needs no more of
//! the pool than its luckiest lookup.

use vellum_pool::{OptimisticGuard, PageRef};

use super::Access;
use super::lookup::HeldLeaf;
use super::lookup::{Step, Stop};
use crate::error::{Error, Result};
use crate::node::{INNER_SLOT, LEAF_SLOT, Node, PayloadPlace, Search};
use crate::value::Value;

/// Lookups under way at a time: enough to hide the latency of memory, and so few that what they
/// asked for is still in the first cache when their turn comes.
const ACTIVE: usize = 32;

/// Lookups that wait for reads at a time; less in a small pool.
const WAITING: u64 = 256;

/// Restarts after which a lookup goes on alone.
const RESTARTS: u8 = 16;

/// Reads that are started for a lookup before it has to read by itself, and meets the error.
const READS: u8 = 3;

/// Waits after which a lookup goes on alone.
const WAITS: u8 = 64;

/// The longest value that is copied without a buffer from the heap.
const SHORT: usize = 1024;

/// What was found for a key.
pub(crate) enum Found<'v, 'a> {
    Nothing,
    Inline(&'v [u8]),
    Held(Value<'a>),
}

/// What a lookup does at its next turn.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Begins to search the node.
    Begin,
    /// Searches the slots that are left.
    Search(Search),
    /// Enters the child with this number.
    Enter(u64),
    /// Takes the value out of a leaf.
    Take(Search),
}

/// One key on its way.
#[derive(Clone, Copy, Debug)]
struct Lookup<'a> {
    /// The node it has come to; at [`Stage::Enter`] the parent of the one to be entered.
    node: OptimisticGuard<'a>,
    stage: Stage,
    /// The key's number.
    index: usize,
    /// The node's level.
    level: u8,
    restarts: u8,
    waits: u8,
}

/// How a turn ended.
enum Turn {
    /// The lookup goes on at its next turn.
    Later,
    /// It needs a page that is not there.
    Waits,
    Done,
}

/// A batch of lookups.
struct Batch<'a, 'k, K, V> {
    access: Access<'a>,
    keys: &'k [K],
    visit: V,
    /// The root and its level, for those who start.
    root: (OptimisticGuard<'a>, u8),
    /// The next key to start.
    next: usize,
    waiting: Vec<Lookup<'a>>,
    /// Lookups that may wait at a time.
    places: usize,
    /// Pages whose reads are to be started.
    missing: Vec<PageRef>,
    /// Keys whose blobs are on their way, and the frames that those take.
    blobs: Vec<usize>,
    blob_frames: u64,
    /// Nodes that were entered, for the pool's statistics.
    entered: u64,
    short: [u8; SHORT],
    long: Vec<u8>,
}

impl<'a> Access<'a> {
    /// The values of `keys`, in their order.
    pub(crate) fn multi_get(self, keys: &[&[u8]]) -> Result<Vec<Option<Value<'a>>>> {
        let mut values: Vec<Option<Value<'a>>> = Vec::new();
        values.resize_with(keys.len(), || None);
        self.multi_get_with(keys, |index, found| {
            values[index] = match found {
                Found::Nothing => None,
                Found::Inline(bytes) => Some(Value::Inline(bytes.to_vec().into())),
                Found::Held(value) => Some(value),
            };
        })?;
        Ok(values)
    }

    /// Calls `visit` once for each key, in any order.
    #[inline]
    pub(crate) fn multi_get_with<K: AsRef<[u8]>>(
        self,
        keys: &[K],
        visit: impl FnMut(usize, Found<'_, 'a>),
    ) -> Result<()> {
        let pages = self.pages.pool.capacity() / 4 / u64::from(self.pages.page_frames);
        let mut batch = Batch {
            access: self,
            keys,
            visit,
            root: self.root_at_last()?,
            next: 0,
            waiting: Vec::new(),
            places: pages.clamp(1, WAITING) as usize,
            missing: Vec::new(),
            blobs: Vec::new(),
            blob_frames: 0,
            entered: 0,
            short: [0; SHORT],
            long: Vec::new(),
        };
        let outcome = batch.run();
        self.pages.pool.count_optimistic(batch.entered);
        outcome
    }

    /// The root and its level, however often it changes meanwhile.
    fn root_at_last(self) -> Result<(OptimisticGuard<'a>, u8)> {
        loop {
            match self.root() {
                Ok(root) => return Ok(root),
                Err(Stop::Restart) => {}
                Err(Stop::Fail(error)) => return Err(error),
            }
        }
    }
}

impl<'a, K: AsRef<[u8]>, V: FnMut(usize, Found<'_, 'a>)> Batch<'a, '_, K, V> {
    #[inline(always)]
    fn run(&mut self) -> Result<()> {
        let mut active: [Lookup<'a>; ACTIVE] = std::array::from_fn(|index| self.start(index));
        let mut count = ACTIVE.min(self.keys.len());
        self.next = count;
        while count > 0 || !self.waiting.is_empty() {
            let mut at = 0;
            while at < count {
                match self.turn(&mut active[at])? {
                    Turn::Later => {
                        at += 1;
                        continue;
                    }
                    Turn::Waits => self.waiting.push(active[at]),
                    Turn::Done => {}
                }
                if self.next < self.keys.len() && self.waiting.len() < self.places {
                    active[at] = self.start(self.next);
                    self.next += 1;
                    at += 1;
                } else {
                    count -= 1;
                    active[at] = active[count];
                }
            }
            if !self.waiting.is_empty() {
                count = self.attend(&mut active, count)?;
            }
        }
        self.finish_blobs()
    }

    /// A lookup of the key `index`, at the root.
    #[inline(always)]
    fn start(&self, index: usize) -> Lookup<'a> {
        let (node, level) = self.root;
        Lookup { node, stage: Stage::Begin, index, level, restarts: 0, waits: 0 }
    }

    /// What a lookup does before it gives way.
    #[inline(always)]
    fn turn(&mut self, lookup: &mut Lookup<'a>) -> Result<Turn> {
        match self.step(lookup) {
            Ok(turn) => Ok(turn),
            Err(stop) => self.stopped(lookup, stop),
        }
    }

    /// A lookup met a change, or an error.
    #[cold]
    fn stopped(&mut self, lookup: &mut Lookup<'a>, stop: Stop) -> Result<Turn> {
        if let Stop::Fail(error) = stop {
            return Err(error);
        }
        if lookup.restarts >= RESTARTS {
            self.finish_alone(lookup.index)?;
            return Ok(Turn::Done);
        }
        self.root = self.access.root_at_last()?;
        let restarts = lookup.restarts + 1;
        *lookup = Lookup { restarts, ..self.start(lookup.index) };
        Ok(Turn::Later)
    }

    #[inline(always)]
    fn step(&mut self, lookup: &mut Lookup<'a>) -> Step<Turn> {
        let (access, key) = (self.access, self.keys[lookup.index].as_ref());
        let pool = &access.pages.pool;
        loop {
            let level = lookup.level;
            match lookup.stage {
                Stage::Begin => {
                    let search = access.read(lookup.node, |node| match level {
                        0 => node.narrow::<LEAF_SLOT>(key),
                        _ => node.narrow::<INNER_SLOT>(key),
                    })?;
                    lookup.stage = Stage::Search(search);
                    // The nodes above the parents of leaves are few, and at hand.
                    if level < 2 && search.has_hints() {
                        let (offset, len) = search.slots_left(level);
                        pool.touch(lookup.node.page(), offset, len);
                        return Ok(Turn::Later);
                    }
                }
                Stage::Search(mut search) if level > 0 => {
                    let id = access.read(lookup.node, |node| {
                        node.probe::<INNER_SLOT>(&mut search)?;
                        Ok(node.resolve_child(search, key)?.1)
                    })?;
                    lookup.stage = Stage::Enter(id);
                    if level <= 2 {
                        pool.touch_state(access.page(id));
                        access.touch_node(access.page(id), level - 1);
                        return Ok(Turn::Later);
                    }
                }
                Stage::Enter(id) => {
                    if !self.enter(lookup, id)? {
                        return Ok(Turn::Waits);
                    }
                }
                Stage::Search(mut search) => {
                    let cell = access.read(lookup.node, |node| {
                        node.probe::<LEAF_SLOT>(&mut search)?;
                        node.cell_at(search)
                    })?;
                    lookup.stage = Stage::Take(search);
                    if let Some((offset, len)) = cell {
                        pool.touch(lookup.node.page(), offset, len.min(SHORT));
                        return Ok(Turn::Later);
                    }
                }
                Stage::Take(search) => return self.take(lookup, search),
            }
        }
    }

    /// Goes on to a child. False if it is not there; then the parent is as it was.
    #[inline(always)]
    fn enter(&mut self, lookup: &mut Lookup<'a>, id: u64) -> Step<bool> {
        let access = self.access;
        let child = access.pages.pool.glance(access.page(id));
        lookup.node.validate()?;
        let Some(child) = child else {
            lookup.waits = lookup.waits.saturating_add(1);
            self.missing.push(access.page(id));
            return Ok(false);
        };
        access.check_node(child, lookup.level - 1)?;
        self.entered += 1;
        lookup.waits = 0;
        (lookup.node, lookup.level, lookup.stage) = (child, lookup.level - 1, Stage::Begin);
        Ok(true)
    }

    /// Takes the value of a key out of the leaf it has come to.
    #[inline(always)]
    fn take(&mut self, lookup: &mut Lookup<'a>, search: Search) -> Step<Turn> {
        let (leaf, key) = (lookup.node, self.keys[lookup.index].as_ref());
        let place = self.access.read(leaf, |node| node.resolve_payload(search, key))?;
        let Some(place) = place else {
            leaf.validate()?;
            (self.visit)(lookup.index, Found::Nothing);
            return Ok(Turn::Done);
        };
        if place.blob {
            return self.take_blob(lookup, place);
        }
        let value = match self.short.get_mut(..place.len) {
            Some(value) => value,
            None => {
                self.long.resize(place.len, 0);
                &mut self.long[..]
            }
        };
        self.access.read(leaf, |node| node.payload_to(place, value))?;
        leaf.validate()?;
        (self.visit)(lookup.index, Found::Inline(value));
        Ok(Turn::Done)
    }

    /// Starts to read a blob; it is taken when all lookups have come to their leaves.
    #[cold]
    fn take_blob(&mut self, lookup: &Lookup<'a>, place: PayloadPlace) -> Step<Turn> {
        let pool = &self.access.pages.pool;
        // A reference stays good as long as its leaf is held.
        let leaf = lookup.node.upgrade_shared()?;
        let torn = |torn| Error::torn(leaf.page(), torn);
        let payload = Node::new(&leaf[..]).payload(place).map_err(torn)?;
        let blob = HeldLeaf::from(&leaf).blob(payload)?;
        let (frames, most) = (u64::from(blob.page.frames), pool.capacity() / 8);
        if frames <= most && !pool.is_resident(blob.page) {
            if self.blob_frames + frames > most {
                drop(leaf);
                self.finish_blobs()?;
                // The next turn finds the reference again.
                return Ok(Turn::Later);
            }
            self.blob_frames += frames;
            pool.bring_in(&[blob.page]);
        }
        self.blobs.push(lookup.index);
        Ok(Turn::Done)
    }

    /// Hands out the blobs that were started.
    #[inline(never)]
    fn finish_blobs(&mut self) -> Result<()> {
        self.blob_frames = 0;
        for index in std::mem::take(&mut self.blobs) {
            self.finish_alone(index)?;
        }
        Ok(())
    }

    /// Looks up a key by itself.
    #[cold]
    fn finish_alone(&mut self, index: usize) -> Result<()> {
        let value = self.access.get(self.keys[index].as_ref())?;
        (self.visit)(index, value.map_or(Found::Nothing, Found::Held));
        Ok(())
    }

    /// Starts the reads that lookups wait for and takes those back whose pages have come. If there
    /// is nothing else to do, waits for one.
    #[cold]
    #[inline(never)]
    fn attend(&mut self, active: &mut [Lookup<'a>; ACTIVE], mut count: usize) -> Result<usize> {
        self.bring_in();
        // As long as many are active the others may wait: looking after them costs time, too.
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
            // Half of them have come when the one in the middle has: few awakenings, and the
            // device has something to do meanwhile.
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
            self.access.pages.pool.bring_in(&self.missing);
            self.missing.clear();
        }
    }

    /// The page of a waiting lookup has not come. If it is not on its way either, as when there
    /// was no memory for it, its read is started again.
    fn still_waits(&mut self, at: usize) -> bool {
        let pool = &self.access.pages.pool;
        let lookup = &mut self.waiting[at];
        let Stage::Enter(id) = lookup.stage else { return false };
        let page = self.access.page(id);
        if pool.glance(page).is_some() {
            return false;
        }
        if lookup.waits < READS && !pool.is_resident(page) {
            if lookup.node.validate().is_err() {
                return false;
            }
            lookup.waits += 1;
            self.missing.push(page);
        }
        true
    }

    /// Waits for the page that a lookup needs, or reads it. True if that ended the lookup.
    fn await_page(&mut self, lookup: &mut Lookup<'a>) -> Result<bool> {
        let Stage::Enter(id) = lookup.stage else { return Ok(false) };
        if lookup.waits > WAITS {
            // Its pages go as soon as they have come.
            return self.finish_alone(lookup.index).map(|()| true);
        }
        match self.access.child(lookup.node, id) {
            Ok(_) => Ok(false),
            Err(stop) => self.stopped(lookup, stop).map(|turn| matches!(turn, Turn::Done)),
        }
    }
}
