//! The request of an `mmap` call.

use std::ffi::c_int;
use std::ops::Range;

/// Bytes of a page.
pub const PAGE_SIZE: u64 = 4096;

/// Flags that mean the same in the kernel's mapping and in a library's. Flags that choose
/// addresses, and those of huge pages, locks, growth and write-through are not among them.
const HARMLESS: c_int =
    libc::MAP_SHARED | libc::MAP_PRIVATE | libc::MAP_POPULATE | libc::MAP_NORESERVE;

/// The arguments of a call, without the address, which is only a hint.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes.
    pub length: usize,
    /// `PROT_READ` and others.
    pub rights: c_int,
    /// `MAP_SHARED` and others.
    pub flags: c_int,
    /// The descriptor; negative without a file.
    pub file: c_int,
    /// The first byte of the file.
    pub offset: i64,
}

impl Request {
    /// Whether the call maps a file for reading, as far as the arguments tell.
    pub fn is_for_reading(&self) -> bool {
        let Self { length, rights, flags, file, offset } = *self;
        file >= 0
            && length > 0
            && rights == libc::PROT_READ
            && flags & !HARMLESS == 0
            && offset >= 0
            && offset.cast_unsigned().is_multiple_of(PAGE_SIZE)
    }

    /// The bytes of the file that it asks for, in whole pages. `None` if there are no such.
    pub fn bytes(&self) -> Option<Range<u64>> {
        let start = u64::try_from(self.offset).ok()?;
        let end = start.checked_add(self.length as u64)?;
        Some(start..end.checked_next_multiple_of(PAGE_SIZE)?)
    }

    /// These bytes as offsets, if all of them are within an extent.
    pub fn pages_within(&self, extent: usize) -> Option<Range<usize>> {
        let bytes = self.bytes().filter(|bytes| bytes.end <= extent as u64)?;
        Some(bytes.start as usize..bytes.end as usize)
    }

    /// Whether it begins within a file of `bytes` bytes.
    pub fn begins_within(&self, bytes: u64) -> bool {
        self.offset.cast_unsigned() < bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_that_map_a_file_for_reading_are_taken() {
        let good = Request {
            length: 1,
            rights: libc::PROT_READ,
            flags: libc::MAP_SHARED,
            file: 3,
            offset: 8192,
        };
        assert!(good.is_for_reading());
        let private = Request { flags: libc::MAP_PRIVATE | libc::MAP_POPULATE, ..good };
        assert!(private.is_for_reading());
        let bad = [
            Request { length: 0, ..good },
            Request { rights: libc::PROT_READ | libc::PROT_WRITE, ..good },
            Request { rights: libc::PROT_READ | libc::PROT_EXEC, ..good },
            Request { rights: libc::PROT_NONE, ..good },
            Request { flags: libc::MAP_SHARED | libc::MAP_FIXED, ..good },
            Request { flags: libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, ..good },
            Request { file: -1, ..good },
            Request { offset: 100, ..good },
            Request { offset: -4096, ..good },
        ];
        for request in bad {
            assert!(!request.is_for_reading(), "{request:?}");
        }
        assert!(good.begins_within(8193) && !good.begins_within(8192));
        assert_eq!(good.bytes(), Some(8192..12_288));
        assert_eq!(Request { length: usize::MAX, ..good }.bytes(), None);
        assert_eq!(good.pages_within(12_288), Some(8192..12_288));
        assert_eq!(Request { length: 4097, ..good }.pages_within(12_288), None);
        assert_eq!(Request { length: usize::MAX, ..good }.pages_within(1 << 30), None);
    }
}
