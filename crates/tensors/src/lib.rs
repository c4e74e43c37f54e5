//! The places of tensors in model files.
//!
//! A file with weights is a header and a block of data. Once the file is in memory, a tensor is a
//! range of it: nothing needs to be copied. This crate reads the headers of two formats,
//! [`safetensors`] and [`gguf`], and says for each tensor its name, its type, its shape and its
//! [`Range`](std::ops::Range) of bytes in the file.
//!
//! A file may come from an attacker. Whatever its bytes are, reading its header ends with a layout
//! or an error, takes time and memory in proportion to the header, and never panics; and every
//! range of a layout lies within the file, overlaps no other, and has exactly the bytes that the
//! tensor's type and shape need.

mod error;
mod extent;
pub mod gguf;
pub mod safetensors;

pub use error::{Error, Result};
pub use extent::{MAX_RANK, Tensor};
