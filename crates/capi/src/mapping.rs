//! A Morsel in the address space.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use crate::call::{OutParameter, call, given};
use crate::types::{Handle, MappingHandle, access};

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_map(
    morsel: Option<&Handle>,
    access_number: u32,
    address: u64,
    result: Option<&mut MaybeUninit<Box<MappingHandle>>>,
) -> c_int {
    call(|| {
        let (out, morsel) = (OutParameter::new(result)?, given(morsel, "the Morsel")?);
        let access = access(access_number)?;
        let mapping = match address {
            0 => morsel.0.map(access)?,
            address => morsel.0.map_at(access, address)?,
        };
        out.set(Box::new(MappingHandle(mapping)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_mapping_base(mapping: Option<&MappingHandle>) -> *mut c_void {
    mapping.map_or(ptr::null_mut(), |mapping| mapping.0.base().as_ptr().cast())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_mapping_length(mapping: Option<&MappingHandle>) -> u64 {
    mapping.map_or(0, |mapping| mapping.0.length())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_unmap(mapping: Option<Box<MappingHandle>>) {
    drop(mapping);
}
