//! Malicious files: every checksum is valid, but the contents of the pages are not.

use vellum::PageRef;
use vellum::node::{Fences, Node, NodeMut, Payload, check_bounds};
use vellum::page::{PageKind, init};

use crate::entry::{exercise, reseal, sound_store};
use crate::support::{Random, each_seed};

const KIND: usize = 36;
const LEVEL: usize = 38;
const COUNT: usize = 40;
const UPPER_CHILD: usize = 64;
const SLOTS: usize = 136;

fn put(image: &mut [u8], page: usize, at: usize, bytes: &[u8]) {
    let start = page * 4096 + at;
    image[start..start + bytes.len()].copy_from_slice(bytes);
}

/// The pages of this kind.
fn pages_of(image: &[u8], kind: u8) -> Vec<usize> {
    let is_page = |page: &usize| {
        let bytes = &image[page * 4096..(page + 1) * 4096];
        &bytes[32..36] == b"VLMP" && bytes[KIND] == kind && bytes[8] == *page as u8
    };
    (0..image.len() / 4096).filter(is_page).collect()
}

/// Uses a store in which `change` has changed the image. All checksums are valid.
fn changed(change: impl Fn(&mut [u8])) {
    let mut image = sound_store(1).to_vec();
    change(&mut image);
    for page in 0..image.len() / 4096 {
        reseal(&mut image, page);
    }
    exercise(image, 1);
}

/// Every child reference of every inner node refers, in turn, to a page of each kind, and to the
/// node itself.
#[test]
fn children_that_lead_anywhere() {
    let image = sound_store(1);
    let inner = pages_of(image, 2);
    assert!(!inner.is_empty());
    let mut targets = vec![0, 1, 1 << 40, u64::MAX, image.len() as u64 / 4096];
    for kind in 2..=5 {
        let pages = pages_of(image, kind);
        targets.extend(pages.iter().take(3).chain(pages.last()).map(|page| *page as u64));
    }
    for parent in inner {
        let bytes = &image[parent * 4096..(parent + 1) * 4096];
        let count = Node::new(bytes).count().unwrap();
        let slots = (0..count.min(3)).map(|slot| SLOTS + 16 * slot + 8);
        for place in slots.chain([UPPER_CHILD]) {
            for target in &targets {
                changed(|image| put(image, parent, place, &target.to_le_bytes()));
            }
        }
    }
}

/// A blob whose bytes look like a leaf, in the place of a leaf.
#[test]
fn a_blob_that_poses_as_a_leaf() {
    let image = sound_store(1);
    let (inner, leaves, blobs) = (pages_of(image, 2), pages_of(image, 3), pages_of(image, 4));
    for (parent, leaf) in inner.iter().zip(&leaves) {
        let leaf = image[leaf * 4096 + COUNT..(leaf + 1) * 4096].to_vec();
        for garble in 0..4 {
            changed(|image| {
                put(image, blobs[0], COUNT, &leaf);
                match garble {
                    1 => put(image, blobs[0], COUNT + 2, &[0xff; 6]),
                    2 => put(image, blobs[0], SLOTS, &[0xff; 200]),
                    3 => put(image, blobs[0], COUNT, &[0xff, 0]),
                    _ => {}
                }
                put(image, *parent, UPPER_CHILD, &(blobs[0] as u64).to_le_bytes());
                put(image, *parent, SLOTS + 8, &(blobs[0] as u64).to_le_bytes());
            });
        }
    }
}

/// Levels that do not decrease by one, and the greatest levels that a byte can have.
#[test]
fn levels_of_any_height() {
    let image = sound_store(1);
    for page in pages_of(image, 2).into_iter().chain(pages_of(image, 3).into_iter().take(2)) {
        for level in [0, 1, 2, 3, 63, 64, 65, 254, 255] {
            changed(|image| {
                put(image, page, LEVEL, &[level]);
                put(image, page, KIND, &[if level == 0 { 3 } else { 2 }]);
            });
        }
    }
}

/// Any two bytes of a header, a node or the free map at their extremes.
#[test]
fn fields_at_their_extremes() {
    each_seed(150, |seed| {
        let mut random = Random(seed);
        let image = sound_store(1);
        let kind = 1 + random.below(5) as u8;
        let pages = pages_of(image, kind);
        let page = pages[random.index(pages.len())];
        let most = if kind == 5 { 120 } else { 300 };
        let (at, len) = (8 + random.index(most), 1 + random.index(8));
        let byte = [0, 1, 0x7f, 0x80, 0xff][random.index(5)];
        changed(|image| put(image, page, at, &vec![byte; len]));
    });
}

/// A blob of two bytes whose page looks like a leaf with two empty keys and a heap outside the
/// page.
#[test]
fn a_blob_that_poses_as_an_empty_leaf() {
    let image = sound_store(1);
    let (inner, blob) = (pages_of(image, 2), pages_of(image, 4)[0]);
    changed(|image| {
        put(image, blob, COUNT, &[0; 4096 - COUNT]);
        put(image, blob, COUNT, &[2]);
        for parent in &inner {
            for slot in 0..2 {
                put(image, *parent, SLOTS + 16 * slot + 8, &(blob as u64).to_le_bytes());
            }
            put(image, *parent, UPPER_CHILD, &(blob as u64).to_le_bytes());
        }
    });
}

/// The check of a page that is read covers all that a change of the node relies on.
#[test]
fn bounds_cover_what_changes_rely_on() {
    let mut page = vec![0; 4096];
    init(&mut page, PageRef::new(7, 1), PageKind::Leaf, 0, 2);
    let fences = Fences { lower: Some(b"prefix a"), upper: Some(b"prefix b") };
    let mut node = NodeMut::format(&mut page, 0, fences, 0);
    assert!(node.insert(0, b"prefix b", Payload::Inline(b"value")));
    assert_eq!(check_bounds(&page), Ok(()));
    // A compaction would change a prefix length that differs from that of the fences.
    let mut lie = page.clone();
    lie[COUNT + 6] = 3;
    assert!(check_bounds(&lie).is_err());
    // Keys, cells and fences over the limits may leave no room for a split.
    for (fences, key) in [(Fences::default(), 2000), (Fences::default(), 645)] {
        let mut long = page.clone();
        let mut node = NodeMut::format(&mut long, 0, fences, 0);
        assert!(node.insert(0, &vec![1; key], Payload::Inline(b"")));
        assert!(check_bounds(&long).is_err(), "{key}");
    }
    let mut long = page.clone();
    NodeMut::format(&mut long, 0, Fences { lower: Some(&[1; 2000]), upper: None }, 0);
    assert!(check_bounds(&long).is_err());
    let mut high = page;
    NodeMut::format(&mut high, 200, Fences::default(), 9);
    assert!(check_bounds(&high).is_err());
}
