//! Values of the metadata.

use super::cursor::Cursor;
use crate::error::{Error, Result};

const WHAT: &str = "a value";

/// The number of the type of arrays.
const ARRAY: u32 = 9;

/// A value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names say it
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// In UTF-8, says the format; tokens of a vocabulary are not always.
    Text(Vec<u8>),
    /// All of one type.
    Array(Vec<Self>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// A value of the type with this number. Elements of arrays are taken from the budget.
    pub(super) fn read(
        cursor: &mut Cursor<'_>,
        kind: u32,
        budget: &mut u64,
        depth: u32,
    ) -> Result<Self> {
        Ok(match kind {
            0 => Self::U8(u8::from_le_bytes(cursor.array(WHAT)?)),
            1 => Self::I8(i8::from_le_bytes(cursor.array(WHAT)?)),
            2 => Self::U16(u16::from_le_bytes(cursor.array(WHAT)?)),
            3 => Self::I16(i16::from_le_bytes(cursor.array(WHAT)?)),
            4 => Self::U32(cursor.u32(WHAT)?),
            5 => Self::I32(i32::from_le_bytes(cursor.array(WHAT)?)),
            6 => Self::F32(f32::from_le_bytes(cursor.array(WHAT)?)),
            7 => Self::Bool(bool(cursor.array(WHAT)?)?),
            8 => Self::Text(cursor.bytes(WHAT)?.to_vec()),
            ARRAY => Self::array(cursor, budget, depth)?,
            10 => Self::U64(cursor.u64(WHAT)?),
            11 => Self::I64(i64::from_le_bytes(cursor.array(WHAT)?)),
            12 => Self::F64(f64::from_le_bytes(cursor.array(WHAT)?)),
            other => {
                let reason = format!("a value of the type {other}, which does not exist");
                return Err(Error::Header { reason });
            }
        })
    }

    fn array(cursor: &mut Cursor<'_>, budget: &mut u64, depth: u32) -> Result<Self> {
        let Some(depth) = depth.checked_sub(1) else {
            return Err(Error::Header { reason: "arrays are nested too deep".into() });
        };
        let kind = cursor.u32("an array's type")?;
        let count = cursor.count("the elements of an array", *budget)?;
        *budget -= count;
        // An element takes a byte at least: the reader reserves no memory for elements that cannot
        // follow.
        if count > cursor.left() {
            return Err(Error::Truncated { what: "an array" });
        }
        let mut values = Vec::new();
        for _ in 0..count {
            values.push(Self::read(cursor, kind, budget, depth)?);
        }
        Ok(Self::Array(values))
    }
}

fn bool([byte]: [u8; 1]) -> Result<bool> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::Header { reason: format!("a truth value of {other}") }),
    }
}
