//! The bytes of a record.
//!
//! Little endian. A record is a head, the ranges of pages that its group took, the ranges that it
//! freed, and the pages that it changed:
//!
//! ```text
//! head    kind u8 = 1, 0 u8, changed pages u16, taken u16, freed u16
//! range   first page u64, frames u32
//! page    first page u64, frames u32, form u8, length u32, bytes
//! ```
//!
//! If the group removed values in pieces, the kind is 2, and these follow the ranges. The pages of
//! such a value are freed by later records. Until one has freed the root of the value's index, no
//! page of the value is free.
//!
//! ```text
//! values  count u16, each tree u32, reference 20 bytes
//! ```
//!
//! The form of a page's bytes is 1, edits, or 2, an image. An image leaves out the gap between the
//! slots and the heap: it has the gap's begin u32 and its end u32, and the bytes around it. An edit
//! is one of these:
//!
//! ```text
//! insert      1 u8, index u16, key length u16, payload's kind u8 and length u16, key, payload
//! replace     2 u8, index u16, payload's kind u8 and length u16, payload
//! remove      3 u8, index u16
//! remove all  4 u8, count u16, each index u16
//! overwrite   5 u8, index u16, offset u16, length u16, bytes of the value from the offset on
//! keep left   6 u8, index u16, separator length u16, separator
//! keep right  7 u8, index u16, separator length u16, separator
//! ```
//!
//! Where at least half of a replaced value stays, edits overwrite the parts that change instead.
//!
//! The kinds of a payload are 1, a value, 2, a reference to a blob, and 3, a child.
//!
//! The log guards its records by checksums. A reader of a record still believes none of its
//! numbers: every length is checked against the bytes that are there, and what an edit says is
//! checked against the page (`redo/page.rs`).

use std::ops::Range;

use smallvec::SmallVec;
use vellum_pool::PageRef;

use crate::node::{Edit, Node, Part, Payload, Torn};
use crate::page::blob::{BLOB_REF, BlobRef};
use crate::page::{self, PAGE_HEADER};

/// The kind of the record of a group.
const GROUP: u8 = 1;

/// The kind of the record of a group that removed values in pieces.
const REMOVING: u8 = 2;

/// The number of a tree, and a value in pieces that it had.
pub(crate) type RemovedValue = (u32, BlobRef);

/// What one of these takes in a record, in bytes.
const REMOVED_BYTES: usize = 4 + BLOB_REF;

const EDITS: u8 = 1;
const IMAGE: u8 = 2;

const INSERT: u8 = 1;
const REPLACE: u8 = 2;
const REMOVE: u8 = 3;
const REMOVE_ALL: u8 = 4;
const OVERWRITE: u8 = 5;
const KEEP_LEFT: u8 = 6;
const KEEP_RIGHT: u8 = 7;

const INLINE: u8 = 1;
const BLOB: u8 = 2;
const CHILD: u8 = 3;

/// A record that no version of this program wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadRecord(pub &'static str);

// Writing.

/// What an edit has besides keys, payloads and indexes, at most.
const EDIT_BYTES: usize = 16;

/// Adds an edit to the edits of a page.
pub(crate) fn push_edit(bytes: &mut Vec<u8>, edit: Edit<'_>) {
    // At once: the allocator grows memory under a lock that threads share.
    bytes.reserve(match edit {
        Edit::Insert { key, payload, .. } => EDIT_BYTES + key.len() + payload.heap_len(),
        Edit::Replace { payload, .. } => EDIT_BYTES + payload.heap_len(),
        Edit::Remove { .. } => EDIT_BYTES,
        Edit::RemoveAll { indexes } => EDIT_BYTES + 2 * indexes.len(),
        Edit::Overwrite { bytes: part, .. } => OVERWRITE_BYTES + part.len(),
        Edit::Keep { separator, .. } => EDIT_BYTES + separator.len(),
    });
    let mut index_of = |code: u8, index: usize| {
        bytes.push(code);
        push_u16(bytes, index);
    };
    match edit {
        Edit::Insert { index, key, payload } => {
            index_of(INSERT, index);
            push_u16(bytes, key.len());
            push_payload(bytes, key, payload);
        }
        Edit::Replace { index, payload } => {
            index_of(REPLACE, index);
            push_payload(bytes, &[], payload);
        }
        Edit::Remove { index } => index_of(REMOVE, index),
        Edit::RemoveAll { indexes } => {
            index_of(REMOVE_ALL, indexes.len());
            indexes.iter().for_each(|index| push_u16(bytes, *index));
        }
        Edit::Overwrite { index, offset, bytes: part } => {
            index_of(OVERWRITE, index);
            push_u16(bytes, offset);
            push_u16(bytes, part.len());
            bytes.extend_from_slice(part);
        }
        Edit::Keep { part, at, separator } => {
            index_of(if part == Part::Left { KEEP_LEFT } else { KEEP_RIGHT }, at);
            push_u16(bytes, separator.len());
            bytes.extend_from_slice(separator);
        }
    }
}

