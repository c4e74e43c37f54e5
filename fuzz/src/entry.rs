//! The bodies of the fuzz targets, shared with the simulation tests: for any input bytes there must
//! be no panic, no endless loop and no wrong arithmetic.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use vellum::node::{
    Node, NodeLimits, NodeMut, Part, Payload, check, check_bounds, copy_part, fits_merge,
    merge_into_right, plan_split,
};
use vellum::page::{self, PageKind};
use vellum::{BackupOptions, BackupProgress, Options, PageRef, RestoreOptions, Store, Tree};
use vellum_pool::device::MemoryDevice;
use vellum_pool::{PAGE_SIZE, Space};

use crate::source::Source;

/// More entries than any of these files has. A walk that gets so far runs in a circle.
const ENTRIES_MAX: usize = 200_000;

/// Decodes one page. If its bounds are sound, performs all operations of a node on it.
///
/// The first two bytes choose the page's length and which fields are corrected before it is
/// decoded; a few bytes of choices follow, and then the page from its front and its end.
pub fn page_decoder(bytes: &[u8]) {
    let mut source = Source(bytes);
    let choice = source.number();
    let frames = [1, 2, 16][choice % 3];
    let mut changes = Source(source.take(24));
    let mut image = vec![0; frames as usize * PAGE_SIZE];
    let half = source.0.len() / 2;
    let (front, back) = source.0.split_at(half.min(image.len() / 2));
    image[..front.len()].copy_from_slice(front);
    let back = &back[..back.len().min(image.len() / 2)];
    let end = image.len() - back.len();
    image[end..].copy_from_slice(back);

    let place = PageRef::new(7, frames);
    let _ = page::verify(place, &image);
    if choice & 0x100 != 0 {
        let level = image[38];
        let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
        page::init(&mut image, place, kind, level, 2);
    }
    let _ = page::seal(&mut image, &[]);
    let _ = page::verify(place, &image);
    read_node(&image);
    if check_bounds(&image).is_ok() {
        let sound = check(&image).is_ok();
        change_node(&mut image, &mut changes, sound);
    }
}

/// All operations that an optimistic reader may perform on an invalid page.
fn read_node(image: &[u8]) {
    let node = Node::new(image);
    let mut key = Vec::new();
    let _ = (node.level(), node.prefix_len(), node.free_space(), node.has_room(30, 30));
    let _ = (node.lower_into(&mut key), node.upper_into(&mut key), node.prefix());
    for name in [&b""[..], b"a", &[255; 700], &image[100..140]] {
        let _ = (node.find(name), node.find_child(name), node.find_slot(name));
    }
    for index in 0..node.count().unwrap_or(0).min(5000) {
        let _ = (node.key_into(index, &mut key), node.suffix(index), node.child(index));
    }
}

/// Changes a node whose bounds are sound. No change panics, and a sound node stays sound.
fn change_node(image: &mut [u8], source: &mut Source<'_>, sound: bool) {
    let limits = NodeLimits::for_page_size(image.len());
    let right = |image: &[u8]| {
        if sound {
            assert_eq!(check(image), Ok(()));
        }
    };
    let is_leaf = Node::new(&*image).level() == Ok(0);
    while let [_, ..] = source.0 {
        let choice = source.number();
        let mut key = Vec::new();
        let node = Node::new(&*image);
        let count = node.count().unwrap_or(0);
        if count > 0 && !choice.is_multiple_of(3) {
            let _ = node.key_into(choice / 3 % count, &mut key);
        }
        key.extend(source.take(choice / 16 % 5));
        key.truncate(limits.max_key);
        // The tree reaches this page by the fences alone.
        let below = node.lower().is_ok_and(|lower| lower.is_none_or(|lower| *lower < key[..]));
        let above = node.upper().is_ok_and(|upper| upper.is_none_or(|upper| key[..] <= *upper));
        let Ok(found) = node.find_slot(&key) else { continue };
        if !below || !above {
            continue;
        }
        let value = vec![7; choice % (limits.max_inline_value(key.len()) + 1)];
        let mut node = NodeMut::new(image);
        match (is_leaf, found.exact) {
            (true, true) if choice.is_multiple_of(2) => node.remove(found.index),
            (true, true) => _ = node.replace(found.index, Payload::Inline(&value)),
            (true, false) => _ = node.insert(found.index, &key, Payload::Inline(&value)),
            (false, true) => node.remove(found.index),
            (false, false) if node.node().upper().is_ok_and(|upper| upper != Some(&key[..])) => {
                let _ = node.insert(found.index, &key, Payload::Child(9));
            }
            _ => {}
        }
        right(image);
    }
    split_and_merge(image, right);
}

