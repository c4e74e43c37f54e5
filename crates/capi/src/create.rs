//! Making Morsels and finding them by name.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;

use vellum_morsel::{BackendChoice, Provider};

use crate::call::{OutParameter, call, given};
use crate::raw::text;
use crate::types::{CShape, Handle, access, backend};

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_create(
    backend_number: u32,
    shape: Option<&CShape>,
    result: Option<&mut MaybeUninit<Box<Handle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let shape = given(shape, "the shape")?.shape()?;
        let provider = Provider::new(backend(backend_number)?)?;
        out.set(Box::new(Handle(provider.create(&shape)?)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_create_named(
    name: *const c_char,
    shape: Option<&CShape>,
    result: Option<&mut MaybeUninit<Box<Handle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let shape = given(shape, "the shape")?.shape()?;
        let name = text(name, "the name")?;
        let provider = Provider::new(BackendChoice::Auto)?;
        out.set(Box::new(Handle(provider.create_named(name, &shape)?)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_open(
    name: *const c_char,
    access_number: u32,
    result: Option<&mut MaybeUninit<Box<Handle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let (name, access) = (text(name, "the name")?, access(access_number)?);
        let provider = Provider::new(BackendChoice::Auto)?;
        out.set(Box::new(Handle(provider.open(name, access)?)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_unlink(name: *const c_char) -> c_int {
    call(|| {
        let name = text(name, "the name")?;
        Ok(Provider::new(BackendChoice::Auto)?.unlink(name)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_close(morsel: Option<Box<Handle>>) {
    drop(morsel);
}
