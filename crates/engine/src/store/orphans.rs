//! The nodes of a damaged store to which no sound node refers: the *tops* of what is left.
//!
//! Pages know the numbers of their trees, so a scan of the file finds them. It takes two bytes of
//! memory for each page of the file while it runs, and one bit afterwards. A salvage asks for tops
//! in the order of their keys. As many as fit into [`WINDOW_BYTES`] are in memory. The others are
//! read again when they are needed.
//!
//! Of two tops that have a key, the one with the greater sequence number counts. A node gets a new
//! one with each change of its fences. So it counts before nodes that had these keys earlier, were
//! freed, and still lie in the file. If the free map is sure, it rules such nodes out. Else it may
//! be wrong: nodes of a bulk load, and of a store without a log, have no number.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock};

use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, PageFormat, PageRef, Pool, PoolOptions, RawPages, Space};

use crate::error::{Error, Result};
use crate::key::Key;
use crate::node::{Node, Torn};
use crate::page::format::{StoreFormat, scratch_pool};
use crate::page::{self, Checksum, PageKind};
use crate::store::header::HEADER_PAGES;
use crate::sync::lock;

/// What the tops in memory may take, in bytes.
const WINDOW_BYTES: usize = 64 << 20;

/// The scan reads so many pages ahead.
const AHEAD: usize = 64;

/// It looks for inner nodes among so many nodes at a time.
const AHEAD_INNER: usize = 1 << 16;

/// The bounds of the keys of a node: its keys are greater than the first bound and at most the
/// second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyBounds<'k>(pub Option<&'k [u8]>, pub Option<&'k [u8]>);

impl<'k> KeyBounds<'k> {
    pub(crate) fn has(self, key: &[u8]) -> bool {
        self.0.is_none_or(|lower| key > lower) && self.1.is_none_or(|upper| key <= upper)
    }

    /// Whether any key can be within the bounds.
    pub(crate) fn is_possible(self) -> bool {
        !matches!(self, KeyBounds(Some(lower), Some(upper)) if lower >= upper)
    }

    /// The keys that are within both.
    pub(crate) fn and(self, other: KeyBounds<'k>) -> KeyBounds<'k> {
        let upper = match (self.1, other.1) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        KeyBounds(self.0.max(other.0), upper)
    }
}

/// A child of an inner node, and the bounds of its keys.
pub(crate) struct Child {
    pub page: u64,
    lower: Option<Key>,
    upper: Option<Key>,
}

impl Child {
    pub(crate) fn keys(&self) -> KeyBounds<'_> {
        KeyBounds(self.lower.as_deref(), self.upper.as_deref())
    }
}

/// The children of an inner node.
pub(crate) fn children(node: &[u8]) -> std::result::Result<Vec<Child>, Torn> {
    let node = Node::new(node);
    let (count, mut key) = (node.count()?, Vec::new());
    let mut lower = node.lower()?.map(Key::from);
    let mut children = Vec::with_capacity(count + 1);
    for index in 0..=count {
        let upper = match index < count {
            true => {
                node.key_into(index, &mut key)?;
                Some(Key::from(&key[..]))
            }
            false => node.upper()?.map(Key::from),
        };
        children.push(Child { page: node.child(index)?, lower, upper: upper.clone() });
        lower = upper;
    }
    Ok(children)
}

/// A node to which no sound node refers.
#[derive(Debug)]
pub(crate) struct Top {
    pub page: PageRef,
    pub level: u8,
    tree: u32,
    lsn: u64,
    lower: Option<Key>,
    upper: Option<Key>,
}

/// A tree, and a bound of its keys.
type Start = (u32, Option<Key>);

impl Top {
    fn of(page: PageRef, bytes: &[u8]) -> std::result::Result<Top, Torn> {
        let node = Node::new(bytes);
        let fence = |key: Option<&[u8]>| key.map(Key::from);
        let (lower, upper) = (fence(node.lower()?), fence(node.upper()?));
        let (tree, lsn) = (page::tree(bytes), page::lsn(bytes));
        Ok(Top { page, level: node.level()?, tree, lsn, lower, upper })
    }

