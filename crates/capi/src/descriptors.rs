//! Morsels by their descriptors: from one, sent to another process, and received.
#![allow(unsafe_code)] // exported names

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

use vellum_morsel::Morsel;

use crate::call::{OutParameter, call, given};
use crate::raw::duplicate;
use crate::types::Handle;

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_from_fd(
    descriptor: c_int,
    result: Option<&mut MaybeUninit<Box<Handle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        out.set(Box::new(Handle(Morsel::from_descriptor(duplicate(descriptor)?)?)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_send(morsel: Option<&Handle>, socket: c_int) -> c_int {
    call(|| {
        let morsel = given(morsel, "the Morsel")?;
        Ok(morsel.0.send(&UnixStream::from(duplicate(socket)?))?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_receive(
    socket: c_int,
    result: Option<&mut MaybeUninit<Box<Handle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let morsel = Morsel::receive(&UnixStream::from(duplicate(socket)?))?;
        out.set(Box::new(Handle(morsel)));
        Ok(())
    })
}
