//! Ranges of keys.

use std::ffi::c_void;
use std::ops::Bound;

use crate::call::{Failure, Outcome};
use crate::raw::bytes;

/// `struct vellum_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CRange {
    start: *const c_void,
    start_length: usize,
    end: *const c_void,
    end_length: usize,
    flags: u32,
    reserved: u32,
}

const PREFIX: u32 = 128;
const WITHOUT_START: u32 = 256;
const WITH_END: u32 = 512;

/// The start and the end of a range.
#[derive(Debug)]
pub(crate) struct Bounds {
    pub(crate) start: Bound<Vec<u8>>,
    pub(crate) end: Bound<Vec<u8>>,
}

/// The bounds of a range; NULL stands for all keys.
pub(crate) fn bounds(range: Option<&CRange>) -> Outcome<Bounds> {
    let all = Bounds { start: Bound::Unbounded, end: Bound::Unbounded };
    let Some(range) = range else { return Ok(all) };
    if range.reserved != 0 {
        return Err(Failure::argument("a reserved member of the range is not 0"));
    }
    let start = key(range.start, range.start_length)?;
    let end = key(range.end, range.end_length)?;
    Ok(match (range.flags, start, end) {
        (PREFIX, None, None) => all,
        (PREFIX, Some(prefix), None) => of_prefix(prefix),
        (flags, start, end) if flags & !(WITHOUT_START | WITH_END) == 0 => Bounds {
            start: bound(start, flags & WITHOUT_START == 0),
            end: bound(end, flags & WITH_END != 0),
        },
        (PREFIX, ..) => return Err(Failure::argument("a range of a prefix has no end")),
        _ => return Err(Failure::argument("flags that exclude each other, or do not exist")),
    })
}

/// A key of the range; NULL stands for none.
fn key<'a>(begin: *const c_void, length: usize) -> Outcome<Option<&'a [u8]>> {
    match (begin.is_null(), length) {
        (true, 0) => Ok(None),
        _ => bytes(begin, length).map(Some),
    }
}

fn bound(key: Option<&[u8]>, is_included: bool) -> Bound<Vec<u8>> {
    match key.map(<[u8]>::to_vec) {
        None => Bound::Unbounded,
        Some(key) if is_included => Bound::Included(key),
        Some(key) => Bound::Excluded(key),
    }
}

/// The keys that begin with `prefix`.
fn of_prefix(prefix: &[u8]) -> Bounds {
    // The first key that comes after all of them: of the bytes up to the last one below 255, the
    // last one is incremented.
    let end = prefix.iter().rposition(|byte| *byte != u8::MAX).map(|last| {
        let mut end = prefix[..=last].to_vec();
        end[last] += 1;
        end
    });
    let end = end.map_or(Bound::Unbounded, Bound::Excluded);
    Bounds { start: Bound::Included(prefix.to_vec()), end }
}

impl Bounds {
    /// The bounds as the store takes them.
    pub(crate) fn keys(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
        (self.start.as_ref().map(|key| &key[..]), self.end.as_ref().map(|key| &key[..]))
    }
}
