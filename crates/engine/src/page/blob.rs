//! Blobs: values that do not fit in a leaf.
//!
//! A value that was stored in one call has a page of its own: the page header, the value's length
//! and then the value. The value is contiguous in the file and in memory, so a lookup can return it
//! as one slice under a guard (SIGMOD'23, section 3.5). The last bytes of the page are a checksum
//! of the key that the value belongs to. A value that was written as a stream is stored in
//! [`pieces`](crate::page::pieces).

use crc_fast::{CrcAlgorithm, checksum};

use vellum_pool::{PageId, PageRef};

use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};
use crate::page::{self, PAGE_HEADER, PageKind};
use crate::store::options::PAGE_FRAMES_MAX;

/// Greatest length of a value in bytes.
pub(crate) const VALUE_MAX: u64 = 1 << 48;
/// The longest pieces, in frames.
pub(crate) const PIECE_FRAMES_MAX: u32 = 256;

/// Length in bytes of a reference to a blob in a leaf.
pub(crate) const BLOB_REF: usize = 20;
/// Offset of a blob's data in its page.
pub(crate) const BLOB_DATA: usize = PAGE_HEADER + 8;
const BLOB_LEN: usize = PAGE_HEADER;
/// Length in bytes of the key's checksum at the end of a blob page.
const BLOB_KEY: usize = 8;
/// Bytes of a blob page that are not part of the value.
pub(crate) const BLOB_REST: usize = BLOB_DATA + BLOB_KEY;

/// If a value is in pieces, the bits of a reference's `frames` from this one on are the length of
/// an index page. The bits below are the length of a piece.
const INDEX_FRAMES_SHIFT: u32 = 24;

/// Where a blob is and how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobRef {
    /// The value's page, or the root of the index if the value is in pieces.
    pub page: PageRef,
    pub len: u64,
    /// Length of each piece in frames; 0 if the value is on one page.
    pub piece_frames: u32,
}

impl BlobRef {
    /// A value on a page of its own.
    pub(crate) fn whole(page: PageRef, len: u64) -> BlobRef {
        BlobRef { page, len, piece_frames: 0 }
    }

    /// Whether the value is contiguous, on a page of its own.
    pub(crate) fn is_whole(self) -> bool {
        self.piece_frames == 0
    }

    pub(crate) fn encode(self) -> [u8; BLOB_REF] {
        let mut bytes = [0; BLOB_REF];
        put_u64(&mut bytes, 0, self.page.id.0);
        put_u64(&mut bytes, 8, self.len);
        let frames = match self.is_whole() {
            true => self.page.frames,
            false => self.piece_frames | self.page.frames << INDEX_FRAMES_SHIFT,
        };
        put_u32(&mut bytes, 16, frames);
        bytes
    }

    /// `None` if the bytes cannot be a reference, because the data would not fit the page or the
    /// pieces.
    pub(crate) fn decode(bytes: &[u8]) -> Option<BlobRef> {
        if bytes.len() != BLOB_REF {
            return None;
        }
        let (id, len) = (PageId(get_u64(bytes, 0)), get_u64(bytes, 8));
        let frames = get_u32(bytes, 16);
        let (low, high) = (frames & PageRef::MAX_FRAMES, frames >> INDEX_FRAMES_SHIFT);
        let (blob, sound) = if high == 0 {
            let page = PageRef { id, frames: low };
            let sound = low > 0 && len <= (page.bytes() - BLOB_DATA) as u64;
            (BlobRef::whole(page, len), sound)
        } else {
            let sound = (1..=PIECE_FRAMES_MAX).contains(&low)
                && high <= PAGE_FRAMES_MAX
                && (1..=VALUE_MAX).contains(&len);
            (BlobRef { page: PageRef { id, frames: high }, len, piece_frames: low }, sound)
        };
        (sound && id.0 < PageRef::MAX_ID).then_some(blob)
    }
}

/// Writes the length of a blob into its page.
pub(crate) fn put_len(bytes: &mut [u8], len: u64) {
    put_u64(bytes, BLOB_LEN, len);
}

/// Writes the checksum of a blob's key into its page.
pub(crate) fn put_key(bytes: &mut [u8], key: &[u8]) {
    let at = bytes.len() - BLOB_KEY;
    put_u64(bytes, at, key_checksum(key));
}

/// Never 0: a recorded 0 means that there is no checksum.
pub(crate) fn key_checksum(key: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, key).max(1)
}

/// Checks that a page holds the value of `key` in `tree`, with a length of `len` bytes.
pub(crate) fn check(bytes: &[u8], tree: u32, key: &[u8], len: u64) -> Result<(), String> {
    check_head(bytes, tree, len)?;
    let tail = &bytes[bytes.len() - BLOB_KEY..];
    check_tail(tail, bytes.len() as u64, key, len)
}

/// As [`check`], for the first bytes of the page.
pub(crate) fn check_head(head: &[u8], tree: u32, len: u64) -> Result<(), String> {
    if page::kind_number(head) != PageKind::Blob as u8 {
        return Err("it is not the page of a value".into());
    }
    if page::tree(head) != tree {
        return Err(format!("it belongs to tree {}, not {tree}", page::tree(head)));
    }
    if self::len(head) != len {
        return Err(format!("its value has {} bytes, not {len}", self::len(head)));
    }
    Ok(())
}

/// As [`check`], for the last bytes of a page whose length is `bytes`.
pub(crate) fn check_tail(tail: &[u8], bytes: u64, key: &[u8], len: u64) -> Result<(), String> {
    // Versions of this program that recorded no checksum left zeros here, or bytes of the value.
    let has_room = BLOB_REST as u64 + len <= bytes;
    let recorded = if has_room { get_u64(tail, tail.len() - BLOB_KEY) } else { 0 };
    match recorded == 0 || recorded == key_checksum(key) {
        true => Ok(()),
        false => Err("its value belongs to another key".into()),
    }
}

/// The value's length that a blob's page records.
pub(crate) fn len(bytes: &[u8]) -> u64 {
    get_u64(bytes, BLOB_LEN)
}
