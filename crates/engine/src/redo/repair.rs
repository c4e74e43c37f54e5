//! Repair of one page from the log, while the store runs.
//!
//! The first record of a page after a checkpoint has the page's image. So a page that has changed
//! since the last checkpoint can be made anew without the file: its newest image, and the edits of
//! later records. A page that is not in memory was written after its records were durable, so what
//! the log makes is what the file should have.
//!
//! The log says nothing of pages that have not changed since the last checkpoint, nor of the pages
//! of long values. They stay damaged.

use std::collections::HashMap;

use vellum_log::{Log, Lsn};
use vellum_pool::{PageId, PageRef};

use super::page::redo;
use super::record::{GroupRecord, Redo};
use super::redoer::{ChangedPages, bad};
use crate::error::Result;
use crate::page;
use crate::planted::{StoreBug, is_planted};

/// The pages that have changed since the last checkpoint, each with its newest image in the log.
#[derive(Debug)]
pub(super) struct ChangedSince {
    pages: ChangedPages,
    /// The newest record of each page.
    last: HashMap<PageId, Lsn>,
    /// Earlier records are known.
    next: Lsn,
}

impl ChangedSince {
    /// None of the records from `cut` on is known yet.
    pub(super) fn new(page_frames: u32, cut: Lsn) -> ChangedSince {
        ChangedSince { pages: ChangedPages::new(page_frames), last: HashMap::new(), next: cut }
    }

    /// Makes a page anew that is not in memory, and that the file does not have as it was written.
    /// `begin` is the store's number at the number 0 of the log. Returns false if the log has no
    /// image of the page.
    ///
    /// # Errors
    /// What the log said; a record that does not fit the page.
    pub(super) fn repair(
        &mut self,
        log: &Log,
        begin: u64,
        page: PageRef,
        bytes: &mut [u8],
    ) -> Result<bool> {
        self.read_on(log)?;
        let image = self.pages.image(page.id.0);
        let Some((image, last)) = image.zip(self.last.get(&page.id)) else { return Ok(false) };
        let (mut scan, mut has_image) = (log.scan(Some(image))?, false);
        while let Some(record) = scan.next_ref()?.filter(|record| record.lsn <= *last) {
            if is_planted(StoreBug::HalfRepair) && record.lsn > image {
                break;
            }
            for change in GroupRecord::pages_of(record.bytes).map_err(bad(record.lsn))? {
                let change = change.map_err(bad(record.lsn))?;
                if change.page == page {
                    redo(&change, record.lsn.0.wrapping_add(begin), bytes)?;
                    has_image = true;
                }
            }
        }
        if has_image {
            page::seal(bytes, &[]);
        }
        Ok(has_image)
    }

