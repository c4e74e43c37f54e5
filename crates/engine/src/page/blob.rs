//! Blobs: values that are too long for a leaf.
//!
//! One that was stored in one call lies on a page of its own: the page header, the value's length
//! and then the value, contiguous in the file and in memory, so that it is handed out as one slice
//! under a guard (SIGMOD'23, section 3.5). The page's last bytes tell which key the value belongs
//! to. One that was written as a stream lies in [`pieces`](crate::page::pieces).

use crc_fast::{CrcAlgorithm, checksum};

use vellum_pool::{PageId, PageRef};

use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};
use crate::page::{self, PAGE_HEADER, PageKind};
use crate::store::options::PAGE_FRAMES_MAX;

/// Greatest length of a value in bytes.
pub(crate) const VALUE_MAX: u64 = 1 << 48;
/// The longest pieces, in frames.
pub(crate) const PIECE_FRAMES_MAX: u32 = 256;

/// Bytes of a reference to a blob, as a leaf holds it.
pub(crate) const BLOB_REF: usize = 20;
/// Where a blob's data begins in its page.
pub(crate) const BLOB_DATA: usize = PAGE_HEADER + 8;
const BLOB_LEN: usize = PAGE_HEADER;
/// Bytes of the key's checksum at a blob page's end.
const BLOB_KEY: usize = 8;
/// Bytes of a blob page beside its value.
pub(crate) const BLOB_REST: usize = BLOB_DATA + BLOB_KEY;

/// In a reference, the bits of `frames` above those for the length of a page: the length of an
/// index page, if the value is in pieces.
const INDEX_FRAMES_SHIFT: u32 = 24;

/// Where a blob is and how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobRef {
    /// The value's page; of a value in pieces the root of their index.
    pub page: PageRef,
    pub len: u64,
    /// Length of each piece in frames; 0 if the value is whole.
    pub piece_frames: u32,
}

impl BlobRef {
    /// A value on a page of its own.
    pub(crate) fn whole(page: PageRef, len: u64) -> BlobRef {
        BlobRef { page, len, piece_frames: 0 }
    }

    /// The value is contiguous on a page of its own.
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

    /// `None` if the bytes cannot be a reference: the data would not fit the page or the pieces.
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

/// Never 0, which means that no checksum was recorded.
pub(crate) fn key_checksum(key: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, key).max(1)
}

/// What is wrong with a page that is to be the value of `key` in `tree`, `len` bytes long.
pub(crate) fn check(bytes: &[u8], tree: u32, key: &[u8], len: u64) -> Result<(), String> {
    check_head(bytes, tree, len)?;
    let tail = &bytes[bytes.len() - BLOB_KEY..];
    check_tail(tail, bytes.len() as u64, key, len)
}

/// As [`check`], of the page's beginning.
pub(crate) fn check_head(head: &[u8], tree: u32, len: u64) -> Result<(), String> {
    if page::kind_number(head) != PageKind::Blob as u8 {
        return Err("it is no value".into());
    }
    if page::tree(head) != tree {
        return Err(format!("it belongs to tree {}, not {tree}", page::tree(head)));
    }
    if self::len(head) != len {
        return Err(format!("its value has {} bytes, not {len}", self::len(head)));
    }
    Ok(())
}

/// As [`check`], of the end of a page that has so many bytes.
pub(crate) fn check_tail(tail: &[u8], bytes: u64, key: &[u8], len: u64) -> Result<(), String> {
    // Versions that recorded no checksum left zeros here, or bytes of the value.
    let has_room = BLOB_REST as u64 + len <= bytes;
    let recorded = if has_room { get_u64(tail, tail.len() - BLOB_KEY) } else { 0 };
    match recorded == 0 || recorded == key_checksum(key) {
        true => Ok(()),
        false => Err("its value belongs to another key".into()),
    }
}

/// The length that a blob's page records.
pub(crate) fn len(bytes: &[u8]) -> u64 {
    get_u64(bytes, BLOB_LEN)
}