/// What an edit that overwrites has besides the bytes.
const OVERWRITE_BYTES: usize = 7;

/// Values are compared in words of so many bytes.
const WORD: usize = 8;

/// Equal parts of values are passed over in strides of so many bytes, a multiple of a word.
const STRIDE: usize = 64;

/// Parts of a value, in their order.
pub(crate) type ChangedParts = SmallVec<[Range<usize>; 4]>;

/// The parts in which a new value differs from an old one of the same length. None if edits that
/// overwrite them are longer than half of the value.
pub(crate) fn changed_parts(old: &[u8], new: &[u8]) -> Option<ChangedParts> {
    if old.len() != new.len() {
        return None;
    }
    let (mut parts, mut bytes, mut at) = (ChangedParts::new(), 0, 0);
    while at < old.len() {
        if has_same::<STRIDE>(old, new, at) {
            at += STRIDE;
            continue;
        }
        let stride_end = old.len().min(at + STRIDE);
        while at < stride_end {
            let start = at;
            at = stride_end.min(start + WORD);
            // The comparison of a whole word needs no call.
            let is_same = match at - start {
                WORD => has_same::<WORD>(old, new, start),
                _ => old[start..at] == new[start..at],
            };
            if is_same {
                continue;
            }
            match parts.last_mut() {
                // Another edit would be about as long as the word between.
                Some(last) if start - last.end <= WORD => {
                    bytes += at - last.end;
                    last.end = at;
                }
                _ => {
                    bytes += OVERWRITE_BYTES + at - start;
                    parts.push(start..at);
                }
            }
            if 2 * bytes > old.len() {
                return None;
            }
        }
    }
    Some(parts)
}

/// Whether both values have the same `LENGTH` bytes at `at`. A fixed length needs no call.
fn has_same<const LENGTH: usize>(old: &[u8], new: &[u8], at: usize) -> bool {
    let bytes = old[at..].first_chunk::<LENGTH>();
    bytes.is_some() && bytes == new[at..].first_chunk()
}

fn push_payload(bytes: &mut Vec<u8>, key: &[u8], payload: Payload<'_>) {
    let child;
    let (kind, payload) = match payload {
        Payload::Inline(value) => (INLINE, value),
        Payload::Blob(reference) => (BLOB, reference),
        Payload::Child(page) => {
            child = page.to_le_bytes();
            (CHILD, &child[..])
        }
    };
    bytes.push(kind);
    push_u16(bytes, payload.len());
    bytes.extend_from_slice(key);
    bytes.extend_from_slice(payload);
}

/// Numbers of slots, and lengths of keys and payloads in a node, have 16 bits.
fn push_u16(bytes: &mut Vec<u8>, number: usize) {
    debug_assert!(number <= usize::from(u16::MAX));
    bytes.extend_from_slice(&(number as u16).to_le_bytes());
}

/// A record that is being written. The ranges come before the pages.
#[derive(Debug)]
pub(crate) struct RecordWriter<'b> {
    bytes: &'b mut Vec<u8>,
}

