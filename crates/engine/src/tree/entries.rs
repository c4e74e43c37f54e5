//! Iterators over ranges of entries: [`Entries`].

use std::borrow::Cow;
use std::ops::Bound;

use super::range::{is_before, is_behind};
use super::{Access, Cursor};
use crate::error::Result;
use crate::value::Value;

/// Leaves that a range reads ahead.
const READ_AHEAD: usize = 32;

/// The entries of a range, in the order of their keys, from both ends.
///
/// As an iterator it gives keys and values that are copies: they can be collected, whatever the
/// size of the pool. [`next_entry`](Entries::next_entry) and
/// [`next_entry_back`](Entries::next_entry_back) give them in place instead, without an allocation
/// for each.
///
/// Each entry was in the tree when it was returned. After an error the iterator has ended.
///
/// ```
/// # use vellum::{Options, Store};
/// # let directory = tempfile::tempdir()?;
/// # let options = Options::new().pool_bytes(4 << 20);
/// # let store = Store::create(directory.path().join("store"), &options)?;
/// let tree = store.create_tree("letters")?;
/// for letter in "abcdef".chars() {
///     tree.upsert(letter.to_string().as_bytes(), b"")?;
/// }
/// let found: Vec<_> = tree.range("b".."e").rev().collect::<vellum::Result<_>>()?;
/// assert!(found.iter().map(|(key, _)| &key[..]).eq([b"d", b"c", b"b"]));
/// let mut entries = tree.range("c"..);
/// let (mut keys, mut bytes) = (0, 0);
/// while let Some((key, value)) = entries.next_entry()? {
///     keys += 1;
///     bytes += key.len() + value.len();
/// }
/// assert_eq!((keys, bytes), (4, 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Entries<'a> {
    access: Access<'a>,
    front: Cursor<'a>,
    /// None until the first step from the end.
    back: Option<Box<Cursor<'a>>>,
    start: Bound<Vec<u8>>,
    end: Bound<Vec<u8>>,
    begun: bool,
    ended: bool,
}

impl<'a> Entries<'a> {
    pub(crate) fn new(
        access: Access<'a>,
        (start, end): (Bound<Vec<u8>>, Bound<Vec<u8>>),
    ) -> Entries<'a> {
        let front = Cursor::new(access).read_ahead(READ_AHEAD);
        Entries { access, front, back: None, start, end, begun: false, ended: false }
    }

    /// All entries of a tree.
    pub(crate) fn all(access: Access<'a>) -> Entries<'a> {
        Entries::new(access, (Bound::Unbounded, Bound::Unbounded))
    }

    /// The next entry from the start, as long as no other is asked for. A long value keeps memory
    /// of the pool, as one that [`Tree::get`](crate::Tree::get) returns.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards.
    #[inline]
    pub fn next_entry(&mut self) -> Result<Option<(&[u8], Value<'_>)>> {
        // The cursor knows how far the range goes in its leaf: most steps are within that.
        if !self.ended
            && let Some(value) = self.front.step()
        {
            let (key, value) = self.front.stepped(value);
            return Ok(Some((key, Value::Inline(Cow::Borrowed(value)))));
        }
        let found = self.step(Entries::forward, |entries| Some(&entries.front))?;
        Ok(found.map(|blob| lend(&self.front, blob)))
    }

    /// As [`next_entry`](Entries::next_entry), from the end.
    ///
    /// # Errors
    /// As `next_entry`.
    pub fn next_entry_back(&mut self) -> Result<Option<(&[u8], Value<'_>)>> {
        let found = self.step(Entries::backward, |entries| entries.back.as_deref())?;
        let back = self.back.as_deref();
        Ok(found.zip(back).map(|(blob, back)| lend(back, blob)))
    }

    /// Moves a cursor to its next entry; what it returns is that one's value, if it is a blob.
    fn step(
        &mut self,
        advance: fn(&mut Entries<'a>) -> Result<bool>,
        cursor: for<'e> fn(&'e Entries<'a>) -> Option<&'e Cursor<'a>>,
    ) -> Result<Option<Option<Value<'a>>>> {
        if self.ended {
            return Ok(None);
        }
        // Unless it comes to an entry.
        self.ended = true;
        while advance(self)? {
            let blob = match cursor(self) {
                Some(cursor) if cursor.is_blob() => match self.access.get(cursor.key())? {
                    // It was removed since the step: go on.
                    None => continue,
                    blob => blob,
                },
                _ => None,
            };
            self.ended = false;
            return Ok(Some(blob));
        }
        Ok(None)
    }

    /// Moves the front cursor; false if that is the end.
    fn forward(&mut self) -> Result<bool> {
        let front = &mut self.front;
        let moved = match (self.begun, &self.start) {
            (true, _) => front.forward()?,
            (_, Bound::Unbounded) => front.first()?,
            (_, Bound::Included(key)) => front.seek(key)?,
            (_, Bound::Excluded(key)) => {
                front.seek(key)? && (front.key() != key || front.forward()?)
            }
        };
        self.begun = true;
        let is_within = moved && is_before(front.key(), &self.end);
        match &self.back {
            Some(back) => Ok(is_within && front.key() < back.key()),
            None if is_within => front.learn_end(&self.end).map(|()| true),
            None => Ok(false),
        }
    }

    /// Moves the back cursor; false if that is the end.
    fn backward(&mut self) -> Result<bool> {
        let moved = match &mut self.back {
            Some(back) => back.backward()?,
            none => {
                // From here on the entries end where the other cursor is.
                self.front.forget_end();
                let back = none.insert(Box::new(Cursor::new(self.access).read_ahead(READ_AHEAD)));
                match &self.end {
                    Bound::Unbounded => back.last()?,
                    Bound::Included(key) => back.seek_back(key)?,
                    Bound::Excluded(key) => {
                        back.seek_back(key)? && (back.key() != key || back.backward()?)
                    }
                }
            }
        };
        let key = self.back.as_deref().map_or(&[][..], Cursor::key);
        Ok(moved && is_behind(key, &self.start) && (!self.begun || key > self.front.key()))
    }
}

/// The entry that a cursor stands on, with its value if that is a blob.
fn lend<'c>(cursor: &'c Cursor<'_>, blob: Option<Value<'c>>) -> (&'c [u8], Value<'c>) {
    let inline = || Value::Inline(Cow::Borrowed(cursor.inline_value()));
    (cursor.key(), blob.unwrap_or_else(inline))
}

/// An entry that is its own. A blob would keep memory of the pool, which a collection exhausts.
fn owned<'a>((key, value): (&[u8], Value<'_>)) -> (Vec<u8>, Value<'a>) {
    (key.to_vec(), Value::Inline(Cow::Owned(value.into_vec())))
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<(Vec<u8>, Value<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_entry().map(|entry| entry.map(owned)).transpose()
    }
}

impl DoubleEndedIterator for Entries<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.next_entry_back().map(|entry| entry.map(owned)).transpose()
    }
}

impl std::iter::FusedIterator for Entries<'_> {}
