//! The buffer manager as a whole: what threads read is what was written, whatever leaves memory.

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use vellum_pool::PAGE_SIZE;
use vellum_testing::patience::PATIENCE;
use vellum_testing::random::Random;

use super::{Error, FileStorage, Storage, Textbook};

/// Words of a page.
const WORDS: usize = PAGE_SIZE / 8;

/// Pages in memory: each is full of its number until it is written. Can fail.
#[derive(Debug, Default)]
struct Memory {
    written: Mutex<BTreeMap<u64, Vec<u8>>>,
    fails: AtomicBool,
}

impl Memory {
    fn check(&self) -> io::Result<()> {
        match self.fails.load(Ordering::Relaxed) {
            true => Err(io::ErrorKind::Other.into()),
            false => Ok(()),
        }
    }
}

impl Storage for Memory {
    fn read(&self, page: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.check()?;
        match self.written.lock().unwrap().get(&page) {
            Some(written) => bytes.copy_from_slice(written),
            None => fill(bytes, page),
        }
        Ok(())
    }

    fn write(&self, page: u64, bytes: &[u8]) -> io::Result<()> {
        self.check()?;
        self.written.lock().unwrap().insert(page, bytes.to_vec());
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.check()
    }
}

fn fill(bytes: &mut [u8], word: u64) {
    bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word.to_le_bytes()));
}

/// The word that all words of a page are equal to.
fn whole(bytes: &[u8]) -> u64 {
    let first: [u8; 8] = bytes[..8].try_into().unwrap();
    assert!(bytes.chunks_exact(8).all(|chunk| chunk == first), "a page of two versions");
    u64::from_le_bytes(first)
}

/// A page's number and how often it was changed, in one word.
fn stamp(page: u64, changes: u64) -> u64 {
    changes << 32 | page
}

#[test]
fn a_small_pool_reads_the_right_pages() {
    let manager = Textbook::new(Memory::default(), 16).unwrap();
    for step in 0..20_000_u64 {
        let page = step.wrapping_mul(0x9e37_79b9) >> 7 & 0xff;
        assert_eq!(manager.word(page, step as usize % WORDS * 8).unwrap(), page);
        assert_eq!(whole(&manager.pin(page).unwrap()), page);
    }
    assert!(manager.pages_read() > 10_000, "{} pages read", manager.pages_read());
    assert_eq!(manager.pages_written(), 0);
}

#[test]
fn dirty_pages_come_back() {
    let manager = Textbook::new(Memory::default(), 8).unwrap();
    for changes in 0..10 {
        for page in 0..64 {
            let mut guard = manager.change(page).unwrap();
            assert_eq!(whole(&guard), stamp(page, changes));
            fill(&mut guard, stamp(page, changes + 1));
        }
    }
    assert!(manager.pages_written() >= 10 * 64 - 8, "{} written", manager.pages_written());
    manager.flush().unwrap();
    let written = manager.pages_written();
    manager.flush().unwrap();
    assert_eq!(manager.pages_written(), written, "clean pages were written");
    let stored = manager.storage().written.lock().unwrap();
    assert!(
        stored.len() == 64 && stored.iter().all(|(page, bytes)| whole(bytes) == stamp(*page, 10))
    );
}