impl<'b> RecordWriter<'b> {
    /// Begins the record of a group in `bytes`, whose contents go.
    pub(crate) fn new(
        bytes: &'b mut Vec<u8>,
        taken: &[PageRef],
        freed: &[PageRef],
    ) -> RecordWriter<'b> {
        bytes.clear();
        bytes.extend_from_slice(&[GROUP, 0, 0, 0]);
        push_u16(bytes, taken.len());
        push_u16(bytes, freed.len());
        taken.iter().chain(freed).for_each(|range| push_range(bytes, *range));
        RecordWriter { bytes }
    }

    /// As [`new`](Self::new), of a group that removed these values in pieces.
    pub(crate) fn removing(
        bytes: &'b mut Vec<u8>,
        taken: &[PageRef],
        freed: &[PageRef],
        values: &[RemovedValue],
    ) -> RecordWriter<'b> {
        let writer = RecordWriter::new(bytes, taken, freed);
        if !values.is_empty() {
            writer.bytes[0] = REMOVING;
            push_u16(writer.bytes, values.len());
            for (tree, value) in values {
                writer.bytes.extend_from_slice(&tree.to_le_bytes());
                writer.bytes.extend_from_slice(&value.encode());
            }
        }
        writer
    }

    /// Adds a page with the edits that [`push_edit`] wrote.
    pub(crate) fn edits(&mut self, page: PageRef, edits: &[u8]) {
        self.begin_page(page, EDITS, edits.len());
        self.bytes.extend_from_slice(edits);
    }

    /// Adds a page with its image.
    ///
    /// # Errors
    /// [`Torn`] if the page is not a node.
    pub(crate) fn image(&mut self, page: PageRef, node: &[u8]) -> Result<(), Torn> {
        let (begin, end) = Node::new(node).gap()?;
        let (before, after) = (node.get(..begin).ok_or(Torn)?, node.get(end..).ok_or(Torn)?);
        self.image_parts(page, begin..end, [before, after]);
        Ok(())
    }

    fn image_parts(&mut self, page: PageRef, gap: Range<usize>, around: [&[u8]; 2]) {
        self.begin_page(page, IMAGE, 8 + around[0].len() + around[1].len());
        push_u32(self.bytes, gap.start);
        push_u32(self.bytes, gap.end);
        around.into_iter().for_each(|bytes| self.bytes.extend_from_slice(bytes));
    }

    fn begin_page(&mut self, page: PageRef, form: u8, len: usize) {
        let count = u16::from_le_bytes([self.bytes[2], self.bytes[3]]) + 1;
        self.bytes[2..4].copy_from_slice(&count.to_le_bytes());
        push_range(self.bytes, page);
        self.bytes.push(form);
        push_u32(self.bytes, len);
    }
}

/// The bytes of a range of pages.
const RANGE_BYTES: usize = 12;

fn push_range(bytes: &mut Vec<u8>, range: PageRef) {
    bytes.extend_from_slice(&range.id.0.to_le_bytes());
    bytes.extend_from_slice(&range.frames.to_le_bytes());
}

/// Lengths of pages and of what is stored of them have 32 bits.
fn push_u32(bytes: &mut Vec<u8>, number: usize) {
    bytes.extend_from_slice(&(number as u32).to_le_bytes());
}

// Reading.

/// The record of a group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GroupRecord<'a> {
    /// Ranges of pages that the group took.
    pub taken: Vec<PageRef>,
    /// Ranges of pages that the group freed.
    pub freed: Vec<PageRef>,
    /// The values in pieces that the group removed.
    pub values: Vec<RemovedValue>,
    /// The pages that the group changed.
    pub pages: Vec<PageRecord<'a>>,
}

/// What a record says of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRecord<'a> {
    /// This part of the record, as it is in the log.
    pub bytes: &'a [u8],
    pub page: PageRef,
    pub redo: Redo<'a>,
}

