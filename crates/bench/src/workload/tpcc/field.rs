//! Fields of fixed-length records: their places, and reading and writing them in place.
//!
//! A record is plain bytes without padding or lengths. The record's layout determines the place of
//! each field, so that reading a field costs one load, and changing it keeps the record's length. A
//! record that is too short for its fields is a programming error.

/// An unsigned number in `N` bytes, at most 8.
#[derive(Clone, Copy, Debug)]
pub struct Number<const N: usize>(usize);

impl<const N: usize> Number<N> {
    /// The field that begins at this byte of the record.
    pub const fn at(at: usize) -> Self {
        assert!(N <= 8);
        Number(at)
    }

    /// Its value.
    #[inline]
    pub fn get(self, record: &[u8]) -> u64 {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&record[self.0..self.0 + N]);
        u64::from_le_bytes(bytes)
    }

    /// Its value, for fields of at most 4 bytes.
    #[inline]
    pub fn get_u32(self, record: &[u8]) -> u32 {
        const { assert!(N <= 4) };
        self.get(record) as u32
    }

    /// Changes it. What does not fit is cut off.
    #[inline]
    pub fn set(self, record: &mut [u8], value: impl Into<u64>) {
        let bytes = value.into().to_le_bytes();
        record[self.0..self.0 + N].copy_from_slice(&bytes[..N]);
    }

    /// Adds to it.
    #[inline]
    pub fn add(self, record: &mut [u8], value: impl Into<u64>) {
        self.set(record, self.get(record).wrapping_add(value.into()));
    }
}

/// An amount of money in cents, in 8 bytes; may be negative.
#[derive(Clone, Copy, Debug)]
pub struct Money<const N: usize>(usize);

impl<const N: usize> Money<N> {
    /// The field that begins at this byte of the record.
    pub const fn at(at: usize) -> Self {
        assert!(N == 8);
        Money(at)
    }

    /// Its value in cents.
    #[inline]
    pub fn get(self, record: &[u8]) -> i64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&record[self.0..self.0 + 8]);
        i64::from_le_bytes(bytes)
    }

    /// Changes it.
    #[inline]
    pub fn set(self, record: &mut [u8], cents: i64) {
        record[self.0..self.0 + 8].copy_from_slice(&cents.to_le_bytes());
    }

    /// Adds to it.
    #[inline]
    pub fn add(self, record: &mut [u8], cents: i64) {
        self.set(record, self.get(record).wrapping_add(cents));
    }
}

/// A text of at most `N` bytes; shorter ones are followed by zeros, which are not part of it.
#[derive(Clone, Copy, Debug)]
pub struct Text<const N: usize>(usize);

impl<const N: usize> Text<N> {
    /// The field that begins at this byte of the record.
    pub const fn at(at: usize) -> Self {
        Text(at)
    }

    /// The whole field, to the last byte.
    #[inline]
    pub fn get(self, record: &[u8]) -> &[u8] {
        &record[self.0..self.0 + N]
    }

    /// The whole field, for writing.
    #[inline]
    pub fn get_mut(self, record: &mut [u8]) -> &mut [u8] {
        &mut record[self.0..self.0 + N]
    }

    /// The text without the field's padding.
    #[cfg(test)]
    pub fn text(self, record: &[u8]) -> &[u8] {
        let field = self.get(record);
        let end = field.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        &field[..end]
    }

    /// A copy of the whole field.
    #[inline]
    pub fn copy(self, record: &[u8]) -> [u8; N] {
        let mut copy = [0; N];
        copy.copy_from_slice(self.get(record));
        copy
    }

    /// Changes it. What does not fit is cut off.
    #[inline]
    pub fn set(self, record: &mut [u8], text: &[u8]) {
        let field = self.get_mut(record);
        let length = text.len().min(N);
        field[..length].copy_from_slice(&text[..length]);
        field[length..].fill(0);
    }
}

/// A module with a record's fields, one after the other in the order given, and its length `BYTES`.
macro_rules! layout {
    ($(#[$about:meta])* $name:ident { $($fields:tt)* }) => {
        $(#[$about])*
        pub mod $name {
            use super::super::field::*;
            layout!(@from 0; $($fields)*);
        }
    };
    (@from $at:expr; $field:ident: $kind:ident<$bytes:literal>, $($rest:tt)*) => {
        pub const $field: $kind<$bytes> = $kind::at($at);
        layout!(@from $at + $bytes; $($rest)*);
    };
    (@from $at:expr;) => {
        pub const BYTES: usize = $at;
    };
}
pub(super) use layout;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_to_their_bytes() {
        let (number, money, text) = (Number::<2>::at(1), Money::<8>::at(3), Text::<4>::at(11));
        let mut record = [0xff; 16];
        number.set(&mut record, 0x1234u16);
        money.set(&mut record, -5);
        text.set(&mut record, b"ab");
        assert_eq!((record[0], record[15]), (0xff, 0xff));
        assert_eq!((number.get(&record), money.get(&record)), (0x1234, -5));
        assert_eq!((text.text(&record), text.get(&record)), (&b"ab"[..], &b"ab\0\0"[..]));
        number.add(&mut record, 1u8);
        money.add(&mut record, -7);
        text.set(&mut record, b"longer");
        assert_eq!((number.get_u32(&record), money.get(&record)), (0x1235, -12));
        assert_eq!(text.copy(&record), *b"long");
        assert_eq!((record[0], record[15]), (0xff, 0xff));
    }
}