    pub(crate) fn keys(&self) -> KeyBounds<'_> {
        KeyBounds(self.lower.as_deref(), self.upper.as_deref())
    }

    /// Of two nodes that have a key, that of the higher rank counts.
    fn rank(&self) -> (u64, u8, PageRef) {
        (self.lsn, self.level, self.page)
    }

    /// Where it begins, for one who asks for what comes after `from`. `None` if it ends before.
    fn start_after(&self, from: &Start) -> Option<Start> {
        let lower = match self.tree.cmp(&from.0) {
            std::cmp::Ordering::Less => return None,
            std::cmp::Ordering::Equal if self.upper.is_some() && self.upper <= from.1 => {
                return None;
            }
            std::cmp::Ordering::Equal => from.1.clone().max(self.lower.clone()),
            std::cmp::Ordering::Greater => self.lower.clone(),
        };
        Some((self.tree, lower))
    }

    /// What it takes in memory, in bytes.
    fn bytes(&self) -> usize {
        let fences = [&self.lower, &self.upper].into_iter().flatten();
        size_of::<(Candidate, Top)>() + fences.map(|key| key.len()).sum::<usize>()
    }
}

/// A top that a window may have.
struct Candidate {
    start: Start,
    top: Top,
}

impl Candidate {
    /// The first ones are those that a window keeps.
    fn order(&self) -> (&Start, Reverse<(u64, u8, PageRef)>) {
        (&self.start, Reverse(self.top.rank()))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

/// The tops from one place on, up to another one. Sorted by their trees and their lower fences.
#[derive(Debug)]
pub(crate) struct Window {
    from: Start,
    /// All if `None`.
    end: Option<Start>,
    tops: Vec<Top>,
}

/// A damaged node.
#[derive(Clone, Copy)]
pub(crate) struct Damaged {
    /// It has this level at most.
    pub level: u8,
    /// A top of this level may be an earlier copy of it, which was freed. It hides the nodes to
    /// which both refer.
    pub has_copies: bool,
}

impl Damaged {
    /// Whether a top may be what is left of the nodes below it. Only the sequence number of a copy
    /// tells it from newer nodes.
    fn leaves(self, top: &Top) -> bool {
        top.level < self.level || (top.level == self.level && self.has_copies && top.lsn > 0)
    }
}

/// A part of a gap.
pub(crate) enum Segment<'w> {
    Top(&'w Top, KeyBounds<'w>),
    /// No top has these keys. The page is the top after it, or the one before it.
    Hole(Option<PageRef>, KeyBounds<'w>),
}

impl Window {
    fn has(&self, place: &Start) -> bool {
        self.from <= *place && self.end.as_ref().is_none_or(|end| place < end)
    }

    /// The last key of a tree up to which the window has its tops. Without one it has all.
    pub(crate) fn end_in(&self, tree: u32) -> Option<&[u8]> {
        self.end.as_ref().filter(|end| end.0 == tree)?.1.as_deref()
    }

    /// Divides the keys of a gap that a damaged node leaves between the tops that count, in order.
    /// `visit` returns false to end this.
    pub(crate) fn divide<'w>(
        &'w self,
        tree: u32,
        damaged: Damaged,
        gap: KeyBounds<'w>,
        visit: &mut dyn FnMut(Segment<'w>) -> bool,
    ) -> bool {
        let first = self.tops.partition_point(|top| top.tree < tree);
        let tops = self.tops[first..].iter().take_while(|top| top.tree == tree);
        let is_in = |top: &&Top| damaged.leaves(top) && top.keys().and(gap).is_possible();
        let mut tops = tops.filter(is_in).peekable();
        let (mut begun, mut at, mut last) = (BinaryHeap::new(), gap.0, None);
        loop {
            while let Some(top) = tops.next_if(|top| top.lower.as_deref() <= at) {
                begun.push(Ranked(top));
            }
            let ends = |top: &Top| top.upper.is_some() && top.upper.as_deref() <= at;
            while begun.peek().is_some_and(|Ranked(top)| ends(top)) {
                begun.pop();
            }
            let rest = KeyBounds(at, gap.1);
            let segment = match (begun.peek(), tops.peek()) {
                (None, next) => {
                    let upper = next.map(|next| (next.page, next.lower.as_deref()));
                    let keys = rest.and(KeyBounds(None, upper.and_then(|(_, lower)| lower)));
                    Segment::Hole(upper.map(|(page, _)| page).or(last), keys)
                }
                (Some(&Ranked(best)), _) => {
                    let mut keys = rest.and(KeyBounds(None, best.upper.as_deref()));
                    while let Some(next) = tops.peek()
                        && keys.has_inside(next.lower.as_deref())
                    {
                        if next.rank() > best.rank() {
                            keys.1 = next.lower.as_deref();
                            break;
                        }
                        begun.extend(tops.next().map(Ranked));
                    }
                    last = Some(best.page);
                    Segment::Top(best, keys)
                }
            };
            let (Segment::Top(_, keys) | Segment::Hole(_, keys)) = &segment;
            let upper = keys.1;
            if !visit(segment) {
                return false;
            }
            at = upper;
            if upper == gap.1 {
                return true;
            }
        }
    }
}

impl KeyBounds<'_> {
    /// Whether keys that are greater than this bound, and others, are within these bounds.
    fn has_inside(self, lower: Option<&[u8]>) -> bool {
        lower.is_some_and(|lower| self.1.is_none_or(|upper| lower < upper))
    }
}

/// In the order of ranks.
struct Ranked<'w>(&'w Top);

