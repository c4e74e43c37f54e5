//! The format of llama.cpp, GGUF: metadata, descriptions of tensors, the data.
//!
//! Versions 2 and 3 in little-endian are read. Numbers that a hostile file may choose are bounded:
//! see [`MAX_TENSORS`], [`MAX_PAIRS`], [`MAX_NAME`], [`MAX_VALUES`] and [`MAX_DEPTH`].

mod cursor;
mod kind;
mod value;

use std::collections::HashSet;

pub use cursor::MAX_NAME;
pub use kind::Kind;
pub use value::Value;

use crate::error::{Error, Result};
use crate::extent::{Tensor, apart, elements};
use cursor::Cursor;

/// Tensors that a file may have.
pub const MAX_TENSORS: u64 = 1 << 20;
/// Pairs of key and value.
pub const MAX_PAIRS: u64 = 1 << 20;
/// Elements of all arrays together.
pub const MAX_VALUES: u64 = 1 << 23;
/// Arrays within arrays.
pub const MAX_DEPTH: u32 = 4;

/// Dimensions that the format has.
const DIMENSIONS: u64 = 4;

/// Tensors begin at multiples of this many bytes unless the metadata says otherwise.
const ALIGNMENT: u32 = 32;

/// The key that says so.
const ALIGNMENT_KEY: &str = "general.alignment";

/// The contents of a file's header.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// The format's version.
    pub version: u32,
    /// Keys with their values, in the file's order; no key occurs twice.
    pub metadata: Vec<(String, Value)>,
    /// The tensors, in the file's order.
    pub tensors: Vec<Tensor<Kind>>,
}

/// Reads the header of a whole file.
///
/// # Errors
/// [`Error`], for every file that is not as the format demands, or beyond the limits.
pub fn layout(file: &[u8]) -> Result<Layout> {
    let mut cursor = Cursor::new(file);
    let version = begin(&mut cursor)?;
    let count = cursor.count("the number of tensors", MAX_TENSORS)?;
    let pairs = cursor.count("the number of keys", MAX_PAIRS)?;
    let metadata = metadata(&mut cursor, pairs)?;
    let alignment = alignment(&metadata)?;
    let mut names = HashSet::new();
    let mut described = Vec::new();
    for _ in 0..count {
        let description = Description::read(&mut cursor)?;
        if !names.insert(description.name.clone()) {
            return Err(description.refused("another tensor has the same name"));
        }
        described.push(description);
    }
    let start = cursor.position().next_multiple_of(alignment);
    let end = file.len() as u64;
    let place = |description: Description| description.place(start, end, alignment);
    let tensors: Vec<Tensor<Kind>> = described.into_iter().map(place).collect::<Result<_>>()?;
    apart(&tensors)?;
    Ok(Layout { version, metadata, tensors })
}

/// Checks that the file has the format, and returns its version.
fn begin(cursor: &mut Cursor<'_>) -> Result<u32> {
    let refuse = |reason: String| Err(Error::Format { format: "GGUF", reason });
    if cursor.take(4, "the magic number")? != b"GGUF" {
        return refuse("it does not begin with 'GGUF'".into());
    }
    match cursor.u32("the version")? {
        version @ (2 | 3) => Ok(version),
        version if version.swap_bytes() < 1 << 16 => {
            refuse("it is in big-endian; convert it to little-endian".into())
        }
        version => refuse(format!("version {version}; versions 2 and 3 are read")),
    }
}

fn metadata(cursor: &mut Cursor<'_>, pairs: u64) -> Result<Vec<(String, Value)>> {
    let mut budget = MAX_VALUES;
    let mut keys = HashSet::new();
    let mut metadata = Vec::new();
    for _ in 0..pairs {
        let key = cursor.name("a key")?;
        if !keys.insert(key.clone()) {
            return Err(Error::Header { reason: format!("the key '{key}' is there twice") });
        }
        let kind = cursor.u32("a value's type")?;
        let value = Value::read(cursor, kind, &mut budget, MAX_DEPTH)?;
        metadata.push((key, value));
    }
    Ok(metadata)
}

fn alignment(metadata: &[(String, Value)]) -> Result<u64> {
    match metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY) {
        None => Ok(ALIGNMENT.into()),
        Some((_, Value::U32(bytes))) if bytes.is_power_of_two() => Ok((*bytes).into()),
        Some((_, other)) => {
            let reason = format!("{ALIGNMENT_KEY} is {other:?}; it must be a power of two");
            Err(Error::Header { reason })
        }
    }
}

/// The description of a tensor in the header.
struct Description {
    name: String,
    kind: Kind,
    shape: Vec<u64>,
    /// From the beginning of the data.
    offset: u64,
}

impl Description {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        let name = cursor.name("a tensor's name")?;
        let rank = u64::from(cursor.u32("a tensor's rank")?);
        if rank > DIMENSIONS {
            let what = "a tensor's number of dimensions";
            return Err(Error::Limit { what, found: rank, limit: DIMENSIONS });
        }
        let mut shape = Vec::new();
        for _ in 0..rank {
            shape.push(cursor.u64("a tensor's shape")?);
        }
        // In the file the dimension whose elements are neighbours comes first.
        shape.reverse();
        let number = cursor.u32("a tensor's type")?;
        let offset = cursor.u64("a tensor's offset")?;
        match Kind::of(number) {
            Some(kind) => Ok(Self { name, kind, shape, offset }),
            None => {
                Err(Error::Tensor { name, reason: format!("its type {number} is not known here") })
            }
        }
    }

    fn refused(&self, reason: impl Into<String>) -> Error {
        Error::Tensor { name: self.name.clone(), reason: reason.into() }
    }

    fn place(self, data: u64, end: u64, alignment: u64) -> Result<Tensor<Kind>> {
        let Kind { name: kind, block, bytes, .. } = self.kind;
        let row = self.shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block) {
            let reason = format!("rows of {row} elements; {kind} has blocks of {block}");
            return Err(self.refused(reason));
        }
        if !self.offset.is_multiple_of(alignment) {
            let reason = format!("its offset {} is no multiple of {alignment}", self.offset);
            return Err(self.refused(reason));
        }
        let length = elements(&self.shape).and_then(|count| (count / block).checked_mul(bytes));
        let start = data.checked_add(self.offset);
        let place = start.zip(length).and_then(|(start, length)| {
            start.checked_add(length).filter(|last| *last <= end).map(|last| start..last)
        });
        match place {
            Some(bytes) => {
                Ok(Tensor { name: self.name, kind: self.kind, shape: self.shape, bytes })
            }
            None => Err(self.refused("its bytes end after the file's end")),
        }
    }
}
