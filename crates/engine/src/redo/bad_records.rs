//! Recovery of records that no version of this program writes, with right checksums: they are
//! refused, and the file stays as it is.

use std::sync::Arc;

use vellum_log::{Log, LogError, LogOptions, RecordRef, SimulatedDevice, SimulatedOptions};
use vellum_pool::PageRef;
use vellum_pool::device::MemoryDevice;

use super::record::RecordWriter;
use crate::page;
use crate::page::blob::BlobRef;
use crate::page::bytes::{put_u32, put_u64};
use crate::store::header::AT_VERSION;
use crate::{Error, Options, Store};

fn options(log: SimulatedDevice) -> Options {
    Options { log: Some(Arc::new(log)), evictors: 0, ..Options::new().pool_bytes(1 << 20) }
}

fn new_log() -> SimulatedDevice {
    let sizes = SimulatedOptions { segments: 64, segment_blocks: 16, ..Default::default() };
    SimulatedDevice::new(sizes)
}

/// The file and the log of a store that was not closed, and a leaf with its bytes.
fn crashed() -> (Vec<u8>, SimulatedDevice, PageRef, Vec<u8>) {
    let file = Arc::new(MemoryDevice::new());
    let log = Arc::new(new_log());
    let options = Options { log: Some(log.clone()), ..options(log.kill()) };
    let store = Store::create_on(file.clone(), &options).unwrap();
    let tree = store.create_tree("tree").unwrap();
    tree.upsert(b"key", b"value").unwrap();
    store.sync().unwrap();
    let page = tree.tree_ref().root_page();
    let bytes = store.core.pages.pool.fix_shared(page).unwrap().to_vec();
    (file.snapshot(), log.kill(), page, bytes)
}

/// What recovery says of a log whose last record is this.
fn recover(file: &[u8], log: SimulatedDevice, record: &[u8]) -> Result<Store, Error> {
    let log = Arc::new(log);
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    let (opened, _) = Log::open(log.clone(), &LogOptions::default(), None, visit).unwrap();
    let lsn = opened.append(record).unwrap();
    opened.wait_durable(lsn).unwrap();
    drop(opened);
    let device = Arc::new(MemoryDevice::from_snapshot(file.to_vec()));
    let store = Store::open_on(device.clone(), &options(log.kill()));
    if store.is_err() {
        assert!(device.snapshot() == file, "a refused record has changed the file");
    }
    store
}

#[track_caller]
fn is_refused(result: Result<Store, Error>, why: &str) {
    match result {
        Err(Error::BadRecord { what, .. }) => assert!(what.contains(why), "{what}"),
        Err(error) => panic!("refused otherwise: {error}"),
        Ok(_) => panic!("a bad record is taken"),
    }
}

/// The record of an image of a leaf at a page, of a tree.
fn image(leaf: &[u8], page: PageRef, tree: u32) -> Vec<u8> {
    let (mut bytes, mut record) = (leaf.to_vec(), Vec::new());
    put_u64(&mut bytes, 8, page.id.0);
    put_u32(&mut bytes, 24, page.frames);
    put_u32(&mut bytes, 28, tree);
    RecordWriter::new(&mut record, &[], &[]).image(page, &bytes).unwrap();
    record
}

#[test]
fn a_sound_record_is_taken() {
    let (file, log, page, leaf) = crashed();
    let store = recover(&file, log, &image(&leaf, page, 2)).unwrap();
    assert_eq!(&*store.tree("tree").unwrap().get(b"key").unwrap().unwrap(), b"value");
    assert!(store.check(&mut |_| {}).unwrap().is_sound());
}

#[test]
fn no_record_changes_a_header() {
    for number in [0, 1] {
        let (file, log, _, leaf) = crashed();
        let record = image(&leaf, PageRef::new(number, 1), 2);
        is_refused(recover(&file, log, &record), "no file can have");
    }
}

#[test]
fn no_record_changes_a_page_that_no_file_can_have() {
    let (file, log, _, leaf) = crashed();
    let record = image(&leaf, PageRef::new(1 << 52, 1), 2);
    is_refused(recover(&file, log, &record), "no file can have");
}

/// A few bytes can say that a page has 2 GiB, nearly all of which is its gap.
#[test]
fn no_record_makes_recovery_take_memory_for_another_length() {
    for frames in [2, 16, 1 << 19] {
        let (file, log, page, leaf) = crashed();
        let page = PageRef { frames, ..page };
        let mut record = image(&leaf, PageRef { frames: 1, ..page }, 2);
        // The page's frames, and the end of the gap.
        put_u32(&mut record, 16, frames);
        let end = u32::from_le_bytes(*record[29..].first_chunk().unwrap());
        put_u32(&mut record, 29, end + (frames - 1) * 4096);
        is_refused(recover(&file, log, &record), "length of a tree's pages");
    }
}

#[test]
fn no_record_has_a_tree_after_the_last_one() {
    for tree in [u32::MAX - 1, u32::MAX] {
        let (file, log, page, leaf) = crashed();
        is_refused(recover(&file, log, &image(&leaf, page, tree)), "tree");
    }
}

