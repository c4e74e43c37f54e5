//! Recovery of records that no version of this program writes, with right checksums: they are
//! refused, and the file stays as it is.

use std::sync::Arc;

use vellum_log::{Log, LogError, LogOptions, RecordRef, SimulatedDevice, SimulatedOptions};
use vellum_pool::PageRef;
use vellum_pool::device::MemoryDevice;

use super::record::{RecordWriter, push_edit};
use crate::node::{Edit, Node, NodeLimits, Part, Payload};
use crate::page;
use crate::page::blob::BlobRef;
use crate::page::bytes::{put_u32, put_u64};
use crate::store::header::AT_VERSION;
use crate::{Error, Options, Store, Tree};

fn options(log: SimulatedDevice) -> Options {
    Options { log: Some(Arc::new(log)), evictors: 0, ..Options::new().pool_bytes(1 << 20) }
}

fn new_log() -> SimulatedDevice {
    let sizes = SimulatedOptions { segments: 64, segment_blocks: 16, ..Default::default() };
    SimulatedDevice::new(sizes)
}

/// The file and the log of a store that was not closed, and a leaf with its bytes.
fn crashed() -> (Vec<u8>, SimulatedDevice, PageRef, Vec<u8>) {
    crashed_with(|tree| {
        tree.upsert(b"key", b"value").unwrap();
        tree.tree_ref().root_page()
    })
}

/// The same of a store whose tree `fill` fills, and the page that it tells.
fn crashed_with(
    fill: impl FnOnce(&Tree) -> PageRef,
) -> (Vec<u8>, SimulatedDevice, PageRef, Vec<u8>) {
    let file = Arc::new(MemoryDevice::new());
    let log = Arc::new(new_log());
    let options = Options { log: Some(log.clone()), ..options(log.kill()) };
    let store = Store::create_on(file.clone(), &options).unwrap();
    let tree = store.create_tree("tree").unwrap();
    let page = fill(&tree);
    store.sync().unwrap();
    let bytes = store.core.pages.pool.fix_shared(page).unwrap().to_vec();
    (file.snapshot(), log.kill(), page, bytes)
}

/// What recovery says of a log whose last record is this.
fn recover(file: &[u8], log: SimulatedDevice, record: &[u8]) -> Result<Store, Error> {
    let (device, store) = recover_on(file, log, record, None);
    if store.is_err() {
        assert!(device.snapshot() == file, "a refused record has changed the file");
    }
    store
}

/// The same with memory for so many bytes of pages: the others are pending.
fn recover_on(
    file: &[u8],
    log: SimulatedDevice,
    record: &[u8],
    bytes: Option<usize>,
) -> (Arc<MemoryDevice>, Result<Store, Error>) {
    let log = Arc::new(log);
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    let (opened, _) = Log::open(log.clone(), &LogOptions::default(), None, visit).unwrap();
    let lsn = opened.append(record).unwrap();
    opened.wait_durable(lsn).unwrap();
    drop(opened);
    let device = Arc::new(MemoryDevice::from_snapshot(file.to_vec()));
    let options = options(log.kill());
    let options = Options { recovery_bytes: bytes.or(options.recovery_bytes), ..options };
    let store = Store::open_on(device.clone(), &options);
    (device, store)
}

#[track_caller]
fn is_refused(result: Result<Store, Error>, why: &str) {
    match result {
        Err(Error::BadRecord { what, .. }) => assert!(what.contains(why), "{what}"),
        Err(error) => panic!("refused otherwise: {error}"),
        Ok(_) => panic!("a bad record is taken"),
    }
}

/// The file and the log of a store that was not closed, and a node of its tree.
struct CrashedNode {
    file: Vec<u8>,
    log: SimulatedDevice,
    page: PageRef,
    bytes: Vec<u8>,
}

impl CrashedNode {
    /// A node of `level`, below the root and in the midst of a tree whose keys have a prefix.
    fn inside(level: u8) -> CrashedNode {
        let (file, log, page, bytes) = crashed_with(|tree| {
            for number in 0..700_u32 {
                let key = [&[b'p'; 200][..], &number.to_be_bytes(), &[b'e'; 40]].concat();
                tree.insert(&key, &[7; 200]).unwrap();
            }
            let tree = tree.tree_ref();
            let mut page = tree.root_page();
            loop {
                let bytes = tree.pages.pool.fix_shared(page).unwrap();
                let node = Node::new(&bytes[..]);
                if node.level() == Ok(level) {
                    return page;
                }
                let child = node.child(node.count().unwrap() / 2).unwrap();
                page = PageRef::new(child, page.frames);
            }
        });
        CrashedNode { file, log, page, bytes }
    }

    /// Recovery of the edit with memory for so many bytes of pages, and a reading of the nodes that
    /// are pending after it, if `reads`.
    fn redo(&self, edit: Edit<'_>, bytes: usize, reads: bool) -> Result<(), Error> {
        let record = edit_record(self.page, edit);
        let (device, store) = recover_on(&self.file, self.log.kill(), &record, Some(bytes));
        let redone = match &store {
            Ok(store) if reads => {
                let tree = store.tree("tree").unwrap();
                tree.entries().try_for_each(|entry| entry.map(drop))
            }
            _ => Ok(()),
        };
        assert!(device.snapshot() == self.file, "the recovery has changed the file");
        store.and(redone)
    }