impl PartialEq for Ranked<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.0.rank() == other.0.rank()
    }
}

impl Eq for Ranked<'_> {}

impl PartialOrd for Ranked<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ranked<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.rank().cmp(&other.0.rank())
    }
}

/// What the scan knows of a page: whether it is a sound node, an inner one, and one to which a
/// sound node refers; and a fingerprint of its tree, its level and its fences. A node refers to
/// another one only if that is what the reference says. So stale nodes, and those of a hostile
/// file, hide no other node, or one of 8,192.
#[derive(Clone, Copy, Default)]
struct Seen(u16);

impl Seen {
    const NODE: u16 = 1 << 15;
    const INNER: u16 = 1 << 14;
    const REFERRED_TO: u16 = 1 << 13;

    fn fingerprint(tree: u32, level: u8, keys: KeyBounds<'_>) -> u16 {
        let mut hasher = DefaultHasher::new();
        (tree, level, keys.0, keys.1).hash(&mut hasher);
        hasher.finish() as u16 & (Self::REFERRED_TO - 1)
    }

    fn of(top: &Top) -> Seen {
        let inner = if top.level > 0 { Self::INNER } else { 0 };
        Seen(Self::NODE | inner | Self::fingerprint(top.tree, top.level, top.keys()))
    }

    fn note_reference(&mut self, fingerprint: u16) {
        if self.0 & Self::NODE != 0 && self.0 & (Self::REFERRED_TO - 1) == fingerprint {
            self.0 |= Self::REFERRED_TO;
        }
    }

    fn is_inner(self) -> bool {
        self.0 & Self::INNER != 0
    }

