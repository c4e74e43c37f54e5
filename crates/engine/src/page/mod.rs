//! The header at the beginning of every page, and the checks when a page is read.
//!
//! Forty bytes, little endian (docs/format.md, "Page header"). The checksum comes first and covers
//! all bytes after it. The writer computes it from a private copy of the head and from the body in
//! place, without copying the body.

pub(crate) mod blob;
pub(crate) mod bytes;
pub(crate) mod format;
pub(crate) mod pieces;
pub(crate) mod runs;

use crc_fast::{CrcAlgorithm, Digest};
use vellum_pool::{PageDamage, PageId, PageRef};

use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};

/// Length of the page header in bytes.
pub const PAGE_HEADER: usize = 40;
/// Version of the page format that this code writes. It reads no other.
pub const PAGE_VERSION: u8 = 1;
/// The magic number of a page: "VLMP".
pub const PAGE_MAGIC: u32 = u32::from_le_bytes(*b"VLMP");

const CHECKSUM: usize = 0;
pub(crate) const ID: usize = 8;
const LSN: usize = 16;
const FRAMES: usize = 24;
pub(crate) const TREE: usize = 28;
const MAGIC: usize = 32;
pub(crate) const KIND: usize = 36;
const VERSION: usize = 37;
pub(crate) const LEVEL: usize = 38;

/// The tree's number and the magic number, as the eight bytes at [`TREE`] of a page of this tree.
#[inline(always)]
pub(crate) const fn tree_and_magic(tree: u32) -> u64 {
    tree as u64 | (PAGE_MAGIC as u64) << 32
}

/// Kind, version and level, as the four bytes at [`KIND`] of a node of this level.
#[inline(always)]
pub(crate) const fn kind_and_level(level: u8) -> u32 {
    let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
    kind as u32 | (PAGE_VERSION as u32) << 8 | (level as u32) << 16
}

const _: () = assert!(MAGIC == TREE + 4 && VERSION == KIND + 1 && LEVEL == KIND + 2);

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum PageKind {
    /// Page 0 or 1: the store's header.
    Header = 1,
    /// A tree node with children.
    Inner = 2,
    /// A tree node with entries.
    Leaf = 3,
    /// A value that is contiguous on this page.
    Blob = 4,
    /// A part of the list of unused ranges of the file.
    FreeMap = 5,
    /// A piece of a value that was written as a stream.
    Piece = 6,
    /// The places of the pieces of such a value.
    PieceIndex = 7,
}

impl PageKind {
    /// The kind with this number on disk.
    pub fn from_number(number: u8) -> Option<PageKind> {
        match number {
            1 => Some(PageKind::Header),
            2 => Some(PageKind::Inner),
            3 => Some(PageKind::Leaf),
            4 => Some(PageKind::Blob),
            5 => Some(PageKind::FreeMap),
            6 => Some(PageKind::Piece),
            7 => Some(PageKind::PieceIndex),
            _ => None,
        }
    }
}

/// The decoded page header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageHeader {
    /// CRC-64/NVME of all bytes after the checksum.
    pub checksum: u64,
    /// The page's own position.
    pub id: u64,
    /// Log sequence number of the last change; zero until there is a log.
    pub lsn: u64,
    /// The page's length in units of 4 KiB.
    pub frames: u32,
    /// The tree that the page belongs to; 0 for pages of the store itself.
    pub tree: u32,
    /// What the page holds.
    pub kind: PageKind,
    /// Height above the leaves, or above the pieces; 0 for all pages but inner nodes and piece
    /// indexes.
    pub level: u8,
}

/// Writes the header of a new page. [`seal`] adds the checksum.
pub fn init(bytes: &mut [u8], page: PageRef, kind: PageKind, level: u8, tree: u32) {
    bytes[..PAGE_HEADER].fill(0);
    put_u64(bytes, ID, page.id.0);
    put_u32(bytes, FRAMES, page.frames);
    put_u32(bytes, TREE, tree);
    put_u32(bytes, MAGIC, PAGE_MAGIC);
    bytes[KIND] = kind as u8;
    bytes[VERSION] = PAGE_VERSION;
    bytes[LEVEL] = level;
}

/// Changes kind and level, as when a root leaf becomes an inner node.
pub(crate) fn set_kind(bytes: &mut [u8], kind: PageKind, level: u8) {
    bytes[KIND] = kind as u8;
    bytes[LEVEL] = level;
}

/// The number of the page's kind, which may be unknown.
pub(crate) fn kind_number(bytes: &[u8]) -> u8 {
    bytes[KIND]
}

/// Whether the page is a node of a tree.
pub(crate) fn is_node(bytes: &[u8]) -> bool {
    [PageKind::Leaf as u8, PageKind::Inner as u8].contains(&bytes[KIND])
}

/// The tree that a page belongs to.
pub fn tree(bytes: &[u8]) -> u32 {
    get_u32(bytes, TREE)
}

/// The log sequence number of a page's last change.
pub fn lsn(bytes: &[u8]) -> u64 {
    get_u64(bytes, LSN)
}

/// Changes the log sequence number of a page's last change.
pub(crate) fn set_lsn(bytes: &mut [u8], lsn: u64) {
    put_u64(bytes, LSN, lsn);
}

