//! The resident pages of one shard, in a hash table by their place, and in four queues.
//!
//! An open-addressing table of 16 bytes per entry. The first word of an entry is the page. The
//! second one links it into one of the queues and holds what the policy notes about it. Pages do
//! not move while they are in the table, except when it grows. The old pages, followed by the young
//! ones, are one chain, so that a page becomes old without a write to any other.

use crate::page::PageRef;

/// A queue of the policy. Pages come at the newest end and are looked at from the oldest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    /// New pages that no search has looked at yet.
    Young,
    /// New pages that were marked, to see whether a thread accesses them again.
    Old,
    /// Pages that were accessed again.
    Main,
    /// New pages that were read ahead, until the access for which they were is likely to be over.
    Ahead,
}

/// The policy's record of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Note {
    /// How many looks that find it unused it survives: 0 to 3.
    pub(super) credit: u8,
    /// The search proposed it from the queues of new pages: a ghost remembers it when it leaves.
    pub(super) leaves_ghost: bool,
    /// The epoch in which the page came: a number from 0 to 7, after which the numbers begin again.
    pub(super) epoch: u8,
}

impl Note {
    /// How many numbers epochs have.
    pub(super) const EPOCHS: u8 = 8;

    /// The epoch after this one.
    pub(super) fn epoch_after(epoch: u8) -> u8 {
        (epoch + 1) % Note::EPOCHS
    }

    /// How many epochs have begun since the page came: 0 to 7.
    pub(super) fn epochs_until(self, now: u8) -> u8 {
        (now + Note::EPOCHS - self.epoch) % Note::EPOCHS
    }
}

/// An entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(u32);

/// No entry. Also the most entries that a table can have, which is 1 TiB of pages.
const NONE: u32 = (1 << LINK_BITS) - 1;
const LINK_BITS: u32 = 28;
const FRAMES_BITS: u32 = 24;
const FREE: [u64; 2] = [0; 2];

/// The second word of an entry, unpacked.
#[derive(Clone, Copy)]
struct Links {
    older: u32,
    newer: u32,
    queue: Queue,
    note: Note,
}

impl Links {
    fn pack(self) -> u64 {
        let note = u64::from(self.note.credit)
            | u64::from(self.note.leaves_ghost) << 2
            | u64::from(self.note.epoch) << 3;
        let links = u64::from(self.older) | u64::from(self.newer) << LINK_BITS;
        links | (self.queue as u64) << (2 * LINK_BITS) | note << (2 * LINK_BITS + 2)
    }

    fn unpack(word: u64) -> Links {
        let bits = word >> (2 * LINK_BITS);
        let queue = match bits & 3 {
            0 => Queue::Young,
            1 => Queue::Old,
            2 => Queue::Main,
            _ => Queue::Ahead,
        };
        let note = Note {
            credit: (bits >> 2 & 3) as u8,
            leaves_ghost: bits >> 4 & 1 == 1,
            epoch: (bits >> 5 & 7) as u8,
        };
        let older = (word & u64::from(NONE)) as u32;
        Links { older, newer: (word >> LINK_BITS & u64::from(NONE)) as u32, queue, note }
    }
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
}

const EMPTY: Ends = Ends { oldest: NONE, newest: NONE };

/// The resident pages of one shard.
pub(super) struct PageTable {
    entries: Vec<[u64; 2]>,
    pages: usize,
    /// No page is further from its first entry than this.
    reach: usize,
    /// Old and young pages.
    new: Ends,
    main: Ends,
    ahead: Ends,
    /// The oldest of the young pages.
    young: u32,
    /// Of the pages in each queue.
    frames: [u64; 4],
}

