//! An embeddable store.

pub mod blob;
pub mod bulk;
mod bytes;
pub mod node;
pub mod page;
