//! Blobs: values that are too long for a leaf, each on a page of its own.
//!
//! A blob page is the page header, the value's length and then the value, contiguous in the file
//! and in memory, so that it is handed out as one slice under a guard (SIGMOD'23, section 3.5). Its
//! last bytes tell which key the value belongs to.

use crc_fast::{CrcAlgorithm, checksum};

use vellum_pool::{PageId, PageRef};

use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};
use crate::page::{self, PAGE_HEADER, PageKind};

/// Bytes of a reference to a blob, as a leaf holds it.
pub(crate) const BLOB_REF: usize = 20;
/// Where a blob's data begins in its page.
pub(crate) const BLOB_DATA: usize = PAGE_HEADER + 8;
const BLOB_LEN: usize = PAGE_HEADER;
/// Bytes of the key's checksum at a blob page's end.
const BLOB_KEY: usize = 8;
/// Bytes of a blob page beside its value.
pub(crate) const BLOB_REST: usize = BLOB_DATA + BLOB_KEY;

/// Where a blob is and how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobRef {
    pub page: PageRef,
    pub len: u64,
}

impl BlobRef {
    pub(crate) fn encode(self) -> [u8; BLOB_REF] {
        let mut bytes = [0; BLOB_REF];
        put_u64(&mut bytes, 0, self.page.id.0);
        put_u64(&mut bytes, 8, self.len);
        put_u32(&mut bytes, 16, self.page.frames);
        bytes
    }

    /// `None` if the bytes cannot be a reference: the data would not fit the page.
    pub(crate) fn decode(bytes: &[u8]) -> Option<BlobRef> {
        if bytes.len() != BLOB_REF {
            return None;
        }
        let page = PageRef { id: PageId(get_u64(bytes, 0)), frames: get_u32(bytes, 16) };
        let blob = BlobRef { page, len: get_u64(bytes, 8) };
        let sound = (1..=PageRef::MAX_FRAMES).contains(&page.frames)
            && page.id.0 < PageRef::MAX_ID
            && blob.len <= (page.bytes() - BLOB_DATA) as u64;
        sound.then_some(blob)
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
fn key_checksum(key: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, key).max(1)
}

/// What is wrong with a page that is to be the value of `key` in `tree`, `len` bytes long.
pub(crate) fn check(bytes: &[u8], tree: u32, key: &[u8], len: u64) -> Result<(), String> {
    if page::kind_number(bytes) != PageKind::Blob as u8 {
        return Err("it is no value".into());
    }
    if page::tree(bytes) != tree {
        return Err(format!("it belongs to tree {}, not {tree}", page::tree(bytes)));
    }
    if self::len(bytes) != len {
        return Err(format!("its value has {} bytes, not {len}", self::len(bytes)));
    }
    // Versions that recorded no checksum left zeros here, or bytes of the value.
    let at = bytes.len() - BLOB_KEY;
    let recorded = if BLOB_DATA as u64 + len <= at as u64 { get_u64(bytes, at) } else { 0 };
    match recorded == 0 || recorded == key_checksum(key) {
        true => Ok(()),
        false => Err("its value belongs to another key".into()),
    }
}

/// The length that a blob's page records.
pub(crate) fn len(bytes: &[u8]) -> u64 {
    get_u64(bytes, BLOB_LEN)
}