    fn is_top(self) -> bool {
        self.0 & (Self::NODE | Self::REFERRED_TO) == Self::NODE
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Orphans {
    device: Arc<dyn Device>,
    page_frames: u32,
    /// The free pages, if they are known for sure. Free pages may be nodes of dropped trees.
    space: Option<Space>,
    window_bytes: usize,
    scan: OnceLock<Scan>,
    window: Mutex<Option<Arc<Window>>>,
}

/// What a scan of the file has found.
#[derive(Debug)]
struct Scan {
    /// Apart from the store's pool, which may have a value in the place of a node.
    pool: Pool,
    /// A bit for each place of a node: whether there is a top.
    tops: Vec<u64>,
    /// The trees of the tops.
    trees: BTreeSet<u32>,
}

/// Is told which page the scan has reached. Its error ends the scan.
pub(crate) type Progress<'p> = &'p mut dyn FnMut(u64) -> Result<()>;

impl Orphans {
    pub(crate) fn new(device: &Arc<dyn Device>, page_frames: u32, space: Option<Space>) -> Orphans {
        Orphans {
            device: device.clone(),
            page_frames,
            space,
            window_bytes: WINDOW_BYTES,
            scan: OnceLock::new(),
            window: Mutex::default(),
        }
    }

    /// Scans the file, unless that was done.
    ///
    /// # Errors
    /// Too little memory for the scan, and the error of `progress`.
    pub(crate) fn find(&self, progress: Progress<'_>) -> Result<()> {
        self.scan(progress).map(drop)
    }

    /// The numbers of the trees that have tops.
    pub(crate) fn trees(&self) -> Result<&BTreeSet<u32>> {
        Ok(&self.scan(&mut |_| Ok(()))?.trees)
    }

    /// The tops of a tree from those on that have a key after this one.
    pub(crate) fn window(&self, tree: u32, from: Option<&[u8]>) -> Result<Arc<Window>> {
        let from = (tree, from.map(Key::from));
        let mut window = lock(&self.window);
        match &*window {
            Some(window) if window.has(&from) => Ok(window.clone()),
            _ => {
                // If all fit, the window serves for all trees.
                let first = if window.is_none() { (0, None) } else { from.clone() };
                let mut loaded = self.load(first)?;
                if !loaded.has(&from) {
                    loaded = self.load(from)?;
                }
                Ok(window.insert(Arc::new(loaded)).clone())
            }
        }
    }

    fn load(&self, from: Start) -> Result<Window> {
        let scan = self.scan(&mut |_| Ok(()))?;
        let words = scan.tops.iter().enumerate();
        let places = words.flat_map(|(at, word)| {
            (0..64).filter(move |bit| word & 1 << bit != 0).map(move |bit| 64 * at + bit)
        });
        let (mut kept, mut bytes, mut end) = (BinaryHeap::new(), 0, None::<Start>);
        scan.each(places.map(|at| self.place(at)), |page, read| {
            let Some(top) = sound_node(page, read) else { return Ok(()) };
            let Some(start) = top.start_after(&from) else { return Ok(()) };
            if end.as_ref().is_some_and(|end| start >= *end) {
                return Ok(());
            }
            bytes += top.bytes();
            kept.push(Candidate { start, top });
            while bytes > self.window_bytes
                && let Some(Candidate { start, top }) = kept.pop()
            {
                bytes -= top.bytes();
                // If too many have the first key, those of the lowest ranks are left out.
                end = if start > from { Some(start) } else { end.take() };
            }
            Ok(())
        })?;
        let mut tops: Vec<_> = kept.into_iter().map(|Candidate { top, .. }| top).collect();
        tops.sort_by(|a, b| (a.tree, &a.lower).cmp(&(b.tree, &b.lower)));
        Ok(Window { from, end, tops })
    }

    /// The place of a node by its number.
    fn place(&self, at: usize) -> PageRef {
        PageRef::new(HEADER_PAGES + at as u64 * u64::from(self.page_frames), self.page_frames)
    }

    fn scan(&self, progress: Progress<'_>) -> Result<&Scan> {
        if let Some(scan) = self.scan.get() {
            return Ok(scan);
        }
        let unit = u64::from(self.page_frames);
        let frames = (4 * AHEAD as u64 * unit).max(PoolOptions::MIN_FRAMES);
        let pool = scratch_pool(&self.device, Arc::new(RawPages), frames)?;
        let count = (pool.file_pages().saturating_sub(HEADER_PAGES) / unit) as usize;
        let mut seen = nothing_seen(count)?;
        let mut scan = Scan { pool, tops: Vec::new(), trees: BTreeSet::new() };
        self.find_nodes(&scan, &mut seen, progress)?;
        let file_pages = scan.pool.file_pages();
        for first in (0..count).step_by(AHEAD_INNER) {
            let some = first..count.min(first + AHEAD_INNER);
            let inner = some.filter(|at| seen[*at].is_inner()).map(|at| self.place(at));
            let inner: Vec<_> = inner.collect();
            scan.each(inner.into_iter(), |page, bytes| {
                progress(file_pages)?;
                self.note_children(page, bytes, &mut seen);
                Ok(())
            })?;
        }
        let is_top = |word: &[Seen]| {
            let bits = word.iter().enumerate().map(|(bit, seen)| u64::from(seen.is_top()) << bit);
            bits.sum()
        };
        scan.tops = seen.chunks(64).map(is_top).collect();
        let tops = (0..count).filter(|at| seen[*at].is_top()).map(|at| self.place(at));
        let mut trees = BTreeSet::new();
        scan.each(tops, |_, bytes| {
            trees.insert(page::tree(bytes));
            Ok(())
        })?;
        scan.trees = trees;
        Ok(self.scan.get_or_init(|| scan))
    }

    fn note_children(&self, page: PageRef, bytes: &[u8], seen: &mut [Seen]) {
        let Some(top) = sound_node(page, bytes) else { return };
        let (Ok(children), Some(level)) = (children(bytes), top.level.checked_sub(1)) else {
            return;
        };
        let unit = u64::from(self.page_frames);
        for child in children {
            let at = child.page.checked_sub(HEADER_PAGES).filter(|at| at.is_multiple_of(unit));
            let at = at.and_then(|at| usize::try_from(at / unit).ok());
            if let Some(seen) = at.and_then(|at| seen.get_mut(at)) {
                seen.note_reference(Seen::fingerprint(top.tree, level, child.keys()));
            }
        }
    }

    /// Finds the sound nodes of the file. What is within a sound value is none, whatever its bytes
    /// are.
    fn find_nodes(&self, scan: &Scan, seen: &mut [Seen], progress: Progress<'_>) -> Result<()> {
        let unit = u64::from(self.page_frames);
        let value_end = Cell::new(0);
        // The file may be longer than its space.
        let is_free = |page: &PageRef| {
            self.space
                .as_ref()
                .is_some_and(|space| space.has_free(page.id.0, unit) || page.id.0 >= space.end())
        };
        let places = (0..seen.len()).map(|at| self.place(at));
        let places = places.filter(|page| page.id.0 >= value_end.get() && !is_free(page));
        // Frames that may be read in vain: a hostile file could claim many long values.
        let mut spare = 2 * scan.pool.file_pages();
        scan.each(places, |page, bytes| {
            progress(page.id.0)?;
            if page.id.0 < value_end.get() {
                return Ok(());
            }
            if let Some(top) = sound_node(page, bytes) {
                let at = (page.id.0 - HEADER_PAGES) / unit;
                seen.get_mut(at as usize).into_iter().for_each(|seen| *seen = Seen::of(&top));
            } else if let Some(value) = claimed_value(page, bytes, scan.pool.file_pages()) {
                let len = u64::from(value.frames);
                match spare.checked_sub(len) {
                    Some(_) if scan.is_sound(value, bytes, page.frames) => {
                        value_end.set(value.id.0 + len);
                    }
                    left => spare = left.unwrap_or(spare),
                }
            }
            Ok(())
        })
    }
}

/// What is known of so many pages before the scan. A damaged file may be longer than what the
/// memory suffices for.
fn nothing_seen(count: usize) -> Result<Vec<Seen>> {
    let mut seen = Vec::new();
    seen.try_reserve_exact(count).map_err(|_| {
        Error::BadOption(format!(
            "the salvage needs two bytes of memory for each of the file's {count} pages, and has \
             not got them"
        ))
    })?;
    seen.resize(count, Seen::default());
    Ok(seen)
}

impl Scan {
    /// Reads pages in order. Skips those that cannot be read.
    fn each(
        &self,
        mut pages: impl Iterator<Item = PageRef>,
        mut visit: impl FnMut(PageRef, &[u8]) -> Result<()>,
    ) -> Result<()> {
        loop {
            let some: Vec<_> = pages.by_ref().take(AHEAD).collect();
            if some.is_empty() {
                return Ok(());
            }
            self.pool.evict_and_prefetch(&some);
            for page in some {
                if let Ok(read) = self.pool.fix_shared(page) {
                    visit(page, &read)?;
                }
            }
        }
    }

    /// Whether a page of many frames has the checksum of its bytes. `first` are the first ones.
    fn is_sound(&self, page: PageRef, first: &[u8], unit: u32) -> bool {
        let mut checksum = Checksum::of(first);
        let (mut read, range) = (u64::from(unit), page.range());
        let rest = (range.start..range.start + range.count).step_by(unit as usize).skip(1);
        let rest = rest.map(|start| PageRef::new(start, unit));
        let outcome = self.each(rest, |part, bytes| {
            read += u64::from(part.frames);
            checksum.add(bytes);
            Ok(())
        });
        let is_whole = outcome.is_ok() && read == range.count;
        is_whole && page::verify_parts(page, first, checksum.value()).is_ok()
    }
}

/// The sound node in a page.
fn sound_node(page: PageRef, bytes: &[u8]) -> Option<Top> {
    let is_sound = page::is_node(bytes) && StoreFormat::to_read().verify(page, bytes).is_ok();
    is_sound.then(|| Top::of(page, bytes).ok()).flatten()
}

/// The page of a value that begins in a page, if it is longer than that, and within the file.
fn claimed_value(page: PageRef, bytes: &[u8], file_pages: u64) -> Option<PageRef> {
    let value = page::claimed(bytes).filter(|claimed| claimed.id == page.id)?;
    let kind = PageKind::from_number(page::kind_number(bytes))?;
    let is_value = matches!(kind, PageKind::Blob | PageKind::Piece | PageKind::PieceIndex);
    let is_long = value.frames > page.frames && value.frames.is_multiple_of(page.frames);
    let is_within = page.id.0 + u64::from(value.frames) <= file_pages;
    (is_value && is_long && is_within && bytes.len() >= PAGE_SIZE).then_some(value)
}

#[cfg(test)]
mod tests {
    use vellum_pool::device::MemoryDevice;

    use super::*;
    use crate::store::open;
    use crate::tree::TreeRef;
    use crate::{Options, Store};

    #[test]
    fn a_file_for_which_the_memory_does_not_suffice_is_an_error() {
        assert_eq!(nothing_seen(3).unwrap().len(), 3);
        let refused = nothing_seen(usize::MAX / 4).err().unwrap().to_string();
        assert!(refused.contains("memory"), "{refused}");
    }

    /// Windows of few tops bring back what one of all tops does.
    #[test]
    fn tops_that_do_not_fit_into_memory_are_read_again() {
        let options = Options::new().pool_bytes(4 << 20);
        let device = Arc::new(MemoryDevice::new());
        let store = Store::create_on(device.clone(), &options).unwrap();
        for name in ["a", "t", "z"] {
            let sorted = (0..9000_u32).map(|number| (number.to_be_bytes(), [7; 100]));
            store.create_tree(name).unwrap().bulk_load(sorted).unwrap();
        }
        store.close().unwrap();
        let mut image = device.snapshot();
        let is_inner = |page: &&mut [u8]| page[36] == PageKind::Inner as u8;
        image.chunks_mut(PAGE_SIZE).skip(2).filter(is_inner).for_each(|page| page[200] ^= 1);
        // So few that a window ends in the midst of a tree, and even right after its first top.
        for window_bytes in [WINDOW_BYTES, 5000, 700, 1] {
            let device = Arc::new(MemoryDevice::from_snapshot(image.clone()));
            let mut core = open::open(device, &options.clone().salvage(true)).unwrap();
            core.orphans.as_mut().unwrap().window_bytes = window_bytes;
            let (trees, _) = core.salvage_catalog(None);
            assert_eq!(trees.len(), 3);
            for state in trees.iter().rev() {
                let tree = TreeRef { pages: &core.pages, state };
                let (mut found, mut damage) = (Vec::new(), 0);
                tree.salvage_readers(core.orphans.as_ref(), &mut |entry| {
                    match entry {
                        Ok((key, _)) => found.push(u32::from_be_bytes(key.try_into().unwrap())),
                        Err(_) => damage += 1,
                    }
                    true
                });
                // A window has room for one top, or none can be found.
                match window_bytes {
                    1 => assert!(found.is_empty() && damage > 0),
                    _ => assert!(found.into_iter().eq(0..9000) && damage == 1, "{damage}"),
                }
            }
        }
    }
}
