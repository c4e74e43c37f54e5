//! The store's header: pages 0 and 1, written alternately (docs/format.md, "Header pages").
//!
//! The header with the larger sequence number is the valid one. A header says "clean" or "in use".
//! If it says "clean", every page is in the file and the free map is valid. A clean header may list
//! pages: then it is valid only if each of these pages has the checksum in the list. Before the
//! pool writes a page that the newest header does not list, the store makes a newer header durable
//! in the other header page.
//!
//! A header "in use" may name a log. Then its free map and its other fields describe a cut, and the
//! records of the log from the cut on describe what has changed since.

use vellum_pool::device::{Device, Write};
use vellum_pool::{PAGE_SIZE, PageDamage, PageRef};

use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};
use crate::page::{self, PAGE_HEADER, PageKind};

/// Version of the format of a new store.
pub(crate) const FORMAT_VERSION: u32 = 1;
/// Version of the format of a store that has, or had, a value in pieces.
pub(crate) const FORMAT_VERSION_PIECES: u32 = 2;
/// Version of a header that lists pages, of a store that never had a log.
pub(crate) const FORMAT_VERSION_LIST: u32 = 3;
/// Version of a header of a store that has, or had, a log.
pub(crate) const FORMAT_VERSION_LOG: u32 = 4;
/// Version of a clean header that names the log that ended with it.
pub(crate) const FORMAT_VERSION_ENDED_LOG: u32 = 5;
/// Version of a header in use that names a log in which edits may overwrite parts of values.
pub(crate) const FORMAT_VERSION_PARTS: u32 = 6;
/// Version of a header whose free map says what was written since a backup as well.
pub(crate) const FORMAT_VERSION_CHANGES: u32 = 7;
/// Version of a header in use that names a log in which edits may split nodes, and replace
/// children.
pub(crate) const FORMAT_VERSION_SPLITS: u32 = 8;
/// The greatest version that this code reads.
pub(crate) const FORMAT_VERSION_NEWEST: u32 = FORMAT_VERSION_SPLITS;
/// The most pages that a header lists, with the fields of a log before the list.
pub(crate) const LISTED_MAX: usize = (PAGE_SIZE - LIST) / LISTED_BYTES;
/// The most frames of all listed pages.
pub(crate) const LISTED_FRAMES_MAX: u64 = 256;
/// Number of header pages at the beginning of the file.
pub(crate) const HEADER_PAGES: u64 = 2;
const MAGIC: &[u8; 8] = b"VELLUMDB";
/// The greatest number of the next tree.
pub(crate) const NEXT_TREE_MAX: u32 = u32::MAX - 1;
const CLEAN: u64 = 1;
const CHANGES: u64 = 2;

const AT_MAGIC: usize = PAGE_HEADER;
pub(crate) const AT_VERSION: usize = PAGE_HEADER + 8;
const AT_PAGE_FRAMES: usize = PAGE_HEADER + 12;
const AT_STORE_ID: usize = PAGE_HEADER + 16;
const AT_SEQUENCE: usize = PAGE_HEADER + 32;
const AT_FLAGS: usize = PAGE_HEADER + 40;
const AT_CATALOG: usize = PAGE_HEADER + 48;
const AT_FREE_MAP: usize = PAGE_HEADER + 56;
const AT_FILE_PAGES: usize = PAGE_HEADER + 64;
const AT_NEXT_TREE: usize = PAGE_HEADER + 72;
const AT_LISTED: usize = PAGE_HEADER + 80;
const AT_STORE_VERSION: usize = PAGE_HEADER + 84;
const AT_LOG: usize = PAGE_HEADER + 88;
const AT_LOG_BEGIN: usize = PAGE_HEADER + 96;
const AT_LSN: usize = PAGE_HEADER + 104;
const LIST: usize = PAGE_HEADER + 112;
/// The place of the list in a header of version 3, which has no fields of a log.
const LIST_WITHOUT_LOG: usize = AT_LOG;
/// Length of an entry of the list: number, frames and checksum of a page.
const LISTED_BYTES: usize = 20;

/// The decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Version of the store's format.
    pub version: u32,
    /// Length of tree pages in units of 4 KiB.
    pub page_frames: u32,
    /// Tells stores apart.
    pub store_id: u128,
    /// Increases by one with every written header. Its lowest bit is the number of the header's
    /// page.
    pub sequence: u64,
    /// All pages are in the file.
    pub clean: bool,
    /// Root page of the catalog.
    pub catalog: u64,
    /// First page of the free map, 0 if there is none; valid only if clean.
    pub free_map: u64,
    /// The pages of the free map also say what was written since a backup.
    pub changes: bool,
    /// Length of the file in pages of 4 KiB when this header was written.
    pub file_pages: u64,
    /// Number of the next tree to be created.
    pub next_tree: u32,
    /// The number of listed pages.
    pub listed: u32,
    /// The log of the store.
    pub log: LogPoint,
}

