//! The request of an `mmap` call, and whether a Morsel could serve it.

use std::ffi::c_int;
use std::ops::Range;

use vellum_morsel::PAGE_SIZE;

/// Flags that mean the same for a Morsel as for a file. Flags that choose addresses, and those of
/// huge pages, locks, growth and write-through are not among them.
const HARMLESS: c_int =
    libc::MAP_SHARED | libc::MAP_PRIVATE | libc::MAP_POPULATE | libc::MAP_NORESERVE;

/// The arguments of a call, without the address, which is only a hint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) length: usize,
    pub(crate) rights: c_int,
    pub(crate) flags: c_int,
    pub(crate) file: c_int,
    pub(crate) offset: i64,
}

impl Request {
    /// Whether the call maps a file for reading, as far as the arguments tell.
    pub(crate) fn is_for_reading(&self) -> bool {
        let Self { length, rights, flags, file, offset } = *self;
        file >= 0
            && length > 0
            && rights == libc::PROT_READ
            && flags & !HARMLESS == 0
            && offset >= 0
            && offset.cast_unsigned().is_multiple_of(PAGE_SIZE)
    }

    /// The pages that it asks for, as offsets, if all of them are within an extent.
    pub(crate) fn pages_within(&self, extent: usize) -> Option<Range<usize>> {
        let start = usize::try_from(self.offset).ok()?;
        let end = start.checked_add(self.length)?.checked_next_multiple_of(PAGE_SIZE as usize)?;
        (end <= extent).then_some(start..end)
    }

    /// Whether it begins within a file of `bytes` bytes.
    pub(crate) fn begins_within(&self, bytes: u64) -> bool {
        self.offset.cast_unsigned() < bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reading_a_file_is_answered_by_a_morsel() {
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
        assert_eq!(good.pages_within(12_288), Some(8192..12_288));
        assert_eq!(Request { length: 4097, ..good }.pages_within(12_288), None);
        assert_eq!(Request { length: usize::MAX, ..good }.pages_within(1 << 30), None);
    }
}