fn split_and_merge(image: &[u8], right: impl Fn(&[u8])) {
    // A key that the fences lead here.
    let mut key = Vec::new();
    let node = Node::new(image);
    if !matches!(node.upper_into(&mut key), Ok(true)) {
        let _ = node.lower_into(&mut key);
        key.push(1);
    }
    let Ok(split) = plan_split(node, &key) else { return };
    let (mut one, mut two) = (vec![0; image.len()], image.to_vec());
    let level = image[38];
    let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
    page::init(&mut one, PageRef::new(9, (image.len() / PAGE_SIZE) as u32), kind, level, 2);
    if copy_part(&mut one, node, Part::Left, &split).is_err()
        || !NodeMut::new(&mut two).keep(Part::Right, split.left, &split.separator)
    {
        return;
    }
    // Whichever part a page keeps, that part is the same as in a new page.
    let mut other = image.to_vec();
    assert!(NodeMut::new(&mut other).keep(Part::Left, split.left, &split.separator));
    let (old, new) = (Node::new(&other[..]), Node::new(&one[..]));
    assert_eq!((old.count(), old.free_space()), (new.count(), new.free_space()));
    // A split of a node that is not sorted may have halves with reversed fences.
    let sorted = check(&one).is_ok() && check(&two).is_ok();
    if check(image).is_ok() {
        right(&one);
        right(&two);
    }
    let fits = fits_merge(Node::new(&one), Node::new(&two), &split.separator);
    if fits == Ok(true) {
        let merged = merge_into_right(Node::new(&one), &mut two, &split.separator);
        assert!(merged.is_ok() || !sorted);
        if merged.is_ok() && sorted {
            assert_eq!(check(&two), Ok(()));
        }
    }
}

/// Decodes a map of free ranges; an accepted map is usable, and encodes to the same bytes.
pub fn space_decoder(bytes: &[u8]) {
    let Ok(mut space) = Space::decode(bytes) else { return };
    assert_eq!(space.encode(), bytes);
    let free: Vec<_> = space.free_extents().collect();
    assert_eq!(free.iter().map(|(_, count)| count).sum::<u64>(), space.free_pages());
    for (start, count) in free {
        assert!(start >= space.first() && start + count <= space.end());
        assert!(space.free(start, 1).is_err() && space.has_free(start, 1));
    }
    let (before, used) = (space.clone(), space.allocated_pages());
    if before.end() < 1 << 50 {
        for count in [1, 7, 1000] {
            let start = space.allocate(count);
            assert!(start >= before.first() && !space.has_free(start, 1));
            space.free(start, count).unwrap();
        }
        assert_eq!(space.allocated_pages(), used);
    }
    space.trim();
    let _ = (space.free(0, 1), space.free(u64::MAX, u64::MAX), space.largest_free());
}

/// Opens a file of any bytes, or a sound store with some bytes changed.
///
/// The first byte chooses: 0 takes the rest as the file. Otherwise each five bytes that follow are
/// a page, a position in it and a byte to put there; the last bit of the position's first byte says
/// whether the page gets a new checksum.
pub fn store_opener(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let page_frames = 1 + u32::from(choice % 2);
    if *choice == 0 {
        return exercise(rest.to_vec(), 1);
    }
    let mut image = sound_store(page_frames).to_vec();
    let pages = image.len() / PAGE_SIZE;
    for mutation in rest.chunks_exact(5).take(64) {
        let page = usize::from(mutation[0]) % pages;
        let offset = usize::from(mutation[2]) << 8 | usize::from(mutation[3]);
        // Half of them hit the fields at the front of the page.
        let offset = if mutation[1] & 2 == 0 { offset % 256 } else { offset % PAGE_SIZE };
        image[page * PAGE_SIZE + offset] = mutation[4];
        if mutation[1] & 1 == 0 {
            reseal(&mut image, page);
        }
    }
    if choice & 0x80 != 0 {
        let len = image.len() - usize::from(*choice) * 97 % image.len();
        image.truncate(len);
    }
    exercise(image, page_frames);
}

/// Gives the page at this position a valid checksum.
pub fn reseal(image: &mut [u8], page: usize) {
    let start = page * PAGE_SIZE;
    let Some(bytes) = image.get_mut(start..) else { return };
    let Some(frames) = bytes.get(24..28) else { return };
    let frames = u32::from_le_bytes([frames[0], frames[1], frames[2], frames[3]]) as usize;
    let len = frames.clamp(1, bytes.len() / PAGE_SIZE) * PAGE_SIZE;
    page::seal(&mut bytes[..len], &[]);
}

