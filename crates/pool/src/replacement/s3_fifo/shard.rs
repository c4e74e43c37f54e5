//! The rules, for the pages of one shard. The caller holds the shard's lock.

use super::ghosts::Ghosts;
use super::table::{Entry, Note, PageTable, Queue, hash};
use crate::page::PageRef;
use crate::replacement::{Arrival, MarkOutcome, Residents};

/// New pages have this part of the frames. If they have more, they leave first ...
const NEW_PART: u64 = 16;
/// ... but this part while the pool fills up, so that they make room first.
const NEW_PART_FILLING: u64 = 12;
/// The search looks at this many new pages and then at one of the main queue, even if new pages
/// make all the room: so a page that was hot once leaves in the end.
const AGING: u32 = 32;
/// Of the frames of new pages, this part holds pages that no search has looked at yet.
const YOUNG: (u64, u64) = (3, 10);
/// Pages that were read ahead have at most this part of the frames. They stay apart from the other
/// new pages until as many pages as this part of the frames have come after them ...
const AHEAD_PART: u64 = 4;
/// ... or this many, counted in all shards together. A scan reads up to 1,024 pages ahead, or an
/// eighth of the pool.
const AHEAD_MOST: u64 = 4_096;
/// This many epochs pass while so many pages come.
const AHEAD_EPOCHS: u8 = 4;
// A page that stays one epoch longer must not look like one that has just come.
const _: () = assert!(AHEAD_EPOCHS + 1 < Note::EPOCHS);
/// The most credit that a page of the main queue can gain.
const CREDIT_MAX: u8 = 3;
/// Looks after which a page of the main queue that stays unused can go: one that marks it, one for
/// each credit, one that finds it without any.
pub(super) const LOOKS_PER_PAGE: usize = CREDIT_MAX as usize + 3;

/// How many pages and frames are still wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) frames: u64,
    pub(super) pages: usize,
}

impl Wanted {
    pub(super) fn is_nothing(self) -> bool {
        self.frames == 0 || self.pages == 0
    }

    fn found(&mut self, page: PageRef) {
        self.frames = self.frames.saturating_sub(u64::from(page.frames));
        self.pages -= 1;
    }
}

/// The most that a shard does in one search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Pages to propose.
    pub(super) pages: usize,
    /// Looks at pages.
    pub(super) looks: usize,
}

/// A part of the resident pages, chosen by their hash, with its own queues and ghosts.
pub(super) struct Shard {
    table: PageTable,
    ghosts: Ghosts,
    /// New pages that were looked at since one of the main queue was.
    since_main: u32,
    /// How many pages come in an epoch.
    epoch_pages: u64,
    /// Pages that came in this epoch.
    came: u64,
    /// Its number, as [`Note::epoch`].
    epoch: u8,
}

impl Shard {
    /// One of `shards` shards, for about `frames` frames, that remembers `ghosts` frames.
    pub(super) fn new(frames: u64, ghosts: u64, shards: u64) -> Shard {
        let pages = usize::try_from(frames).unwrap_or(usize::MAX);
        Shard {
            table: PageTable::new(pages),
            ghosts: Ghosts::new(ghosts),
            since_main: 0,
            epoch_pages: (frames / AHEAD_PART).min(AHEAD_MOST / shards) / u64::from(AHEAD_EPOCHS),
            came: 0,
            epoch: 0,
        }
    }

    /// How many pages there are.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// How many frames they have.
    pub(super) fn frames(&self) -> u64 {
        self.table.all_frames()
    }

    #[cfg(all(test, not(feature = "model")))]
    pub(super) fn ahead_frames(&self) -> u64 {
        self.table.frames(Queue::Ahead)
    }