    fn takes(&self, edit: Edit<'_>) -> bool {
        self.redo(edit, 1 << 20, false).is_ok()
    }

    /// The opening refuses the node with this edit. If the node is pending, a reader does.
    #[track_caller]
    fn refuses(&self, edit: Edit<'_>, why: &str) {
        for (bytes, reads, why) in [(0, true, "only the log has"), (1 << 20, false, why)] {
            match self.redo(edit, bytes, reads) {
                Err(Error::Damaged { page, what }) => {
                    assert!(page == self.page && what.contains(why), "{edit:?}: {page}: {what}");
                }
                Err(error) => panic!("{edit:?} is refused otherwise: {error}"),
                Ok(()) => panic!("{edit:?} is taken"),
            }
        }
    }
}

/// The record of an edit of a page.
fn edit_record(page: PageRef, edit: Edit<'_>) -> Vec<u8> {
    let (mut edits, mut record) = (Vec::new(), Vec::new());
    push_edit(&mut edits, edit);
    RecordWriter::new(&mut record, &[], &[]).edits(page, &edits);
    record
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

/// Both parts of a leaf, and of an inner node, at every place where it is not split.
#[test]
fn no_record_keeps_a_part_that_a_split_does_not_make() {
    for level in [0, 1] {
        let crashed = CrashedNode::inside(level);
        let node = Node::new(&crashed.bytes[..]);
        let key = |index| node.key(index).unwrap().to_vec();
        let (count, max_key) = (node.count().unwrap(), NodeLimits::for_page_size(4096).max_key);
        let (lower, upper) = (node.lower().unwrap().unwrap(), node.upper().unwrap().unwrap());
        let prefix = node.prefix().unwrap().to_vec();
        assert!(count > 3 && prefix.len() >= 200 && node.level() == Ok(level));
        // In a leaf the separator's own entry belongs to the left part.
        let (separator, at) = (key(count / 2), count / 2 + usize::from(level == 0));
        let longest = [&separator[..], &vec![b'f'; max_key - separator.len()]].concat();
        let longer = [&longest[..], b"f"].concat();
        let below = [&lower[..lower.len() - 1], &[lower[lower.len() - 1] - 1]].concat();
        let above = [upper, b"f"].concat();
        let other_prefix = [&prefix[..prefix.len() - 1], b"\xff"].concat();
        let bad: &[(usize, &[u8])] = &[
            (at - 1, &separator),
            (at + 1, &separator),
            (count + 1, &separator),
            (usize::from(u16::MAX), &separator),
            (count, upper),
            (count - 1, upper),
            (count, &above),
            (0, lower),
            (0, &below),
            (0, b""),
            (at, b""),
            (0, &prefix[..prefix.len() - 1]),
            (at, &prefix[..prefix.len() - 1]),
            (at, &other_prefix),
            (count, &other_prefix),
            (at, &longer),
        ];
        for part in [Part::Left, Part::Right] {
            assert!(crashed.takes(Edit::Keep { part, at, separator: &separator }));
            let longest = Edit::Keep { part, at, separator: &longest };
            assert_eq!(crashed.takes(longest), level == 0);
            for &(at, separator) in bad {
                crashed.refuses(Edit::Keep { part, at, separator }, "is not split there");
            }
        }
    }
}

#[test]
fn no_record_replaces_a_child_by_what_no_node_has() {
    let replaced = |level: u8, bad: &[(usize, Payload<'_>, &str)]| {
        let crashed = CrashedNode::inside(level);
        let count = Node::new(&crashed.bytes[..]).count().unwrap();
        let sound = if level == 0 { Payload::Inline(b"new") } else { Payload::Child(99) };
        assert!(crashed.takes(Edit::Replace { index: count - 1, payload: sound }));
        assert_eq!(crashed.takes(Edit::Replace { index: count, payload: sound }), level > 0);
        for &(after, payload, why) in bad {
            crashed.refuses(Edit::Replace { index: count - 1 + after, payload }, why);
        }
    };
    let (none, child) = (Payload::Child(0), Payload::Child(99));
    let (value, blob) = (Payload::Inline(b"new"), Payload::Blob(&[1; 20]));
    let (entry, slot) = ("cannot have such an entry", "has no such slot");
    let of_inner = [none, value, blob].map(|payload| (0, payload, entry));
    let after_inner = [(1, none, entry), (1, value, slot), (1, blob, slot), (2, child, slot)];
    replaced(1, &[&of_inner[..], &after_inner].concat());
    let of_leaf = [none, child].map(|payload| (0, payload, entry));
    let after_leaf = [(1, none, entry), (1, child, entry), (1, value, slot), (1, blob, slot)];
    replaced(0, &[&of_leaf[..], &after_leaf].concat());
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