/// Where the newest header of a store begins.
pub fn newest_header(file: &[u8]) -> usize {
    let sequence = |page: usize| u64::from_le_bytes(*file[page + 72..].first_chunk().unwrap());
    if sequence(0) > sequence(PAGE_SIZE) { 0 } else { PAGE_SIZE }
}

fn options(page_frames: u32) -> Options {
    // Larger than any of these files: a false reference is found by its position, not by waiting.
    Options::new().pool_bytes(256 * 4096 * u64::from(page_frames)).evictors(0)
}

/// A small store of three levels, blobs and two trees, closed.
pub fn sound_store(page_frames: u32) -> &'static [u8] {
    static STORES: [OnceLock<Vec<u8>>; 2] = [OnceLock::new(), OnceLock::new()];
    STORES[page_frames as usize - 1].get_or_init(|| {
        let device = Arc::new(MemoryDevice::new());
        let options = options(page_frames).page_frames(page_frames);
        let store = Store::create_on(device.clone(), &options).unwrap();
        let (tree, other) = (store.create_tree("t").unwrap(), store.create_tree("u").unwrap());
        let count = 40 * page_frames;
        for n in 0..count {
            // Long keys that differ early give low fan-out, and so more levels.
            let key = [&(n * 7 % count).to_be_bytes()[2..], &[b'k'; 500]].concat();
            tree.upsert(&key, &[n as u8; 60]).unwrap();
            other.upsert(format!("key {n}").as_bytes(), &[n as u8; 50]).unwrap();
        }
        for n in 0..3u8 {
            other.upsert(&[n], &vec![n; 3000 + 3000 * usize::from(n)]).unwrap();
        }
        // Some free space, too.
        for n in 0..count / 4 {
            other.remove(format!("key {n}").as_bytes()).unwrap();
        }
        other.remove(&[1]).unwrap();
        store.close().unwrap();
        device.snapshot()
    })
}

/// Performs all operations on an arbitrary file, as a store and by salvage.
pub fn exercise(image: Vec<u8>, page_frames: u32) {
    let open = |options: Options| {
        let device = Arc::new(MemoryDevice::from_snapshot(image.clone()));
        Store::open_on(device, &options)
    };
    if let Ok(store) = open(options(page_frames).salvage(true)) {
        for tree in trees(&store) {
            let mut visited = 0;
            tree.salvage(&mut |_| {
                visited += 1;
                visited < ENTRIES_MAX
            });
            read(&tree);
        }
        let _ = (store.check(&mut |_| {}), store.close());
    }
    let Ok(store) = open(options(page_frames)) else { return };
    let _ = (store.check(&mut |_| {}), store.stat());
    for tree in trees(&store) {
        read(&tree);
        change(&tree);
        read(&tree);
    }
    let _ = (store.create_tree("new"), store.drop_tree("u"), store.sync());
    let _ = store.check(&mut |_| {});
    let _ = (store.drop_tree("t"), store.tree_or_create("t"), store.close());
}

/// The trees of a store that can be opened.
pub fn trees(store: &Store) -> Vec<Tree> {
    let names = store.trees().unwrap_or_else(|_| vec!["t".into(), "u".into()]);
    names.iter().filter_map(|name| store.tree(name).ok()).collect()
}

/// Reads a tree in each way.
pub fn read(tree: &Tree) {
    let _ = (tree.check(), tree.stat());
    let forward = tree.entries().map_while(Result::ok).take(ENTRIES_MAX).count();
    let mut cursor = tree.cursor().read_ahead(4);
    let mut backward = 0;
    while backward < ENTRIES_MAX && matches!(cursor.backward(), Ok(true)) {
        let _ = cursor.value();
        backward += 1;
    }
    assert!(forward.max(backward) < ENTRIES_MAX, "a walk in a circle");
    let keys: [&[u8]; 5] = [b"", b"key 7", &[2], &[0, 9, b'k'], &[255; 600]];
    let mut value = Vec::new();
    for key in keys {
        let _ = (tree.get(key).map(drop), tree.contains(key), tree.get_into(key, &mut value));
        let _ = (tree.with(key, <[u8]>::len), tree.cursor().seek_back(key));
    }
    let _ = tree.multi_get(&keys).map(drop);
}

