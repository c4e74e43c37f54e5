//! Asking the cache daemon for a file.
#![allow(unsafe_code)] // exported names

use std::ffi::c_int;
use std::fs::File;
use std::mem::MaybeUninit;

use vellum_morsel::Client;

use crate::call::{OutParameter, call};
use crate::raw::duplicate;
use crate::types::Handle;

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_of_file(
    file: c_int,
    result: Option<&mut MaybeUninit<Box<Handle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let loaded = Client::usual().load(&File::from(duplicate(file)?), |_| {})?;
        out.set(Box::new(Handle(loaded.morsel)));
        Ok(())
    })
}