    /// All pages, in no order.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageRef> {
        self.table.pages()
    }

    pub(super) fn contains(&self, page: PageRef) -> bool {
        self.table.find(page).is_some()
    }

    fn new_frames(&self) -> u64 {
        self.table.frames(Queue::Young) + self.table.frames(Queue::Old)
    }

    /// Whether new pages have more than one `part`th of the frames.
    fn new_exceed(&self, part: u64) -> bool {
        self.new_frames() * part > self.frames()
    }

    pub(super) fn admit(&mut self, page: PageRef, arrival: Arrival, filling: bool) {
        self.page_comes();
        let note = Note { epoch: self.epoch, ..Note::default() };
        let queue = match arrival {
            _ if self.ghosts.take(hash(page)) => Queue::Main,
            Arrival::Needed => Queue::Young,
            Arrival::Ahead => Queue::Ahead,
        };
        self.table.insert(page, queue, note);
        while self.table.frames(Queue::Ahead) * AHEAD_PART > self.frames() {
            let Some(entry) = self.table.oldest(Queue::Ahead) else { break };
            self.table.make_young(entry);
        }
        while filling && self.new_exceed(NEW_PART_FILLING) {
            let oldest = self.table.oldest(Queue::Old).or(self.table.oldest(Queue::Young));
            let Some(entry) = oldest else { break };
            self.table.renew(entry, Note::default());
        }
    }

    /// Counts a page that comes. When an epoch ends, pages become young that were read ahead in an
    /// earlier one.
    fn page_comes(&mut self) {
        self.came += 1;
        if self.came < self.epoch_pages {
            return;
        }
        self.came = 0;
        self.epoch = Note::epoch_after(self.epoch);
        while let Some(entry) = self.table.oldest(Queue::Ahead) {
            if self.table.note(entry).epochs_until(self.epoch) <= AHEAD_EPOCHS {
                return;
            }
            self.table.make_young(entry);
        }
    }

    pub(super) fn forget(&mut self, page: PageRef) {
        let Some(entry) = self.table.find(page) else {
            debug_assert!(false, "{page} is forgotten, but was not admitted");
            return;
        };
        if self.table.note(entry).leaves_ghost {
            self.ghosts.add(hash(page), page.frames);
        }
        self.table.remove(entry);
    }

    /// Proposes pages whose chance is spent. Then marks new pages ahead, so that there is time to
    /// access them again before the next visit.
    pub(super) fn propose(
        &mut self,
        residents: &dyn Residents,
        effort: Effort,
        wanted: &mut Wanted,
        candidates: &mut Vec<PageRef>,
    ) {
        let first = candidates.len();
        // After one round of the main queue the proposed pages come up again.
        let (mut first_proposed, mut is_round) = (None, false);
        // If no page of the main queue can leave even without credit, new pages have to.
        let mut main_looks = LOOKS_PER_PAGE * self.table.len();
        for _ in 0..effort.looks {
            if wanted.is_nothing() || candidates.len() - first >= effort.pages {
                break;
            }
            let main = self.table.oldest(Queue::Main).filter(|_| main_looks > 0);
            let proposed = match main {
                Some(_) if self.since_main < AGING && self.new_exceed(NEW_PART) => {
                    self.since_main += 1;
                    self.look_at_new(residents)
                }
                None => self.look_at_new(residents),
                Some(entry) => {
                    is_round |= main == first_proposed;
                    main_looks -= 1;
                    self.since_main = 0;
                    self.look_at_main(entry, residents)
                }
            };
            let Some(entry) = proposed else { continue };
            let page = self.table.page(entry);
            if !(is_round && candidates[first..].contains(&page)) {
                first_proposed = first_proposed.or(Some(entry));
                wanted.found(page);
                candidates.push(page);
            }
        }
        while self.table.frames(Queue::Young) * YOUNG.1 > self.new_frames() * YOUNG.0 {
            let Some(entry) = self.table.oldest(Queue::Young) else { break };
            self.mark(entry, residents);
        }
    }

    /// Marks a young page. A later access clears the mark; the load came before it.
    fn mark(&mut self, entry: Entry, residents: &dyn Residents) {
        residents.try_mark(self.table.page(entry));
        self.table.age(entry);
    }

    /// Looks at the oldest new page, and returns it if it can leave. In either case makes it the
    /// newest of the main queue: other threads do not propose it, and it is there if it stays.
    fn look_at_new(&mut self, residents: &dyn Residents) -> Option<Entry> {
        let Some(entry) = self.table.oldest(Queue::Old) else {
            match self.table.oldest(Queue::Young) {
                Some(entry) => self.mark(entry, residents),
                None => self.table.make_young(self.table.oldest(Queue::Ahead)?),
            }
            return None;
        };
        let is_unused = residents.try_mark(self.table.page(entry)) == MarkOutcome::AlreadyMarked;
        self.table.renew(entry, Note { leaves_ghost: is_unused, ..Note::default() });
        is_unused.then_some(entry)
    }

    /// Looks at the oldest page of the main queue, makes it the newest, and returns it if it can
    /// leave.
    fn look_at_main(&mut self, entry: Entry, residents: &dyn Residents) -> Option<Entry> {
        let credit = self.table.note(entry).credit;
        let is_unused = residents.try_mark(self.table.page(entry)) == MarkOutcome::AlreadyMarked;
        let left = if is_unused { credit.saturating_sub(1) } else { (credit + 1).min(CREDIT_MAX) };
        self.table.renew(entry, Note { credit: left, ..Note::default() });
        (is_unused && credit == 0).then_some(entry)
    }
}
