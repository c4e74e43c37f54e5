//! A pool all of whose pages are in memory, and that memory as a plain array.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use vellum_pool::{
    HugePages, PAGE_SIZE, PageRef, Pool, PoolOptions, PoolSize, RawPages, Space, Translation,
};

use super::Chain;
use super::memory::Memory;
use super::pattern_device::PatternDevice;

/// How long the pool may take until its memory is in huge pages.
const PATIENCE: Duration = Duration::from_secs(180);
/// How long to wait for a change meanwhile.
const STANDSTILL: Duration = Duration::from_secs(15);

/// See the module's documentation.
#[derive(Debug)]
pub struct Resident {
    chain: Chain,
    pool: Pool,
    /// Where page 0 is, or would be; null if the pages lie in slots.
    base: *const u8,
}

impl Resident {
    /// Opens a pool over a [`PatternDevice`] and brings in the pages of its chain, into pages of
    /// 4 KiB.
    ///
    /// # Errors
    /// No memory, no address space.
    pub fn new(chain: Chain) -> Result<Resident> {
        Resident::open(chain, HugePages::Off, Translation::Mmu)
    }

    /// As [`new`](Resident::new), but the pages lie in slots, in another order than in the file, as
    /// in a pool that has evicted many. The slots are in huge pages if the system has some.
    ///
    /// # Errors
    /// No memory, no address space.
    pub fn by_table(chain: Chain) -> Result<Resident> {
        Resident::open(chain, HugePages::Auto, Translation::Table)
    }

    /// As [`new`](Resident::new), but waits until the pool has collapsed the pages, or stops. Also
    /// returns the share of pages in huge pages, 0 to 1.
    ///
    /// # Errors
    /// No memory, no address space.
    pub fn in_huge_pages(chain: Chain) -> Result<(Resident, f64)> {
        let before = Memory::now()?;
        let pages = Resident::open(chain, HugePages::Auto, Translation::Mmu)?;
        let all = (chain.pages() * PAGE_SIZE as u64) as f64;
        let started = Instant::now();
        let (mut share, mut since) = (0.0, started);
        loop {
            let now = Memory::now()?.since(before).huge as f64 / all;
            if now > share {
                (share, since) = (now.min(1.0), Instant::now());
            }
            if share == 1.0 || since.elapsed() > STANDSTILL || started.elapsed() > PATIENCE {
                return Ok((pages, share));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn open(chain: Chain, huge_pages: HugePages, translation: Translation) -> Result<Resident> {
        // This many more frames, so that no page is evicted, and that collapsing has room.
        let frames = chain.pages() + chain.pages() / 8 + 1024;
        let options = PoolOptions {
            size: PoolSize::Bytes(frames * PAGE_SIZE as u64),
            // Without a thread in the background a pool has no huge pages.
            evictors: u64::from(huge_pages != HugePages::Off),
            huge_pages,
            translation,
            ..PoolOptions::default()
        };
        let device = Arc::new(PatternDevice(chain));
        let space = Space::new(chain.range());
        let pool = Pool::open(device, Arc::new(RawPages), space, options)
            .context("opening a pool for the pages")?;
        let mut base = std::ptr::null();
        let in_slots = translation == Translation::Table;
        let order: &mut dyn Iterator<Item = u64> = match in_slots {
            true => &mut chain.starts().take(chain.pages() as usize),
            false => &mut chain.places(),
        };
        for place in order {
            let page = pool.fix_shared(PageRef::new(place, 1))?;
            if !in_slots {
                base = page.as_ptr().wrapping_sub(place as usize * PAGE_SIZE);
            }
        }
        let stats = pool.stats();
        anyhow::ensure!(
            stats.evictions == 0 && stats.misses == chain.pages(),
            "of {} pages {} were read and {} left again",
            chain.pages(),
            stats.misses,
            stats.evictions
        );
        Ok(Resident { chain, pool, base })
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The order of its pages.
    pub fn chain(&self) -> Chain {
        self.chain
    }

    /// Eight bytes of a page through a pointer, without any check.
    ///
    /// # Safety
    /// The page is one of the chain's, and `offset..offset + 8` lies within it, aligned to 8. The
    /// pages do not lie in slots.
    #[inline(always)]
    pub unsafe fn plain(&self, page: u64, offset: usize) -> u64 {
        // SAFETY: the caller's promise; the pages of the chain are in memory as long as the pool
        // is, since it has room for all of them, and no thread writes to them.
        unsafe {
            self.base.add(page as usize * PAGE_SIZE).add(offset).cast::<u64>().read_volatile()
        }
    }
}
