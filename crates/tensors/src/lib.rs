//! The places of tensors in model files.
//!
//! A file with weights is a header and a block of data. Once the file is in memory, a tensor is a
//! range of it: nothing needs to be copied. This crate reads the headers of two formats,
//! [`safetensors`] and [`gguf`], and says for each tensor its name, its type, its shape and its
//! [`Range`](std::ops::Range) of bytes in the file.
//!
//! ```
//! use vellum_tensors::safetensors;
//!
//! // A file with one tensor: two numbers of 32 bits.
//! let header = br#"{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
//! let mut file = (header.len() as u64).to_le_bytes().to_vec();
//! file.extend_from_slice(header);
//! file.extend_from_slice(&[0; 8]);
//!
//! let layout = safetensors::layout(&file)?;
//! let bias = &layout.tensors[0];
//! assert_eq!((bias.name.as_str(), &bias.shape[..]), ("bias", &[2][..]));
//! assert_eq!(bias.bytes.end, file.len() as u64);
//!
//! // A header that claims more bytes than the file has is an error.
//! file.pop();
//! assert!(safetensors::layout(&file).is_err());
//! # Ok::<(), vellum_tensors::Error>(())
//! ```
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