impl<'a> PageRecord<'a> {
    /// Reads the part of a record that is about one page.
    ///
    /// # Errors
    /// [`BadRecord`] if the bytes begin otherwise.
    pub(crate) fn read(bytes: &'a [u8]) -> Result<PageRecord<'a>, BadRecord> {
        Reader(bytes).page()
    }

    /// The slot that the first edit is about, if that is about one slot.
    pub(crate) fn first_slot(&self) -> Option<usize> {
        match self.redo {
            Redo::Edits([INSERT | REPLACE | REMOVE | OVERWRITE, low, high, ..]) => {
                Some(usize::from(u16::from_le_bytes([*low, *high])))
            }
            _ => None,
        }
    }

    /// The number of the tree that an image is of.
    ///
    /// # Errors
    /// [`BadRecord`] if it is no image, or too short for a page header.
    pub(crate) fn image_tree(&self) -> Result<u32, BadRecord> {
        match self.redo {
            Redo::Image { begin, bytes, .. } if begin >= PAGE_HEADER => Ok(page::tree(bytes)),
            _ => Err(BadRecord("an image has no page header")),
        }
    }
}

/// What makes a page what it was after the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redo<'a> {
    /// The edits of the node as it was before the group.
    Edits(&'a [u8]),
    /// The bytes around the gap from `begin` to `end`.
    Image { begin: usize, end: usize, bytes: &'a [u8] },
}

impl<'a> GroupRecord<'a> {
    /// Reads a record.
    ///
    /// # Errors
    /// [`BadRecord`] if it is not the record of a group.
    pub(crate) fn read(record: &'a [u8]) -> Result<GroupRecord<'a>, BadRecord> {
        let (mut rest, kind, [pages, taken, freed]) = Self::head(record)?;
        let mut ranges =
            |count| (0..count).map(|_| rest.range()).collect::<Result<Vec<_>, BadRecord>>();
        let (taken, freed) = (ranges(taken)?, ranges(freed)?);
        let count = if kind == REMOVING { rest.u16()? } else { 0 };
        if kind == REMOVING && count == 0 {
            return Err(BadRecord("it removes no values"));
        }
        let values = (0..count).map(|_| rest.removed_value()).collect::<Result<_, _>>()?;
        let pages = PageRecords { rest, left: pages }.collect::<Result<_, _>>()?;
        Ok(GroupRecord { taken, freed, values, pages })
    }

    /// Reads of a record only what it says of pages.
    ///
    /// # Errors
    /// As [`read`](Self::read), but nothing is said of the ranges.
    pub(crate) fn pages_of(record: &'a [u8]) -> Result<PageRecords<'a>, BadRecord> {
        let (mut rest, kind, [pages, taken, freed]) = Self::head(record)?;
        rest.take((taken + freed) * RANGE_BYTES)?;
        let values = if kind == REMOVING { rest.u16()? } else { 0 };
        rest.take(values * REMOVED_BYTES)?;
        Ok(PageRecords { rest, left: pages })
    }

    /// The rest of a record after its head, its kind, and how many pages, ranges that were taken
    /// and ranges that were freed it has.
    fn head(record: &'a [u8]) -> Result<(Reader<'a>, u8, [usize; 3]), BadRecord> {
        let mut rest = Reader(record);
        let [kind @ (GROUP | REMOVING), 0] = rest.array()? else {
            return Err(BadRecord("its kind is unknown"));
        };
        let counts = [rest.u16()?, rest.u16()?, rest.u16()?];
        Ok((rest, kind, counts))
    }
}

/// What a record says of its pages, one after the other.
#[derive(Debug)]
pub(crate) struct PageRecords<'a> {
    rest: Reader<'a>,
    left: usize,
}

impl<'a> Iterator for PageRecords<'a> {
    type Item = Result<PageRecord<'a>, BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left > 0 {
            self.left -= 1;
            return Some(self.rest.page());
        }
        let rest = std::mem::take(&mut self.rest.0);
        (!rest.is_empty()).then_some(Err(BadRecord("it is longer than its parts")))
    }
}

/// The edits of a page, in their order.
#[derive(Debug)]
pub(crate) struct Edits<'a> {
    rest: Reader<'a>,
    indexes: Vec<usize>,
}

impl<'a> Edits<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Edits<'a> {
        Edits { rest: Reader(bytes), indexes: Vec::new() }
    }

    /// The next edit.
    ///
    /// # Errors
    /// [`BadRecord`] if what follows is not an edit.
    pub(crate) fn next(&mut self) -> Result<Option<Edit<'_>>, BadRecord> {
        let rest = &mut self.rest;
        if rest.0.is_empty() {
            return Ok(None);
        }
        let [code] = rest.array()?;
        let index = rest.u16()?;
        Ok(Some(match code {
            INSERT => {
                let key_len = rest.u16()?;
                let (key, payload) = rest.payload(key_len)?;
                Edit::Insert { index, key, payload }
            }
            REPLACE => Edit::Replace { index, payload: rest.payload(0)?.1 },
            REMOVE => Edit::Remove { index },
            OVERWRITE => {
                let (offset, len) = (rest.u16()?, rest.u16()?);
                Edit::Overwrite { index, offset, bytes: rest.take(len)? }
            }
            REMOVE_ALL => {
                self.indexes.clear();
                for _ in 0..index {
                    self.indexes.push(rest.u16()?);
                }
                Edit::RemoveAll { indexes: &self.indexes }
            }
            KEEP_LEFT | KEEP_RIGHT => {
                let len = rest.u16()?;
                let part = if code == KEEP_LEFT { Part::Left } else { Part::Right };
                Edit::Keep { part, at: index, separator: rest.take(len)? }
            }
            _ => return Err(BadRecord("an edit is unknown")),
        }))
    }
}

