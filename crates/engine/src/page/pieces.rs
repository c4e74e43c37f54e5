//! Values in pieces: a writer can store a value as a stream, without knowing its length.
//!
//! Pieces are pages of equal length, each with its own checksum. A tree of index pages has the
//! places of the pieces. The value's length alone determines the shape of that tree, so a reader
//! finds piece `n` by its number. Every page of a value stores the value's own number. By that
//! number a reader tells it from a page that an earlier value left in the same place
//! (docs/format.md, "Values in pieces").

use crate::page::blob::{BlobRef, key_checksum};
use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};
use crate::page::{self, LEVEL, PAGE_HEADER, PageKind};

/// The value's number, in pieces and in index pages.
const VALUE: usize = PAGE_HEADER;
/// A piece's number, or that of the first piece below an index page.
const NUMBER: usize = PAGE_HEADER + 8;
/// Offset of the data in a piece.
pub(crate) const PIECE_DATA: usize = PAGE_HEADER + 16;

// Offsets in an index page. Only the root uses the length, the key's checksum and the length of the
// pieces.
const LEN: usize = PAGE_HEADER + 16;
const KEY: usize = PAGE_HEADER + 24;
const COUNT: usize = PAGE_HEADER + 32;
const PIECE_FRAMES: usize = PAGE_HEADER + 36;
const REFS: usize = PAGE_HEADER + 40;

/// Bytes of the value in a piece that has `frames` frames.
pub(crate) fn piece_data(frames: u32) -> usize {
    frames as usize * vellum_pool::PAGE_SIZE - PIECE_DATA
}

/// The most references in an index page that has `frames` frames.
pub(crate) fn fanout(frames: u32) -> usize {
    (frames as usize * vellum_pool::PAGE_SIZE - REFS) / 8
}

/// The shape of a value in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Number of pieces.
    pub pieces: u64,
    /// Level of the root above the pieces, 1 or more.
    pub level: u8,
    fanout: u64,
    piece_frames: u32,
    index_frames: u32,
}

impl Shape {
    /// The shape of this value, which must be in pieces.
    pub(crate) fn of(blob: BlobRef) -> Shape {
        let fanout = fanout(blob.page.frames) as u64;
        let pieces = blob.len.div_ceil(piece_data(blob.piece_frames) as u64);
        let (mut level, mut reach) = (1, fanout);
        while reach < pieces {
            reach = reach.saturating_mul(fanout);
            level += 1;
        }
        let (piece_frames, index_frames) = (blob.piece_frames, blob.page.frames);
        Shape { pieces, level, fanout, piece_frames, index_frames }
    }

    /// The number of pieces below one child of an index page of `level`.
    pub(crate) fn step(self, level: u8) -> u64 {
        self.fanout.saturating_pow(u32::from(level) - 1)
    }

    /// The number of children of the index page of `level` whose first piece is `first`.
    fn children(self, level: u8, first: u64) -> u64 {
        self.pieces.saturating_sub(first).div_ceil(self.step(level)).min(self.fanout)
    }

    /// The number of frames of all pages, pieces and indexes.
    pub(crate) fn frames(self) -> u64 {
        let index: u64 =
            (1..=self.level).map(|level| self.pieces.div_ceil(self.step(level + 1))).sum();
        self.pieces * u64::from(self.piece_frames) + index * u64::from(self.index_frames)
    }
}

/// Fills in a new piece: its numbers and its data.
pub(crate) fn put_piece(bytes: &mut [u8], value: u64, number: u64, data: &[u8]) {
    put_u64(bytes, VALUE, value);
    put_u64(bytes, NUMBER, number);
    bytes[PIECE_DATA..PIECE_DATA + data.len()].copy_from_slice(data);
}

/// Fills in a new index page above the pieces from `first` on.
pub(crate) fn put_index(bytes: &mut [u8], value: u64, first: u64, refs: &[u64]) {
    put_u64(bytes, VALUE, value);
    put_u64(bytes, NUMBER, first);
    put_u32(bytes, COUNT, refs.len() as u32);
    for (place, id) in bytes[REFS..].chunks_exact_mut(8).zip(refs) {
        place.copy_from_slice(&id.to_le_bytes());
    }
}

/// Makes an index page the root of the value of `key`.
pub(crate) fn put_root(bytes: &mut [u8], key: &[u8], len: u64, piece_frames: u32) {
    put_u64(bytes, LEN, len);
    put_u64(bytes, KEY, key_checksum(key));
    put_u32(bytes, PIECE_FRAMES, piece_frames);
}

/// Checks that the references of an index page are inside the page.
pub(crate) fn check_bounds(bytes: &[u8]) -> Result<(), String> {
    let (count, room) = (get_u32(bytes, COUNT) as usize, (bytes.len() - REFS) / 8);
    match (1..=room).contains(&count) {
        true => Ok(()),
        false => Err(format!("it says that it has {count} references")),
    }
}

