//! Functions of an open Morsel.
#![allow(unsafe_code)] // exported names

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given};
use crate::raw::duplicate;
use crate::types::{CStat, Handle, seals};

fn range(offset: u64, length: u64) -> Outcome<Range<u64>> {
    let end = offset.checked_add(length);
    end.map(|end| offset..end).ok_or_else(|| Failure::argument("a range beyond all addresses"))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_length(morsel: Option<&Handle>) -> u64 {
    morsel.map_or(0, |morsel| morsel.0.length())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_fd(morsel: Option<&Handle>) -> c_int {
    morsel.map_or(-Errno::INVAL.raw_os_error(), |morsel| morsel.0.as_fd().as_raw_fd())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_get_stat(
    morsel: Option<&Handle>,
    result: Option<&mut MaybeUninit<CStat>>,
) -> c_int {
    call(|| {
        let (out, morsel) = (OutParameter::new(result)?, given(morsel, "the Morsel")?);
        out.set(CStat::new(morsel.0.backend(), &morsel.0.stat()?));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_populate(
    morsel: Option<&Handle>,
    offset: u64,
    length: u64,
) -> c_int {
    call(|| Ok(given(morsel, "the Morsel")?.0.populate(range(offset, length)?)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_punch(morsel: Option<&Handle>, offset: u64, length: u64) -> c_int {
    call(|| Ok(given(morsel, "the Morsel")?.0.punch(range(offset, length)?)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_fill(
    morsel: Option<&Handle>,
    source: c_int,
    from: u64,
    offset: u64,
    length: u64,
    filled: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call(|| {
        let morsel = given(morsel, "the Morsel")?;
        let bytes = morsel.0.fill(duplicate(source)?, from, offset, length)?;
        if let Some(filled) = filled {
            filled.write(bytes);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_seal(morsel: Option<&Handle>, bits: u32) -> c_int {
    call(|| Ok(given(morsel, "the Morsel")?.0.seal(seals::from_bits(bits)?)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_revoke(morsel: Option<&Handle>) -> c_int {
    call(|| Ok(given(morsel, "the Morsel")?.0.revoke()?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_read_only(
    morsel: Option<&Handle>,
    result: Option<&mut MaybeUninit<Box<Handle>>>,
) -> c_int {
    call(|| {
        let (out, morsel) = (OutParameter::new(result)?, given(morsel, "the Morsel")?);
        out.set(Box::new(Handle(morsel.0.read_only()?)));
        Ok(())
    })
}