/// Completes a page before it is written: computes the checksum and stores it in `head`. Returns
/// the LSN.
///
/// The page's bytes are `head` followed by `body`; `head` holds at least the page header.
pub fn seal(head: &mut [u8], body: &[u8]) -> u64 {
    let checksum = checksum(head, body);
    put_u64(head, CHECKSUM, checksum);
    lsn(head)
}

/// The checksum that is stored in a sealed page.
pub(crate) fn checksum_of(sealed: &[u8]) -> u64 {
    get_u64(sealed, CHECKSUM)
}

/// CRC-64/NVME of the part of `head` after the checksum field, followed by `body`.
fn checksum(head: &[u8], body: &[u8]) -> u64 {
    let mut checksum = Checksum::of(head);
    if !body.is_empty() {
        checksum.add(body);
    }
    checksum.value()
}

/// Computes the checksum of a page that is read in parts.
pub(crate) struct Checksum(Digest);

impl Checksum {
    /// Begins with the first part of the page, which includes the page header.
    pub(crate) fn of(head: &[u8]) -> Checksum {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&head[ID..]);
        Checksum(digest)
    }

    /// Adds the next part of the page.
    pub(crate) fn add(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.finalize()
    }
}

/// Decodes the header of a page and checks it against `page`.
///
/// # Errors
/// Names the page and the first field that differs: magic, version, checksum, position, length or
/// kind.
pub fn verify(page: PageRef, bytes: &[u8]) -> Result<PageHeader, PageDamage> {
    if bytes.len() < PAGE_HEADER || bytes.len() != page.bytes() {
        let what = format!("it has {} bytes instead of {}", bytes.len(), page.bytes());
        return Err(PageDamage { page, what });
    }
    verify_parts(page, bytes, checksum(bytes, &[]))
}

/// As [`verify`], for a page that is not in memory as a whole: takes the page's first bytes, and
/// the checksum that [`Checksum`] computed from all parts.
pub(crate) fn verify_parts(
    page: PageRef,
    bytes: &[u8],
    computed: u64,
) -> Result<PageHeader, PageDamage> {
    let damage = |what: String| PageDamage { page, what };
    if get_u32(bytes, MAGIC) != PAGE_MAGIC {
        return Err(damage(match bytes.iter().all(|byte| *byte == 0) {
            true => "it is all zeros, so it was never written".into(),
            false => format!("its magic number is {:#010x}, not a page's", get_u32(bytes, MAGIC)),
        }));
    }
    if bytes[VERSION] != PAGE_VERSION {
        return Err(damage(format!(
            "its format version is {}, but this program reads {PAGE_VERSION}",
            bytes[VERSION]
        )));
    }
    let stored = get_u64(bytes, CHECKSUM);
    if stored != computed {
        return Err(damage(format!(
            "its checksum is {stored:#018x}, but that of its bytes is {computed:#018x}"
        )));
    }
    if get_u64(bytes, ID) != page.id.0 {
        return Err(damage(format!("it says that it is page {}", get_u64(bytes, ID))));
    }
    if get_u32(bytes, FRAMES) != page.frames {
        return Err(damage(format!(
            "it says that it has {} frames instead of {}",
            get_u32(bytes, FRAMES),
            page.frames
        )));
    }
    let kind = PageKind::from_number(bytes[KIND])
        .ok_or_else(|| damage(format!("its kind {} is unknown", bytes[KIND])))?;
    Ok(PageHeader {
        checksum: stored,
        id: page.id.0,
        lsn: lsn(bytes),
        frames: page.frames,
        tree: tree(bytes),
        kind,
        level: bytes[LEVEL],
    })
}

/// The position and length that a page's header claims, for reports on files of unknown state.
pub fn claimed(bytes: &[u8]) -> Option<PageRef> {
    (bytes.len() >= PAGE_HEADER && get_u32(bytes, MAGIC) == PAGE_MAGIC)
        .then(|| PageRef { id: PageId(get_u64(bytes, ID)), frames: get_u32(bytes, FRAMES) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: PageRef = PageRef { id: PageId(7), frames: 2 };

    fn sealed() -> Vec<u8> {
        let mut bytes = vec![0xa5; 8192];
        init(&mut bytes, PAGE, PageKind::Blob, 0, 9);
        let (head, body) = bytes.split_at_mut(4096);
        assert_eq!(seal(head, body), 0);
        bytes
    }

    #[test]
    fn a_sealed_page_verifies() {
        let header = verify(PAGE, &sealed()).unwrap();
        assert_eq!((header.kind, header.tree, header.frames), (PageKind::Blob, 9, 2));
        assert_eq!(claimed(&sealed()), Some(PAGE));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let good = sealed();
        for bit in (0..8192 * 8).step_by(7).chain(0..PAGE_HEADER * 8) {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(verify(PAGE, &bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_page_in_the_wrong_place_is_noticed() {
        let error = verify(PageRef::new(8, 2), &sealed()).unwrap_err();
        assert!(error.to_string().contains("says that it is page 7"), "{error}");
        assert!(verify(PageRef::new(7, 1), &sealed()[..4096]).is_err());
        let zeros = verify(PAGE, &[0; 8192]).unwrap_err();
        assert!(zeros.to_string().contains("never written"), "{zeros}");
    }
}
