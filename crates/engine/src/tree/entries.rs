//! Iterators over ranges of entries: [`Entries`].

use std::ops::Bound;

use super::{Access, Cursor};
use crate::error::Result;
use crate::value::Value;

/// Leaves that a range reads ahead.
const READ_AHEAD: usize = 32;

/// The entries of a range, in the order of their keys.
///
/// Each was in the tree when it was returned. After an error the iterator has ended.
#[derive(Debug)]
pub struct Entries<'a> {
    cursor: Cursor<'a>,
    start: Bound<Vec<u8>>,
    end: Bound<Vec<u8>>,
    begun: bool,
    ended: bool,
}

impl<'a> Entries<'a> {
    pub(crate) fn range(
        access: Access<'a>,
        (start, end): (Bound<&[u8]>, Bound<&[u8]>),
    ) -> Entries<'a> {
        Entries {
            cursor: Cursor::new(access).read_ahead(READ_AHEAD),
            start: start.map(<[u8]>::to_vec),
            end: end.map(<[u8]>::to_vec),
            begun: false,
            ended: false,
        }
    }

    pub(crate) fn prefix(access: Access<'a>, prefix: &[u8]) -> Entries<'a> {
        // The first key behind the prefix ends where its last byte below 255 is one more.
        let kept = prefix.iter().rposition(|byte| *byte != 255);
        let end = kept.map(|last| {
            let mut end = prefix[..=last].to_vec();
            end[last] += 1;
            end
        });
        let end = end.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        Entries::range(access, (Bound::Included(prefix), end))
    }

    fn step(&mut self) -> Result<bool> {
        if self.begun {
            return self.cursor.forward();
        }
        self.begun = true;
        match &self.start {
            Bound::Unbounded => self.cursor.first(),
            Bound::Included(key) => self.cursor.seek(key),
            Bound::Excluded(key) => {
                let found = self.cursor.seek(key)?;
                match found && self.cursor.key() == key {
                    true => self.cursor.forward(),
                    false => Ok(found),
                }
            }
        }
    }

    fn is_inside(&self) -> bool {
        let key = self.cursor.key();
        match &self.end {
            Bound::Unbounded => true,
            Bound::Included(end) => key <= &end[..],
            Bound::Excluded(end) => key < &end[..],
        }
    }

    fn next_entry(&mut self) -> Result<Option<(Vec<u8>, Value<'a>)>> {
        while self.step()? && self.is_inside() {
            // A blob that was removed since the step is not there any more: go on.
            if let Some(value) = self.cursor.owned_value()? {
                return Ok(Some((self.cursor.key().to_vec(), value)));
            }
        }
        Ok(None)
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<(Vec<u8>, Value<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.next_entry();
        self.ended = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}