/// A header's place in the records of the store.
///
/// Records have log sequence numbers that grow for as long as the store exists, whatever logs it
/// has one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogPoint {
    /// The identity of the log of a store that is in use with one. In a clean header the identity
    /// of the log that ended with it, of which a process may have left the files. Else 0.
    pub identity: u64,
    /// The log sequence number at the log's own number 0, modulo 2^64. Of no meaning without a log.
    pub begin: u64,
    /// The header describes the store after all records before this log sequence number. 0 if the
    /// store never had a log.
    pub lsn: u64,
}

/// A page that a header lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub page: PageRef,
    pub checksum: u64,
}

/// The contents of a header page.
#[derive(Debug)]
pub(crate) enum HeaderPage {
    /// A header of this program's format.
    Valid(Header),
    /// A header of another format version.
    OtherVersion(u32),
    /// A header page that is damaged.
    Damaged(PageDamage),
    /// Nothing that looks like a header.
    Foreign,
}

/// A buffer with the alignment that devices need.
#[repr(C, align(4096))]
pub(crate) struct AlignedPage(pub [u8; PAGE_SIZE]);

impl LogPoint {
    /// What a header says of a store that goes on without a log.
    pub(crate) fn without_log(self) -> LogPoint {
        LogPoint { identity: 0, begin: 0, ..self }
    }
}

impl Header {
    /// The page that this header belongs to.
    pub(crate) fn page(&self) -> PageRef {
        PageRef::new(self.sequence % HEADER_PAGES, 1)
    }

    /// Whether pages may have log sequence numbers other than 0.
    fn has_lsns(&self) -> bool {
        self.log.lsn > 0
    }

    /// The version that the header's page says.
    pub(crate) fn encoded_version(&self) -> u32 {
        match (self.has_lsns(), self.listed) {
            (true, _) if !self.clean && self.log.identity != 0 => FORMAT_VERSION_SPLITS,
            _ if self.changes => FORMAT_VERSION_CHANGES,
            (true, _) if self.log.identity == 0 => FORMAT_VERSION_LOG,
            (true, _) => FORMAT_VERSION_ENDED_LOG,
            (false, 0) => self.version,
            (false, _) => FORMAT_VERSION_LIST,
        }
    }

    /// Whether `page` says the version that this code writes of such a header.
    pub(crate) fn is_newest_version(&self, page: &AlignedPage) -> bool {
        get_u32(&page.0, AT_VERSION) == self.encoded_version()
    }

    fn list_place(&self) -> usize {
        if self.has_lsns() { LIST } else { LIST_WITHOUT_LOG }
    }

    /// The sealed page of this header. `list` must have `self.listed` entries.
    pub(crate) fn encode(&self, list: &[Listed]) -> Box<AlignedPage> {
        debug_assert_eq!(self.listed as usize, list.len());
        let mut block = Box::new(AlignedPage([0; PAGE_SIZE]));
        let bytes = &mut block.0;
        page::init(bytes, self.page(), PageKind::Header, 0, 0);
        bytes[AT_MAGIC..AT_VERSION].copy_from_slice(MAGIC);
        put_u32(bytes, AT_VERSION, self.encoded_version());
        put_u32(bytes, AT_PAGE_FRAMES, self.page_frames);
        bytes[AT_STORE_ID..AT_SEQUENCE].copy_from_slice(&self.store_id.to_le_bytes());
        put_u64(bytes, AT_SEQUENCE, self.sequence);
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        put_u64(bytes, AT_FLAGS, flag(self.clean, CLEAN) | flag(self.changes, CHANGES));
        put_u64(bytes, AT_CATALOG, self.catalog);
        put_u64(bytes, AT_FREE_MAP, self.free_map);
        put_u64(bytes, AT_FILE_PAGES, self.file_pages);
        put_u32(bytes, AT_NEXT_TREE, self.next_tree);
        if self.encoded_version() >= FORMAT_VERSION_LIST {
            put_u32(bytes, AT_LISTED, self.listed);
            put_u32(bytes, AT_STORE_VERSION, self.version);
        }
        if self.has_lsns() {
            put_u64(bytes, AT_LOG, self.log.identity);
            put_u64(bytes, AT_LOG_BEGIN, self.log.begin);
            put_u64(bytes, AT_LSN, self.log.lsn);
        }
        let places = bytes[self.list_place()..].chunks_exact_mut(LISTED_BYTES);
        for (listed, bytes) in list.iter().zip(places) {
            put_u64(bytes, 0, listed.page.id.0);
            put_u32(bytes, 8, listed.page.frames);
            put_u64(bytes, 12, listed.checksum);
        }
        page::seal(bytes, &[]);
        block
    }