/// Readers with a pin and without, and writers, over a pool that always evicts. Each page only
/// ever has one word in all places, and its changes are counted.
#[test]
fn threads_see_whole_pages_and_no_change_is_lost() {
    const PAGES: u64 = 96;
    // On a busy machine a thread may look for a frame for more than a second.
    let manager = Textbook::new(Memory::default(), 24).unwrap().with_patience(PATIENCE);
    let changes: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let run = |thread: u64| {
        let mut random = Random(thread);
        for step in 0..30_000_u64 {
            let page = random.below(PAGES);
            let before = changes[page as usize].load(Ordering::Acquire);
            let seen = match step % 3 {
                0 => manager.word(page, random.index(WORDS) * 8).unwrap(),
                1 => whole(&manager.pin(page).unwrap()),
                _ => {
                    let mut guard = manager.change(page).unwrap();
                    let next = whole(&guard) + (1 << 32);
                    fill(&mut guard, next);
                    changes[page as usize].fetch_add(1, Ordering::Release);
                    next
                }
            };
            assert_eq!(seen & 0xffff_ffff, page);
            assert!(seen >> 32 >= before, "page {page}: {} after {before} changes", seen >> 32);
        }
    };
    thread::scope(|scope| (1..=4).for_each(|thread| drop(scope.spawn(move || run(thread)))));
    for (page, changes) in (0..PAGES).zip(&changes) {
        let expected = stamp(page, changes.load(Ordering::Relaxed));
        assert_eq!(whole(&manager.pin(page).unwrap()), expected);
    }
    assert!(manager.pages_read() > 1_000 && manager.pages_written() > 1_000);
}

#[test]
fn all_frames_pinned_is_an_error() {
    let manager = Textbook::new(Memory::default(), 8).unwrap();
    let manager = manager.with_patience(Duration::from_millis(20));
    let mut pins: Vec<_> = (0..7).map(|page| manager.pin(page).unwrap()).collect();
    let last = manager.change(7).unwrap();
    assert!(matches!(manager.word(8, 0), Err(Error::AllPinned)));
    assert!(matches!(manager.pin(8), Err(Error::AllPinned)));
    assert!(matches!(manager.change(8), Err(Error::AllPinned)));
    assert_eq!(manager.word(3, 8).unwrap(), 3, "a page that is there needs no frame");
    pins.pop();
    assert_eq!(manager.word(8, 0).unwrap(), 8);
    drop(last);
    assert_eq!(whole(&manager.pin(9).unwrap()), 9);
}

#[test]
fn failures_of_the_storage_lose_no_frame_and_no_page() {
    let manager = Textbook::new(Memory::default(), 4).unwrap();
    let manager = manager.with_patience(Duration::from_millis(20));
    (0..4).for_each(|page| fill(&mut manager.change(page).unwrap(), 100 + page));
    manager.storage().fails.store(true, Ordering::Relaxed);
    for _ in 0..20 {
        assert!(matches!(manager.word(9, 0), Err(Error::Write(..))));
    }
    assert!(matches!(manager.flush(), Err(Error::Write(..))));
    manager.storage().fails.store(false, Ordering::Relaxed);
    manager.flush().unwrap();
    manager.storage().fails.store(true, Ordering::Relaxed);
    for _ in 0..20 {
        assert!(matches!(manager.word(9, 0), Err(Error::Read(9, _))));
    }
    manager.storage().fails.store(false, Ordering::Relaxed);
    for page in (0..4).chain(0..4) {
        assert_eq!(manager.word(page, 16).unwrap(), 100 + page);
        assert_eq!(manager.word(page + 10, 16).unwrap(), page + 10);
    }
}

#[test]
fn pages_of_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pages");
    let bytes: Vec<u8> =
        (0..32_u64).flat_map(|page| (0..WORDS).flat_map(move |_| page.to_le_bytes())).collect();
    std::fs::write(&path, &bytes).unwrap();
    let manager = Textbook::new(FileStorage::open(&path).unwrap(), 8).unwrap();
    (0..32).for_each(|page| assert_eq!(whole(&manager.pin(page).unwrap()), page));
    assert!(matches!(manager.word(32, 0), Err(Error::Read(32, _))), "beyond the end");
    (0..32).for_each(|page| fill(&mut manager.change(page).unwrap(), page + 7));
    manager.flush().unwrap();
    let stored = std::fs::read(&path).unwrap();
    let pages = stored.chunks_exact(PAGE_SIZE).map(whole);
    assert!(pages.eq(7..39));
}
