//! S3-FIFO over marks: resists scans and loops, and makes hits no slower.
//!
//! After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP'23): a small queue
//! for new pages, a main queue for pages that were accessed again, and ghosts, the names of pages
//! that left the small queue and may come back. A page that a scan reads once passes through the
//! small queue alone, and does not push pages out of the main queue.
//!
//! The paper counts accesses on every hit. Here a hit only clears a page's mark (SIGMOD'23, section
//! 3.4), so the policy learns only whether a thread accessed the page since the last look. So the
//! rules differ from the paper's:
//!
//! - *New pages get their mark late.* The load that brings a page in is an access, and so are the
//!   next few by the same transaction. The policy marks a page when 30 % of the small queue came
//!   after it; only an access after that moves the page to the main queue.
//! - *Pages that were read ahead* pass a queue of their own first, so that the access for which
//!   they were read comes before their mark. It has a quarter of the frames, or 4,096 pages.
//! - *Credit in the main queue.* A page gains a credit, up to three, when a look finds it accessed,
//!   and spends one when a look does not: a clock that tells warm pages from hot ones.
//! - *The main queue ages*, slowly, even while new pages make all the room: with every 32 of them
//!   the policy looks at one page of the main queue. So a page that was hot once leaves in the end.
//! - *The first pages go to the main queue* until the pool is full for the first time, all but the
//!   last twelfth. A loop that is longer than the pool finds most of them again on every turn.
//! - *Proposed pages* join the main queue at its end, whether or not the evictor evicts them. So
//!   the policy loses none, and no other thread proposes the same page at the same time.
//!
//! The policy spreads the pages over shards by their hash. Each shard has a lock. A thread holds it
//! for one page that comes or goes, and for a few looks of a search. The policy counts frames, not
//! pages.
//!
//! Memory: 21.3 bytes per frame of the pool for the table, 5 bytes per frame for the ghosts; none
//! of it follows the size of the file.

mod ghosts;
mod shard;
mod table;
#[cfg(all(test, not(feature = "model")))]
mod tests;

use std::fmt;

use self::shard::{Effort, LOOKS_PER_PAGE, Shard, Wanted};
use super::{Arrival, ReplacementPolicy, Residents};
use crate::page::PageRef;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, lock};

/// A shard has at least this many frames, so that its queues behave like those of the whole.
const FRAMES_PER_SHARD: u64 = 4_096;
const SHARDS_MAX: u64 = 64;
/// A shard's table has room for fewer than 2^28 pages.
const FRAMES_PER_SHARD_MAX: u64 = 1 << 26;
/// Ghosts, as a part of the pool's frames. New pages and ghosts together reach back as far as the
/// memory of LRU does: a working set that LRU would keep is recognised when it comes again.
const GHOSTS: (u64, u64) = (15, 16);
/// Candidates from a shard of average size before the next one is asked.
const VISIT: usize = 32;
/// Looks at pages during such a visit.
const LOOKS: usize = 256;
/// A policy of two queues, after S3-FIFO (Yang et al., SOSP'23). New pages pass a small one; only a
/// page that is used again, or comes back soon after it left, gets to the main one.
pub struct S3Fifo {
    shards: Box<[PaddedShard]>,
    frames_per_shard: u64,
    /// Where the next search begins.
    turn: AtomicU64,
    /// No thread has asked for candidates yet.
    filling: AtomicBool,
}

/// A shard in cache lines of its own.
#[repr(align(128))]
struct PaddedShard(Mutex<Shard>);

impl S3Fifo {
    /// For a pool of `frames` frames.
    pub fn new(frames: u64) -> S3Fifo {
        let fewest = frames.div_ceil(FRAMES_PER_SHARD_MAX);
        let shards = (frames / FRAMES_PER_SHARD).clamp(1, SHARDS_MAX).max(fewest);
        S3Fifo::with_shards(frames, shards)
    }

    fn with_shards(frames: u64, shards: u64) -> S3Fifo {
        let each = frames.div_ceil(shards).max(1);
        let shard = |_| {
            let ghosts = each * GHOSTS.0 / GHOSTS.1;
            PaddedShard(Mutex::new(Shard::new(each, ghosts, shards)))
        };
        S3Fifo {
            shards: (0..shards).map(shard).collect(),
            frames_per_shard: each,
            turn: AtomicU64::new(0),
            filling: AtomicBool::new(true),
        }
    }

    fn shard_of(&self, page: PageRef) -> MutexGuard<'_, Shard> {
        let shard = (u128::from(table::hash(page)) * self.shards.len() as u128) >> 64;
        lock(&self.shards[shard as usize].0)
    }

    /// Asks the shards in turn, beginning with `start`, until there are enough candidates. Asks
    /// each shard once, for as much as `effort` says, which may be nothing.
    fn ask_shards(
        &self,
        start: u64,
        effort: impl Fn(&Shard) -> Option<Effort>,
        residents: &dyn Residents,
        mut wanted: Wanted,
        candidates: &mut Vec<PageRef>,
    ) {
        let shards = self.shards.len();
        for step in 0..shards {
            if wanted.is_nothing() {
                return;
            }
            let at = (start % shards as u64) as usize + step;
            let mut shard = lock(&self.shards[at % shards].0);
            if let Some(effort) = effort(&shard) {
                shard.propose(residents, effort, &mut wanted, candidates);
            }
        }
    }
}

impl ReplacementPolicy for S3Fifo {
    fn admit(&self, page: PageRef, arrival: Arrival) {
        let filling = self.filling.load(Ordering::Relaxed);
        self.shard_of(page).admit(page, arrival, filling);
    }

    fn forget(&self, page: PageRef) {
        self.shard_of(page).forget(page);
    }

    fn contains(&self, page: PageRef) -> bool {
        self.shard_of(page).contains(page)
    }

    fn candidates(
        &self,
        residents: &dyn Residents,
        frames: u64,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    ) {
        if self.filling.load(Ordering::Relaxed) {
            self.filling.store(false, Ordering::Relaxed);
        }
        let wanted = Wanted { frames, pages: pages.saturating_sub(candidates.len()) };
        let before = candidates.len();
        // Small pools have few shards: then each has to give more.
        let visit = VISIT.max(wanted.pages.div_ceil(self.shards.len()));
        // Threads that search at once begin at different shards.
        let start = self.turn.fetch_add(wanted.pages.div_ceil(visit) as u64, Ordering::Relaxed);
        // A shard that has more gives more, and one that has few gives none: all keep their size.
        let share = self.frames_per_shard;
        let in_proportion = |shard: &Shard| {
            let pages = (visit as u64 * shard.frames()).div_ceil(share) as usize;
            (shard.frames() >= share - share / 16).then_some(Effort { pages, looks: LOOKS })
        };
        self.ask_shards(start, in_proportion, residents, wanted, candidates);
        // If all pages so far are in use, look at all others. The second round finds the pages that
        // the first one marked.
        let all = |shard: &Shard| {
            let looks = (LOOKS_PER_PAGE + 3) * shard.len();
            Some(Effort { pages: visit, looks })
        };
        for _ in 0..2 {
            if candidates.len() == before {
                self.ask_shards(start, all, residents, wanted, candidates);
            }
        }
    }

    fn for_each(&self, visit: &mut dyn FnMut(PageRef)) {
        for shard in &self.shards {
            // The function that is called may ask the policy in turn.
            let pages: Vec<PageRef> = lock(&shard.0).pages().collect();
            pages.into_iter().for_each(&mut *visit);
        }
    }
}

impl fmt::Debug for S3Fifo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S3Fifo({} shards of {} frames)", self.shards.len(), self.frames_per_shard)
    }
}