    /// Takes in the records that have become durable.
    fn read_on(&mut self, log: &Log) -> Result<()> {
        let end = log.durable();
        if self.next >= end {
            return Ok(());
        }
        let mut scan = log.scan(Some(self.next))?;
        while let Some(record) = scan.next_ref()?.filter(|record| record.lsn < end) {
            let group = GroupRecord::read(record.bytes).map_err(bad(record.lsn))?;
            for range in &group.taken {
                self.pages.remove(range.id.0, range.frames.into());
            }
            for change in &group.pages {
                self.last.insert(change.page.id, record.lsn);
                if let Redo::Image { .. } = change.redo {
                    self.pages.insert(change.page.id.0, record.lsn);
                }
            }
            for range in &group.freed {
                self.pages.remove(range.id.0, range.frames.into());
            }
        }
        self.next = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use rustix::io::Errno;
    use vellum_log::{SimulatedDevice, SimulatedOptions};
    use vellum_pool::device::{
        Call, Device, Fault, FaultyDevice, HookedDevice, MemoryDevice, Operation, Write,
    };
    use vellum_pool::{PAGE_SIZE, PageRef};

    use crate::page::{self, PageKind};
    use crate::store::header::AlignedPage;
    use crate::{Error, Options, Store};

    const ENTRIES: u32 = 20_000;

    fn options(log: &Arc<SimulatedDevice>) -> Options {
        let options = Options::new().pool_bytes(1 << 20);
        Options { log: Some(log.clone()), log_bytes: 256 << 20, evictors: 0, ..options }
    }

    fn new_log() -> Arc<SimulatedDevice> {
        let options = SimulatedOptions { segments: 4096, segment_blocks: 16, ..Default::default() };
        Arc::new(SimulatedDevice::new(options))
    }

    fn put(store: &Store, numbers: impl Iterator<Item = u32>) {
        let tree = store.tree("tree").unwrap();
        numbers.for_each(|number| {
            tree.upsert(&number.to_be_bytes(), &[number as u8; 200]).unwrap();
        });
    }

    /// A store with all entries, whose log has them since it began.
    fn filled_store<D: Device>(device: &Arc<D>, log: &Arc<SimulatedDevice>) -> Store {
        let store = Store::create_on(device.clone(), &options(log)).unwrap();
        store.create_tree("tree").unwrap();
        put(&store, 0..ENTRIES);
        store
    }

    fn expect_all(store: &Store) {
        let tree = store.tree("tree").unwrap();
        for number in 0..ENTRIES {
            let value = tree.get(&number.to_be_bytes()).unwrap();
            assert_eq!(value.as_deref(), Some(&[number as u8; 200][..]), "{number}");
        }
    }

    fn expect_sound(store: &Store) {
        expect_all(store);
        let report = store.check(&mut |_| ()).unwrap();
        assert!(report.is_sound(), "{:?}", report.damage);
    }

    /// Changes a byte of each node that the file has. Returns the pages.
    fn damage_nodes(memory: &MemoryDevice) -> Vec<PageRef> {
        let bytes = memory.snapshot();
        let mut damaged = Vec::new();
        for (number, page) in (0..).zip(bytes.chunks_exact(PAGE_SIZE)) {
            let place = PageRef::new(number, 1);
            let is_node = |kind| kind == PageKind::Leaf || kind == PageKind::Inner;
            if page::verify(place, page).is_ok_and(|header| is_node(header.kind)) {
                let mut other = AlignedPage(*page.first_chunk().unwrap());
                other.0[2000] ^= 4;
                let mut writes = [Write::new(number, [&other.0, &[]])];
                memory.write(&mut writes);
                damaged.push(place);
            }
        }
        damaged
    }

    #[test]
    fn a_damaged_page_that_has_changed_since_the_checkpoint_is_made_anew() {
        let (log, memory) = (new_log(), Arc::new(MemoryDevice::new()));
        let store = filled_store(&memory, &log);
        // Leaves change, split, and leave memory, several times.
        for round in 0..3 {
            put(&store, (0..ENTRIES).map(|number| number.wrapping_mul(7919 + round) % ENTRIES));
        }
        let in_memory = |store: &Store| {
            let place = |number| PageRef::new(number, 1);
            let is_there = |page| store.core.pages.pool.fix_shared_resident(page).is_some();
            (0..2_000).map(place).filter(|page| is_there(*page)).collect::<Vec<_>>()
        };
        let (before, kept) = (memory.snapshot(), in_memory(&store));
        assert!(damage_nodes(&memory).len() > 500);
        // Those that are in memory, and as they are in the file, are not read again.
        for page in kept {
            let at = page.id.0 as usize * PAGE_SIZE;
            let Some(bytes) = before.get(at..at + PAGE_SIZE) else { continue };
            let sound = AlignedPage(*bytes.first_chunk().unwrap());
            memory.write(&mut [Write::new(page.id.0, [&sound.0, &[]])]);
        }
        expect_sound(&store);
        assert!(store.pool_stats().repairs > 400);
        // What was repaired goes to the file.
        store.close().unwrap();
        let copy = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
        expect_sound(&Store::open_on(copy, &Options::new().pool_bytes(1 << 20)).unwrap());
    }

    #[test]
    fn a_page_that_cannot_be_read_is_made_anew() {
        let (log, memory) = (new_log(), Arc::new(MemoryDevice::new()));
        let device = Arc::new(FaultyDevice::new(memory.clone(), 1).unwrap());
        let store = filled_store(&device, &log);
        device.plan().fail_always(Operation::Read, Fault::Error(Errno::IO));
        expect_all(&store);
        assert!(store.pool_stats().repairs > 400);
    }

    #[test]
    fn a_damaged_page_that_the_log_does_not_have_stays_damaged() {
        let (log, memory) = (new_log(), Arc::new(MemoryDevice::new()));
        filled_store(&memory, &log).close().unwrap();
        let store = Store::open_on(memory.clone(), &options(&log)).unwrap();
        let tree = store.tree("tree").unwrap();
        // The first leaf changes.
        put(&store, 0..1);
        let is_resident = |page| store.core.pages.pool.fix_shared_resident(page).is_some();
        let damaged = damage_nodes(&memory).into_iter().filter(|page| !is_resident(*page));
        assert!(damaged.count() > 500);
        let error = tree.get(&(ENTRIES / 2).to_be_bytes()).map(drop).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
        assert_eq!(store.pool_stats().repairs, 0);
        assert!(tree.contains(&0_u32.to_be_bytes()).unwrap());
    }

    /// After the checkpoint the log would not have the image of a page that is dirty because it was
    /// repaired, and a crash in the write of that page would leave neither.
    #[test]
    fn a_checkpoint_that_is_written_keeps_older_pages_from_being_made_anew() {
        let (log, memory) = (new_log(), Arc::new(MemoryDevice::new()));
        let device = Arc::new(HookedDevice::new(memory.clone()));
        let store = filled_store(&device, &log);
        let (core, tree) = (store.core.clone(), store.tree("tree").unwrap());
        let syncs = Arc::new(AtomicU64::new(0));
        let counted = syncs.clone();
        device.set_hook(move |call| {
            // The pages of the cut are written, and its header is not.
            if matches!(call, Call::Sync) && counted.fetch_add(1, Ordering::SeqCst) == 0 {
                assert!(damage_nodes(&memory).len() > 500);
                let tree = tree.clone();
                let read = thread::spawn(move || tree.get(&(ENTRIES / 2).to_be_bytes()).map(drop));
                assert!(matches!(read.join().unwrap(), Err(Error::Damaged { .. })));
            }
        });
        let redo_log = core.pages.redo_log.as_ref().unwrap();
        core.pages.cut_log_if(redo_log, |_| true).unwrap();
        device.clear_hook();
        assert!(syncs.load(Ordering::SeqCst) > 0);
        assert_eq!(store.pool_stats().repairs, 0);
        assert_eq!(core.pages.pool.dirty_pages(), 0);
    }

    /// The page was clean when the checkpoint looked for dirty ones.
    #[test]
    fn a_checkpoint_writes_what_is_repaired_while_it_writes_pages() {
        let (log, memory) = (new_log(), Arc::new(MemoryDevice::new()));
        let device = Arc::new(HookedDevice::new(memory.clone()));
        let store = filled_store(&device, &log);
        let (core, tree) = (store.core.clone(), store.tree("tree").unwrap());
        let (damaged, writes) = (memory.clone(), Arc::new(AtomicU64::new(0)));
        let counted = writes.clone();
        device.set_hook(move |call| {
            if matches!(call, Call::Write(_)) && counted.fetch_add(1, Ordering::SeqCst) == 0 {
                assert!(damage_nodes(&damaged).len() > 500);
                let tree = tree.clone();
                let read = move || tree.contains(&(ENTRIES / 2).to_be_bytes());
                assert!(thread::spawn(read).join().unwrap().unwrap());
            }
        });
        let redo_log = core.pages.redo_log.as_ref().unwrap();
        core.pages.cut_log_if(redo_log, |_| true).unwrap();
        device.clear_hook();
        assert!(writes.load(Ordering::SeqCst) > 0 && store.pool_stats().repairs > 0);
        assert_eq!(core.pages.pool.dirty_pages(), 0);
    }

    /// The place of a freed page may have other contents, of which no record tells yet.
    #[test]
    fn a_freed_page_is_not_made_anew() {
        let (log, memory) = (new_log(), Arc::new(MemoryDevice::new()));
        let store = filled_store(&memory, &log);
        let pages = damage_nodes(&memory);
        let redo_log = store.core.pages.redo_log.clone().unwrap();
        let mut bytes = vec![0; PAGE_SIZE];
        let mut made = |page| redo_log.repair(page, &mut bytes).unwrap();
        let before: Vec<_> = pages.iter().filter(|page| made(**page)).collect();
        assert!(before.len() > 500);
        store.tree("tree").unwrap().clear().unwrap();
        store.sync().unwrap();
        let left = before.iter().filter(|page| made(***page)).count();
        assert!(left < 10, "{left}");
        // A checkpoint will need none of them.
        assert!(redo_log.repair_from(redo_log.end()).is_empty());
        assert!(!before.iter().any(|page| made(**page)));
    }
}