/// Checks that a page is the root of `blob`, and that the value belongs to `key` if the key is
/// known. Returns the value's number.
pub(crate) fn check_root(
    bytes: &[u8],
    tree: u32,
    blob: BlobRef,
    key: Option<&[u8]>,
) -> Result<u64, String> {
    let value = get_u64(bytes, VALUE);
    check_index(bytes, tree, Shape::of(blob), value, (Shape::of(blob).level, 0))?;
    if (get_u64(bytes, LEN), get_u32(bytes, PIECE_FRAMES)) != (blob.len, blob.piece_frames) {
        return Err(format!("its value has {} bytes, not {}", get_u64(bytes, LEN), blob.len));
    }
    match key.is_none_or(|key| get_u64(bytes, KEY) == key_checksum(key)) {
        true => Ok(value),
        false => Err("its value belongs to another key".into()),
    }
}

/// Checks that a page is the index page of a value with this level and first piece.
pub(crate) fn check_index(
    bytes: &[u8],
    tree: u32,
    shape: Shape,
    value: u64,
    (level, first): (u8, u64),
) -> Result<(), String> {
    check_part(bytes, PageKind::PieceIndex, tree, value, first)?;
    let (found, expected) = (u64::from(get_u32(bytes, COUNT)), shape.children(level, first));
    if bytes[LEVEL] != level || found != expected {
        let found = format!("level {} and {found} references", bytes[LEVEL]);
        return Err(format!("it has {found}, but level {level} and {expected} are expected"));
    }
    Ok(())
}

/// Checks that a page is this piece of a value.
pub(crate) fn check_piece(bytes: &[u8], tree: u32, value: u64, number: u64) -> Result<(), String> {
    check_part(bytes, PageKind::Piece, tree, value, number)
}

fn check_part(
    bytes: &[u8],
    kind: PageKind,
    tree: u32,
    value: u64,
    number: u64,
) -> Result<(), String> {
    if page::kind_number(bytes) != kind as u8 {
        return Err("it is not part of a value in pieces, but one is expected here".into());
    }
    if page::tree(bytes) != tree {
        return Err(format!("it belongs to tree {}, not {tree}", page::tree(bytes)));
    }
    if get_u64(bytes, VALUE) != value {
        return Err("it is part of another value".into());
    }
    match get_u64(bytes, NUMBER) {
        found if found == number => Ok(()),
        found => Err(format!("it begins with piece {found}, but {number} is expected")),
    }
}

/// The pages that an index page refers to.
pub(crate) fn refs(bytes: &[u8]) -> Vec<u64> {
    let count = get_u32(bytes, COUNT) as usize;
    (0..count).map(|index| get_u64(bytes, REFS + 8 * index)).collect()
}

impl BlobRef {
    /// The number of frames that the value takes.
    pub(crate) fn frames(self) -> u64 {
        match self.is_whole() {
            true => u64::from(self.page.frames),
            false => Shape::of(self).frames(),
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_pool::PageRef;

    use super::*;
    use crate::page::blob::{PIECE_FRAMES_MAX, VALUE_MAX};

    fn value(len: u64) -> BlobRef {
        BlobRef { page: PageRef::new(7, 1), len, piece_frames: 1 }
    }

    #[test]
    fn references_survive_a_round_trip() {
        for len in [1, 4040, VALUE_MAX] {
            assert_eq!(BlobRef::decode(&value(len).encode()), Some(value(len)));
        }
        let whole = BlobRef::whole(PageRef::new(7, PageRef::MAX_FRAMES), 99);
        assert_eq!(BlobRef::decode(&whole.encode()), Some(whole));
        let too_long = [value(0), value(VALUE_MAX + 1)];
        let strange = [
            BlobRef { piece_frames: PIECE_FRAMES_MAX + 1, ..value(1) },
            BlobRef { page: PageRef::new(7, 17), ..value(1) },
            BlobRef { page: PageRef::new(PageRef::MAX_ID, 1), ..value(1) },
        ];
        for blob in too_long.into_iter().chain(strange) {
            assert_eq!(BlobRef::decode(&blob.encode()), None, "{blob:?}");
        }
    }

    #[test]
    fn the_shape_follows_from_the_length() {
        let (data, fanout) = (piece_data(1) as u64, fanout(1) as u64);
        for (pieces, level, index) in [
            (1, 1, 1),
            (fanout, 1, 1),
            (fanout + 1, 2, 3),
            (fanout * fanout, 2, fanout + 1),
            (fanout * fanout + 1, 3, fanout + 1 + 2 + 1),
        ] {
            for len in [(pieces - 1) * data + 1, pieces * data] {
                let shape = Shape::of(value(len));
                assert_eq!((shape.pieces, shape.level), (pieces, level));
                assert_eq!(shape.frames(), pieces + index);
            }
        }
        assert_eq!(Shape::of(value(VALUE_MAX)).level, 5);
    }
}