/// The bytes of a record that have not been read.
#[derive(Debug)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], BadRecord> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(BadRecord("it is too short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const LEN: usize>(&mut self) -> Result<[u8; LEN], BadRecord> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(BadRecord("it is too short"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<usize, BadRecord> {
        Ok(usize::from(u16::from_le_bytes(self.array()?)))
    }

    fn u32(&mut self) -> Result<usize, BadRecord> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    fn range(&mut self) -> Result<PageRef, BadRecord> {
        let (first, frames) =
            (u64::from_le_bytes(self.array()?), u32::from_le_bytes(self.array()?));
        match first.checked_add(frames.into()) {
            Some(_) if frames > 0 => Ok(PageRef::new(first, frames)),
            _ => Err(BadRecord("a range of pages has no pages, or too high ones")),
        }
    }

    fn removed_value(&mut self) -> Result<RemovedValue, BadRecord> {
        let tree = u32::from_le_bytes(self.array()?);
        let value = BlobRef::decode(self.take(BLOB_REF)?).filter(|value| !value.is_whole());
        Ok((tree, value.ok_or(BadRecord("a removed value is not in pieces"))?))
    }

    fn page(&mut self) -> Result<PageRecord<'a>, BadRecord> {
        let whole = self.0;
        let page = self.range()?;
        let [form] = self.array()?;
        let len = self.u32()?;
        let mut bytes = Reader(self.take(len)?);
        let redo = match form {
            EDITS => Redo::Edits(bytes.0),
            IMAGE => {
                let (begin, end) = (bytes.u32()?, bytes.u32()?);
                let is_whole = begin <= end
                    && end <= page.bytes()
                    && bytes.0.len() == page.bytes() - (end - begin);
                if !is_whole {
                    return Err(BadRecord("an image has not as many bytes as its page"));
                }
                Redo::Image { begin, end, bytes: bytes.0 }
            }
            _ => return Err(BadRecord("the form of a page is unknown")),
        };
        Ok(PageRecord { bytes: &whole[..whole.len() - self.0.len()], page, redo })
    }

    /// A key of `key_len` bytes and a payload, after the payload's kind and length.
    fn payload(&mut self, key_len: usize) -> Result<(&'a [u8], Payload<'a>), BadRecord> {
        let [kind] = self.array()?;
        let len = self.u16()?;
        let (key, mut payload) = (self.take(key_len)?, Reader(self.take(len)?));
        let payload = match kind {
            INLINE => Payload::Inline(payload.0),
            BLOB => Payload::Blob(payload.0),
            CHILD if len == 8 => Payload::Child(u64::from_le_bytes(payload.array()?)),
            _ => return Err(BadRecord("the kind of a payload is unknown")),
        };
        Ok((key, payload))
    }
}

/// A record decoded, with all of its edits, and encoded again. `None` if no version of this program
/// wrote the record. For fuzzing.
#[cfg(feature = "testing")]
pub fn encoded_again(record: &[u8]) -> Option<Vec<u8>> {
    let group = GroupRecord::read(record).ok()?;
    let mut bytes = Vec::new();
    let mut writer = RecordWriter::removing(&mut bytes, &group.taken, &group.freed, &group.values);
    for change in &group.pages {
        match change.redo {
            Redo::Edits(edits) => {
                let (mut edits, mut again) = (Edits::new(edits), Vec::new());
                while let Some(edit) = edits.next().ok()? {
                    push_edit(&mut again, edit);
                }
                writer.edits(change.page, &again);
            }
            Redo::Image { begin, end, bytes } => {
                writer.image_parts(change.page, begin..end, [bytes, &[]]);
            }
        }
    }
    Some(bytes)
}