    /// Decodes page `number`, 0 or 1.
    pub(crate) fn decode(number: u64, bytes: &[u8]) -> HeaderPage {
        let at = PageRef::new(number, 1);
        let damaged = |what: &str| HeaderPage::Damaged(PageDamage { page: at, what: what.into() });
        let looks_like_one = bytes.len() == PAGE_SIZE && &bytes[AT_MAGIC..AT_VERSION] == MAGIC;
        let verified = page::verify(at, bytes);
        if !looks_like_one {
            return match verified {
                Ok(_) => damaged("it is not a header page"),
                Err(damage) if page::claimed(bytes).is_some() => HeaderPage::Damaged(damage),
                Err(_) => HeaderPage::Foreign,
            };
        }
        match verified {
            Err(damage) => return HeaderPage::Damaged(damage),
            Ok(header) if header.kind != PageKind::Header => {
                return damaged("it is not a header page");
            }
            Ok(_) => {}
        }
        let version = get_u32(bytes, AT_VERSION);
        let is_of_log = (FORMAT_VERSION_LOG..=FORMAT_VERSION_NEWEST).contains(&version);
        let log = match is_of_log {
            true => LogPoint {
                identity: get_u64(bytes, AT_LOG),
                begin: get_u64(bytes, AT_LOG_BEGIN),
                lsn: get_u64(bytes, AT_LSN),
            },
            false => LogPoint::default(),
        };
        let (listed, store_version) = match version {
            FORMAT_VERSION..=FORMAT_VERSION_PIECES => (0, version),
            FORMAT_VERSION_LIST..=FORMAT_VERSION_NEWEST => {
                (get_u32(bytes, AT_LISTED), get_u32(bytes, AT_STORE_VERSION))
            }
            other => return HeaderPage::OtherVersion(other),
        };
        let says_of_changes = get_u64(bytes, AT_FLAGS) & CHANGES != 0;
        let mut store_id = [0; 16];
        store_id.copy_from_slice(&bytes[AT_STORE_ID..AT_SEQUENCE]);
        let header = Header {
            version: store_version,
            page_frames: get_u32(bytes, AT_PAGE_FRAMES),
            store_id: u128::from_le_bytes(store_id),
            sequence: get_u64(bytes, AT_SEQUENCE),
            clean: get_u64(bytes, AT_FLAGS) & CLEAN != 0,
            catalog: get_u64(bytes, AT_CATALOG),
            free_map: get_u64(bytes, AT_FREE_MAP),
            changes: version >= FORMAT_VERSION_CHANGES && says_of_changes,
            file_pages: get_u64(bytes, AT_FILE_PAGES),
            next_tree: get_u32(bytes, AT_NEXT_TREE),
            listed,
            log,
        };
        let counters_are_sound = header.counts() && is_of_log == header.has_lsns();
        let known = (FORMAT_VERSION..=FORMAT_VERSION_PIECES).contains(&store_version);
        let list = header.list(bytes);
        let frames = list.map(|listed| u64::from(listed.page.frames)).sum::<u64>();
        let listed_max = (PAGE_SIZE - header.list_place()) / LISTED_BYTES;
        let can_list = listed as usize <= listed_max && frames <= LISTED_FRAMES_MAX;
        let can_list = listed == 0 || can_list && header.clean;
        let says_of_log = match (header.clean, log.identity != 0) {
            (_, true) if version == FORMAT_VERSION_CHANGES => says_of_changes,
            (true, true) => version == FORMAT_VERSION_ENDED_LOG,
            // Earlier programs wrote the version of all logs, or that of parts.
            (false, true) => {
                [FORMAT_VERSION_LOG, FORMAT_VERSION_PARTS, FORMAT_VERSION_SPLITS].contains(&version)
            }
            (_, false) => version <= FORMAT_VERSION_LOG,
        };
        if header.page() != at
            || !(1..=16).contains(&header.page_frames)
            || !counters_are_sound
            || !known
            || !can_list
            || !says_of_log
        {
            return damaged("its fields contradict each other");
        }
        HeaderPage::Valid(header)
    }

    /// The pages that the header lists, from its page.
    pub(crate) fn list(&self, bytes: &[u8]) -> impl Iterator<Item = Listed> {
        let places = bytes[self.list_place()..].chunks_exact(LISTED_BYTES);
        places.take(self.listed as usize).map(|bytes| Listed {
            page: PageRef::new(get_u64(bytes, 0), get_u32(bytes, 8)),
            checksum: get_u64(bytes, 12),
        })
    }