/// Scatters the places of pages (the finalizer of SplitMix64). Its top byte chooses the shard.
pub(super) fn hash(page: PageRef) -> u64 {
    let mut z = page.id.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn encode(page: PageRef) -> u64 {
    debug_assert!(page.frames > 0 && page.frames <= PageRef::MAX_FRAMES);
    (page.id.0 << FRAMES_BITS) | u64::from(page.frames)
}

fn decode(word: u64) -> PageRef {
    PageRef::new(word >> FRAMES_BITS, (word & u64::from(PageRef::MAX_FRAMES)) as u32)
}

/// Entries for so many pages: a quarter stays free.
fn entries_for(pages: usize) -> usize {
    (pages + pages / 3 + 8).min(NONE as usize)
}

impl PageTable {
    /// For `pages` pages; it grows if more come.
    pub(super) fn new(pages: usize) -> PageTable {
        PageTable {
            entries: vec![FREE; entries_for(pages)],
            pages: 0,
            reach: 0,
            new: EMPTY,
            main: EMPTY,
            ahead: EMPTY,
            young: NONE,
            frames: [0; 4],
        }
    }

    /// How many pages there are.
    pub(super) fn len(&self) -> usize {
        self.pages
    }

    /// Frames of the pages in a queue.
    pub(super) fn frames(&self, queue: Queue) -> u64 {
        self.frames[queue as usize]
    }

    /// Frames of all pages.
    pub(super) fn all_frames(&self) -> u64 {
        self.frames.iter().sum()
    }

    /// The page in an entry that is not free.
    pub(super) fn page(&self, entry: Entry) -> PageRef {
        decode(self.entries[entry.0 as usize][0])
    }

    fn links(&self, entry: u32) -> Links {
        Links::unpack(self.entries[entry as usize][1])
    }

    fn change_links(&mut self, entry: u32, change: impl FnOnce(&mut Links)) {
        let mut links = self.links(entry);
        change(&mut links);
        self.entries[entry as usize][1] = links.pack();
    }

    /// The record of the page in an entry.
    pub(super) fn note(&self, entry: Entry) -> Note {
        self.links(entry.0).note
    }

    fn first_entry(&self, page: PageRef) -> usize {
        let below_shard = hash(page) << 8;
        ((u128::from(below_shard) * self.entries.len() as u128) >> 64) as usize
    }

    /// The entry of a page, if the table has it with this size.
    pub(super) fn find(&self, page: PageRef) -> Option<Entry> {
        let wanted = encode(page);
        let mut entry = self.first_entry(page);
        for _ in 0..=self.reach {
            if self.entries[entry][0] == wanted {
                return Some(Entry(entry as u32));
            }
            entry = self.after(entry);
        }
        None
    }

    fn after(&self, entry: usize) -> usize {
        if entry + 1 < self.entries.len() { entry + 1 } else { 0 }
    }

    /// Adds a page that is not in the table, as the newest of a queue, but not of the old pages.
    pub(super) fn insert(&mut self, page: PageRef, queue: Queue, note: Note) {
        debug_assert_ne!(queue, Queue::Old);
        if self.pages >= self.entries.len() - self.entries.len() / 8 {
            self.grow();
        }
        self.place(page, queue, note);
    }

    fn place(&mut self, page: PageRef, queue: Queue, note: Note) {
        let (mut entry, mut distance) = (self.first_entry(page), 0);
        // The loop ends: an eighth of the entries is free, or the table had grown.
        while self.entries[entry][0] != 0 {
            entry = self.after(entry);
            distance += 1;
        }
        self.reach = self.reach.max(distance);
        self.pages += 1;
        self.entries[entry][0] = encode(page);
        self.link(entry as u32, queue, note);
    }

    fn grow(&mut self) {
        let larger = PageTable::new(self.entries.len() + self.entries.len() / 4);
        let smaller = std::mem::replace(self, larger);
        for mut next in [smaller.new.oldest, smaller.main.oldest, smaller.ahead.oldest] {
            while next != NONE {
                let links = smaller.links(next);
                self.place(smaller.page(Entry(next)), links.queue, links.note);
                next = links.newer;
            }
        }
    }

    /// Takes a page out.
    pub(super) fn remove(&mut self, entry: Entry) {
        self.unlink(entry.0);
        self.entries[entry.0 as usize] = FREE;
        self.pages -= 1;
    }

    /// The oldest page of a queue.
    pub(super) fn oldest(&self, queue: Queue) -> Option<Entry> {
        let oldest = match queue {
            Queue::Young => self.young,
            Queue::Old if self.new.oldest == self.young => NONE,
            Queue::Old => self.new.oldest,
            Queue::Main => self.main.oldest,
            Queue::Ahead => self.ahead.oldest,
        };
        (oldest != NONE).then_some(Entry(oldest))
    }

    /// Makes the oldest of the young pages the newest of the old ones.
    pub(super) fn age(&mut self, entry: Entry) {
        debug_assert_eq!(entry.0, self.young);
        let frames = u64::from(self.page(entry).frames);
        self.frames[Queue::Young as usize] -= frames;
        self.frames[Queue::Old as usize] += frames;
        self.young = self.links(entry.0).newer;
        self.change_links(entry.0, |links| links.queue = Queue::Old);
    }

    /// Makes a page that was read ahead the newest of the young ones.
    pub(super) fn make_young(&mut self, entry: Entry) {
        debug_assert_eq!(self.links(entry.0).queue, Queue::Ahead);
        self.unlink(entry.0);
        self.link(entry.0, Queue::Young, Note::default());
    }

    /// Makes a page the newest of the main queue, which it may have been in before.
    pub(super) fn renew(&mut self, entry: Entry, note: Note) {
        self.unlink(entry.0);
        self.link(entry.0, Queue::Main, note);
    }

    fn ends(&mut self, queue: Queue) -> &mut Ends {
        match queue {
            Queue::Young | Queue::Old => &mut self.new,
            Queue::Main => &mut self.main,
            Queue::Ahead => &mut self.ahead,
        }
    }

    fn unlink(&mut self, entry: u32) {
        let Links { older, newer, queue, .. } = self.links(entry);
        self.frames[queue as usize] -= u64::from(self.page(Entry(entry)).frames);
        if entry == self.young {
            self.young = newer;
        }
        match older {
            NONE => self.ends(queue).oldest = newer,
            older => self.change_links(older, |links| links.newer = newer),
        }
        match newer {
            NONE => self.ends(queue).newest = older,
            newer => self.change_links(newer, |links| links.older = older),
        }
    }

    /// Old pages are linked only before there are young ones.
    fn link(&mut self, entry: u32, queue: Queue, note: Note) {
        self.frames[queue as usize] += u64::from(self.page(Entry(entry)).frames);
        if queue == Queue::Young && self.young == NONE {
            self.young = entry;
        }
        let older = std::mem::replace(&mut self.ends(queue).newest, entry);
        match older {
            NONE => self.ends(queue).oldest = entry,
            older => self.change_links(older, |links| links.newer = entry),
        }
        self.entries[entry as usize][1] = Links { older, newer: NONE, queue, note }.pack();
    }

    /// All pages, in no order.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageRef> {
        self.entries.iter().filter(|entry| entry[0] != 0).map(|entry| decode(entry[0]))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const QUEUES: [Queue; 4] = [Queue::Young, Queue::Old, Queue::Main, Queue::Ahead];

    fn contents(table: &PageTable) -> [Vec<PageRef>; 4] {
        let mut queues: [Vec<PageRef>; 4] = Default::default();
        for ends in [table.new, table.main, table.ahead] {
            let (mut next, mut older) = (ends.oldest, NONE);
            while next != NONE {
                let links = table.links(next);
                assert_eq!(links.older, older);
                assert!(links.queue != Queue::Old || queues[Queue::Young as usize].is_empty());
                queues[links.queue as usize].push(table.page(Entry(next)));
                (older, next) = (next, links.newer);
            }
            assert_eq!(ends.newest, older);
        }
        for queue in QUEUES {
            let pages = &queues[queue as usize];
            let frames: u64 = pages.iter().map(|page| u64::from(page.frames)).sum();
            assert_eq!(table.frames(queue), frames);
            let oldest = table.oldest(queue).map(|entry| table.page(entry));
            assert_eq!(oldest, pages.first().copied());
        }
        queues
    }

    proptest! {
        /// Made for two pages, so that it grows, too.
        #[test]
        fn behaves_like_four_queues(
            steps in prop::collection::vec((0u8..7, 0u64..60, 1u32..5), 1..300),
        ) {
            let mut table = PageTable::new(2);
            let mut model: [VecDeque<PageRef>; 4] = Default::default();
            let remove = |model: &mut [VecDeque<PageRef>; 4], page: PageRef| {
                model.iter_mut().for_each(|queue| queue.retain(|other| *other != page));
            };
            for (step, id, frames) in steps {
                let known = model.iter().flatten().find(|page| page.id.0 == id).copied();
                match (step, known) {
                    (0, _) => {
                        let young = model[0].pop_front();
                        prop_assert_eq!(table.oldest(Queue::Young).is_some(), young.is_some());
                        table.oldest(Queue::Young).into_iter().for_each(|entry| table.age(entry));
                        model[1].extend(young);
                    }
                    (5, _) => {
                        let ahead = model[Queue::Ahead as usize].pop_front();
                        let entry = table.oldest(Queue::Ahead);
                        prop_assert_eq!(entry.is_some(), ahead.is_some());
                        entry.into_iter().for_each(|entry| table.make_young(entry));
                        model[0].extend(ahead);
                    }
                    (_, None) => {
                        let page = PageRef::new(id, frames);
                        prop_assert!(table.find(page).is_none());
                        let queue = match step {
                            1 => Queue::Main,
                            2 | 6 => Queue::Ahead,
                            _ => Queue::Young,
                        };
                        table.insert(page, queue, Note::default());
                        model[queue as usize].push_back(page);
                    }
                    (1, Some(page)) => {
                        table.remove(table.find(page).unwrap());
                        remove(&mut model, page);
                    }
                    (_, Some(page)) => {
                        let entry = table.find(page).unwrap();
                        prop_assert!(table.find(PageRef::new(id, page.frames + 1)).is_none());
                        let note = Note {
                            credit: (id % 4) as u8,
                            leaves_ghost: frames == 1,
                            epoch: (id % 8) as u8,
                        };
                        table.renew(entry, note);
                        prop_assert_eq!(table.note(entry), note);
                        remove(&mut model, page);
                        model[2].push_back(page);
                    }
                }
                prop_assert_eq!(contents(&table), model.clone().map(Vec::from));
            }
            prop_assert_eq!(table.len(), model.iter().map(VecDeque::len).sum::<usize>());
            prop_assert_eq!(table.pages().count(), table.len());
        }
    }

    #[test]
    fn a_table_that_turned_over_many_times_still_finds_quickly() {
        let mut table = PageTable::new(3_000);
        for id in 0..300_000 {
            table.insert(PageRef::new(id, 1), Queue::Young, Note::default());
            if id >= 3_000 {
                table.remove(table.find(PageRef::new(id - 3_000, 1)).unwrap());
            }
        }
        assert_eq!(table.len(), 3_000);
        assert_eq!(table.entries.len(), entries_for(3_000), "it need not grow");
        assert!(table.reach < 300, "the longest search: {}", table.reach);
    }

    #[test]
    fn epochs_take_turns() {
        let note = Note { epoch: 6, ..Note::default() };
        let mut now = 6;
        for epochs in (0..8).chain(0..8) {
            assert_eq!(note.epochs_until(now), epochs);
            now = Note::epoch_after(now);
        }
    }

    #[test]
    fn notes_survive_growth() {
        let mut table = PageTable::new(1);
        let noted = Note { credit: 3, leaves_ghost: true, epoch: 7 };
        table.insert(PageRef::new(0, 1), Queue::Main, noted);
        (1..1_000).for_each(|id| table.insert(PageRef::new(id, 1), Queue::Main, Note::default()));
        assert_eq!(table.note(table.find(PageRef::new(0, 1)).unwrap()), noted);
    }

    #[test]
    fn the_largest_reference_fits() {
        let page = PageRef::new(PageRef::MAX_ID - 7, 7);
        let large = PageRef::new(0, PageRef::MAX_FRAMES);
        let mut table = PageTable::new(2);
        table.insert(page, Queue::Young, Note::default());
        table.insert(large, Queue::Young, Note::default());
        assert_eq!(contents(&table)[0], [page, large]);
    }
}