/// A build before version 8 might log that a merge freed pages which no tree had. They stay what
/// they are. This build writes no such record, and takes none.
#[test]
fn older_builds_may_free_pages_that_are_not_there() {
    let (file, log, ..) = crashed();
    let older = |mut file: Vec<u8>| {
        for page in [0, 4096] {
            let version = page + AT_VERSION;
            if file[version] == 8 {
                put_u32(&mut file, version, 6);
                page::seal(&mut file[page..page + 4096], &[]);
            }
        }
        file
    };
    // The second begins in the file, and takes the tree's pages with it.
    for (start, frames) in [(0, 20_493), (2, 20_493), (1, 1), (1 << 39, 8)] {
        let range = PageRef::new(start, frames);
        let value = BlobRef { page: PageRef::new(start, 1), len: 1 << 20, piece_frames: 16 };
        let (mut freed, mut removed) = (Vec::new(), Vec::new());
        RecordWriter::new(&mut freed, &[], &[range]);
        RecordWriter::removing(&mut removed, &[], &[], &[(2, value)]);
        // That value lies in the file, and cannot be told from another one.
        let records = if start == 2 { vec![freed] } else { vec![freed, removed] };
        for record in records {
            let store = recover(&older(file.clone()), log.kill(), &record).unwrap();
            assert!(store.tree("tree").unwrap().contains(b"key").unwrap());
            let report = store.check(&mut |_| {}).unwrap();
            assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
            if start < 2 {
                is_refused(recover(&file, log.kill(), &record), "no file can have");
            }
        }
    }
}

/// Headers whose numbers are the last ones that a header can have: the store is refused, or opens
/// again afterwards.
#[test]
fn numbers_do_not_run_out_unnoticed() {
    let (file, log, ..) = crashed();
    let number = |at: usize| u64::from_le_bytes(*file[at..].first_chunk().unwrap());
    for less in [0, 1, 2, 3, 4096, 1 << 20] {
        for is_lsn in [false, true] {
            let mut file = file.clone();
            let newest = if number(72) > number(4096 + 72) { 0 } else { 4096 };
            if is_lsn {
                let lsn = (1 << 63) - 1 - less;
                let begin = lsn - (number(newest + 144) - number(newest + 136));
                put_u64(&mut file, newest + 136, begin);
                put_u64(&mut file, newest + 144, lsn);
            } else {
                for page in [0, 4096] {
                    // The number's last bit tells the page.
                    let sequence = (1 << 62) - 2 * less - if page == newest { 2 } else { 3 };
                    let sequence = sequence + u64::from(newest > 0);
                    put_u64(&mut file, page + 72, sequence);
                }
            }
            for page in [0, 4096] {
                page::seal(&mut file[page..page + 4096], &[]);
            }
            let open = |file: Vec<u8>| {
                let device = Arc::new(MemoryDevice::from_snapshot(file));
                let store = Store::open_on(device.clone(), &options(log.kill()));
                (device, store)
            };
            let (device, store) = open(file);
            let store = match store {
                Ok(store) => store,
                Err(error) => {
                    let again = open(device.snapshot()).1.err().map(|error| error.to_string());
                    assert_eq!(again, Some(error.to_string()));
                    continue;
                }
            };
            let tree = store.tree("tree").unwrap();
            let changed = tree.upsert(b"more", b"value");
            drop(tree);
            if store.close().is_err() {
                continue;
            }
            let device = Arc::new(MemoryDevice::from_snapshot(device.snapshot()));
            let store = Store::open_on(device, &Options { log: None, ..options(new_log()) });
            let store = store.unwrap_or_else(|error| panic!("{less}, {is_lsn}: {error}"));
            assert_eq!(store.tree("tree").unwrap().contains(b"more").unwrap(), changed.is_ok());
        }
    }
}

/// Pages of a later time than the header, as in a file that was copied while a store wrote to it: a
/// change of such a page is recovered as every other one.
#[test]
fn changes_of_pages_that_are_newer_than_the_header_are_recovered() {
    let (file, log, ..) = crashed();
    let device = Arc::new(MemoryDevice::from_snapshot(file));
    Store::open_on(device.clone(), &options(log.kill())).unwrap().close().unwrap();
    let mut file = device.snapshot();
    for page in [0, 4096] {
        put_u64(&mut file, page + 144, 4096);
        page::seal(&mut file[page..page + 4096], &[]);
    }
    let device = Arc::new(MemoryDevice::from_snapshot(file));
    let log = Arc::new(new_log());
    let with_log = Options { log: Some(log.clone()), ..options(log.kill()) };
    let store = Store::open_on(device.clone(), &with_log).unwrap();
    store.tree("tree").unwrap().upsert(b"acknowledged", b"value").unwrap();
    store.sync().unwrap();
    let device = Arc::new(MemoryDevice::from_snapshot(device.snapshot()));
    let recovered = Store::open_on(device, &options(log.kill())).unwrap();
    assert!(recovered.tree("tree").unwrap().contains(b"acknowledged").unwrap());
}
