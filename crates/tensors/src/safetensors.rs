//! The format of the library safetensors: 8 bytes with the length of a header in JSON, the header,
//! the data.
//!
//! As that library does, this refuses headers of more than 100 MB, duplicate names, and data that
//! belongs to no tensor or to two of them. Types of less than a byte are refused, too.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::error::{Error, Result};
use crate::extent::{MAX_RANK, Tensor, elements};

/// Bytes that a header may have.
pub const MAX_HEADER: u64 = 100_000_000;

/// The types of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[allow(missing_docs, non_camel_case_types)] // the names are the format's
pub enum Kind {
    BOOL,
    U8,
    I8,
    F8_E4M3,
    F8_E5M2,
    F8_E8M0,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    C64,
}

impl Kind {
    /// Bytes of an element.
    pub const fn size(self) -> u64 {
        match self {
            Self::BOOL | Self::U8 | Self::I8 | Self::F8_E4M3 | Self::F8_E5M2 | Self::F8_E8M0 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::C64 => 8,
        }
    }
}

/// The contents of a file's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The metadata of the file's creator.
    pub metadata: BTreeMap<String, String>,
    /// The tensors in the order of their bytes.
    pub tensors: Vec<Tensor<Kind>>,
}

/// Reads the header of a whole file.
///
/// # Errors
/// [`Error`], for every file that is not exactly as the format demands.
pub fn layout(file: &[u8]) -> Result<Layout> {
    let Some((length, rest)) = file.split_first_chunk() else {
        return Err(Error::Truncated { what: "the length of the header" });
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        let reason = format!(
            "as a header's length its first 8 bytes are {length}, and at most {MAX_HEADER} is read"
        );
        return Err(Error::Format { format: "safetensors", reason });
    }
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let header = header.ok_or(Error::Truncated { what: "the header" })?;
    if header.first() != Some(&b'{') {
        let reason = "its header is not an object of JSON".into();
        return Err(Error::Format { format: "safetensors", reason });
    }
    let header: Header = serde_json::from_slice(header)
        .map_err(|error| Error::Header { reason: error.to_string() })?;
    let start = length + 8;
    let tensors = place(header.tensors, start, file.len() as u64)?;
    Ok(Layout { metadata: header.metadata, tensors })
}

/// The entries with their places in the file, in the order of those.
fn place(mut entries: Vec<(String, Entry)>, start: u64, end: u64) -> Result<Vec<Tensor<Kind>>> {
    entries.sort_unstable_by_key(|(_, entry)| entry.data_offsets);
    let mut tensors = Vec::with_capacity(entries.len());
    let mut next = start;
    for (name, entry) in entries {
        let (from, to) = entry.data_offsets;
        let refuse = |reason: String| Error::Tensor { name: name.clone(), reason };
        if entry.shape.len() > MAX_RANK {
            let dimensions = entry.shape.len();
            return Err(refuse(format!("{dimensions} dimensions; at most {MAX_RANK} are read")));
        }
        let bytes = elements(&entry.shape).and_then(|count| count.checked_mul(entry.dtype.size()));
        if to.checked_sub(from).is_none() || to.checked_sub(from) != bytes {
            return Err(refuse(format!(
                "offsets {from} to {to} are not as many bytes as {:?} of shape {:?} needs",
                entry.dtype, entry.shape
            )));
        }
        if from.checked_add(start) != Some(next) {
            let reason = "its bytes overlap those of another tensor, or leave a gap before them";
            return Err(refuse(reason.into()));
        }
        next = match to.checked_add(start) {
            Some(place) if place <= end => place,
            _ => return Err(refuse(format!("its bytes end at {to}, after the data's end"))),
        };
        let bytes = from + start..next;
        tensors.push(Tensor { name, kind: entry.dtype, shape: entry.shape, bytes });
    }
    if next == end {
        return Ok(tensors);
    }
    Err(Error::Header { reason: format!("{} bytes at the end belong to no tensor", end - next) })
}

/// The description of a tensor in the header.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: Kind,
    shape: Vec<u64>,
    /// From the beginning of the data.
    data_offsets: (u64, u64),
}

struct Header {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, Entry)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// A visitor, because maps would keep the last of several entries with one name.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header { metadata: BTreeMap::new(), tensors: Vec::new() };
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("two entries of the name '{name}'")));
            }
            if name == "__metadata__" {
                header.metadata = map.next_value()?;
            } else {
                header.tensors.push((name, map.next_value()?));
            }
        }
        Ok(header)
    }
}