/// Changes a tree in each way.
pub fn change(tree: &Tree) {
    for n in 0..40u32 {
        let long = [&(n * 7 % 80).to_be_bytes()[2..], &[b'k'; 500]].concat();
        let key = format!("key {}", n * 3);
        let _ = tree.upsert(&long, &[1; 200]);
        let _ = tree.upsert(key.as_bytes(), &vec![2; if n % 9 == 0 { 5000 } else { 300 }]);
        let _ = tree.insert(&n.to_be_bytes(), b"new");
    }
    for n in 0..80u32 {
        let long = [&n.to_be_bytes()[2..], &[b'k'; 500]].concat();
        let _ = (tree.remove(&long), tree.remove(format!("key {n}").as_bytes()));
        let _ = tree.remove(&[n as u8]);
    }
}

/// Restores a sound backup with an increment of which some bytes are changed.
///
/// The first byte chooses whether the increment's first page gets a new checksum, and whether the
/// increment is cut off. Each four bytes that follow are a position and a byte to put there. Half
/// of the positions lie in the first page's fields, and a quarter in the tables at the end.
pub fn increment_reader(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let files = sound_backup();
    let mut image = files.increment.clone();
    let end = image.len();
    for mutation in rest.chunks_exact(4).take(16) {
        let offset = usize::from(mutation[1]) << 8 | usize::from(mutation[2]);
        let at = match mutation[0] % 4 {
            0 | 1 => offset % 144,
            2 => end - 1 - offset % 4096,
            _ => offset % end,
        };
        image[at] = mutation[3];
    }
    if choice & 1 == 0 {
        page::seal(&mut image[..PAGE_SIZE], &[]);
    }
    if choice & 0x80 != 0 {
        image.truncate(end - usize::from(*choice) * 97 % end);
    }
    let folder = TemporaryFolder::new();
    let [base, bad, to] = ["base", "bad", "restored"].map(|name| folder.0.join(name));
    std::fs::write(&base, &files.base).unwrap();
    std::fs::write(&bad, &image).unwrap();
    let goes_on = &mut |_: BackupProgress| ControlFlow::Continue(());
    let options = RestoreOptions::new().replace(true);
    if vellum::restore(&to, &base, std::slice::from_ref(&bad), &options, goes_on).is_ok() {
        let store = Store::open(&to, &options_to_read()).unwrap();
        assert!(store.check(&mut |_| {}).unwrap().is_sound());
    }
    // As a base for the next increment.
    let device = Arc::new(MemoryDevice::from_snapshot(sound_store(1).to_vec()));
    let store = Store::open_on(device, &options_to_read()).unwrap();
    let options = BackupOptions::new().replace(true).since(bad);
    let goes_on = &mut |_: BackupProgress| ControlFlow::Continue(());
    let _ = store.backup(folder.0.join("next"), &options, goes_on);
}

fn options_to_read() -> Options {
    options(1).read_only(true)
}

/// A folder that goes when this is dropped.
pub struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// A new one.
    pub fn new() -> TemporaryFolder {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vellum-fuzz-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        TemporaryFolder(folder)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct SoundBackup {
    base: Vec<u8>,
    increment: Vec<u8>,
}

/// The files of a backup, and of an increment that follows it.
fn sound_backup() -> &'static SoundBackup {
    static FILES: OnceLock<SoundBackup> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = TemporaryFolder::new();
        let device = Arc::new(MemoryDevice::from_snapshot(sound_store(1).to_vec()));
        let store = Store::open_on(device, &options(1)).unwrap();
        let (base, increment) = (folder.0.join("base"), folder.0.join("increment"));
        let goes_on = &mut |_: BackupProgress| ControlFlow::Continue(());
        store.backup(&base, &BackupOptions::new(), goes_on).unwrap();
        store.tree("t").unwrap().upsert(b"new", &[9; 5000]).unwrap();
        let goes_on = &mut |_: BackupProgress| ControlFlow::Continue(());
        store.backup(&increment, &BackupOptions::new().since(&base), goes_on).unwrap();
        let read = |path| std::fs::read(path).unwrap();
        SoundBackup { base: read(base), increment: read(increment) }
    })
}

/// Changes a byte of a page, half of the time among its first ones.
pub fn change_page(file: &mut [u8], choice: usize, source: &mut Source<'_>) {
    let page = match choice & 6 {
        0 => newest_header(file) / PAGE_SIZE,
        _ => source.below(file.len() / PAGE_SIZE),
    };
    let limit = if choice & 1 == 0 { 160 } else { PAGE_SIZE };
    file[page * PAGE_SIZE + source.below(limit)] = source.number() as u8;
    if choice & 0x38 != 0x38 {
        reseal(file, page);
    }
}