    /// Whether its counters are within their limits, which they do not reach for centuries.
    fn counts(&self) -> bool {
        self.sequence < 1 << 62 && self.next_tree <= NEXT_TREE_MAX && self.log.lsn < 1 << 63
    }

    /// Writes the header to its page. The caller makes it durable by syncing the device.
    pub(crate) fn write(&self, device: &dyn Device, list: &[Listed]) -> std::io::Result<()> {
        if !self.counts() {
            // Only a damaged file comes so far. No opening would believe this header.
            let what = "the numbers of the store's header have run out: load a dump of the store";
            return Err(std::io::Error::other(what));
        }
        let block = self.encode(list);
        let mut writes = [Write::new(self.page().id.0, [&block.0, &[]])];
        device.write(&mut writes);
        let [write] = writes;
        write.result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_a_round_trip_and_no_flipped_bit() {
        let header = Header {
            version: FORMAT_VERSION_PIECES,
            page_frames: 4,
            store_id: 0x1234_5678_9abc_def0_1122_3344_5566_7788,
            sequence: 7,
            clean: true,
            catalog: 2,
            free_map: 99,
            changes: false,
            file_pages: 1000,
            next_tree: 5,
            listed: LISTED_MAX as u32,
            log: LogPoint { identity: 0, begin: 1 << 40, lsn: 1 << 41 },
        };
        let listed =
            |n: u64| Listed { page: PageRef::new(n << 40, 1 + n as u32 % 4 / 3), checksum: !n };
        let list: Vec<_> = (0..LISTED_MAX as u64).map(|n| listed(n % 100)).collect();
        let block = header.encode(&list);
        let HeaderPage::Valid(decoded) = Header::decode(1, &block.0) else { panic!("not valid") };
        assert_eq!(decoded, header);
        assert!(decoded.list(&block.0).eq(list.iter().copied()));
        let no_log = LogPoint::default();
        let log = LogPoint { identity: u64::MAX, ..header.log };
        let plain = Header { listed: 0, ..header };
        for (header, version) in [
            (plain, FORMAT_VERSION_LOG),
            (Header { clean: false, log, ..plain }, FORMAT_VERSION_SPLITS),
            (Header { log, ..plain }, FORMAT_VERSION_ENDED_LOG),
            (Header { log, changes: true, ..plain }, FORMAT_VERSION_CHANGES),
            (Header { clean: false, log, changes: true, ..plain }, FORMAT_VERSION_SPLITS),
            (Header { log: no_log, ..plain }, FORMAT_VERSION_PIECES),
        ] {
            let block = header.encode(&[]);
            assert_eq!(get_u32(&block.0, AT_VERSION), version);
            let HeaderPage::Valid(decoded) = Header::decode(1, &block.0) else {
                panic!("not valid")
            };
            assert_eq!(decoded, header);
        }
        let old = Header { log: no_log, ..header }.encode(&list);
        assert_eq!(get_u32(&old.0, AT_VERSION), FORMAT_VERSION_LIST);
        let HeaderPage::Valid(decoded) = Header::decode(1, &old.0) else { panic!("not valid") };
        assert!(decoded.list(&old.0).eq(list));
        // Only a clean header names a log that has ended. Earlier programs wrote version 4 in use.
        for (clean, log, version, is_valid) in [
            (true, log, FORMAT_VERSION_LOG, false),
            (true, log, FORMAT_VERSION_PARTS, false),
            (true, log, FORMAT_VERSION_SPLITS, false),
            (false, log, FORMAT_VERSION_PARTS, true),
            (false, header.log, FORMAT_VERSION_SPLITS, false),
            (false, log, FORMAT_VERSION_ENDED_LOG, false),
            (false, log, FORMAT_VERSION_LOG, true),
            (false, header.log, FORMAT_VERSION_PARTS, false),
            (true, log, FORMAT_VERSION_CHANGES, false),
            (false, log, FORMAT_VERSION_CHANGES, false),
        ] {
            let mut other = Header { clean, log, ..plain }.encode(&[]);
            put_u32(&mut other.0, AT_VERSION, version);
            page::seal(&mut other.0, &[]);
            let decoded = Header::decode(1, &other.0);
            assert_eq!(matches!(decoded, HeaderPage::Valid(_)), is_valid, "{clean}, {version}");
        }
        assert!(matches!(Header::decode(0, &block.0), HeaderPage::Damaged(_)));
        for bit in 0..200 * 8 {
            let mut bytes = block.0;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!matches!(Header::decode(1, &bytes), HeaderPage::Valid(_)), "bit {bit}");
        }
        assert!(matches!(Header::decode(0, &[7; PAGE_SIZE]), HeaderPage::Foreign));
    }
}
